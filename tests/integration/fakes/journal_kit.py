"""What the journal's tests share: records made short, a journal opened for a test, and a disk that can fail."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw

from relevo.journal import AcceptRequest, ChangeState, EndRequest, Journal

SECTOR_BYTES = 512


def accept(name: object, **fields: Any) -> AcceptRequest:
    """An acceptance with ordinary contents."""
    values: dict[str, Any] = {
        "id": f"req_{name}",
        "owner": "local",
        "model": "demo",
        "kind": "chat",
        "created": 1000.0,
        "body_digest": f"digest {name}",
        "kept": False,
        "ask": b'{"messages": []}',
        "prompt_tokens": [1, 2, 3],
        "seed": 7,
    }
    return AcceptRequest(**(values | fields))


def move(name: object, old: str, new: str, **fields: Any) -> ChangeState:
    return ChangeState(id=f"req_{name}", old=old, new=new, at=1001.0, **fields)


def end(name: object, state: str = "completed", at: float = 1002.0, **fields: Any) -> EndRequest:
    return EndRequest(id=f"req_{name}", state=state, at=at, **({"result": b'{"text": "hello"}'} | fields))


class _Unsynced(apsw.VFS):
    """The real file system without its syncs, for tests that are not about them: a busy disk takes 10 ms for each."""

    def __init__(self) -> None:
        self.name = "unsynced"
        super().__init__(self.name, "")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _UnsyncedFile("", name, flags)


class _UnsyncedFile(apsw.VFSFile):
    def xSync(self, flags: int) -> None:
        pass


UNSYNCED = _Unsynced()


def open_journal(state: Path, **settings: Any) -> Journal:
    values: dict[str, Any] = {
        "reserve_bytes": 65536,
        "retention_s": 3600.0,
        "payload_bytes": 2**29,
        "clock": lambda: 1010.0,
        "vfs": UNSYNCED.name,
    }
    return Journal.open(state, **(values | settings))


@asynccontextmanager
async def opened(state: Path, **settings: Any) -> AsyncIterator[Journal]:
    """A journal that is closed at the end, whatever happened."""
    journal = open_journal(state, **settings)
    try:
        yield journal
    finally:
        await journal.close(10)


class _Image:
    """A file as the platter has it, and the writes that no sync has forced there yet."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []  # None: truncate to the offset

    def size(self) -> int:
        size = len(self.durable)
        for offset, data in self.pending:
            size = offset if data is None else max(size, offset + len(data))
        return size

    def sync(self) -> None:
        for offset, data in self.pending:
            _put(self.durable, offset, data)
        self.pending.clear()

    def after_power_cut(self, dice: random.Random, keep: float) -> bytes:
        """What a disk may hold: each unsynced write there, not there, or torn at a sector."""
        left = bytearray(self.durable)
        for offset, data in self.pending:
            if dice.random() >= keep:
                continue
            torn = data is not None and dice.random() < 0.25
            kept_bytes = SECTOR_BYTES * dice.randint(0, len(data) // SECTOR_BYTES) if data and torn else None
            _put(left, offset, data if data is None else data[:kept_bytes])
        return bytes(left)


def _put(image: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del image[offset:]
        return
    if len(image) < offset:
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data


class Disk(apsw.VFS):
    """SQLite's view of a disk that can run full, fail a call, or lose its power.

    `before(kind, file, call)` is asked before each write, sync and truncation, and may raise an apsw error. `call`
    counts them all. Everything else goes to the real file system.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, "")
        self.name = name
        self.images: dict[str, _Image] = {}
        self.calls = 0
        self.syncs = 0
        self.capacity_bytes: int | None = None
        self.reserve: Path | None = None
        self.before: Callable[[str, str, int], None] = lambda _kind, _file, _call: None
        self.guard = threading.RLock()

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        path = name if isinstance(name, str) or name is None else name.filename()
        return _DiskFile(self, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.images.pop(Path(filename).name, None)
        super().xDelete(filename, syncdir)

    def asked(self, kind: str, file: str) -> None:
        self.calls += 1
        self.before(kind, file, self.calls)

    def check_space(self, file: str, upto: int) -> None:
        if self.capacity_bytes is None:
            return
        used = sum(image.size() for name, image in self.images.items() if name != file)
        if self.reserve is not None and self.reserve.exists():
            used += self.reserve.stat().st_size
        if upto > self.images[file].size() and used + upto > self.capacity_bytes:
            raise apsw.FullError("no space left on this disk")

    def cut_power(self, dice: random.Random, keep: float) -> dict[str, bytes]:
        """The files as a machine would find them that lost its power now."""
        return {name: image.after_power_cut(dice, keep) for name, image in self.images.items()}


class _DiskFile(apsw.VFSFile):
    def __init__(self, disk: Disk, path: str | None, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk
        self._name = Path(path).name if path else f"temporary {id(self)}"
        if self._name not in disk.images:
            image = disk.images[self._name] = _Image()
            if path and Path(path).exists():
                image.durable = bytearray(Path(path).read_bytes())

    def xWrite(self, data: bytes, offset: int) -> None:
        with self._disk.guard:
            self._disk.asked("write", self._name)
            self._disk.check_space(self._name, offset + len(data))
            super().xWrite(data, offset)
            self._disk.images[self._name].pending.append((offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        with self._disk.guard:
            self._disk.asked("truncate", self._name)
            super().xTruncate(newsize)
            self._disk.images[self._name].pending.append((newsize, None))

    def xSync(self, flags: int) -> None:
        with self._disk.guard:
            self._disk.asked("sync", self._name)
            self._disk.syncs += 1
            self._disk.images[self._name].sync()


def sync_error(_kind: str = "", _file: str = "", _call: int = 0) -> None:
    """What SQLite sees when fsync says EIO."""
    error = apsw.IOError("the disk failed to sync")
    error.extendedresult = apsw.SQLITE_IOERR_FSYNC
    raise error
