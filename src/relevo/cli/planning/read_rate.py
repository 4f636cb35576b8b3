"""How fast a model's file comes from storage, and memory from RAM: measured in a fraction of a second, honestly."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

_BLOCK_BYTES = 4 * 2**20
_BLOCKS = 16
_ENOUGH_S = 0.5
_COPY_BYTES = 40 * 2**20
_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class ReadRate:
    """A measured rate, and what it was measured by."""

    bytes_a_s: float
    read_bytes: int
    how: str
    """As the end of a sentence for people."""
    surely_storage: bool
    """Whether the kernel's cache was passed by. Not: then the figure may be the cache's."""


def storage_rate(path: Path) -> ReadRate | None:
    """Read a few blocks spread over the file, past the kernel's cache where the file system allows it.

    None where the file is smaller than a block, or cannot be read. A drive's or a hypervisor's own cache counts as
    the drive.
    """
    direct = getattr(os, "O_DIRECT", None)
    if direct is not None:
        with contextlib.suppress(OSError):
            return _measure(path, os.O_RDONLY | os.O_CLOEXEC | direct, surely=True)
    with contextlib.suppress(OSError):
        return _measure(path, os.O_RDONLY | os.O_CLOEXEC, surely=False)
    return None


def memory_rate() -> float:
    """Bytes a second that one core reads from RAM, copying more than most caches hold: a rough figure."""
    source = memoryview(bytearray(_COPY_BYTES))
    target = bytearray(_PIECE_BYTES)
    best_s = float("inf")
    for _ in range(2):
        started = time.perf_counter()
        for at in range(0, _COPY_BYTES, _PIECE_BYTES):
            target[:] = source[at : at + _PIECE_BYTES]
        best_s = min(best_s, time.perf_counter() - started)
    return _COPY_BYTES / best_s


def _measure(path: Path, flags: int, *, surely: bool) -> ReadRate | None:
    """Raises OSError where the file system does not take the flags, or the file cannot be read."""
    descriptor = os.open(path, flags)
    try:
        size = os.fstat(descriptor).st_size
        if size < _BLOCK_BYTES:
            return None
        if not surely and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        blocks = min(_BLOCKS, size // _BLOCK_BYTES)
        step = size // blocks // mmap.PAGESIZE * mmap.PAGESIZE
        with mmap.mmap(-1, _BLOCK_BYTES) as buffer:  # page-aligned, as direct reads need it
            done = 0
            started = time.perf_counter()
            for block in range(blocks):
                done += os.preadv(descriptor, [buffer], block * step)
                if time.perf_counter() - started > _ENOUGH_S:
                    break
            took_s = time.perf_counter() - started
    finally:
        os.close(descriptor)
    how = (
        "read past the kernel's cache"
        if surely
        else "read after the kernel was asked to drop its copy, which it may have kept"
    )
    return ReadRate(done / took_s, done, how, surely)
