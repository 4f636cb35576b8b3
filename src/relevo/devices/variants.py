"""Which CPU library computes on the emulated accelerator: another than the twin's, so that it differs as a card does.

Measured: the logits of two CPU libraries with different instructions differ by 0.5 to 0.95, about as much as a
GPU's and a CPU's. With `equal_arithmetic` both routes use the same library and are bit-equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from relevo.core.errors import DeviceError

STAND_INS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("sapphirerapids", "zen4", "cooperlake", "icelake", "cascadelake", "cannonlake", "skylakex"),
            ("haswell", "sandybridge", "sse42", "x64"),
        ),
        **dict.fromkeys(("alderlake", "haswell", "piledriver"), ("sandybridge", "sse42", "x64")),
        **dict.fromkeys(("ivybridge", "sandybridge"), ("sse42", "x64")),
        "sse42": ("x64",),
        **dict.fromkeys(("armv9.2_2", "armv9.2_1", "armv8.6_2", "armv8.6_1", "armv8.2_3"), ("armv8.2_1", "armv8.0_1")),
        **dict.fromkeys(("armv8.2_2", "armv8.2_1"), ("armv8.0_1",)),
    }
)
"""Best library of a processor -> those with fewer instructions that compute differently, the quickest first."""


def cpu_variant(best: str | None, available: Sequence[str], *, equal_arithmetic: bool = False) -> str | None:
    """Name of the CPU library for the emulated accelerator.

    `best`: the twin's; `available`: those that run on this processor (both from the inspect program's facts).
    None: the libraries have no variants (an own build), so both routes use the same one and are equal anyway.
    Raises DeviceError where only one library runs here and different arithmetic was wanted.
    """
    if equal_arithmetic or best is None:
        return best
    for name in STAND_INS.get(best, ()):
        if name in available:
            return name
    others = ", ".join(name for name in available if name != best) or "none"
    raise DeviceError(
        f"No second CPU library that stands in for a card's arithmetic runs beside {best} here (others: {others}). "
        "Set equal_arithmetic = true for this device."
    )
