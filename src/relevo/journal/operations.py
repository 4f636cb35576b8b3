"""What can be written to the journal: one frozen record for each kind of change.

Payload fields are bytes, encoded by the caller, so that nothing can change between submission and commit.
Times are wall time, seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relevo.core.errors import Conflict, RelevoError


class StateConflict(Conflict):
    """The request is not in the state this change starts from."""


class KeyTaken(Conflict):
    """Another request of this owner has this Idempotency-Key."""


class BadOperation(RelevoError):
    """The journal was handed something it cannot record. This is a fault in Relevo."""


class _Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all changes."""


class AcceptRequest(_Operation, frozen=True, kw_only=True):
    """Acceptance: the request exists from the commit that holds this. Its first state is `accepted`."""

    id: str
    owner: str
    model: str
    kind: str
    created: float
    body_digest: str
    kept: bool
    ask: bytes  # the encoded core.events.Ask
    prompt_tokens: Sequence[int]
    seed: int  # effective, 0 to 2**64-1
    weighed: bytes = b"{}"  # JSON: limits and demand found at admission
    standby: bytes = b"null"  # JSON
    idempotency_key: str | None = None
    deadline_at: float | None = None
    payload_path: str | None = None  # relative to the state folder; removed when the payload is blanked

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "prompt_tokens", tuple(self.prompt_tokens))


class ChangeState(_Operation, frozen=True, kw_only=True):
    """A move between open states. Refused (StateConflict) unless the request is in `old`."""

    id: str
    old: str
    new: str
    at: float
    reason: str | None = None
    kept_until: float | None = None  # of a resumable request


class StartAttempt(_Operation, frozen=True, kw_only=True):
    """An attempt begins. Numbered from 1 without gaps; refused when the request ended."""

    id: str
    attempt: int
    route: str
    device: str
    replica_pid: int | None
    at: float
    cause: str | None = None


class EndAttempt(_Operation, frozen=True, kw_only=True):
    """An attempt ends, once. Allowed after the request's own end: a cancel is answered before its worker is."""

    id: str
    attempt: int
    outcome: str
    at: float
    code: str | None = None
    message: str | None = None


class AddEvent(_Operation, frozen=True, kw_only=True):
    """Append to the request's events. Numbered 1, 2, 3 in the order of submission."""

    id: str
    kind: str
    at: float
    payload: bytes  # JSON


class SaveCheckpoint(_Operation, frozen=True, kw_only=True):
    """Replace the newest checkpoint of a choice. Refused when the request ended."""

    id: str
    choice: int
    tokens: Sequence[int]  # all output tokens so far; copied, the caller's list may grow on
    text: str  # all released text so far
    delivered_bytes: int
    at: float
    finish: str | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "tokens", tuple(self.tokens))


class EndRequest(_Operation, frozen=True, kw_only=True):
    """The one end: completed, cancelled or failed, with the result. Refused (StateConflict) when it ended before."""

    id: str
    state: str
    at: float
    reason: str | None = None
    result: bytes | None = None  # JSON
    completion_tokens: int | None = None


class WorkerStarted(_Operation, frozen=True, kw_only=True):
    """A worker process exists. Recorded before it is given work, so that a crash leaves no stranger."""

    pid: int
    start_time: int  # field 22 of /proc/PID/stat
    model: str
    route: str
    device: str
    at: float


class WorkerGone(_Operation, frozen=True, kw_only=True):
    """A worker process was seen to be gone."""

    pid: int
    start_time: int


class PutFact(_Operation, frozen=True, kw_only=True):
    """Remember a small value under a key, in place of the old one."""

    key: str
    value: bytes  # JSON


class AddMeasurement(_Operation, frozen=True, kw_only=True):
    """Keep what a load or run taught about memory. The oldest go: of this key, and of all when there are too many."""

    key: str  # model, device and options, in one text
    engine: str  # kind and build
    driver: str
    at: float
    value: bytes  # JSON, at most apply.MEASUREMENT_BYTES


class BlankPayload(_Operation, frozen=True, kw_only=True):
    """Remove what an ended request said and got, now. Its states, digests and counts stay."""

    id: str


Operation = (
    AcceptRequest
    | ChangeState
    | StartAttempt
    | EndAttempt
    | AddEvent
    | SaveCheckpoint
    | EndRequest
    | WorkerStarted
    | WorkerGone
    | PutFact
    | AddMeasurement
    | BlankPayload
)
