"""The state folder's small files: the lock that names its holder, the reserve, and the high-water mark."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from relevo.core.errors import StateFolderBusy, StateFolderError
from relevo.journal.database import sync_folder

LOCK = "relevo.lock"
RESERVE = "reserve"
HIGH_WATER = "high_water"
_HIGH_WATER_BYTES = 96


class Holder(msgspec.Struct, frozen=True):
    """Who holds a state folder, as far as its lock file tells."""

    pid: int
    address: str | None = None


def make_folder(state: Path) -> None:
    """Raises StateFolderError when the folder cannot be made or written."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise StateFolderError(f"The state folder {state} cannot be made: {e.strerror}.") from e
    if not state.is_dir():
        raise StateFolderError(f"The state folder {state} is not a folder.")


def read_holder(state: Path) -> Holder | None:
    """Who holds the folder now; None when nobody does. A holder that cannot be read has pid 0."""
    try:
        fd = os.open(state / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            return msgspec.json.decode(os.pread(fd, 4096, 0), type=Holder)
        except msgspec.DecodeError:
            return Holder(pid=0)
    finally:
        os.close(fd)
    return None


class FolderLock:
    """An flock on `relevo.lock`, held until `release` or the end of the process.

    The descriptor is closed on exec, so a worker that outlives us does not hold our folder.
    """

    def __init__(self, state: Path, *, shared: bool = False) -> None:
        """Raises StateFolderBusy naming the holder, or StateFolderError."""
        self._fd: int | None = None
        try:
            fd = os.open(state / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise StateFolderError(f"The state folder {state} cannot be written: {e.strerror}.") from e
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise _busy(state) from None
        except OSError as e:
            os.close(fd)
            raise StateFolderError(f"The state folder {state} cannot be locked: {e.strerror}.") from e
        self._fd = fd
        if not shared:
            self.announce(None)

    def announce(self, address: str | None) -> None:
        """Write who holds the folder, and where it answers. A full disk does not matter here."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, msgspec.json.encode(Holder(pid=os.getpid(), address=address)), 0)

    def release(self) -> None:
        """Harmless when repeated."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _busy(state: Path) -> StateFolderBusy:
    holder = read_holder(state)
    who = "Another Relevo"
    if holder is not None and holder.pid:
        where = f", {holder.address}" if holder.address else ""
        who = f"Another Relevo (process {holder.pid}{where})"
    return StateFolderBusy(
        f"{who} is using the state folder {state}. Stop it, or choose another folder with --state.",
        detail={} if holder is None else {"pid": holder.pid, "address": holder.address},
    )


class Reserve:
    """A file of real blocks, given up when the disk is full, so that accepted work can end."""

    def __init__(self, state: Path, size_bytes: int) -> None:
        self._path = state / RESERVE
        self._size_bytes = size_bytes

    def make(self) -> bool:
        """Have the reserve on disk. False when there is no space for it."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return False
        try:
            if os.fstat(fd).st_size != self._size_bytes:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, self._size_bytes)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                self.give_up()
                return False
            raise
        finally:
            os.close(fd)
        return True

    def give_up(self) -> None:
        """Free its blocks. Harmless when it is gone."""
        with contextlib.suppress(OSError):
            self._path.unlink()


class Mark(NamedTuple):
    """How far a journal had come when a commit was acknowledged."""

    journal: str
    commits: int
    number: int  # of the newest request


class HighWater:
    """The mark beside the journal, written after each commit and before it is acknowledged.

    It survives the end of the process; it is not synced each time, so after a power cut it may lag by what the
    kernel had not written. It never leads: a mark ahead of the file means that acknowledged commits are missing.
    """

    def __init__(self, state: Path) -> None:
        """Raises StateFolderError when it cannot be opened."""
        self._path = state / HIGH_WATER
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise StateFolderError(f"The state folder {state} cannot be written: {e.strerror}.") from e
        sync_folder(state)

    def read(self) -> Mark | None:
        """None when there is no mark, or it was torn."""
        text = os.pread(self._fd, _HIGH_WATER_BYTES, 0)
        try:
            journal, commits, number, check = text.decode("ascii").split()
            if int(check, 16) != zlib.crc32(f"{journal} {commits} {number}".encode()):
                return None
            return Mark(journal, int(commits), int(number))
        except ValueError:
            return None

    def write(self, mark: Mark) -> None:
        """Best effort: on a full disk the old mark stays, which only lags."""
        text = f"{mark.journal} {mark.commits} {mark.number}"
        line = f"{text} {zlib.crc32(text.encode()):08x}"
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, line.encode().ljust(_HIGH_WATER_BYTES - 1) + b"\n", 0)

    def close(self) -> None:
        """Sync it once, at a clean end."""
        with contextlib.suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)
