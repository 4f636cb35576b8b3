"""A service without engines: what it does to a request is a script, and what happens to its tickets is written down."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from relevo.core.errors import Conflict, DeviceNotFound, RelevoError, RequestNotFound
from relevo.core.events import Ask, Delta, Ended, Routed, ServiceEvent, TokenLogprob, Usage, Waiting

Step = ServiceEvent | float | asyncio.Event | Exception
"""An event to yield, seconds to wait, something to wait for, or an error to raise."""
Script = Callable[[Ask], Sequence[Step]]


def relevo_object(route: str | None = "gpu", **more: Any) -> dict[str, Any]:
    """A `relevo` object of the outer contract."""
    device = {"gpu": "gpu0", "cpu": "host"}.get(route or "")
    return {
        "request_id": None,
        "route": route,
        "device": device,
        "model": "demo",
        "backup_model": None,
        "degraded": route == "cpu",
        "reason": None,
        "standby": {"route": "cpu", "estimate_ms": 900.0} if route == "gpu" else None,
        "limits": {"context_tokens": 4096, "max_output_tokens": 512, "concurrency": 8},
        "queue": {"lane": route, "position": 0, "age_ms": 0.0},
        "eta": {"first_token_ms": 40.0, "total_ms": 400.0},
        "handovers": [],
        "cancel": None,
        **more,
    }


def completed(prompt_tokens: int = 7, completion_tokens: int = 3, route: str = "gpu") -> Ended:
    """The good end."""
    return Ended("completed", Usage(prompt_tokens, completion_tokens), relevo_object(route))


def resumable() -> Ended:
    """The end of a delivery whose route was lost."""
    error = {
        "message": "The GPU was lost after output had been delivered. Resume the request to go on.",
        "type": "server_error",
        "code": "resumable",
        "checkpoint": "cp_1",
        "resume": "POST /relevo/v1/requests/ID/resume",
        "kept_until": 1.0,
    }
    return Ended("resumable", Usage(7, 2), relevo_object(None), "device lost", error)


def token_logprobs(text: str, top: int) -> list[TokenLogprob]:
    """One made-up token with `top` alternatives."""
    best = [(9, b"x", -1.5), (10, b"\xff", float("-inf"))][:top]
    return [TokenLogprob(5, text.encode(), -0.25, best)]


def plain_answer(ask: Ask, words: Sequence[str] = ("Hel", "lo ", "you")) -> list[Step]:
    """Routed at once, the words for each choice, completed."""
    steps: list[Step] = [Routed(relevo_object())]
    for number, word in enumerate(words):
        for choice in range(ask.n):
            finish = "stop" if number == len(words) - 1 else None
            logprobs = None if ask.logprobs is None else token_logprobs(word, ask.logprobs)
            steps.append(Delta(choice, word, [5], finish, logprobs))
    return [*steps, completed(7, len(words) * ask.n)]


class FakeTicket:
    """A ticket that plays a script."""

    def __init__(self, ask: Ask, steps: Sequence[Step], *, replayed: bool = False) -> None:
        self.request_id = "req_" + uuid.uuid4().hex
        self.created = time.time()
        self.replayed = replayed
        self.ask = ask
        self.left = asyncio.Event()
        self.times_left = 0
        self.reading = asyncio.Event()
        self.closed = 0
        self.past: list[ServiceEvent] = []
        self._steps = steps
        self._relevo = relevo_object(None, request_id=self.request_id)

    def relevo(self) -> dict[str, Any]:
        return self._relevo

    async def events(self) -> AsyncIterator[ServiceEvent]:
        self.reading.set()
        try:
            for step in self._steps:
                if isinstance(step, int | float):
                    await asyncio.sleep(step)
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    if isinstance(step, Routed):
                        self._relevo = step.relevo
                    self.past.append(step)
                    yield step
        finally:
            self.closed += 1

    async def leave(self) -> None:
        self.times_left += 1
        self.left.set()


class FakeService:
    """Implements the service's page for the HTTP layer."""

    def __init__(self, script: Script = plain_answer) -> None:
        self.script = script
        self.tickets: list[FakeTicket] = []
        self.asks: list[Ask] = []
        self.refusal: RelevoError | None = None
        self.refusals = 10**9
        self.submit_gate: asyncio.Event | None = None
        self.submitting = asyncio.Event()
        self.replayed = False
        self.serves = True
        self.watchers = 0
        self.owners: dict[str, str] = {}
        self.statuses: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def submit(self, ask: Ask) -> FakeTicket:
        self.asks.append(ask)
        self.submitting.set()
        if self.submit_gate is not None:
            await self.submit_gate.wait()
        if self.refusal is not None and self.refusals > 0:
            self.refusals -= 1
            raise self.refusal
        return self._ticket(ask)

    def _ticket(self, ask: Ask) -> FakeTicket:
        ticket = FakeTicket(ask, self.script(ask), replayed=self.replayed)
        self.tickets.append(ticket)
        self.owners[ticket.request_id] = ask.owner
        return ticket

    def models(self) -> list[dict[str, Any]]:
        demo = {"id": "demo", "created": 1, "owned_by": "relevo", "context_tokens": 4096, "routes": ["gpu", "cpu"]}
        return [{**demo, "degraded": False, "aliases": ["demo-alias"]}, {**demo, "id": "org/other", "degraded": True}]

    def status(self) -> dict[str, Any]:
        return {"state": "ok", "version": "test", "devices": [], "replicas": [], "lanes": [], "certificate": None}

    def health(self) -> dict[str, Any]:
        return {"status": "ok"}

    def ready(self) -> tuple[bool, dict[str, Any]]:
        return (True, {"status": "degraded"}) if self.serves else (False, {"status": "starting"})

    def _find(self, owner: str | None, request_id: str) -> FakeTicket:
        for ticket in self.tickets:
            if ticket.request_id == request_id and owner in (None, self.owners[request_id]):
                return ticket
        raise RequestNotFound

    def _record(self, ticket: FakeTicket) -> dict[str, Any]:
        ended = [event for event in ticket.past if isinstance(event, Ended)]
        state = ended[-1].state if ended else "running"
        return {"id": ticket.request_id, "state": state, "model": "demo", "kind": ticket.ask.kind, "n": ticket.ask.n}

    async def list_requests(
        self, owner: str | None, *, limit: int, state: str | None, idempotency_key: str | None
    ) -> list[dict[str, Any]]:
        seen = [t for t in reversed(self.tickets) if owner in (None, self.owners[t.request_id])]
        if idempotency_key is not None:
            seen = [t for t in seen if t.ask.idempotency_key == idempotency_key]
        records = [self._record(ticket) for ticket in seen]
        return [record for record in records if state in (None, record["state"])][:limit]

    async def get_request(self, owner: str | None, request_id: str) -> dict[str, Any]:
        return self._record(self._find(owner, request_id))

    async def cancel_request(self, owner: str | None, request_id: str) -> dict[str, Any]:
        return {**self._record(self._find(owner, request_id)), "state": "cancelled"}

    async def resume_request(self, owner: str | None, request_id: str) -> FakeTicket:
        old = self._find(owner, request_id)
        if self._record(old)["state"] != "resumable":
            raise Conflict("Only a resumable request can be resumed.")
        ticket = FakeTicket(old.ask, plain_answer(old.ask, ("and ", "on")))
        ticket.request_id = request_id
        self.tickets.append(ticket)
        return ticket

    async def request_events(
        self, owner: str | None, request_id: str, after: int
    ) -> AsyncIterator[tuple[int, ServiceEvent]]:
        for number, event in enumerate(self._find(owner, request_id).past, 1):
            if number > after:
                yield number, event
        if self.refusal is not None:
            raise self.refusal

    def probe_device(self, name: str) -> dict[str, Any]:
        if name != "gpu0":
            raise DeviceNotFound(f"No device is called {name!r} here.")
        return {"name": name}

    async def watch_status(self) -> AsyncIterator[dict[str, Any]]:
        self.watchers += 1
        try:
            yield self.status()
            while True:
                yield await self.statuses.get()
        finally:
            self.watchers -= 1

    def metrics(self) -> bytes:
        return b"relevo_up 1\n"


def queued(*positions: int, eta_ms: float | None = 8000.0) -> list[Step]:
    """Waiting at these positions."""
    return [Waiting("gpu", position, eta_ms) for position in positions]
