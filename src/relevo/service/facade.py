"""What the dialects may ask of the service. The HTTP layer knows this page and nothing behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from relevo.core.events import Ask, ServiceEvent


class Ticket(Protocol):
    """An accepted request, as one caller sees it."""

    @property
    def request_id(self) -> str:
        """`req_` and 32 hex digits; the id in every answer, header and record."""
        ...

    @property
    def created(self) -> float:
        """Wall time of acceptance, seconds since the epoch."""
        ...

    @property
    def replayed(self) -> bool:
        """True when this call attached to work that an earlier call had started."""
        ...

    def relevo(self) -> dict[str, Any]:
        """The `relevo` object of the outer contract, as of now."""
        ...

    def events(self) -> AsyncIterator[ServiceEvent]:
        """Everything of this request in order, from its first event, until and including Ended.

        Waits: Waiting while queued, Routed when a route is known, Delta for output. A caller that
        attaches late gets the past first. Every event yielded is as durable as the contract asks.
        """
        ...

    async def leave(self) -> None:
        """The caller went away. A request that is not kept, and has no other caller, is cancelled."""
        ...


class Service(Protocol):
    """The one owner of requests, leases and routes."""

    async def submit(self, ask: Ask) -> Ticket:
        """Weigh, admit and record a request, or attach to the one it repeats.

        Returns when the acceptance is durable. Raises RelevoError for a refusal; nothing is changed then.
        """
        ...

    def models(self) -> list[dict[str, Any]]:
        """`{id, created, owned_by, context_tokens, routes: [...], degraded}` for each model, from memory."""
        ...

    def status(self) -> dict[str, Any]:
        """The status object of the outer contract."""
        ...

    def health(self) -> dict[str, Any]:
        """`{status: ok}` while the loop turns."""
        ...

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether any route serves, and a body that says ok, degraded or why not."""
        ...

    async def list_requests(
        self, owner: str | None, *, limit: int, state: str | None, idempotency_key: str | None
    ) -> list[dict[str, Any]]:
        """Newest first, without results. `owner` None sees all."""
        ...

    async def get_request(self, owner: str | None, request_id: str) -> dict[str, Any]:
        """The record of the outer contract. Raises RequestNotFound (also for another owner's)."""
        ...

    async def cancel_request(self, owner: str | None, request_id: str) -> dict[str, Any]:
        """Cancel; harmless on an ended request. Returns the record."""
        ...

    async def resume_request(self, owner: str | None, request_id: str) -> Ticket:
        """Take up a resumable request from its checkpoint, same id, next attempt. Raises Conflict in another state."""
        ...

    def request_events(self, owner: str | None, request_id: str, after: int) -> AsyncIterator[tuple[int, ServiceEvent]]:
        """A request's events numbered from 1, those after number `after`, until and including Ended.

        Watching is not calling: a request is not kept alive by it, nor cancelled when the watcher leaves.
        Raises RequestNotFound at the first step (also for another owner's).
        """
        ...

    def probe_device(self, name: str) -> dict[str, Any]:
        """Try a device again now: ends back-offs and give-ups of its workers, and asks its breaker for a probe.

        Returns its status. Raises DeviceNotFound.
        """
        ...

    def watch_status(self) -> AsyncIterator[dict[str, Any]]:
        """A status object at once, then one on each change (at most a few a second)."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        ...
