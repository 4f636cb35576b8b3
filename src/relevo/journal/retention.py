"""Forgetting, in small slices between commits: payloads first, then whole rows, then the space they took."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import apsw

from relevo.journal.apply import Applier
from relevo.journal.reads import Reads
from relevo.journal.statements import statements

ROWS_KEPT_S = 30 * 86400.0  # states and digests of ended requests
SLICE_ROWS = 64
VACUUM_PAGES = 512
FREE_PAGES_KEPT = 2048  # new work uses them again


@dataclass(frozen=True, slots=True)
class Limits:
    """How long payloads stay, and the used size of the file above which the oldest go before their time."""

    retention_s: float
    payload_bytes: int


class Retention:
    """Works through one connection. `slice` is one transaction's worth; the writer calls it when there is time."""

    def __init__(self, connection: apsw.Connection, applier: Applier, limits: Limits, state: Path) -> None:
        self._connection = connection
        self._applier = applier
        self._reads = Reads(connection)
        self._limits = limits
        self._state = state

    def due(self, now: float) -> bool:
        """Whether `slice` would find anything."""
        return bool(self._to_blank(now, 1) or self._to_delete(now, 1) or self._keys_due(now))

    def slice(self, now: float) -> list[Path]:
        """Blank and delete a few, inside the caller's transaction. Returns files to remove after its commit."""
        files: list[Path] = []
        for number in self._to_blank(now, SLICE_ROWS):
            files += self.files_of(number)
            self._applier.blank(number)
        for number in self._to_delete(now, SLICE_ROWS):
            self._connection.execute(statements()["delete_request"], (number,))
        self._connection.execute(statements()["free_keys"], (now - self._limits.retention_s, SLICE_ROWS))
        return files

    def files_of(self, number: int) -> list[Path]:
        """The file of a large body, if it has one inside the state folder."""
        row = self._connection.execute(statements()["payload_path"], (number,)).fetchone()
        if row is None:
            return []
        path = (self._state / row[0]).resolve()
        return [path] if path.is_relative_to(self._state.resolve()) else []

    def shrink(self) -> bool:
        """Give a slice of free pages back to the file system, if there are many. False when there was nothing to do."""
        free = self._reads.free_pages()
        if free <= max(FREE_PAGES_KEPT, self._reads.used_bytes() // 4096 // 4):
            return False
        self._connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        return True

    def _over(self) -> bool:
        return self._reads.used_bytes() > self._limits.payload_bytes

    def _to_blank(self, now: float, limit: int) -> list[int]:
        if self._over():
            return self._numbers("to_blank_by_size", limit)
        return self._numbers("to_blank_by_age", now - self._limits.retention_s, limit)

    def _to_delete(self, now: float, limit: int) -> list[int]:
        # Under pressure of space rows go early too, but never while their key is promised.
        kept_s = self._limits.retention_s if self._over() else max(ROWS_KEPT_S, self._limits.retention_s)
        return self._numbers("to_delete", now - kept_s, limit)

    def _keys_due(self, now: float) -> bool:
        return bool(self._numbers("keys_to_free", now - self._limits.retention_s, 1))

    def _numbers(self, name: str, *values: float) -> list[int]:
        return [row[0] for row in self._connection.execute(statements()[name], values)]


def remove(files: list[Path]) -> None:
    """Unlink what a committed slice named. What cannot be removed is left; nothing refers to it any more."""
    for path in files:
        with contextlib.suppress(OSError):
            path.unlink()
