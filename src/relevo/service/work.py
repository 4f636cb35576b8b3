"""One accepted request while it lives in memory: what it asked, what exists of the answer, who listens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from relevo.core.cells import CellLease, live_cells
from relevo.core.events import (
    Ask,
    ChoiceStart,
    Delta,
    Ended,
    Piece,
    Routed,
    Sampling,
    ServiceEvent,
    TokenLogprob,
    Usage,
)
from relevo.core.request import TERMINAL, RequestState, advance


@dataclass(slots=True)
class Choice:
    """What exists of one of the n answers."""

    index: int
    max_output_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    text_bytes: int = 0
    finish: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Append a step's output."""
        self.tokens.extend(piece.tokens)
        if piece.text:
            self.text.append(piece.text)
            self.text_bytes += len(piece.text) if piece.text.isascii() else len(piece.text.encode())
        if piece.logprobs:
            self.logprobs.extend(piece.logprobs)
        if piece.finish is not None:
            self.finish = piece.finish

    def forget(self) -> None:
        """Back to nothing, for a restart of work that nobody has seen."""
        self.tokens, self.text, self.text_bytes, self.finish, self.logprobs = [], [], 0, None, []

    def start(self, held_tokens: int | None) -> ChoiceStart:
        """Where the next attempt takes up, and how far it may go at first (None: to its limit)."""
        return ChoiceStart(
            index=self.index,
            max_output_tokens=self.max_output_tokens,
            output_tokens=list(self.tokens),
            delivered_bytes=self.text_bytes,
            held_tokens=held_tokens,
        )

    @property
    def whole_text(self) -> str:
        """All text released so far."""
        return "".join(self.text)


@dataclass(frozen=True, slots=True)
class Parked:
    """Answers of a running request that wait for cells. They keep what they hold, and nothing of them is lost."""

    since: float
    """Wall time, in seconds."""
    choices: tuple[int, ...]
    reason: str

    def view(self) -> dict[str, Any]:
        """The JSON of the outer contract."""
        return {"since": self.since, "choices": list(self.choices), "reason": self.reason}


@dataclass(slots=True)
class Handover:
    """One change of route, as the outer contract lists it."""

    from_route: str
    to_route: str | None
    at_token: int
    grade: str | None
    cause: str
    lost_at: float
    gap_ms: float | None = None

    def view(self) -> dict[str, Any]:
        """The JSON of the outer contract."""
        return {
            "from": self.from_route,
            "to": self.to_route,
            "at_token": self.at_token,
            "grade": self.grade,
            "cause": self.cause,
            "gap_ms": self.gap_ms,
        }


class Work:
    """A request between acceptance and its end. Only the service changes it; tickets read it."""

    def __init__(
        self,
        request_id: str,
        ask: Ask,
        *,
        created: float,
        prompt_tokens: list[int],
        sampling: Sampling,
        outputs: Iterable[int],
    ) -> None:
        self.request_id = request_id
        self.ask = ask
        self.created = created
        self.prompt_tokens = prompt_tokens
        self.sampling = sampling
        self.choices = [Choice(i, limit) for i, limit in enumerate(outputs)]
        self.wish = ask.handover
        self.state = RequestState.ACCEPTED
        self.reason: str | None = None
        self.ended_at: float | None = None

        self.route: str | None = None  # where it is queued or runs
        self.lane_since: float = 0.0
        self.deadline: float | None = None
        """Monotonic time at which it must have started, on whatever route."""
        self.attempt = 0
        self.attempt_started: float = 0.0
        self.first_output_at: float | None = None
        self.degraded_reason: str | None = None
        self.standby: dict[str, Any] | None = None
        self.backup_model: str | None = None
        self.cells: CellLease | None = None
        self.parked: Parked | None = None
        self.gives_way: str | None = None
        """Why it is being taken out of its worker although nothing is wrong with it."""
        self.gave_way = 0  # how often
        self.alone_kills = 0
        self.suspect = False
        self.cancel_requested = False
        self.cancel_reason: str | None = None
        self.handovers: list[Handover] = []
        self.kept_until: float | None = None
        self.error: dict[str, Any] | None = None

        self.events: list[ServiceEvent] = []
        self.callers = 0
        self.delivered = False  # some caller of a stream was given output
        self.first_output_gate: asyncio.Future[None] | None = None
        self.durable_events = 0  # of a kept request: how many events may leave
        self.checkpointed_tokens = 0
        self.checkpointed_at = 0.0  # wall time
        self.checkpoint_pending = False
        self._kept = ask.kept
        self._listeners: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        route = f" on {self.route}" if self.route else ""
        return f"<{self.request_id[:12]} {self.state}{route}, attempt {self.attempt}, {self.output_tokens} tokens>"

    # -- state

    def move(self, state: RequestState) -> RequestState:
        """Change state along the published table; returns the old one. Raises IllegalTransition."""
        old = self.state
        self.state = advance(old, state)
        return old

    @property
    def ended(self) -> bool:
        """Whether it has reached an end."""
        return self.state in TERMINAL

    @property
    def resting(self) -> bool:
        """Whether it is resumable: it holds nothing and waits for a person."""
        return self.state is RequestState.RESUMABLE

    @property
    def output_tokens(self) -> int:
        """Tokens of all choices."""
        if len(self.choices) == 1:  # asked for at every step
            return len(self.choices[0].tokens)
        return sum(len(c.tokens) for c in self.choices)

    @property
    def usage(self) -> Usage:
        """Tokens counted so far."""
        return Usage(prompt_tokens=len(self.prompt_tokens), completion_tokens=self.output_tokens)

    @property
    def open_choices(self) -> list[Choice]:
        """Choices without a finish."""
        return [c for c in self.choices if c.finish is None]

    def starts(self) -> list[ChoiceStart]:
        """The open choices, as the next attempt takes them up with the cells leased for it."""
        starts = []
        for choice in self.open_choices:
            answer = self.cells.answer(choice.index) if self.cells is not None else None
            grows = answer is not None and answer.held < answer.limit
            starts.append(choice.start(answer.held if answer is not None and grows else None))
        return starts

    def live_cells(self, shared: bool) -> int:
        """Cells of its lease that hold a token."""
        lease = self.cells
        if lease is None or lease.prompt_read < lease.prompt_tokens or self.first_output_at is None:
            return 0 if lease is None else lease.prompt_read
        return live_cells(lease.prompt_tokens, [len(self.choices[a.choice].tokens) for a in lease.answers], shared)

    # -- output

    def add_piece(self, piece: Piece) -> None:
        """Take a step's output into the record and tell the listeners."""
        self.choices[piece.choice].add(piece)
        self.publish(
            Delta(
                choice=piece.choice, text=piece.text, tokens=piece.tokens, finish=piece.finish, logprobs=piece.logprobs
            )
        )

    def forget_output(self) -> None:
        """Drop output nobody has seen, for a restart from the prompt."""
        for choice in self.choices:
            choice.forget()
        first = next((i for i, e in enumerate(self.events) if isinstance(e, Delta)), len(self.events))
        del self.events[first:]
        self.durable_events = min(self.durable_events, len(self.events))
        self.first_output_at = None
        self.checkpointed_tokens = 0

    # -- listeners

    def publish(self, event: ServiceEvent) -> None:
        """Append an event and wake everyone who listens."""
        self.events.append(event)
        self.wake()

    def wake(self) -> None:
        """Let listeners look again."""
        if self._listeners:
            listeners, self._listeners = self._listeners, []
            for future in listeners:
                if not future.done():  # else whoever waited was cancelled
                    future.set_result(None)

    def changed(self, loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Future[None]:
        """To be awaited: done when something changed. A bare future, because every streamed token makes one.

        `loop` None: the running one. Who waits often looks it up once (that takes a system call).
        """
        future: asyncio.Future[None] = (loop or asyncio.get_running_loop()).create_future()
        self._listeners.append(future)
        return future

    def may_leave(self, index: int) -> bool:
        """Whether event `index` is as durable as the contract asks."""
        gate = self.first_output_gate
        recorded = gate is None or gate.done()
        if recorded and not self._kept:  # almost always
            return True
        if isinstance(self.events[index], Routed):
            return True
        if self._kept and not isinstance(self.events[index], Ended):
            return index < self.durable_events
        return recorded
