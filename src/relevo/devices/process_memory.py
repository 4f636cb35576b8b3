"""What the Linux kernel says of one process's private memory, and the limit it keeps on it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

PROC = Path("/proc")


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; None when it is gone or a zombie.

    With the pid it names one process for good; the pid alone is given away again.
    """
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything, brackets too
    return None if fields[0] in "ZX" else int(fields[19])


def data_bytes(pid: int) -> int | None:
    """VmData: private writable memory, counted when reserved; exactly what RLIMIT_DATA bounds. None when it is gone."""
    try:
        with (PROC / str(pid) / "status").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("VmData:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def resident_bytes(pid: int) -> int | None:
    """VmRSS: what is in RAM now, mapped files included. None when it is gone, or not on Linux."""
    try:
        pages = int((PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def set_data_limit(pid: int, limit_bytes: int | None) -> bool:
    """Set the soft RLIMIT_DATA of a process; None lifts it. False when the process is gone or is not ours."""
    if sys.platform != "linux":
        return False
    import resource

    try:
        _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        soft = hard if limit_bytes is None else limit_bytes
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        resource.prlimit(pid, resource.RLIMIT_DATA, (soft, hard))
    except (OSError, ValueError):
        return False
    return True


def kill_group(pid: int) -> None:
    """SIGKILL a process, with its group where it leads one. Gone already: nothing happens."""
    with contextlib.suppress(OSError):
        if os.getpgid(pid) == pid and pid != os.getpgrp():
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
