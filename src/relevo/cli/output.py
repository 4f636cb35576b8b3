"""How the command line speaks: tables for people, JSON for programs, one sentence on stderr for mistakes."""

from __future__ import annotations

import datetime
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from relevo.core.units import size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_COLUMNS = 200  # of a table that goes into a file or another program, where nothing wraps
_MOST_VALUE = 60


def complain(message: str) -> None:
    """One sentence on stderr."""
    print(message, file=sys.stderr)


def print_json(value: Any) -> None:
    """Facts for programs, on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def console() -> Console:
    """Where people read. Markup in what others wrote is never obeyed."""
    from rich import console as rich_console

    class Screen(rich_console.Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # one place decides what that means

    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Screen(markup=False, highlight=False, emoji=False, soft_wrap=False, width=width)


def say(text: str = "") -> None:
    """A line for people, never broken by us."""
    print(text)


def table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table; `numbers` names the columns that line up on the right."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=title, title_justify="left", title_style="bold", caption_justify="left", caption_style="",
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made


def plain(text: str) -> str:
    """Text of unknown origin without what would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def bytes_text(count: Any) -> str:
    """A size in binary units, for people; JSON has the bytes."""
    return size_text(int(count)) if isinstance(count, int | float) else "unknown"


def duration_text(seconds: Any) -> str:
    """A time span in its two largest units."""
    if not isinstance(seconds, int | float):
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {name}"
    return f"{whole} s"


def time_text(at: Any) -> str:
    """A wall time in the zone of whoever reads."""
    if not isinstance(at, int | float):
        return "-"
    return datetime.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def ago_text(at: Any) -> str:
    """How long ago a wall time was."""
    return f"{duration_text(max(0.0, time.time() - at))} ago" if isinstance(at, int | float) else "-"


def figure(record: dict[str, Any], field: str) -> str:
    """A size from the outer contract; one that is not known says why."""
    value = record.get(field)
    return bytes_text(value) if value is not None else unknown(record, field)


def unknown(record: dict[str, Any], field: str) -> str:
    """`unknown: reason`, where the reason stands beside the figure or for the whole record."""
    stem = field.removesuffix("_bytes")
    reasons = record.get("unknown") or record.get("reasons")
    found = reasons.get(field) if isinstance(reasons, dict) else None
    for name in (f"{field}_reason", f"{stem}_reason", "reason"):
        found = found or record.get(name)
    return f"unknown: {plain(str(found))}" if found else "unknown"


def short(value: Any, most: int = _MOST_VALUE) -> str:
    """One line of a value."""
    text = plain(str(value)).replace("\n", " ")
    return text if len(text) <= most else text[: most - 1] + "…"
