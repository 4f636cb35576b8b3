"""Which process is which: a pid is given away again, a pid with its start time is not."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LONGEST_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process this is, for the journal. The pid alone could be somebody else's by tomorrow."""

    pid: int
    start_time: int
    """Clock ticks after boot (field 22 of /proc/PID/stat); elsewhere milliseconds since the epoch."""


def stat_fields(pid: int) -> list[str] | None:
    """/proc/PID/stat from its third field (the state) on; the second may contain anything, brackets too."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, _LONGEST_BYTES).rpartition(b")")[2].decode("ascii").split()
    except OSError:  # it ended while we asked
        return None
    finally:
        os.close(fd)


def start_time(pid: int) -> int | None:
    """When the process started (see Identity), also while it is a zombie. None when there is no such process."""
    if sys.platform != "linux":
        return _start_elsewhere(pid, zombie_counts=True)
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def alive_since(pid: int) -> int | None:
    """When the process started (see Identity); None when it is gone, or a zombie, which holds no memory any more."""
    if sys.platform != "linux":
        return _start_elsewhere(pid, zombie_counts=False)
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def is_alive(identity: Identity) -> bool:
    """Whether this very process is alive, and no zombie."""
    return alive_since(identity.pid) == identity.start_time


def group_members(group: int) -> list[int]:
    """Pids of a process group's living members. Zombies have no memory and do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    except PermissionError:
        pass  # macOS says so of a group of zombies
    if sys.platform != "linux":
        import psutil  # type: ignore[import-untyped]

        alive = (p for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE)
        return [p.pid for p in alive if _group_of(p.pid) == group]
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = stat_fields(int(entry.name))
            if fields and int(fields[2]) == group and (fields[0] not in "ZX" or int(fields[17]) > 1):
                members.append(int(entry.name))
    return members


def kill_group(pid: int) -> None:
    """SIGKILL a process, with its group where it leads one. Gone already: nothing happens."""
    with contextlib.suppress(OSError):
        if os.getpgid(pid) == pid and pid != os.getpgrp():
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _start_elsewhere(pid: int, *, zombie_counts: bool) -> int | None:
    import psutil  # type: ignore[import-untyped]

    try:
        process = psutil.Process(pid)
        if not zombie_counts and process.status() == psutil.STATUS_ZOMBIE:
            return None
        return int(process.create_time() * 1000)
    except psutil.Error:
        return None
