"""What the Linux kernel says of one process's memory. Every figure is None when it is gone, or not on Linux."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")


def data_bytes(pid: int) -> int | None:
    """VmData: private writable memory, counted when reserved; exactly what RLIMIT_DATA bounds."""
    return _status_bytes(pid, "VmData:")


def resident_bytes(pid: int) -> int | None:
    """VmRSS: what is in RAM now, mapped files included."""
    return _status_bytes(pid, "VmRSS:")


def peak_resident_bytes(pid: int) -> int | None:
    """VmHWM: the most that VmRSS ever was."""
    return _status_bytes(pid, "VmHWM:")


def anonymous_bytes(pid: int) -> int | None:
    """RssAnon: private memory in RAM now. Nobody else can use it, and only swap could take it."""
    return _status_bytes(pid, "RssAnon:")


def proportional_bytes(pid: int) -> int | None:
    """Pss: what is in RAM now, shared pages counted in parts (two workers that map one file count it once together).

    The kernel walks all page tables for it: milliseconds for a large process, so not for every reading.
    """
    return _field_bytes(PROC / str(pid) / "smaps_rollup", "Pss:")


def _status_bytes(pid: int, key: str) -> int | None:
    return _field_bytes(PROC / str(pid) / "status", key)


def _field_bytes(path: Path, key: str) -> int | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(key):
                    return int(line.split()[1]) * 1024  # the kernel writes kB and means KiB
    except (OSError, ValueError, IndexError):
        pass
    return None
