"""How each operation is written: one function a kind, chosen by the record's type.

Runs inside the writer's transaction. A refusal is raised and undone by the writer's savepoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import apsw

from relevo.core.errors import RelevoError, RequestNotFound
from relevo.core.memory.learned import KEPT_PER_KEY
from relevo.journal import operations as op
from relevo.journal.packing import pack_tokens
from relevo.journal.records import ENDED_STATES, OPEN_STATES
from relevo.journal.statements import statements

SEED_LIMIT = 2**64
MEASUREMENTS_PER_KEY = KEPT_PER_KEY
MEASUREMENTS = 4096
"""Of all keys together: models, options and devices come and go."""
MEASUREMENT_BYTES = 16384


class Applier:
    """Writes operations through one connection. `boot` names this boot; `now` gives the time of facts."""

    def __init__(self, connection: apsw.Connection, boot: str, now: Callable[[], float]) -> None:
        self._execute = connection.execute
        self._changes = connection.changes
        self._boot = boot
        self._now = now

    def apply(self, operation: op.Operation) -> None:
        """Write one operation.

        Raises StateConflict, KeyTaken, RequestNotFound or BadOperation for a refusal; apsw errors when the file
        cannot be written.
        """
        try:
            _APPLY[type(operation)](self, operation)
        except apsw.ConstraintError as e:
            name = type(operation).__name__
            if getattr(e, "extendedresult", None) == apsw.SQLITE_CONSTRAINT_DATATYPE:
                raise op.BadOperation(f"{name} cannot be recorded: {e}.", detail=_about(operation)) from e
            raise op.StateConflict(f"{name}: {e}.", detail=_about(operation)) from e
        except (apsw.TooBigError, apsw.MismatchError) as e:
            raise op.BadOperation(detail=_about(operation)) from e
        except (RelevoError, apsw.Error):
            raise
        except Exception as e:  # whatever is wrong with one record must not stop the others
            name = type(operation).__name__
            raise op.BadOperation(f"{name} cannot be recorded: {_plain(e)}.", detail=_about(operation)) from e

    def _find(self, request_id: str) -> tuple[int, str]:
        row = self._execute(statements()["find_request"], (request_id,)).fetchone()
        if row is None:
            raise RequestNotFound(detail={"id": request_id})
        return row[0], row[1]

    def _find_open(self, request_id: str, what: str) -> int:
        number, state = self._find(request_id)
        if state in ENDED_STATES:
            raise op.StateConflict(f"The request is {state}: {what}.", detail={"id": request_id, "state": state})
        return number

    def _accept(self, o: op.AcceptRequest) -> None:
        if not 0 <= o.seed < SEED_LIMIT:
            raise ValueError("a seed is between 0 and 2^64-1")
        tokens = pack_tokens(o.prompt_tokens)
        values = {
            "id": o.id,
            "owner": o.owner,
            "model": o.model,
            "kind": o.kind,
            "created": o.created,
            "idempotency_key": o.idempotency_key,
            "body_digest": o.body_digest,
            "kept": int(o.kept),
            "deadline_at": o.deadline_at,
            "seed": str(o.seed),
            "prompt_tokens": len(o.prompt_tokens),
        }
        try:
            row = self._execute(statements()["accept_request"], values).fetchone()
        except apsw.ConstraintError as e:
            if "requests.idempotency_key" in str(e):
                raise op.KeyTaken(detail={"owner": o.owner, "idempotency_key": o.idempotency_key}) from e
            raise
        assert row is not None
        self._execute(statements()["store_payload"], (row[0], o.ask, tokens, o.weighed, o.standby, o.payload_path))

    def _change(self, o: op.ChangeState) -> None:
        if o.new not in OPEN_STATES:
            raise ValueError(f"{o.new!r} is not an open state; EndRequest ends a request")
        number, state = self._find(o.id)
        values = {
            "number": number,
            "old": o.old,
            "new": o.new,
            "at": o.at,
            "reason": o.reason,
            "kept_until": o.kept_until,
        }
        self._execute(statements()["change_state"], values)
        if self._changes() != 1:
            raise op.StateConflict(f"The request is {state}, not {o.old}.", detail={"id": o.id, "state": state})

    def _end(self, o: op.EndRequest) -> None:
        if o.state not in ENDED_STATES:
            raise ValueError(f"{o.state!r} is not an end")
        number = self._find_open(o.id, "it ends once")
        values = {
            "number": number,
            "state": o.state,
            "at": o.at,
            "reason": o.reason,
            "completion_tokens": o.completion_tokens,
        }
        self._execute(statements()["end_request"], values)
        if o.result is not None:
            self._execute(statements()["store_result"], (number, o.result))

    def _start_attempt(self, o: op.StartAttempt) -> None:
        number = self._find_open(o.id, "no attempt starts")
        self._execute(
            statements()["start_attempt"], (number, o.attempt, o.route, o.device, o.replica_pid, o.at, o.cause)
        )

    def _end_attempt(self, o: op.EndAttempt) -> None:
        number, _ = self._find(o.id)
        values = {
            "number": number,
            "attempt": o.attempt,
            "outcome": o.outcome,
            "at": o.at,
            "code": o.code,
            "message": o.message,
        }
        self._execute(statements()["end_attempt"], values)
        if self._changes() != 1:
            raise op.StateConflict(f"Attempt {o.attempt} is not running.", detail={"id": o.id, "attempt": o.attempt})

    def _add_event(self, o: op.AddEvent) -> None:
        number, _ = self._find(o.id)
        self._execute(
            statements()["add_event"], {"number": number, "at": o.at, "kind": o.kind, "payload": _bytes(o.payload)}
        )

    def _save_checkpoint(self, o: op.SaveCheckpoint) -> None:
        number = self._find_open(o.id, "no checkpoint is saved")
        self._execute(
            statements()["save_checkpoint"],
            (number, o.choice, pack_tokens(o.tokens), o.text, o.delivered_bytes, o.finish, o.at),
        )

    def _worker_started(self, o: op.WorkerStarted) -> None:
        self._execute(
            statements()["worker_started"], (o.pid, o.start_time, self._boot, o.model, o.route, o.device, o.at)
        )

    def _worker_gone(self, o: op.WorkerGone) -> None:
        self._execute(statements()["worker_gone"], (o.pid, o.start_time))

    def _put_fact(self, o: op.PutFact) -> None:
        self._execute(statements()["put_fact"], (o.key, o.value, self._now()))

    def _add_measurement(self, o: op.AddMeasurement) -> None:
        if len(_bytes(o.value)) > MEASUREMENT_BYTES:
            raise ValueError(f"a measurement has at most {MEASUREMENT_BYTES} bytes")
        self._execute(statements()["add_measurement"], (o.key, o.engine, o.driver, o.at, o.value))
        self._execute(statements()["forget_measurements_of_key"], (o.key, MEASUREMENTS_PER_KEY))
        self._execute(statements()["forget_measurements"], (MEASUREMENTS,))

    def _blank(self, o: op.BlankPayload) -> None:
        number, state = self._find(o.id)
        if state not in ENDED_STATES:
            raise op.StateConflict(f"The request is {state}: only what ended is blanked.", detail={"id": o.id})
        self.blank(number)

    def blank(self, number: int) -> None:
        """Remove an ended request's payloads. The caller removes the file of a large body after the commit."""
        for name in ("delete_payload", "delete_result", "delete_checkpoints", "blank_events"):
            self._execute(statements()[name], (number,))
        self._execute(statements()["mark_blanked"], {"number": number, "at": self._now()})


def _bytes(value: bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a payload is bytes")
    return value


def _plain(error: BaseException) -> str:
    # an encoding error's text quotes the content, which does not belong in messages
    return "text that is not Unicode" if isinstance(error, UnicodeError) else str(error)


def _about(operation: op.Operation) -> dict[str, Any]:
    return {"id": operation.id} if hasattr(operation, "id") else {}


_APPLY: dict[type, Callable[[Applier, Any], None]] = {
    op.AcceptRequest: Applier._accept,
    op.ChangeState: Applier._change,
    op.StartAttempt: Applier._start_attempt,
    op.EndAttempt: Applier._end_attempt,
    op.AddEvent: Applier._add_event,
    op.SaveCheckpoint: Applier._save_checkpoint,
    op.EndRequest: Applier._end,
    op.WorkerStarted: Applier._worker_started,
    op.WorkerGone: Applier._worker_gone,
    op.PutFact: Applier._put_fact,
    op.AddMeasurement: Applier._add_measurement,
    op.BlankPayload: Applier._blank,
}
