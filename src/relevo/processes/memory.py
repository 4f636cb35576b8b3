"""What the Linux kernel says of one process's memory. Every figure is None when it is gone, or not on Linux."""

from __future__ import annotations

import os
from typing import Final

_LONGEST_BYTES: Final = 16384


def data_bytes(pid: int) -> int | None:
    """VmData: private writable memory, counted when reserved; exactly what RLIMIT_DATA bounds."""
    return _status_bytes(pid, b"VmData:")


def resident_bytes(pid: int) -> int | None:
    """VmRSS: what is in RAM now, mapped files included."""
    return _status_bytes(pid, b"VmRSS:")


def peak_resident_bytes(pid: int) -> int | None:
    """VmHWM: the most that VmRSS ever was."""
    return _status_bytes(pid, b"VmHWM:")


def anonymous_bytes(pid: int) -> int | None:
    """RssAnon: private memory in RAM now. Nobody else can use it, and only swap could take it."""
    return _status_bytes(pid, b"RssAnon:")


def proportional_bytes(pid: int) -> int | None:
    """Pss: what is in RAM now, shared pages counted in parts (two workers that map one file count it once together).

    The kernel walks all page tables for it: milliseconds for a large process, so not for every reading.
    """
    return _field_bytes(f"/proc/{pid}/smaps_rollup", b"Pss:")


def _status_bytes(pid: int, key: bytes) -> int | None:
    return _field_bytes(f"/proc/{pid}/status", key)


def _field_bytes(path: str, key: bytes) -> int | None:
    """Read at once and without decoding: the emulated device asks twenty times a second for each of its processes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(fd, _LONGEST_BYTES)
    except OSError:  # it ended while we asked
        return None
    finally:
        os.close(fd)
    begin = text.find(b"\n" + key)
    if begin < 0:
        return None
    end = text.find(b"\n", begin + 1)
    return int(text[begin + 1 + len(key) : end].split()[0]) * 1024  # the kernel writes kB and means KiB
