"""An accepted request as one caller sees it: its events from the first, at the caller's own pace."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from relevo.core.events import Delta, Ended, ServiceEvent, Waiting
from relevo.core.request import RequestState
from relevo.service.work import Work


class WorkTicket:
    """Reads a Work's events. Several tickets may read one Work; each has its own place."""

    def __init__(
        self,
        work: Work,
        *,
        replayed: bool,
        start: int,
        describe: Callable[[Work], dict[str, Any]],
        waiting: Callable[[Work], Waiting | None],
        left: Callable[[Work], None],
        watches: bool = False,
    ) -> None:
        self._work = work
        self._next = start
        self._describe = describe
        self._waiting = waiting
        self._left = left
        self._gone = watches  # who only watches neither keeps the request alive nor ends it by leaving
        self.replayed = replayed
        work.callers += not watches

    @property
    def request_id(self) -> str:
        """The id in every answer, header and record."""
        return self._work.request_id

    @property
    def created(self) -> float:
        """Wall time of acceptance, in seconds."""
        return self._work.created

    def relevo(self) -> dict[str, Any]:
        """The `relevo` object, as of now."""
        return self._describe(self._work)

    async def events(self) -> AsyncIterator[ServiceEvent]:
        """Everything in order, until and including Ended. See facade.Ticket."""
        work = self._work
        while True:
            # A restart truncates events that nobody was given, so our place may lie past the end.
            self._next = min(self._next, len(work.events))
            if self._next < len(work.events) and work.may_leave(self._next):
                event = work.events[self._next]
                self._next += 1
                if isinstance(event, Delta) and work.ask.stream:
                    work.delivered = True
                last = isinstance(event, Ended) and self._next == len(work.events)
                if last:
                    self._depart()
                yield event
                if last:
                    return
                continue
            await work.changed()
            # The service wakes queued work every now and then, so that the caller hears where it stands.
            if self._next >= len(work.events) and work.state in (RequestState.ACCEPTED, RequestState.QUEUED):
                waiting = self._waiting(work)
                if waiting is not None:
                    yield waiting

    async def leave(self) -> None:
        """The caller went away. A request that is not kept, and has no other caller, is cancelled."""
        if self._depart():
            self._left(self._work)

    def _depart(self) -> bool:
        """Stop counting as a caller. False when it did not count."""
        if self._gone:
            return False
        self._gone = True
        self._work.callers -= 1
        return True
