"""The service's figures: as admission needs them, as people see them, as Prometheus scrapes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from relevo import __version__
from relevo.core.admission import (
    Admit,
    Delay,
    NoStandby,
    Policy,
    Redirect,
    RouteState,
    RouteView,
    Standby,
    Verdict,
    Weighed,
    decide,
    in_preference,
)
from relevo.core.breaker import BreakerState
from relevo.core.described import named
from relevo.core.events import Ask
from relevo.core.forecast import Eta, Load, estimate
from relevo.core.handover import Way
from relevo.core.request import RequestState
from relevo.replicas.state import ReplicaState
from relevo.service.berths import Berth, HeldDevice, Posture
from relevo.service.growth import expected_output
from relevo.service.load_view import load_view
from relevo.service.metrics import Metrics
from relevo.service.routes import Route, ServedModel
from relevo.service.views import relevo_object
from relevo.service.work import Work

if TYPE_CHECKING:
    from relevo.service.fleet import Fleet

STATE_OF: dict[ReplicaState, RouteState] = {
    ReplicaState.STOPPED: RouteState.STOPPED,
    ReplicaState.WAITING: RouteState.BACKING_OFF,
    ReplicaState.STARTING: RouteState.STARTING,
    ReplicaState.SERVING: RouteState.SERVING,
    ReplicaState.SUSPECT: RouteState.BACKING_OFF,
    ReplicaState.FENCED: RouteState.BACKING_OFF,
    ReplicaState.DRAINING: RouteState.STOPPED,
    ReplicaState.GIVEN_UP: RouteState.GIVEN_UP,
}
CHANGES_PER_S = 4


class StatusBoard:
    """Reads everything, changes nothing."""

    def __init__(self, models: dict[str, ServedModel], metrics: Metrics, trouble: Callable[[], str | None]) -> None:
        self._models = models
        self._metrics = metrics
        self._trouble = trouble
        self._news: set[asyncio.Future[None]] = set()
        self.fleet: Fleet  # set once by whoever builds the house

    # --------------------------------------------------------------- deciding

    def decide(self, model: ServedModel, ask: Ask, prompt_tokens: int, outputs: tuple[int, ...]) -> Verdict:
        """Admission's verdict on a request, by the figures of now."""
        weighed = Weighed(
            prompt_tokens=prompt_tokens,
            outputs=outputs,
            output_is_default=ask.max_output_tokens is None,
            expected_outputs=tuple(expected_output(model.preferred.forecast.outputs, ask, limit) for limit in outputs),
            priority=ask.priority,
            policy=named(Policy, ask.policy or model.config.policy),
            deadline_s=ask.deadline_s,
        )
        return decide(weighed, in_preference([self._view_for(ask, route) for route in model.routes.values()]))

    def _view_for(self, ask: Ask, route: Route) -> RouteView:
        """A route as admission sees it for this request: who waits there and has the lower priority is behind it."""
        view = self.view(route)
        if not view.queued:
            return view
        return msgspec.structs.replace(view, ahead=route.lane.ahead_of(ask.priority, time.monotonic()))

    def view(self, route: Route) -> RouteView:
        """A route as admission sees it."""
        berth = self.fleet.berths[route.replica.name]
        breaker = berth.held.breaker
        now = time.monotonic()
        state = STATE_OF[route.replica.state]
        state = self._state_of(berth, route, state)
        lane = route.lane
        return RouteView(
            route=route.name,
            device=route.device,
            state=state,
            cells=route.context_tokens,
            slots=route.slots,
            shared=route.shared,
            cells_free=0 if route.parked else route.cells.free_cells,  # the next ones are for those who wait for them
            slots_free=route.cells.free_slots,
            queued=lane.queued,
            running=lane.running,
            queue_limit=lane.queue_limit,
            concurrency=lane.concurrency,
            breaker_open=breaker.state is not BreakerState.CLOSED,
            reopens_in_s=self._reopens_in_s(route, breaker.next_probe_s(now)),
            cause=self._cause(route),
            pressure=str(berth.held.ledger.stage),
            max_context_tokens=route.lane_config.max_context_tokens,
            max_output_tokens=route.lane_config.max_output_tokens,
            rates=route.forecast.rates(route.name, max(1, lane.running)),
            load_eta_ms=route.load_ms,
        )

    @staticmethod
    def _state_of(berth: Berth, route: Route, state: RouteState) -> RouteState:
        if berth.posture is Posture.DORMANT:
            return RouteState.STOPPED
        if state is RouteState.SERVING and route.closed_reason is not None:
            return RouteState.BACKING_OFF
        if state is RouteState.BACKING_OFF and (berth.rests or not berth.first.is_set()):
            return RouteState.STARTING  # it only waits for its turn, or for work
        return state

    @staticmethod
    def _reopens_in_s(route: Route, probe_s: float | None) -> float | None:
        if probe_s is not None:
            return probe_s
        at = route.replica.next_start_at
        return None if at is None else max(0.0, at - asyncio.get_running_loop().time())

    def _cause(self, route: Route) -> str | None:
        """Why it does not serve, or None when it does."""
        berth = self.fleet.berths[route.replica.name]
        held = berth.held
        if berth.posture is Posture.DORMANT or berth.rests:
            return None
        if held.breaker.state is not BreakerState.CLOSED:
            return f"The breaker of {held.name} is {held.breaker.state}: {held.breaker.cause}"
        if route.serving:
            return None
        if route.closed_reason is not None:
            return route.closed_reason
        if route.waiting_reason is not None:
            return route.waiting_reason
        death = route.replica.last_death
        why = f" {death.cause}" if death is not None else ""
        return f"The {route.name} route is {route.replica.state}: {route.replica.state.sentence}{why}"

    def better_route(self, work: Work) -> str | None:
        """Where accepted work should wait now; None where no route would take it."""
        model = self._models[work.ask.model]
        outputs = tuple(c.max_output_tokens for c in work.open_choices)
        verdict = self.decide(model, work.ask, len(work.prompt_tokens), outputs)
        if not isinstance(verdict, Admit | Delay | Redirect):
            return None
        work.degraded_reason = verdict.reason if isinstance(verdict, Redirect) else None
        work.standby = self.standby_view(verdict.standby)
        return verdict.route

    def home(self, work: Work) -> str:
        """The route its model prefers."""
        return self._models[work.ask.model].preferred.name

    def ways(self, work: Work, lost: Route) -> tuple[Way | None, Way | None]:
        """Its standby, and the route it ran on, as they are now."""
        model = self._models[work.ask.model]
        planned = (work.standby or {}).get("route")
        others = [self._way(r) for r in model.routes.values() if r is not lost]
        # Without a plan of its own (it runs on its standby already) any other open route will do.
        standby = next((way for way in others if way.route == planned), None) or next(
            (w for w in others if w.open), None
        )
        return standby, self._way(lost)

    def _way(self, route: Route) -> Way:
        view = self.view(route)
        return Way(route.name, view.open or self._rests(route), returns=view.state is not RouteState.GIVEN_UP)

    def _rests(self, route: Route) -> bool:
        """Whether it takes work although no worker runs: it is loaded when work comes."""
        return self.fleet.berths[route.replica.name].rests

    @staticmethod
    def standby_view(standby: Standby | NoStandby) -> dict[str, Any] | None:
        """The standby as the outer contract shows it; None for none."""
        if isinstance(standby, NoStandby):
            return None
        return {"route": standby.route, "estimate_ms": rounded(standby.estimate_ms), "limits": standby.limits}

    # ----------------------------------------------------------- one request

    def describe(self, work: Work) -> dict[str, Any]:
        """The `relevo` object of a request, as of now."""
        route = self._route_of(work)
        if route is None:
            return relevo_object(work, device=None, limits=None, queue=None, eta=None)
        view = self.view(route)
        return relevo_object(
            work,
            device=self._device_name(route),
            limits=view.limits(),
            queue=self.queue_view(work),
            eta=self._eta(work, route, view),
        )

    def _route_of(self, work: Work) -> Route | None:
        model = self._models.get(work.ask.model)
        return model.routes.get(work.route or "") if model is not None else None

    @staticmethod
    def _device_name(route: Route) -> str:
        return f"{route.device} (emulated)" if route.emulated else route.device

    def queue_view(self, work: Work) -> dict[str, Any] | None:
        """Where it stands in line; None when it does not wait."""
        route = self._route_of(work)
        if route is None or work.state not in (RequestState.ACCEPTED, RequestState.QUEUED):
            return None
        position = route.lane.position(work.request_id)
        if position is None:
            return None
        return {
            "lane": route.lane.name,
            "position": position,
            "age_ms": round((time.monotonic() - work.lane_since) * 1000, 1),
        }

    def eta_view(self, work: Work) -> dict[str, Any] | None:
        """What is left by the estimate; None when nothing was learned, or it ended."""
        route = self._route_of(work)
        return None if route is None else self._eta(work, route, self.view(route))

    @staticmethod
    def _eta(work: Work, route: Route, view: RouteView) -> dict[str, Any] | None:
        if work.ended:
            return None
        position = route.lane.position(work.request_id)
        load = Load(
            queued_ahead=0 if position is None else position - 1,
            running=0 if position is None else view.running,
            concurrency=view.concurrency,
            ready_in_ms=0.0 if view.open else (view.load_eta_ms or 0.0),
        )
        outputs = [c.max_output_tokens - len(c.tokens) for c in work.open_choices] or [0]
        eta = estimate(
            view.rates, len(work.prompt_tokens), outputs, load, output_is_default=work.ask.max_output_tokens is None
        )
        if not isinstance(eta, Eta):
            return None
        return {"first_token_ms": rounded(eta.first_token_ms), "total_ms": rounded(eta.total_ms)}

    # -------------------------------------------------------------- everything

    def status(self) -> dict[str, Any]:
        """The status object of the outer contract."""
        ready, _ = self.ready(draining=False)
        trouble = self._trouble()
        degraded = trouble is not None or any(m.degraded for m in self._models.values())
        return {
            "state": "down" if not ready else "degraded" if degraded else "ok",
            "version": __version__,
            "reasons": self._reasons(trouble),
            "devices": [self._device(held) for held in self.fleet.devices.values()],
            "replicas": [self._replica(m, r) for m in self._models.values() for r in self.shown(m)],
            "lanes": [self._lane(r) for m in self._models.values() for r in self.shown(m)],
            "certificate": None,
            "certificate_reason": "No drill has been run on this machine.",
        }

    def shown(self, model: ServedModel) -> list[Route]:
        """The routes that people should see: not a hybrid one that nothing asks for."""
        return [route for route in model.routes.values() if self.fleet.berths[route.replica.name].shown]

    def _reasons(self, trouble: str | None) -> list[str]:
        causes = [self._cause(r) for m in self._models.values() for r in m.routes.values()]
        return [reason for reason in (trouble, *causes) if reason is not None]

    def _device(self, held: HeldDevice) -> dict[str, Any]:
        view = held.ledger.snapshot(time.monotonic())
        breaker = held.breaker
        to_wall = time.time() - time.monotonic()
        return {
            "name": held.name,
            "kind": held.device.kind,
            "description": held.device.description,
            "tells": held.device.tells,
            "emulated": held.emulated,
            "total_bytes": view.total_bytes,
            "driver_reserved_bytes": view.driver_reserved_bytes,
            "reported_free_bytes": view.reported_free_bytes,
            "leased_bytes": view.leased_bytes,
            "granted_not_visible_bytes": view.granted_not_visible_bytes,
            "returning_bytes": view.returning_bytes,
            "external_bytes": view.external_bytes,
            "available_bytes": view.available_bytes,
            "headroom_bytes": view.headroom_bytes,
            "largest_block_bytes": view.largest_block_bytes,
            "pressure": None if view.pressure is None else round(view.pressure, 3),
            "pressure_stage": str(view.stage),
            "pressure_reason": view.stage_reason,
            "read_at": None if view.read_at is None else view.read_at + to_wall,
            "reason": view.reason,
            "leases": [{"holder": h.holder, "bytes": h.bytes_, "state": str(h.state)} for h in view.leases],
            "breaker": {
                "state": str(breaker.state),
                "cause": breaker.cause,
                "since": breaker.since + to_wall if breaker.since else None,
                "next_probe_s": rounded(breaker.next_probe_s(time.monotonic())),
            },
        }

    def _replica(self, model: ServedModel, route: Route) -> dict[str, Any]:
        replica = route.replica
        ready = replica.ready
        death = replica.last_death
        return {
            "name": replica.name,
            "model": model.name,
            "task": "chat",
            "route": route.name,
            "device": route.device,
            "emulated": route.emulated,
            "state": str(replica.state),
            "reason": self._cause(route),
            "pid": replica.pid,
            "engine": ready.engine if ready is not None else None,
            "library": ready.library if ready is not None else None,
            "fingerprint": route.fingerprint,
            "incarnation": replica.incarnation,
            "load_ms": rounded(ready.load_ms) if ready is not None else None,
            "load": load_view(self.fleet.berths[replica.name]),
            "last_death": None
            if death is None
            else {"cause": death.cause, "kind": death.kind and str(death.kind), "at": death.at},
        }

    @staticmethod
    def _lane(route: Route) -> dict[str, Any]:
        view = route.lane.snapshot(time.monotonic())
        return {
            "name": view.name,
            "model": route.model,
            "route": route.name,
            "queued": view.queued,
            "running": view.running,
            "oldest_age_ms": round(view.oldest_age_ms, 1),
            "limit": view.limit,
            "concurrency": view.concurrency,
            **cells_view(route),
        }

    def ready(self, *, draining: bool) -> tuple[bool, dict[str, Any]]:
        """Whether any route serves, and what to say about it."""
        if draining:
            return False, {"status": "draining", "degraded": True}
        serving = [r for m in self._models.values() for r in m.routes.values() if r.serving or self._rests(r)]
        trouble = self._trouble()
        degraded = trouble is not None or any(m.degraded for m in self._models.values())
        if serving:
            return True, {
                "status": "degraded" if degraded else "ok",
                "degraded": degraded,
                "reasons": self._reasons(trouble),
            }
        starting = any(
            self.view(r).state is RouteState.STARTING for m in self._models.values() for r in m.routes.values()
        )
        return False, {
            "status": "starting" if starting else "down",
            "degraded": True,
            "reasons": self._reasons(self._trouble()),
        }

    def measure(self) -> None:
        """Bring the gauges up to date."""
        for model in self._models.values():
            for route in model.routes.values():
                self._metrics.queued.labels(model.name, route.name).set(route.lane.queued)
                self._metrics.running.labels(model.name, route.name).set(route.lane.running)
                for what, cells in cells_view(route).items():
                    if what.startswith("cells_"):
                        self._metrics.cells.labels(model.name, route.name, what.removeprefix("cells_")).set(cells)
        for held in self.fleet.devices.values():
            view = held.ledger.snapshot()
            self._metrics.device_leased.labels(held.name).set(view.leased_bytes)
            if view.available_bytes is not None:
                self._metrics.device_available.labels(held.name).set(view.available_bytes)
            else:
                self._metrics.device_available.clear()
            for state in BreakerState:
                self._metrics.breaker.labels(held.name, str(state)).set(held.breaker.state is state)

    # ------------------------------------------------------------------- news

    def touch(self) -> None:
        """Something that status shows may have changed."""
        news, self._news = self._news, set()
        for future in news:
            if not future.done():
                future.set_result(None)

    async def changed(self) -> None:
        """Wait until something may have changed, and a moment more so that a burst is shown once."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._news.add(future)
        try:
            await future
        finally:
            self._news.discard(future)
        await asyncio.sleep(1 / CHANGES_PER_S)


def cells_view(route: Route) -> dict[str, Any]:
    """How its cells are used. Leased ones are in use, or may be at any moment; live ones of these hold a token.

    What is set aside belongs to running requests that have not come that far; free is what anybody may take.
    """
    pool, live = route.cells, route.live_cells
    parked = [work.parked for work in route.running.values() if work.parked is not None]
    return {
        "cells_total": pool.total_cells,
        "cells_leased": pool.held_cells,
        "cells_live": live,
        "cells_set_aside": pool.total_cells - pool.free_cells - pool.held_cells,
        "cells_free": pool.free_cells,
        "cells_reserved_unused": pool.total_cells - pool.free_cells - live,
        "expected_output_tokens": route.forecast.outputs.expected(pool.largest_context_tokens),
        "parked": len(parked),
        "parked_reason": parked[0].reason if parked else None,
    }


def rounded(value: float | None) -> float | None:
    """To a tenth; None stays unknown."""
    return None if value is None else round(value, 1)
