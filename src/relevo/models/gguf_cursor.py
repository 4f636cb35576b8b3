"""A bounded read over the header of a model file, from front to back.

Every length is checked against the file and against a limit before anything is read or allocated for it.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import BinaryIO

from relevo.core.errors import ModelFileError

MAX_STRING_BYTES = 4 * 2**20
MAX_HEADER_BYTES = 64 * 2**20
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
_CHUNK_BYTES = 2**20


class Cursor:
    """A bounded forward read over the file: never past its end, never more than a chunk ahead."""

    def __init__(self, path: Path, file: BinaryIO, size_bytes: int) -> None:
        self.path = path
        self._file = file
        self.size_bytes = size_bytes
        self._buffer = b""
        self._at = 0
        self._read_bytes = 0

    @property
    def position(self) -> int:
        """Bytes of the file that were taken."""
        return self._read_bytes - len(self._buffer) + self._at

    def wrong(self, what: str) -> ModelFileError:
        """The error that says what is wrong with this file."""
        return ModelFileError(f"The model file {self.path} is damaged or not a GGUF file: {what}.")

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes. Raises ModelFileError, naming `what`, where the file ends before."""
        self._ensure(count, what)
        start = self._at
        self._at = start + count
        return self._buffer[start : self._at]

    def number(self, kind: struct.Struct, what: str) -> int:
        """The next whole number."""
        return int(kind.unpack(self.take(kind.size, what))[0])

    def string(self, what: str, limit_bytes: int = MAX_STRING_BYTES) -> bytes:
        """The next length-prefixed string, undecoded."""
        length = self.number(U64, what)
        if length > limit_bytes:
            raise self.wrong(f"{what} claims {length} bytes, more than the {limit_bytes} allowed")
        return self.take(length, what)

    def left(self) -> int:
        """Bytes of the file that were not taken."""
        return self.size_bytes - self.position

    def skip(self, count: int, what: str, digest: hashlib._Hash) -> None:
        """Walk over `count` bytes, a chunk at a time."""
        if count > self.left():
            raise self.wrong(f"it ends inside {what}")
        while count:
            part = self.take(min(count, _CHUNK_BYTES), what)
            digest.update(part)
            count -= len(part)

    def skip_strings(self, count: int, what: str, digest: hashlib._Hash) -> None:
        """Walk over `count` length-prefixed strings without making an object of each."""
        if count * U64.size > self.left():
            raise self.wrong(f"it ends inside {what}")
        unpack = U64.unpack_from
        while count:
            buffer, at = self._buffer, self._at
            end = len(buffer)
            while count and at + 8 <= end:
                following = at + 8 + unpack(buffer, at)[0]
                if following > end:
                    break
                at = following
                count -= 1
            digest.update(memoryview(buffer)[self._at : at])
            self._at = at
            if count:  # the next string reaches past the buffer, or is too long to be true
                self._ensure(8, what)
                length = unpack(self._buffer, self._at)[0]
                if length > MAX_STRING_BYTES:
                    raise self.wrong(f"a string of {what} claims {length} bytes")
                self._ensure(8 + length, what)

    def _ensure(self, count: int, what: str) -> None:
        have = len(self._buffer) - self._at
        if have >= count:
            return
        if count > self.left():
            raise self.wrong(f"it ends inside {what}")
        if self.position + count > MAX_HEADER_BYTES:
            raise self.wrong(f"its header is larger than the {MAX_HEADER_BYTES} bytes allowed")
        more = self._file.read(max(count - have, _CHUNK_BYTES))
        if len(more) < count - have:  # it became shorter while we read
            raise self.wrong(f"it ends inside {what}")
        self._buffer = self._buffer[self._at :] + more
        self._at = 0
        self._read_bytes += len(more)
