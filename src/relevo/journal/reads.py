"""How each record is read. Used by the writer thread between commits, and by the reader of a journal nobody holds."""

from __future__ import annotations

from typing import Any

import apsw

from relevo.journal.folder import Mark
from relevo.journal.packing import unpack_tokens
from relevo.journal.records import (
    AttemptRecord,
    CheckpointRecord,
    Counts,
    EventRecord,
    Gap,
    MeasurementRecord,
    Move,
    RequestRecord,
    RequestSummary,
    WorkerRecord,
)
from relevo.journal.statements import statements

EVENTS_AT_ONCE = 10_000


class Reads:
    """Reads through one connection. Nothing here changes the file."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def _rows(self, name: str, values: Any = ()) -> list[tuple[Any, ...]]:
        return self._connection.execute(statements()[name], values).fetchall()

    def _row(self, name: str, values: Any = ()) -> tuple[Any, ...] | None:
        rows = self._rows(name, values)
        return rows[0] if rows else None

    def get(self, request_id: str) -> RequestRecord | None:
        """A request by its id, or None."""
        row = self._row("summary_of_id", (request_id,))
        return None if row is None else self._record(_summary(row))

    def summaries(
        self, owner: str | None = None, limit: int = 50, state: str | None = None, idempotency_key: str | None = None
    ) -> list[RequestSummary]:
        """Newest first. `owner` None: of all owners."""
        if idempotency_key is not None and owner is not None:
            row = self._row("summary_of_key", (owner, idempotency_key))
            found = [] if row is None else [row]
            return [_summary(r) for r in found if state is None or r[5] == state][:limit]
        values = {"owner": owner, "limit": limit, "state": state, "idempotency_key": idempotency_key}
        if idempotency_key is not None:
            name = "summaries_of_any_key"
        elif state is not None:
            name = "summaries_in_state"
        elif owner is not None:
            name = "summaries_of_owner"
        else:
            name = "summaries"
        return [_summary(row) for row in self._rows(name, values)]

    def find_by_key(self, owner: str, key: str) -> RequestRecord | None:
        """The request of this owner with this Idempotency-Key, or None. A key is freed after the retention time."""
        row = self._row("summary_of_key", (owner, key))
        return None if row is None else self._record(_summary(row))

    def find_recent_by_digest(self, owner: str, digest: str, since: float) -> RequestRecord | None:
        """The newest request of this owner with this body, created at `since` or later, or None."""
        row = self._row("summary_of_digest", (owner, digest, since))
        return None if row is None else self._record(_summary(row))

    def open_requests(self) -> list[RequestRecord]:
        """Everything that has not ended, in order of acceptance, with all that is needed to go on."""
        return [self._record(_summary(row)) for row in self._rows("summaries_open")]

    def events(self, request_id: str, after_seq: int = 0, limit: int = EVENTS_AT_ONCE) -> list[EventRecord]:
        """Events past `after_seq`, in order, at most `limit`."""
        return [EventRecord(*row) for row in self._rows("events", (request_id, after_seq, limit))]

    def workers(self) -> list[WorkerRecord]:
        """Worker processes of this boot that were not seen to go."""
        return [WorkerRecord(*row) for row in self._rows("workers")]

    def fact(self, key: str) -> bytes | None:
        """A remembered value (JSON), or None."""
        row = self._row("fact", (key,))
        return None if row is None else row[0]

    def facts(self, prefix: str = "") -> dict[str, bytes]:
        """All remembered values whose key begins so."""
        return {row[0]: row[1] for row in self._rows("facts", (prefix,))}

    def measurements(
        self, key: str | None = None, *, engine: str | None = None, driver: str | None = None
    ) -> list[MeasurementRecord]:
        """What loads taught about memory, oldest first. None: of all keys, engines, drivers."""
        values = {"engine": engine, "driver": driver} | ({} if key is None else {"key": key})
        rows = self._rows("measurements" if key is None else "measurements_of_key", values)
        return [MeasurementRecord(*row) for row in rows]

    def counts(self) -> Counts:
        """How many requests are in each state, from running totals, and the used size of the file."""
        by_state = {row[0]: row[1] for row in self._rows("totals")}
        return Counts(by_state=by_state, used_bytes=self.used_bytes())

    def gaps(self) -> list[Gap]:
        """Every announced loss."""
        return [Gap(*row) for row in self._rows("gaps")]

    def expire_due(self, now: float) -> list[str]:
        """Ids of resumable requests whose time is over. The service ends them."""
        return [row[0] for row in self._rows("due", (now,))]

    def used_bytes(self) -> int:
        """Pages in use times their size; free pages are not counted."""
        pages = self._pragma("page_count") - self._pragma("freelist_count")
        return pages * self._pragma("page_size")

    def free_pages(self) -> int:
        """Pages of the file that hold nothing."""
        return self._pragma("freelist_count")

    def _pragma(self, name: str) -> int:
        value = self._connection.pragma(name)
        assert isinstance(value, int)
        return value

    def _record(self, summary: RequestSummary) -> RequestRecord:
        number = (summary.number,)
        payload = self._row("payload", number)
        result = self._row("result", number)
        ask, tokens, weighed, standby, path = payload or (None, None, None, None, None)
        return RequestRecord(
            summary=summary,
            ask=ask,
            prompt_tokens=None if tokens is None else unpack_tokens(tokens),
            weighed=weighed,
            standby=standby,
            payload_path=path,
            result=None if result is None else result[0],
            attempts=[AttemptRecord(*row) for row in self._rows("attempts", number)],
            checkpoints=[
                CheckpointRecord(choice, unpack_tokens(tokens), text, delivered, finish, at)
                for choice, tokens, text, delivered, finish, at in self._rows("checkpoints", number)
            ],
            moves=[Move(*row) for row in self._rows("moves", number)],
        )


def read_mark(connection: apsw.Connection) -> Mark:
    """How far the file has come."""
    row: Any = connection.execute(statements()["identity"]).fetchone()
    return Mark(*row)


def _summary(row: tuple[Any, ...]) -> RequestSummary:
    values = list(row)
    values[12] = bool(values[12])
    values[15] = int(values[15])
    return RequestSummary(*values)
