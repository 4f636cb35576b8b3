"""Figures in sentences for people. Records and JSON keep plain bytes."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size_text(bytes_: int | None) -> str:
    """A size in binary units: "887 MiB", "1.5 GiB"; "an unknown amount" for None."""
    if bytes_ is None:
        return "an unknown amount"
    for size, unit in _UNITS:
        if bytes_ >= size:
            return f"{bytes_ / size:.{0 if bytes_ >= 100 * size else 1}f} {unit}"
    return f"{bytes_} B"
