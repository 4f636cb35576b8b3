"""What of a request's progress is written to the journal, and when its events may leave because of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from relevo.journal import ChangeState, EndAttempt, Journal, Operation, SaveCheckpoint, StartAttempt
from relevo.service.work import Work

_log = logging.getLogger("relevo.records")

CHECKPOINT_TOKENS = 16
CHECKPOINT_S = 0.25
"""A stream that is not kept is journaled when both have gone by: the most that a crash can take from its record."""


class Recorder:
    """Writes a request's moves, attempts and checkpoints, in the order in which they happened."""

    def __init__(self, journal: Journal, wall: Callable[[], float]) -> None:
        self._journal = journal
        self._wall = wall

    def submit(self, *operations: Operation) -> asyncio.Future[None]:
        """Queue operations for the next commit; the future resolves when they are durable."""
        return self._journal.submit(*operations)

    def post(self, what: str, *operations: Operation) -> None:
        """Queue operations that nobody waits for; a failure is logged."""
        self._journal.submit(*operations).add_done_callback(log_failure(what))

    def move(self, work: Work, change: ChangeState) -> None:
        """A change of state."""
        self.post(f"a move of {work.request_id}", change)

    def attempt_started(
        self, work: Work, change: ChangeState, *, route: str, device: str, pid: int | None
    ) -> asyncio.Future[None]:
        """A move to running with its attempt. Output may leave once this is durable."""
        cause = work.handovers[-1].cause if work.handovers else None
        started = StartAttempt(
            id=work.request_id,
            attempt=work.attempt,
            route=route,
            device=device,
            replica_pid=pid,
            at=change.at,
            cause=cause,
        )
        return self._journal.submit(change, started)

    def attempt_ended(self, work: Work, outcome: str, code: str | None, message: str | None) -> None:
        """An attempt holds nothing any more."""
        ended = EndAttempt(
            id=work.request_id, attempt=work.attempt, outcome=outcome, at=self._wall(), code=code, message=message
        )
        self.post(f"the end of an attempt of {work.request_id}", ended)

    # ------------------------------------------------------------- checkpoints

    def checkpoints(self, work: Work) -> list[SaveCheckpoint]:
        """Every choice as it stands."""
        at = self._wall()
        work.checkpointed_tokens = work.output_tokens
        work.checkpointed_at = at
        return [
            SaveCheckpoint(
                id=work.request_id,
                choice=c.index,
                tokens=list(c.tokens),
                text=c.whole_text,
                delivered_bytes=c.text_bytes,
                finish=c.finish,
                at=at,
            )
            for c in work.choices
            if c.tokens
        ]

    def progressed(self, work: Work) -> None:
        """Output was added: save it as often as this request's promise asks."""
        if work.ask.kept:
            self._flush_kept(work)
        elif self._is_checkpoint_due(work):
            self.post(f"a checkpoint of {work.request_id}", *self.checkpoints(work))

    def _is_checkpoint_due(self, work: Work) -> bool:
        new_tokens = work.output_tokens - work.checkpointed_tokens
        return (
            work.ask.stream and new_tokens >= CHECKPOINT_TOKENS and self._wall() - work.checkpointed_at >= CHECKPOINT_S
        )

    def _flush_kept(self, work: Work) -> None:
        """Save what is new of a kept request; its events leave when that is durable. One save at a time."""
        if work.checkpoint_pending or work.durable_events >= len(work.events):
            return
        work.checkpoint_pending = True
        upto, attempt = len(work.events), work.attempt
        saved = self._journal.submit(*self.checkpoints(work))

        def saved_now(done: asyncio.Future[None]) -> None:
            work.checkpoint_pending = False
            if done.cancelled() or done.exception() is not None:
                return
            if work.attempt == attempt:  # else a restart took those events back
                work.durable_events = max(work.durable_events, min(upto, len(work.events)))
            work.wake()
            if not work.ended:
                self._flush_kept(work)

        saved.add_done_callback(log_failure(f"a checkpoint of {work.request_id}"))
        saved.add_done_callback(saved_now)


def log_failure(what: str) -> Callable[[asyncio.Future[None]], None]:
    """A callback that logs a journal future's failure, where nobody else awaits it."""

    def check(done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("%s could not be recorded: %s", what, error)

    return check
