"""Large request bodies, as files beside the journal: durable before the acceptance that names them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from relevo.core.errors import JournalUnavailable
from relevo.journal.database import sync_folder

FOLDER = "bodies"
LARGE_BYTES = 256 * 2**10
"""A body above this belongs in a file rather than in the acceptance."""

_NAME = re.compile(r"^[A-Za-z0-9_-]{1,128}$")


class Bodies:
    """Files named by their request's id. Blocking: call from a thread."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def write(self, request_id: str, data: bytes) -> str:
        """Store a body and return its path relative to the state folder, for AcceptRequest.payload_path.

        When this returns, the file and its entry are synced. Raises JournalUnavailable when they cannot be;
        nothing is left behind then.
        """
        if not _NAME.match(request_id):
            raise ValueError("a request id is letters, digits, _ and -")
        folder = self._state / FOLDER
        path = folder / request_id
        unfinished = folder / f"{request_id}.part"
        try:
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
                sync_folder(self._state)
            _write_synced(unfinished, data)
            unfinished.rename(path)
            sync_folder(folder)
        except OSError as e:
            for left in (unfinished, path):
                with contextlib.suppress(OSError):
                    left.unlink()
            raise JournalUnavailable(f"The request's body cannot be stored: {e.strerror}.") from e
        return f"{FOLDER}/{request_id}"

    def read(self, path: str) -> bytes | None:
        """A stored body; None when it is gone."""
        try:
            return (self._state / FOLDER / Path(path).name).read_bytes()
        except OSError:
            return None

    def sweep(self, known: Iterable[str]) -> int:
        """Remove files that no request names: their acceptance was never committed. Returns how many."""
        folder = self._state / FOLDER
        if not folder.is_dir():
            return 0
        kept = {Path(path).name for path in known}
        removed = 0
        for file in folder.iterdir():
            if file.name not in kept:
                with contextlib.suppress(OSError):
                    file.unlink()
                    removed += 1
        return removed


def _write_synced(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)
