"""Headers that were read in this process, for as long as their files are unchanged."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from relevo.models.gguf_header import GgufHeader

MAX_ENTRIES = 64


class FileIdentity(msgspec.Struct, frozen=True):
    """What says that a file is still the same: its place, size, time of change in nanoseconds, and inode."""

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: Path | int, path: Path) -> FileIdentity:
        """Of a file or an open descriptor, under this path. Raises OSError."""
        found = os.stat(file)  # noqa: PTH116 - a descriptor has no Path
        return cls(str(path.absolute()), found.st_size, found.st_mtime_ns, found.st_ino)


class HeaderCache:
    """Remembers headers by the identity of every part. Threads may share it."""

    def __init__(self, most: int = MAX_ENTRIES) -> None:
        self._most = most
        self._entries: OrderedDict[str, tuple[tuple[FileIdentity, ...], GgufHeader]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, read: Callable[[Path], GgufHeader]) -> GgufHeader:
        """The header of this path, read only where a part of the model is new or has changed."""
        key = str(path)
        with self._lock:
            entry = self._entries.get(key)
        if entry is not None and _identities(entry[1]) == entry[0]:
            return entry[1]
        before = _identity(path)
        header = read(path)
        found = _identities(header)
        if found is not None and before in found:  # else it changed while it was read
            with self._lock:
                self._entries[key] = (found, header)
                self._entries.move_to_end(key)
                while len(self._entries) > self._most:
                    self._entries.popitem(last=False)
        return header


def _identities(header: GgufHeader) -> tuple[FileIdentity, ...] | None:
    """Of all its files; None where one is not there any more."""
    found = tuple(identity for part in header.parts if (identity := _identity(Path(part.path))) is not None)
    return found if len(found) == len(header.parts) else None


def _identity(path: Path) -> FileIdentity | None:
    try:
        return FileIdentity.of(path, path)
    except (OSError, ValueError):
        return None
