"""An accepted request as one caller sees it: its events from the first, at the caller's own pace."""

from __future__ import annotations

import asyncio
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
        work, loop = self._work, asyncio.get_running_loop()
        events, stream = work.events, work.ask.stream
        while True:
            # A restart truncates events that nobody was given, so our place may lie past the end.
            self._next = min(self._next, len(events))
            if self._next < len(events) and work.may_leave(self._next) and (stream or self._is_final(events)):
                event = events[self._next]
                self._next += 1
                if type(event) is Delta:  # almost every one
                    if stream:
                        work.delivered = True
                    yield event
                    continue
                last = isinstance(event, Ended) and self._next == len(events)
                if last:
                    self._depart()
                yield event
                if last:
                    return
                continue
            if self._next >= len(events) > 0 and work.ended and isinstance(events[-1], Ended):
                # A watcher that has everything already. The state alone says less: its end is told once it is durable.
                self._depart()
                return
            await work.changed(loop)
            # The service wakes queued work every now and then, so that the caller hears where it stands.
            if self._next >= len(events) and work.state in (RequestState.ACCEPTED, RequestState.QUEUED):
                waiting = self._waiting(work)
                if waiting is not None:
                    yield waiting

    def _is_final(self, events: list[ServiceEvent]) -> bool:
        """Whether the event at our place can no longer be taken back.

        The output of a request that is not streamed is given at the end only: until then a lost route takes it all
        back, and whoever had collected some of it would have it twice.
        """
        return type(events[self._next]) is not Delta or isinstance(events[-1], Ended)

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
