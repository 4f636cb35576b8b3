"""What measurements are made of: spread of repeats, tables, the machine, CPU time of a process."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies, between neighbours by a straight line."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def number(value: float | None) -> str:
    """Three figures that mean something."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def spread(values: Iterable[float | None]) -> str:
    """`median (smallest-largest)`."""
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    middle = number(statistics.median(known))
    return middle if len(known) == 1 else f"{middle} ({number(min(known))}-{number(max(known))})"


def median(values: Iterable[float | None]) -> float | None:
    """The middle of the known values."""
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def pairs_ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Ratios of values measured one after the other: load that lasts hits both."""
    return spread(a / b for a, b in zip(ours, theirs, strict=True) if b)


class Report:
    """Prints as it goes, as Markdown, and writes a JSON line for every row where a file is named."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a") if path is not None else None

    def say(self, line: str = "") -> None:
        """A line of text."""
        print(line, flush=True)

    def start(self, case: str, about: str) -> None:
        """The heading of a case, with the load before it."""
        self.say(f"\n## {case}\n\n{about}\n\nLoad before: {load()}; {clock()}.\n")

    def end(self) -> None:
        """The load after a case."""
        self.say(f"\nLoad after: {load()}; {clock()}.")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A Markdown table."""
        self.say("| " + " | ".join(head) + " |")
        self.say("|" + "---|" * len(head))
        for row in rows:
            self.say("| " + " | ".join(str(cell) for cell in row) + " |")

    def keep(self, case: str, **row: Any) -> None:
        """One measurement, as it was."""
        if self._file is not None:
            self._file.write(json.dumps({"case": case, "load": os.getloadavg()[0], **row}) + "\n")
            self._file.flush()


def load() -> str:
    """Load averages of 1, 5 and 15 minutes, and how many processes want to run now."""
    fields = Path("/proc/loadavg").read_text().split()
    return f"{fields[0]} {fields[1]} {fields[2]} (running {fields[3].split('/')[0]})"


def clock() -> str:
    """Time of day, UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%H:%M:%S UTC")


def machine() -> list[str]:
    """What this ran on, for the head of the report."""
    import apsw
    import msgspec
    import uvicorn
    import uvloop

    import relevo

    names = {line.split(":", 1)[1].strip() for line in cpu_lines("model name")}
    peer = "not installed (the rows of llama.cpp's server are left out)"
    try:
        import xllamacpp

        peer = f"xllamacpp {xllamacpp.__version__}, build {xllamacpp.BUILD_INFO}"
    except ImportError:
        pass
    return [
        f"- date: {datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M UTC')}",
        f"- machine: {', '.join(sorted(names)) or platform.machine()}; {os.cpu_count()} cores; "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB; {platform.system()} {platform.release()}",
        f"- Relevo {getattr(relevo, '__version__', '0.1.0')}, Python {platform.python_version()}, "
        f"uvicorn {uvicorn.__version__}, uvloop {uvloop.__version__}, msgspec {msgspec.__version__}, "
        f"SQLite {apsw.sqlite_lib_version()}",
        f"- llama.cpp's own server: {peer}",
        f"- load before: {load()}",
    ]


def cpu_lines(key: str) -> list[str]:
    """Lines of /proc/cpuinfo with this key."""
    return [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(key)]


def cpu_us(pid: int) -> float:
    """CPU time of one process (not of its children) so far, in microseconds, from the scheduler's own count."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total_ns += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue  # the thread ended between the listing and the reading
    return total_ns / 1e3


def file_system(folder: Path) -> str:
    """Kind of file system that holds a folder."""
    found = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if folder.resolve().is_relative_to(mount) and len(mount) > len(found[0]):
            found = (mount, kind)
    return found[1]
