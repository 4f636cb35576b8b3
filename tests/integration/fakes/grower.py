"""A process that grows on command: reads a number of bytes a line, answers `ok` or `MemoryError`. Run as a program."""

from __future__ import annotations

import mmap
import sys

held = []
print("ready", flush=True)
for line in sys.stdin:
    size = int(line)
    if size < 0:
        held.pop().close()
        print("ok", flush=True)
        continue
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block[0] = 1
        held.append(block)
        print("ok", flush=True)
    except (OSError, MemoryError):
        print("MemoryError", flush=True)
