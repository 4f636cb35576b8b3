"""Bringing one request's events to one client: streamed or collected, and leaving properly when the client does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from relevo.api.call import Call
from relevo.api.closing import closing
from relevo.api.connection import ClientGone, Hangup, ReaderStalled
from relevo.api.errors import EndedUnfinished, error_object
from relevo.api.openai_stream import Collected, TextStream
from relevo.api.relevo_headers import pending_headers, relevo_headers
from relevo.api.sse import EventWriter, Pace
from relevo.core.errors import RelevoError
from relevo.core.events import Ask, Delta, Ended, Routed, Waiting
from relevo.service.facade import Service, Ticket

log = structlog.get_logger(__name__)

_BREATHER_EVENTS = 64  # a long past is replayed without a pause: others get their turn after so many events
_LATE_ACCEPT_S = 5.0  # how long a handler whose client left waits for the acceptance; leaving goes on behind

Write = Callable[[Collected, Ended], bytes]


class Farewells:
    """Tells the service that callers left, even while the caller's own task is being torn down."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    async def leave(self, ticket: Ticket, longest_s: float) -> None:
        """Leave, shielded and bounded: a slow service delays nobody, and leaving goes on behind."""
        task = self._start(self._leave(ticket))
        try:
            async with asyncio.timeout(longest_s):
                await asyncio.shield(task)
        except TimeoutError:
            log.warning("call.leave_slow", request_id=ticket.request_id)

    def leave_when_accepted(self, submitting: asyncio.Task[Ticket]) -> asyncio.Task[None]:
        """The client left while its request was being accepted: whatever comes of it is left at once."""
        return self._start(self._leave_late(submitting))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _leave(self, ticket: Ticket) -> None:
        try:
            await ticket.leave()
        except Exception:
            log.exception("call.leave_failed", request_id=ticket.request_id)

    async def _leave_late(self, submitting: asyncio.Task[Ticket]) -> None:
        try:
            ticket = await submitting
        except RelevoError:
            return  # refused: nothing was changed, there is nothing to leave
        except Exception:
            log.exception("call.accept_failed")
            return
        await self._leave(ticket)


async def accept(service: Service, ask: Ask, hangup: Hangup, farewells: Farewells) -> Ticket:
    """Submit, racing the client's disconnect. Raises what submit raises, or ClientGone (the ticket is then left)."""
    return await _accept(asyncio.get_running_loop().create_task(_submitted(service, ask)), hangup, farewells)


async def accept_resume(service: Service, call: Call, request_id: str, hangup: Hangup, farewells: Farewells) -> Ticket:
    """The same for taking up a resumable request."""
    return await _accept(
        asyncio.get_running_loop().create_task(_resumed(service, call.sees, request_id)), hangup, farewells
    )


async def _submitted(service: Service, ask: Ask) -> Ticket:
    return await service.submit(ask)


async def _resumed(service: Service, owner: str | None, request_id: str) -> Ticket:
    return await service.resume_request(owner, request_id)


async def _accept(submitting: asyncio.Task[Ticket], hangup: Hangup, farewells: Farewells) -> Ticket:
    try:
        await asyncio.wait({submitting, hangup.happened}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        farewells.leave_when_accepted(submitting)
        raise
    if submitting.done() and not hangup.happened.done():
        return submitting.result()
    await asyncio.wait({farewells.leave_when_accepted(submitting)}, timeout=_LATE_ACCEPT_S)
    raise ClientGone


class Delivery:
    """One ticket and one client."""

    def __init__(self, call: Call, ticket: Ticket, pace: Pace, farewells: Farewells) -> None:
        self._call = call
        self._ticket = ticket
        self._pace = pace
        self._farewells = farewells
        self._ended: Ended | None = None
        call.request_id = ticket.request_id

    async def collect(self, choices: int, write: Write, hangup: Hangup) -> None:
        """Wait for the end and answer with one JSON body. Raises EndedUnfinished for any other end than completed."""
        collected, ended = await self.gather(choices, hangup)
        headers = relevo_headers(ended.relevo, replayed=self._ticket.replayed)
        await self._call.reply(200, write(collected, ended), b"application/json", headers)

    async def gather(self, choices: int, hangup: Hangup) -> tuple[Collected, Ended]:
        """Wait for the end, without answering yet. Raises EndedUnfinished for any other end than completed."""
        collected = Collected(choices)
        await self._beside(self._gather(collected), hangup.raise_when_gone())
        ended = self._ended
        assert ended is not None
        if ended.state != "completed":
            raise EndedUnfinished(ended)
        return collected, ended

    async def stream(self, dialect: TextStream, hangup: Hangup) -> None:
        """Send events as they come. Raises EndedUnfinished only while no header was sent."""
        streamed = _Streamed(self._call, self._ticket, dialect, self._pace)
        try:
            await self._beside(streamed.pump(), hangup.raise_when_gone(), streamed.tick())
        except RelevoError as error:
            if not self._call.started:
                raise
            await streamed.fail(error)  # bounded: nobody watches the reader any more
        if streamed.refused is not None:
            raise streamed.refused

    async def _gather(self, collected: Collected) -> None:
        async with closing(self._ticket.events()) as events:
            async for event in events:
                if isinstance(event, Delta):
                    collected.add(event)
                elif isinstance(event, Ended):
                    self._ended = event
                    return
        raise RelevoError("The request's events stopped without an end. Its record tells how far it came.")

    async def _beside(self, work: Coroutine[Any, Any, None], *watchers: Coroutine[Any, Any, None]) -> None:
        """Run the work; a watcher that raises ends it. Whoever stops before the end leaves the ticket."""
        finished = False
        try:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(watcher) for watcher in watchers]
                await group.create_task(work)  # in its own task: each event then wakes few frames, not the whole call
                finished = True
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            if not finished:
                await self._farewells.leave(self._ticket, self._pace.leave_s)


class _Streamed:
    """The stream of one delivery."""

    def __init__(self, call: Call, ticket: Ticket, dialect: TextStream, pace: Pace) -> None:
        self._call = call
        self._ticket = ticket
        self._dialect = dialect
        self._pace = pace
        self._writer = EventWriter(call, pace)
        self._began = time.monotonic()
        self._opened = False
        self._waiting: Waiting | None = None
        self.refused: EndedUnfinished | None = None
        """An end without an answer that came before any header: it is told by status."""

    async def pump(self) -> None:
        """Every event to the client, until the end."""
        write, delta = self._writer.write, self._dialect.delta
        seen = 0
        async with closing(self._ticket.events()) as events:
            async for event in events:
                if isinstance(event, Delta):
                    if not self._opened:
                        await self._open(self._ticket.relevo())
                    chunk = delta(event)
                    if chunk:
                        await write(chunk)
                elif isinstance(event, Routed):
                    await self._route(event)
                elif isinstance(event, Waiting):
                    await self._wait(event)
                elif isinstance(event, Ended):
                    await self._end(event)
                    return
                seen += 1
                if seen % _BREATHER_EVENTS == 0:
                    await asyncio.sleep(0)
        raise RelevoError("The request's events stopped without an end. Its record tells how far it came.")

    async def tick(self) -> None:
        """Headers that cannot wait any longer, comments in silence, and the reader that stalled."""
        while True:
            await asyncio.sleep(self._pace.tick_s)
            self._writer.check_reader()
            if not self._call.started:
                if time.monotonic() - self._began >= self._pace.header_wait_s:
                    await self._start_pending()
            elif self._waiting is not None:
                if self._writer.silent_s() >= self._pace.waiting_comment_s:
                    await self._writer.comment(_waiting_line(self._waiting))
            elif self._writer.silent_s() >= self._pace.silence_s:
                await self._writer.comment("running")

    async def fail(self, error: RelevoError) -> None:
        """Our own fault in the middle: the stream says so, and ends."""
        body = error_object(error)
        body.setdefault("relevo", self._ticket.relevo())
        try:
            async with asyncio.timeout(self._pace.send_timeout_s):
                await self._writer.write(self._dialect.failure(body))
                await self._writer.end()
        except TimeoutError:
            raise ReaderStalled from None

    async def _open(self, relevo: dict[str, Any]) -> None:
        """Headers, unless they went before, and the first chunk."""
        self._opened = True
        self._waiting = None
        if not self._call.started:
            await self._writer.start(relevo_headers(relevo, replayed=self._ticket.replayed))
        await self._writer.write(self._dialect.opening(relevo))

    async def _start_pending(self) -> None:
        waiting = self._waiting
        headers = pending_headers(
            self._ticket.relevo(), waiting.eta_ms if waiting else None, replayed=self._ticket.replayed
        )
        await self._writer.start(headers)
        await self._writer.comment(_waiting_line(waiting))

    async def _route(self, event: Routed) -> None:
        if self._opened:
            self._waiting = None
            await self._writer.write(self._dialect.routed(event.relevo))
        else:
            await self._open(event.relevo)

    async def _wait(self, event: Waiting) -> None:
        changed = self._waiting is None or self._waiting.position != event.position
        self._waiting = event
        if self._call.started and changed:
            await self._writer.comment(_waiting_line(event))

    async def _end(self, ended: Ended) -> None:
        if ended.state == "completed":
            if not self._opened:
                await self._open(ended.relevo)
            await self._writer.write(self._dialect.closing(ended))
            await self._writer.end()
            return
        error = EndedUnfinished(ended)
        if not self._call.started:
            self.refused = error
            return
        await self._writer.write(self._dialect.failure(error_object(error)))
        await self._writer.end()


def _waiting_line(waiting: Waiting | None) -> str:
    if waiting is None:
        return "queued position=unknown eta_ms=unknown"
    eta = "unknown" if waiting.eta_ms is None else f"{waiting.eta_ms:.0f}"
    return f"queued position={waiting.position} eta_ms={eta}"
