"""What can be read from the journal."""

from __future__ import annotations

from enum import Enum

import msgspec

OPEN_STATES = frozenset({"accepted", "queued", "running", "resumable"})
ENDED_STATES = frozenset({"completed", "cancelled", "failed"})


class Condition(Enum):
    """Whether the journal can be written."""

    WORKING = "working"
    """Everything is written and synced."""
    FULL = "full"
    """The disk is full: nothing new is accepted, accepted work can end."""
    BROKEN = "broken"
    """A write or a sync failed, or the writer died: nothing is acknowledged until the journal is opened again."""
    CLOSED = "closed"
    """Closed by its owner."""


class _Record(msgspec.Struct, frozen=True):
    """Base of all records."""


class RequestSummary(_Record, frozen=True):
    """A request without its payload. Times are seconds since the epoch."""

    number: int  # order of acceptance
    id: str
    owner: str
    model: str
    kind: str
    state: str
    created: float
    changed: float
    ended: float | None
    reason: str | None
    idempotency_key: str | None
    body_digest: str
    kept: bool
    deadline_at: float | None
    kept_until: float | None
    seed: int
    prompt_tokens: int
    completion_tokens: int | None
    blanked: float | None  # when its payload was removed


class AttemptRecord(_Record, frozen=True):
    """One dispatch. `ended` is None while it runs, or when a crash cut it off."""

    attempt: int
    route: str
    device: str
    replica_pid: int | None
    started: float
    cause: str | None
    ended: float | None
    outcome: str | None
    code: str | None
    message: str | None


class CheckpointRecord(_Record, frozen=True):
    """The newest checkpoint of one choice."""

    choice: int
    tokens: list[int]
    text: str
    delivered_bytes: int
    finish: str | None
    at: float


class Move(_Record, frozen=True):
    """A change of state. `old` is None for the acceptance."""

    at: float
    old: str | None
    new: str
    reason: str | None


class RequestRecord(_Record, frozen=True):
    """All of a request but its events. Payload fields are None once blanked."""

    summary: RequestSummary
    ask: bytes | None
    prompt_tokens: list[int] | None
    weighed: bytes | None
    standby: bytes | None
    payload_path: str | None
    result: bytes | None
    attempts: list[AttemptRecord]
    checkpoints: list[CheckpointRecord]
    moves: list[Move]


class EventRecord(_Record, frozen=True):
    """An event of a request. `payload` is None once blanked."""

    seq: int
    at: float
    kind: str
    payload: bytes | None


class WorkerRecord(_Record, frozen=True):
    """A worker process of this boot that was started and not seen to go."""

    pid: int
    start_time: int
    model: str
    route: str
    device: str
    at: float


class MeasurementRecord(_Record, frozen=True):
    """What a load or run taught about memory. `value` is JSON, as it was handed over."""

    key: str
    engine: str
    driver: str
    at: float
    value: bytes


class Counts(_Record, frozen=True):
    """How many requests are in each state, since the journal was made (deleted ones included), and its size."""

    by_state: dict[str, int]
    used_bytes: int

    @property
    def accepted_in_all(self) -> int:
        """Every request ever accepted."""
        return sum(self.by_state.values())

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return sum(n for state, n in self.by_state.items() if state in OPEN_STATES)


class Gap(_Record, frozen=True):
    """Acknowledged commits that were not in the file at a start. Numbers: of the requests among them, if any."""

    at: float
    commits_from: int
    commits_to: int
    numbers_from: int | None
    numbers_to: int | None

    def sentence(self) -> str:
        """In words, for the log and `relevo doctor`."""
        text = f"Commits {self.commits_from} to {self.commits_to} were acknowledged but are not in the journal"
        if self.numbers_from is not None:
            text += f"; requests number {self.numbers_from} to {self.numbers_to} are lost"
        return text + ". The disk may not honour syncs, or the file was damaged or replaced by an older copy."


class WriterStats(_Record, frozen=True):
    """What the writer did since it was opened."""

    commits: int = 0
    submissions: int = 0
    refused: int = 0
    largest_commit: int = 0  # submissions
    commit_s: float = 0.0  # spent in commits, syncs included
    last_commit_s: float = 0.0
    checkpoints: int = 0
