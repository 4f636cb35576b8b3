"""The service as the dialects see it: accept, watch, cancel and resume requests. See facade.py for what is promised."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from relevo.config import Config
from relevo.core.admission import Admit, Delay, Redirect, Reject
from relevo.core.errors import (
    Conflict,
    Draining,
    IdempotencyMismatch,
    JournalUnavailable,
    ModelNotFound,
    RelevoError,
    RequestNotFound,
    TooManyRequests,
)
from relevo.core.events import Ask, ServiceEvent, Waiting
from relevo.core.request import RequestState, new_request_id
from relevo.journal import AcceptRequest, Journal
from relevo.journal.bodies import LARGE_BYTES
from relevo.service.dispatcher import Dispatcher
from relevo.service.intake import effective_policy, effective_sampling, handover_wish, prompt_tokens_of, wanted_outputs
from relevo.service.metrics import Metrics
from relevo.service.recovery import StoredAsk, restore
from relevo.service.routes import ServedModel
from relevo.service.status import StatusBoard
from relevo.service.ticket import WorkTicket
from relevo.service.views import live_record, past_record, weighed_view
from relevo.service.work import Work

_log = logging.getLogger("relevo.service")

RETRY_WINDOW_S = 600.0
"""How long a client's automatic retry of the same body finds the first try: the official client's own time-out."""

INDEXED = 4096
"""Keys and digests that are found without asking the journal."""


class RelevoService:
    """Implements facade.Service over the dispatcher and the journal."""

    def __init__(
        self,
        config: Config,
        models: dict[str, ServedModel],
        dispatcher: Dispatcher,
        journal: Journal,
        board: StatusBoard,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._models = models
        self._dispatcher = dispatcher
        self._journal = journal
        self._board = board
        self._metrics = metrics
        self._by_key: dict[tuple[str, str], str] = {}
        self._by_digest: dict[tuple[str, str], str] = {}
        self._arriving: dict[tuple[str, str, str], asyncio.Future[None]] = {}
        self._weighed_for: dict[int, str] = {}
        """Owners of what is being weighed and is no request yet, by the identity of the ask."""
        self.draining = False

    # ---------------------------------------------------------------- accepting

    async def submit(self, ask: Ask) -> WorkTicket:
        """See facade.Service.submit."""
        if self.draining:
            raise Draining(retry_after_s=5.0)
        model = self._model(ask.model)
        # From here on the policy is the request's own: a later change of the configuration does not change it.
        ask = msgspec.structs.replace(ask, model=model.name, policy=effective_policy(ask, model.config))
        once = what_must_run_once(ask)
        if once is None:
            return await self._begin(model, ask)
        # A repetition may come while the first is still being looked up or weighed: it waits, and then looks for it.
        while (first := self._arriving.get(once)) is not None:
            await asyncio.wait([first])
        self._arriving[once] = arriving = asyncio.get_running_loop().create_future()
        try:
            earlier = await self._find_earlier(ask)
            return await (self._begin(model, ask) if earlier is None else self._attach(earlier))
        finally:
            del self._arriving[once]
            arriving.set_result(None)

    async def _begin(self, model: ServedModel, ask: Ask) -> WorkTicket:
        """Accept what repeats nothing."""
        if not self._journal.accepting:
            raise JournalUnavailable(self._journal.trouble, retry_after_s=10.0)
        self._check_share(ask.owner)
        self._weighed_for[id(ask)] = ask.owner
        try:
            return self._ticket(await self._accept(model, ask), replayed=False)
        finally:
            self._weighed_for.pop(id(ask), None)

    def _model(self, name: str) -> ServedModel:
        for model in self._models.values():
            if name == model.name or name in model.config.aliases:
                return model
        names = ", ".join(self._models) or "none"
        raise ModelNotFound(f"No model is called {name!r} here. Known models: {names}.", param="model")

    def _check_share(self, owner: str) -> None:
        limit = self._config.limits.running_per_key
        if owner == "local":
            return
        works = self._dispatcher.works.values()
        under_way = sum(w.ask.owner == owner and not w.ended and not w.resting for w in works)
        if under_way + sum(weighed == owner for weighed in self._weighed_for.values()) >= limit:
            raise TooManyRequests(f"This key has {limit} requests under way, as many as it may.", retry_after_s=1.0)

    async def _find_earlier(self, ask: Ask) -> Work | None:
        """The request that this one repeats: by its key, or as the client's own retry of the same body."""
        if ask.idempotency_key is not None:
            return await self._find_by_key(ask, ask.idempotency_key)
        return await self._find_by_digest(ask)

    async def _find_by_key(self, ask: Ask, key: str) -> Work | None:
        work = self._dispatcher.works.get(self._by_key.get((ask.owner, key), ""))
        if work is None:
            record = await self._journal.find_by_key(ask.owner, key)
            work = await restore(self._journal, record) if record is not None else None
            if record is not None and work is None:
                raise Conflict(
                    "The result under this Idempotency-Key was removed after the retention time. Use a new key."
                )
        if work is not None and work.ask.body_digest != ask.body_digest:
            raise IdempotencyMismatch(
                "This Idempotency-Key was used with another request body. Use a new key for a new request.",
                param="Idempotency-Key",
            )
        return work

    async def _find_by_digest(self, ask: Ask) -> Work | None:
        work = self._dispatcher.works.get(self._by_digest.get((ask.owner, ask.body_digest), ""))
        if work is None:
            since = time.time() - RETRY_WINDOW_S
            record = await self._journal.find_recent_by_digest(ask.owner, ask.body_digest, since)
            work = await restore(self._journal, record) if record is not None else None
        if work is None or work.created < time.time() - RETRY_WINDOW_S:
            return None
        # What was cancelled (the client left) or failed is tried anew; everything else is found again.
        return None if work.state in (RequestState.CANCELLED, RequestState.FAILED) or work.cancel_requested else work

    async def _attach(self, work: Work) -> WorkTicket:
        live = self._dispatcher.works.get(work.request_id, work)
        if live.state is RequestState.RESUMABLE:
            return self._resume(live, start=0)
        return self._ticket(live, replayed=True)

    async def _accept(self, model: ServedModel, ask: Ask) -> Work:
        prompt = await prompt_tokens_of(ask, model.text)
        verdict = self._decide(model, ask, prompt)
        now = time.time()
        work = Work(
            new_request_id(secrets.token_bytes(16)),
            ask,
            created=now,
            prompt_tokens=prompt,
            sampling=effective_sampling(ask, model.config.sampling, secrets.randbits),
            outputs=verdict.outputs,
        )
        work.wish = handover_wish(ask, model.config)
        self._note_verdict(work, verdict)
        stored = StoredAsk.of(work).encoded()
        if len(stored) <= LARGE_BYTES:
            await self._record(work, verdict, stored, None)
            return work
        # The file must be synced before its row; meanwhile the figures may have changed, so the verdict is taken anew.
        path = await self._journal.store_body(work.request_id, stored)
        verdict = self._decide(model, ask, prompt)
        self._note_verdict(work, verdict)
        await self._record(work, verdict, b"", path)
        return work

    def _decide(self, model: ServedModel, ask: Ask, prompt: list[int]) -> Admit | Delay | Redirect:
        """Admission's verdict; a refusal is raised."""
        verdict = self._board.decide(model, ask, len(prompt), wanted_outputs(ask, model.config))
        if isinstance(verdict, Reject) or verdict.route != model.preferred.name:
            self._board.fleet.loads.wish(model.name)
        if isinstance(verdict, Reject):
            self._metrics.refusals.labels(model.name, verdict.error.code).inc()
            raise verdict.error
        return verdict

    def _note_verdict(self, work: Work, verdict: Admit | Delay | Redirect) -> None:
        work.standby = self._board.standby_view(verdict.standby)
        if isinstance(verdict, Redirect):
            work.degraded_reason = verdict.reason

    async def _record(
        self, work: Work, verdict: Admit | Delay | Redirect, stored: bytes, payload_path: str | None
    ) -> None:
        """Queue it and start it while its acceptance is being synced; nothing leaves before that is done."""
        ask = work.ask
        lane_s = self._models[ask.model].routes[verdict.route].lane_config.deadline_s
        wait_s = lane_s if ask.deadline_s is None else ask.deadline_s
        began = time.monotonic()
        work.deadline = began + wait_s
        self._dispatcher.adopt(work)
        self._weighed_for.pop(id(ask), None)  # from here on it counts as a request
        queued = self._dispatcher.enqueue(work, verdict.route, handed_over=False)
        accepted = self._journal.submit(
            AcceptRequest(
                id=work.request_id,
                owner=ask.owner,
                model=ask.model,
                kind=ask.kind,
                created=work.created,
                body_digest=ask.body_digest,
                kept=ask.kept,
                ask=stored,
                payload_path=payload_path,
                prompt_tokens=work.prompt_tokens,
                seed=work.sampling.seed,
                weighed=msgspec.json.encode(weighed_view(work, verdict, self._models[ask.model].routes[verdict.route])),
                standby=msgspec.json.encode(work.standby),
                idempotency_key=ask.idempotency_key,
                deadline_at=work.created + wait_s,
            ),
            *([queued] if queued is not None else []),
        )
        self._dispatcher.pump(self._dispatcher.routes[ask.model, verdict.route])
        try:
            await asyncio.shield(accepted)
        except asyncio.CancelledError:
            self._dispatcher.cancel(work, "The client went away while its request was being accepted.")
            raise
        except RelevoError:
            self._dispatcher.withdraw(work)
            raise
        self._metrics.accept_commit.observe(time.monotonic() - began)
        self.index(work)

    def index(self, work: Work) -> None:
        """Let a repetition of this request find it in memory; the journal finds what is older."""
        if work.ask.idempotency_key is not None:
            remember(self._by_key, (work.ask.owner, work.ask.idempotency_key), work.request_id)
        if work.ask.body_digest:
            remember(self._by_digest, (work.ask.owner, work.ask.body_digest), work.request_id)

    # ------------------------------------------------------------------ tickets

    def _ticket(self, work: Work, *, replayed: bool, start: int = 0, watches: bool = False) -> WorkTicket:
        return WorkTicket(
            work,
            replayed=replayed,
            start=start,
            describe=self._board.describe,
            waiting=self._waiting,
            left=self._left,
            watches=watches,
        )

    def _waiting(self, work: Work) -> Waiting | None:
        queue = self._board.queue_view(work)
        if queue is None:
            return None
        eta = self._board.eta_view(work)
        return Waiting(
            lane=queue["lane"], position=queue["position"], eta_ms=None if eta is None else eta["first_token_ms"]
        )

    def _left(self, work: Work) -> None:
        if work.callers == 0 and not work.ask.kept and not work.ended and work.state is not RequestState.RESUMABLE:
            self._dispatcher.cancel(work, "The client went away.")

    # ------------------------------------------------------------------ reading

    def models(self) -> list[dict[str, Any]]:
        """See facade.Service.models."""
        return [
            {
                "id": m.name,
                "created": int(m.created),
                "owned_by": "relevo",
                "context_tokens": m.preferred.context_tokens,
                "routes": [
                    {"route": r.name, "device": r.device, "emulated": r.emulated, "state": str(r.replica.state)}
                    for r in self._board.shown(m)
                ],
                "degraded": m.degraded,
                "aliases": m.config.aliases,
            }
            for m in self._models.values()
        ]

    def status(self) -> dict[str, Any]:
        """See facade.Service.status."""
        return self._board.status()

    def health(self) -> dict[str, Any]:
        """See facade.Service.health."""
        return {"status": "ok"}

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """See facade.Service.ready."""
        return self._board.ready(draining=self.draining)

    def metrics(self) -> bytes:
        """See facade.Service.metrics."""
        self._board.measure()
        return self._metrics.exposition()

    async def list_requests(
        self, owner: str | None, *, limit: int, state: str | None, idempotency_key: str | None
    ) -> list[dict[str, Any]]:
        """See facade.Service.list_requests."""
        rows = await self._journal.list(owner, limit, state, idempotency_key)
        return [
            {
                "id": r.id,
                "state": r.state,
                "model": r.model,
                "kind": r.kind,
                "created": r.created,
                "ended": r.ended,
                "reason": r.reason,
                "idempotency_key": r.idempotency_key,
                "prompt_tokens": r.prompt_tokens,
                "completion_tokens": r.completion_tokens,
            }
            for r in rows
        ]

    async def get_request(self, owner: str | None, request_id: str) -> dict[str, Any]:
        """See facade.Service.get_request."""
        record = await self._journal.get(request_id)
        work = self._dispatcher.works.get(request_id)
        if record is None or (owner is not None and record.summary.owner != owner):
            raise RequestNotFound(
                f"No request has the id {request_id!r} here. It may be older than the retention time."
            )
        if work is None:
            return past_record(record)
        return live_record(work, self._board.describe(work), record)

    async def _own_work(self, owner: str | None, request_id: str) -> Work | None:
        """The request in memory; None when it ended long ago. Raises RequestNotFound."""
        work = self._dispatcher.works.get(request_id)
        if work is not None and (owner is None or work.ask.owner == owner):
            return work
        record = await self._journal.get(request_id)
        if work is not None or record is None or (owner is not None and record.summary.owner != owner):
            raise RequestNotFound(
                f"No request has the id {request_id!r} here. It may be older than the retention time."
            )
        return None

    # ---------------------------------------------------------------- commanding

    async def cancel_request(self, owner: str | None, request_id: str) -> dict[str, Any]:
        """See facade.Service.cancel_request."""
        work = await self._own_work(owner, request_id)
        if work is not None:
            self._dispatcher.cancel(work, "Cancelled by request.")
            # A running one ends with its step; the record is told when it has.
            while not work.ended:
                await work.changed()
        return await self.get_request(owner, request_id)

    async def resume_request(self, owner: str | None, request_id: str) -> WorkTicket:
        """See facade.Service.resume_request."""
        work = await self._own_work(owner, request_id)
        if work is None or work.state is not RequestState.RESUMABLE:
            state = "ended" if work is None else str(work.state)
            raise Conflict(f"Only a resumable request can be resumed; this one is {state}.")
        # Of an answer that is not streamed nobody was given anything yet.
        return self._resume(work, start=len(work.events) if work.ask.stream else 0)

    def _resume(self, work: Work, *, start: int) -> WorkTicket:
        if self.draining:
            raise Draining(retry_after_s=5.0)
        model = self._models[work.ask.model]
        open_outputs = tuple(c.max_output_tokens for c in work.open_choices)
        verdict = self._board.decide(model, work.ask, len(work.prompt_tokens), open_outputs)
        if isinstance(verdict, Reject):
            raise verdict.error
        self._note_verdict(work, verdict)
        start -= self._dispatcher.resume(work, verdict.route)
        return self._ticket(work, replayed=True, start=max(0, start))

    def probe_device(self, name: str) -> dict[str, Any]:
        """See facade.Service.probe_device."""
        self._board.fleet.try_again(name)
        return next(device for device in self.status()["devices"] if device["name"] == name)

    # ------------------------------------------------------------------ watching

    async def request_events(
        self, owner: str | None, request_id: str, after: int
    ) -> AsyncIterator[tuple[int, ServiceEvent]]:
        """See facade.Service.request_events."""
        work = await self._own_work(owner, request_id)
        if work is None:
            record = await self._journal.get(request_id)
            work = await restore(self._journal, record) if record is not None else None
            if work is None:
                raise RequestNotFound("The request's payload was removed after the retention time.")
        number = min(after, len(work.events))
        async for event in self._ticket(work, replayed=True, start=number, watches=True).events():
            if not isinstance(event, Waiting):
                number += 1
                yield number, event

    async def watch_status(self) -> AsyncIterator[dict[str, Any]]:
        """See facade.Service.watch_status."""
        seen: dict[str, Any] | None = None
        while True:
            now = self.status()
            if now != seen:
                seen = now
                yield now
            await self._board.changed()


def what_must_run_once(ask: Ask) -> tuple[str, str, str] | None:
    """What a repetition of this request has in common with it; None where nothing says that it could be one."""
    if ask.idempotency_key is not None:
        return ask.owner, "key", ask.idempotency_key
    if ask.client_retry > 0 and ask.body_digest:
        return ask.owner, "body", ask.body_digest
    return None


def remember(index: dict[tuple[str, str], str], key: tuple[str, str], request_id: str) -> None:
    """Note the newest request under a key, and forget the oldest entry beyond the bound."""
    index.pop(key, None)
    index[key] = request_id
    if len(index) > INDEXED:
        del index[next(iter(index))]
