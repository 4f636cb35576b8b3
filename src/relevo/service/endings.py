"""How a request ends, or comes to rest: once, with a reason, and told only when it is durable."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from relevo.core.errors import Cancelled, Draining, RelevoError
from relevo.core.events import Ended
from relevo.core.request import RequestState
from relevo.journal import ChangeState, EndRequest
from relevo.service.metrics import Metrics
from relevo.service.records import Recorder
from relevo.service.views import result_of, resumable_error
from relevo.service.work import Work

_log = logging.getLogger("relevo.endings")

KEEP_ENDED = 256
"""Ended requests that stay in memory, for a client's own retry; older ones are read from the journal."""


class Endings:
    """Moves work to its end. Whoever calls has let go of lanes, cells and workers before."""

    def __init__(
        self,
        works: dict[str, Work],
        recorder: Recorder,
        metrics: Metrics,
        *,
        describe: Callable[[Work], dict[str, Any]],
        clock: Callable[[], float],
        wall: Callable[[], float],
        retention_s: float,
    ) -> None:
        self._works = works
        self._recorder = recorder
        self._metrics = metrics
        self._describe = describe
        self._clock = clock
        self._wall = wall
        self._retention_s = retention_s
        self._ended: OrderedDict[str, None] = OrderedDict()

    def complete(self, work: Work) -> None:
        """It has its whole answer."""
        self._end(work, RequestState.COMPLETED, None)

    def cancel(self, work: Work) -> None:
        """It was stopped, for the reason in `cancel_reason`."""
        work.error = error_object(Cancelled(f"The request was cancelled: {work.cancel_reason}"))
        self._end(work, RequestState.CANCELLED, work.cancel_reason)

    def fail(self, work: Work, error: RelevoError) -> None:
        """It cannot be served any more."""
        work.error = error_object(error)
        self._end(work, RequestState.FAILED, error.message)

    def rest(self, work: Work, cause: str) -> None:
        """It becomes resumable: what was delivered is kept, and one error event says how to go on."""
        old = work.move(RequestState.RESUMABLE)
        work.kept_until = self._wall() + self._retention_s
        work.reason = cause
        sentence = (
            f"{cause} What was delivered so far is kept; nothing is lost. "
            f"Go on with `relevo requests resume {work.request_id}`, or POST to the address in `resume`."
        )
        work.error = resumable_error(work, sentence)
        change = ChangeState(
            id=work.request_id,
            old=str(old),
            new=str(work.state),
            at=self._wall(),
            reason=cause,
            kept_until=work.kept_until,
        )
        saved = self._recorder.submit(change, *self._recorder.checkpoints(work))
        rest = work.kept_until

        def tell(done: asyncio.Future[None]) -> None:
            # Whoever resumed (or cancelled) it meanwhile goes on with it: the end of this delivery is no news then.
            if work.state is RequestState.RESUMABLE and work.kept_until == rest:
                self._publish(work, done)

        saved.add_done_callback(tell)

    def interrupt(self, work: Work) -> None:
        """The service stops: its callers are told so. It has not ended; the next start takes it up."""
        error = Draining(
            "Relevo is being stopped. The request is kept and will be done after the next start; "
            f"`relevo requests show {work.request_id}` has its result then.",
            retry_after_s=5.0,
        )
        work.publish(Ended(state="failed", usage=work.usage, relevo=self._describe(work), error=error_object(error)))

    def _end(self, work: Work, state: RequestState, reason: str | None) -> None:
        work.move(state)
        work.reason = reason
        work.ended_at = self._wall()
        self._count(work)
        result = {**result_of(work), "error": work.error, "relevo": self._describe(work)}
        saved = self._recorder.submit(
            EndRequest(
                id=work.request_id,
                state=str(state),
                at=work.ended_at,
                reason=reason,
                result=msgspec.json.encode(result),
                completion_tokens=work.output_tokens,
            )
        )
        saved.add_done_callback(lambda done: self._publish(work, done))

    def _publish(self, work: Work, saved: asyncio.Future[None]) -> None:
        """The end is durable (or could not be made so): now it may be told."""
        if saved.cancelled():
            return
        failure = saved.exception()
        error = work.error
        if failure is not None:
            _log.error("the end of %s could not be recorded: %s", work.request_id, failure)
            error = error_object(failure if isinstance(failure, RelevoError) else RelevoError())
        work.durable_events = len(work.events)
        work.publish(
            Ended(
                state=str(work.state) if failure is None else "failed",
                usage=work.usage,
                relevo=self._describe(work),
                reason=work.reason,
                error=error,
            )
        )
        if work.ended:
            self._forget_oldest(work)

    def _forget_oldest(self, work: Work) -> None:
        self._ended[work.request_id] = None
        while len(self._ended) > KEEP_ENDED:
            oldest, _ = self._ended.popitem(last=False)
            self._works.pop(oldest, None)

    def _count(self, work: Work) -> None:
        model, route = work.ask.model, work.route or "none"
        self._metrics.requests.labels(model, route, str(work.state)).inc()
        self._metrics.tokens.labels(model, route, "in").inc(len(work.prompt_tokens))
        self._metrics.tokens.labels(model, route, "out").inc(work.output_tokens)
        if work.first_output_at is not None and work.output_tokens > 1:
            spent_s = self._clock() - work.first_output_at
            self._metrics.per_token.labels(model, route).observe(spent_s / (work.output_tokens - 1))


def error_object(error: RelevoError) -> dict[str, Any]:
    """An error as events and records carry it."""
    return {"message": error.message, "type": error.type, "code": error.code, "param": error.param, **error.detail}
