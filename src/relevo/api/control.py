"""The control routes under /relevo/v1: status, and the requests of the caller."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from relevo.api.body import read_object
from relevo.api.call import Call
from relevo.api.closing import closing
from relevo.api.connection import Hangup
from relevo.api.delivery import Delivery, accept_resume
from relevo.api.errors import error_body
from relevo.api.front import Front
from relevo.api.openai_chat import ChatStream, chat_answer
from relevo.api.openai_chat import answer_id as chat_id
from relevo.api.openai_completion import CompletionStream, completion_answer
from relevo.api.openai_completion import answer_id as completion_id
from relevo.api.relevo_headers import relevo_headers
from relevo.api.route import Access, GuardedRoute
from relevo.api.sse import EventWriter
from relevo.core.errors import BadRequest, RelevoError, RequestNotFound

STATES = ("accepted", "queued", "running", "resumable", "completed", "cancelled", "failed")
MOST_LISTED = 1000
_ID = re.compile(r"req_[0-9a-f]{32}")
_BASE = "/relevo/v1"


class ControlRoutes:
    """Every look-up is by (owner, id): another's request is simply not there."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def routes(self) -> list[GuardedRoute]:
        """The control addresses."""
        key, keys = Access.KEY, self._front.keys
        one = _BASE + "/requests/{id}"
        return [
            GuardedRoute("GET", _BASE + "/status", self.status, access=key, keys=keys),
            GuardedRoute("GET", _BASE + "/events", self.status_events, access=key, keys=keys),
            GuardedRoute("GET", _BASE + "/requests", self.requests, access=key, keys=keys),
            GuardedRoute("GET", one, self.request, access=key, keys=keys),
            GuardedRoute("POST", one + "/cancel", self.cancel, access=key, keys=keys),
            GuardedRoute("POST", one + "/resume", self.resume, access=key, keys=keys),
            GuardedRoute("GET", one + "/events", self.request_events, access=key, keys=keys),
            GuardedRoute("POST", _BASE + "/devices/{name}/probe", self.probe_device, access=Access.OPERATOR, keys=keys),
        ]

    async def status(self, call: Call) -> None:
        """What the service is doing."""
        await call.reply_json(self._front.service.status())

    async def status_events(self, call: Call) -> None:
        """The same, sent again on each change."""
        await self._feed(call, _status_lines(self._front.service.watch_status()))

    async def requests(self, call: Call) -> None:
        """The caller's requests, newest first."""
        query = call.query()
        unknown = set(query) - {"idempotency_key", "state", "limit"}
        if unknown:
            raise BadRequest("The address takes idempotency_key, state and limit.", param=sorted(unknown)[0][:64])
        state = query.get("state")
        if state is not None and state not in STATES:
            raise BadRequest(f"`state` is not valid: one of {', '.join(STATES)}.", param="state")
        found = await self._front.service.list_requests(
            call.sees, limit=_limit(query.get("limit")), state=state, idempotency_key=query.get("idempotency_key")
        )
        await call.reply_json({"object": "list", "data": found})

    async def request(self, call: Call) -> None:
        """One request's record."""
        await call.reply_json(await self._front.service.get_request(call.sees, _request_id(call)))

    async def cancel(self, call: Call) -> None:
        """Cancel; harmless on an ended request."""
        await read_object(call, self._front.config.limits, empty=True)
        await call.reply_json(await self._front.service.cancel_request(call.sees, _request_id(call)))

    async def resume(self, call: Call) -> None:
        """Take up a resumable request.

        With `stream: true` the rest comes as a stream in the dialect the request came in; else this waits for
        the end and gives the record with the dialect's `answer` in it.
        """
        front = self._front
        request_id = _request_id(call)
        body = await read_object(call, front.config.limits, empty=True)
        streamed = body.get("stream", False)
        if not isinstance(streamed, bool):
            raise BadRequest("`stream` is not valid: expected true or false.", param="stream")
        record = await front.service.get_request(call.sees, request_id)
        chat = record.get("kind", "chat") == "chat"
        choices = int(record.get("n") or 1)
        model = str(record.get("model") or "")
        async with Hangup(call.receive) as hangup:
            ticket = await accept_resume(front.service, call, request_id, hangup, front.farewells)
            delivery = Delivery(call, ticket, front.pace, front.farewells)
            if streamed:
                kind, answer = (ChatStream, chat_id) if chat else (CompletionStream, completion_id)
                await delivery.stream(
                    kind(answer(request_id), ticket.created, model, choices=choices, include_usage=True), hangup
                )
                return
            collected, ended = await delivery.gather(choices, hangup)
            whole = chat_answer if chat else completion_answer
            answer_body = whole(request_id, ticket.created, model, collected, ended)
            record = await front.service.get_request(call.sees, request_id)
            await call.reply_json({**record, "answer": msgspec.Raw(answer_body)}, headers=relevo_headers(ended.relevo))

    async def probe_device(self, call: Call) -> None:
        """Try a device again now. For the operator."""
        await read_object(call, self._front.config.limits, empty=True)
        await call.reply_json(self._front.service.probe_device(str(call.path_params["name"])))

    async def request_events(self, call: Call) -> None:
        """A request's events with their numbers; `Last-Event-ID` goes on after the one named."""
        service = self._front.service
        request_id = _request_id(call)
        after = _last_event(call.header("last-event-id"))
        await service.get_request(call.sees, request_id)  # the headers are still to be sent: now is the time for 404
        await self._feed(call, _event_lines(service.request_events(call.sees, request_id, after)))

    async def _feed(self, call: Call, lines: AsyncIterator[bytes]) -> None:
        """Send what comes, until it ends or the reader leaves."""
        call.body_done = True
        writer = EventWriter(call, self._front.pace)
        async with Hangup(call.receive) as hangup:
            await writer.start([])
            try:
                async with asyncio.TaskGroup() as group:
                    beside = [group.create_task(hangup.raise_when_gone()), group.create_task(writer.keep_alive())]
                    async with closing(lines) as every:
                        async for line in every:
                            await writer.write(line)
                    for task in beside:
                        task.cancel()
            except BaseExceptionGroup as several:
                fault = several.exceptions[0]
                if not isinstance(fault, RelevoError):
                    raise fault from None
                await writer.write(b"event: error\ndata: " + error_body(fault) + b"\n\n")
            await writer.end()


async def _status_lines(changes: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async with closing(changes) as every:
        async for status in every:
            yield b"event: status\ndata: " + msgspec.json.encode(status) + b"\n\n"


async def _event_lines(events: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[bytes]:
    async with closing(events) as every:
        async for number, event in every:
            fields = msgspec.to_builtins(event)
            name = fields.pop("type").lower()
            yield b"id: %d\nevent: %s\ndata: %s\n\n" % (number, name.encode(), msgspec.json.encode(fields))


def _request_id(call: Call) -> str:
    """The id in the address. Anything that has not its form is not looked up."""
    found: str = call.path_params["id"]
    if not _ID.fullmatch(found):
        raise RequestNotFound
    return found


def _limit(value: str | None) -> int:
    if value is None:
        return 100
    if not value.isascii() or not value.isdigit() or len(value) > 6 or not 1 <= int(value) <= MOST_LISTED:
        raise BadRequest(f"`limit` is not valid: a whole number from 1 to {MOST_LISTED}.", param="limit")
    return int(value)


def _last_event(value: str | None) -> int:
    if value is None:
        return 0
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise BadRequest("Last-Event-ID is not valid: the number of the last event you have.", param="last-event-id")
    return int(value)
