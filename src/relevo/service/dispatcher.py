"""The one writer of request state: places work in lanes, starts attempts, takes their output, ends them once.

Everything here runs on the event loop without awaiting, so that no decision is
made on a state that changed in between. What must become durable is handed to
the journal in order; what may only leave when it is durable waits on the
journal's answer in the ticket.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from relevo.core.admission import Policy
from relevo.core.described import named
from relevo.core.errors import DeadlinePassed, EngineFailed, QueueFull, ResumeExpired
from relevo.core.events import AttemptEnded, Ended, Piece, Prefilled, Routed, Step, Submit
from relevo.core.forecast import Observation
from relevo.core.handover import BecomeResumable, Continue, Fail, Grade, LostAttempt, Restart, Way, Wish, on_route_lost
from relevo.core.lane import Full, Place
from relevo.core.request import RequestState
from relevo.journal import ChangeState, EndRequest, Journal
from relevo.journal.records import RequestRecord
from relevo.replicas.death import Death
from relevo.replicas.replica import ReplicaNotServing
from relevo.service.endings import Endings
from relevo.service.growth import Growth
from relevo.service.metrics import Metrics
from relevo.service.records import Recorder
from relevo.service.routes import Route
from relevo.service.work import Handover, Work

_log = logging.getLogger("relevo.dispatch")

SELF_INFLICTED = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""Deaths that the work in hand may have caused. A worker killed from outside says nothing about its requests."""


def blames_work(death: Death) -> bool:
    """Whether what the worker was doing can be what killed it."""
    return death.signal in SELF_INFLICTED or (death.code or 0) > 0


class Planner(Protocol):
    """What the dispatcher asks of admission about work that is accepted already."""

    def better_route(self, work: Work) -> str | None:
        """Where it should wait now; None where no route would take it."""
        ...

    def describe(self, work: Work) -> dict[str, Any]:
        """The `relevo` object of a request, as of now."""
        ...

    def home(self, work: Work) -> str:
        """The route its model prefers."""
        ...

    def ways(self, work: Work, lost: Route) -> tuple[Way | None, Way | None]:
        """Its standby, and the route it ran on."""
        ...


class Dispatcher:
    """Owns every open request and the lanes they wait in."""

    def __init__(
        self,
        journal: Journal,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        retention_s: float,
        plan: Planner,
    ) -> None:
        self._journal = journal
        self._metrics = metrics
        self._clock = clock
        self._wall = wall
        self._plan = plan
        self.works: dict[str, Work] = {}
        self._recorder = Recorder(journal, wall)
        self.endings = Endings(
            self.works,
            self._recorder,
            metrics,
            describe=plan.describe,
            clock=clock,
            wall=wall,
            retention_s=retention_s,
        )
        self.routes: dict[tuple[str, str], Route] = {}
        self._growth = Growth(metrics, wall)

    # ------------------------------------------------------------ entering

    def adopt(self, work: Work) -> None:
        """Take a request into memory."""
        self.works[work.request_id] = work

    def enqueue(self, work: Work, route_name: str, *, handed_over: bool = True) -> ChangeState | None:
        """Give it a place in a route's lane. Returns the move for the journal, None if it was queued already.

        Raises QueueFull for a new request where every place is taken; what was accepted before always has one.
        """
        route = self.routes[work.ask.model, route_name]
        if work.attempt and work.deadline is not None:
            # A deadline is one for starting, which it met: a lost route, or a resume, begins another wait.
            wait_s = route.lane_config.deadline_s if work.ask.deadline_s is None else work.ask.deadline_s
            work.deadline = self._clock() + wait_s
        place = self._enter(route, work, handed_over=handed_over)
        if isinstance(place, Full):
            raise QueueFull(retry_after_s=1.0)
        work.route = route_name
        work.lane_since = self._clock()
        if work.state is RequestState.QUEUED:
            return None
        old = work.move(RequestState.QUEUED)
        return ChangeState(id=work.request_id, old=str(old), new=str(work.state), at=self._wall())

    def _enter(self, route: Route, work: Work, *, handed_over: bool) -> Place | Full:
        return route.lane.enter(
            work.request_id,
            self._clock(),
            work.deadline,
            work.ask.owner,
            handed_over=handed_over,
            priority=work.ask.priority,
        )

    def pump(self, route: Route) -> None:
        """Give cells to whoever is parked on a route, start what may start there, end what waited too long."""
        if route.parked:
            self._growth.share_out(route)
        now = self._clock()
        starts = route.lane.start_next(now, lambda holder: self._fits(route, self.works[holder]))
        for holder in starts.expired:
            self._expire(self.works[holder], route)
        for i, holder in enumerate(starts.start):
            try:
                self._start_attempt(route, self.works[holder])
            except ReplicaNotServing as e:
                # It died between the question and the answer; on_lost follows and finds these queued.
                _log.info("%s could not take work: %s", route, e)
                for later in starts.start[i:]:
                    self._put_back(route, self.works[later])
                return

    def _fits(self, route: Route, work: Work) -> bool:
        if not route.serving:
            return False
        if route.running and (work.suspect or any(other.suspect for other in route.running.values())):
            return False  # a suspect runs alone
        fits = self._growth.lease(route, work)
        if fits:
            route.running[work.request_id] = work
        return fits

    def _put_back(self, route: Route, work: Work) -> None:
        self._let_go(route, work)
        self._enter(route, work, handed_over=True)

    def _start_attempt(self, route: Route, work: Work) -> None:
        frame = Submit(
            request_id=work.request_id,
            attempt=work.attempt + 1,
            prompt_tokens=work.prompt_tokens,
            choices=work.starts(),
            sampling=work.sampling,
            stop=work.ask.stop,
            logprobs=work.ask.logprobs,
            ignore_eos=work.ask.ignore_eos,
        )
        route.replica.submit(frame)
        now = self._clock()
        work.attempt += 1
        work.attempt_started = route.used_at = now
        work.first_output_at = None
        old = work.move(RequestState.RUNNING)
        change = ChangeState(id=work.request_id, old=str(old), new=str(work.state), at=self._wall())
        work.first_output_gate = self._recorder.attempt_started(
            work, change, route=route.name, device=route.device, pid=route.replica.pid
        )
        work.first_output_gate.add_done_callback(lambda f: self._attempt_recorded(work, f))
        if work.attempt == 1:
            self._metrics.queue_wait.labels(work.ask.model, route.name).observe(now - work.lane_since)
        self._announce_route(work, route)

    def _attempt_recorded(self, work: Work, recorded: asyncio.Future[None]) -> None:
        if not recorded.cancelled() and (error := recorded.exception()) is not None:
            _log.error("the start of an attempt of %s could not be recorded: %s", work.request_id, error)
        work.wake()

    def _announce_route(self, work: Work, route: Route) -> None:
        if work.handovers and work.handovers[-1].to_route is None:
            work.handovers[-1].to_route = route.name
        work.publish(Routed(relevo=self._plan.describe(work)))

    # -------------------------------------------------------------- output

    def take(self, route: Route, frame: Step | Prefilled | AttemptEnded) -> None:
        """A worker's frame. Frames of an overtaken attempt are dropped and counted."""
        if isinstance(frame, Step):
            for piece in frame.pieces:
                self._take_piece(route, piece)
        elif isinstance(frame, AttemptEnded):
            self._take_end(route, frame)
        elif (work := self._current(route, frame.request_id, frame.attempt)) is not None:
            self._growth.read(route, work, frame)

    def _current(self, route: Route, request_id: str, attempt: int) -> Work | None:
        work = route.running.get(request_id)
        if work is None or work.attempt != attempt:
            self._metrics.stale_frames.inc()
            return None
        return work

    def _take_piece(self, route: Route, piece: Piece) -> None:
        work = self._current(route, piece.request_id, piece.attempt)
        if work is None or work.cancel_requested or work.ended:
            return
        if work.first_output_at is None:
            self._note_first_output(route, work)
        work.add_piece(piece)
        self._growth.follow(route, work, piece)
        self._recorder.progressed(work)

    def _note_first_output(self, route: Route, work: Work) -> None:
        work.first_output_at = self._clock()
        self._metrics.first_token.labels(work.ask.model, route.name).observe(self._wall() - work.created)
        if work.handovers and work.handovers[-1].gap_ms is None:
            work.handovers[-1].gap_ms = round((work.first_output_at - work.handovers[-1].lost_at) * 1000, 1)

    # ---------------------------------------------------------- attempt ends

    def _take_end(self, route: Route, frame: AttemptEnded) -> None:
        work = self._current(route, frame.request_id, frame.attempt)
        if work is None:
            return
        self._learn(route, work, frame)
        gives_way = work.gives_way if frame.outcome == "cancelled" else None
        self._recorder.attempt_ended(work, frame.outcome, frame.code, gives_way or frame.message)
        self._let_go(route, work)
        if work.cancel_requested:
            self.endings.cancel(work)
        elif frame.outcome == "completed":
            self.endings.complete(work)
        elif gives_way is not None:
            work.gave_way += 1
            work.deadline = None  # it had started in time; that it has to wait again is our doing
            self.lose(work, route, gives_way, gave_way=True)
        elif frame.code == "invalid":
            self.endings.fail(work, EngineFailed(f"The engine refused the request: {frame.message}"))
        else:
            self.lose(work, route, frame.message or f"The engine ended the attempt: {frame.code or frame.outcome}.")
        self.pump(route)

    def _learn(self, route: Route, work: Work, frame: AttemptEnded) -> None:
        """Teach the forecast what this attempt took."""
        completed = frame.outcome == "completed"
        if completed and work.ask.max_output_tokens is None and not work.ask.ignore_eos:
            for choice in work.choices:
                route.forecast.outputs.add(len(choice.tokens))
        route.forecast.observe(
            route.name,
            max(1, len(route.running)),
            Observation(
                prompt_tokens=len(work.prompt_tokens),
                prompt_ms=frame.prompt_ms,
                output_tokens=max(len(c.tokens) for c in work.choices),
                decode_ms=frame.decode_ms,
                held_ms=(self._clock() - work.attempt_started) * 1000 if completed else None,
                limit_named=work.ask.max_output_tokens is not None,
            ),
        )

    def _let_go(self, route: Route, work: Work) -> None:
        """The attempt holds nothing on the route any more. Safe to call twice."""
        if route.running.pop(work.request_id, None) is not None:
            route.used_at = self._clock()
        route.lane.leave(work.request_id)
        self._growth.let_go(route, work)

    # ---------------------------------------------------------- in between

    @property
    def running_count(self) -> int:
        """Requests that have an attempt under way."""
        return sum(len(route.running) for route in self.routes.values())

    def tell_waiting(self) -> None:
        """Wake the callers of queued work, so that they hear where it stands."""
        for route in self.routes.values():
            for holder in route.lane.waiting_holders:
                self.works[holder].wake()

    async def expire_resting(self, now: float) -> None:
        """End resumable requests whose time is over. `now` is wall time."""
        for request_id in await self._journal.expire_due(now):
            work = self.works.get(request_id)
            if work is not None and work.state is RequestState.RESUMABLE:
                self.endings.fail(work, ResumeExpired())

    def end_unservable(self, record: RequestRecord) -> asyncio.Future[None]:
        """After a restart: what can't go on (its payload or its model is gone) ends as failed, with the reason."""
        reason = f"After a restart it could not go on: the model {record.summary.model!r} or its payload is gone."
        return self._journal.submit(EndRequest(id=record.summary.id, state="failed", at=self._wall(), reason=reason))

    def requeue(self, work: Work, route_name: str, reason: str | None = None) -> None:
        """Back into a lane: after a restart of the gateway, a lost route, or a rest. The move is journaled."""
        change = self.enqueue(work, route_name)
        if change is not None:
            self._recorder.move(work, msgspec.structs.replace(change, reason=reason))

    async def put_to_rest(self) -> None:
        """The service ends: what delivered output becomes resumable, the rest waits for the next start."""
        for route in self.routes.values():
            for work in list(route.running.values()):
                route.replica.cancel(work.request_id, work.attempt)
                self._recorder.attempt_ended(work, "lost", "stopped", "Relevo was stopped.")
                self._let_go(route, work)
                if work.delivered:
                    self.endings.rest(work, "Relevo was stopped in the middle of this request.")
                else:
                    self.endings.interrupt(work)
            for holder in route.lane.waiting_holders:
                route.lane.leave(holder)
                self.endings.interrupt(self.works[holder])
        await self._journal.commit()

    # ---------------------------------------------------------------- losing

    def route_lost(self, route: Route, death: Death) -> None:
        """The worker of a route is gone and fenced: everything that ran there goes on elsewhere, or rests."""
        lost = list(route.running.values())
        blame = blames_work(death)
        for work in lost:
            work.suspect = work.suspect or (blame and len(lost) > 1)
            work.alone_kills += blame and len(lost) == 1
            self._recorder.attempt_ended(work, "lost", str(death.kind or "stopped"), death.cause)
            self._let_go(route, work)
        for work in lost:
            if work.cancel_requested:
                self.endings.cancel(work)
            else:
                self.lose(work, route, death.cause)
        self.reconsider_waiting(route)

    def reconsider_waiting(self, route: Route) -> None:
        """Everything that waits there looks for another way; what runs stays."""
        for holder in route.lane.waiting_holders:
            self.reconsider(self.works[holder], route)

    def reconsider(self, work: Work, route: Route) -> None:
        """Move queued work to another lane if that serves it better now; there is nothing to carry."""
        target = self._plan.better_route(work)
        if target is not None and target != route.name:
            route.lane.leave(work.request_id)
            self.enqueue(work, target)
            self.pump(self.routes[work.ask.model, target])

    def lose(self, work: Work, route: Route, cause: str, *, gave_way: bool = False) -> None:
        """One request lost its attempt: restart it, go on with it, let it rest as resumable, or fail it.

        `gave_way`: nothing is wrong with its route, so it waits there for its turn.
        """
        if not work.open_choices:
            self.endings.complete(work)  # it lacked only its worker's goodbye
            return
        standby, home = self._plan.ways(work, route)
        decision = on_route_lost(
            LostAttempt(
                route=route.name,
                delivered=work.delivered,
                delivered_bytes=sum(c.text_bytes for c in work.choices),
                choices=len(work.choices),
                policy=named(Policy, work.ask.policy or Policy.AUTO),
                wish=named(Wish, work.wish),
                attempts=work.attempt - work.gave_way,  # those say nothing about it
                alone_kills=work.alone_kills,
                cause=cause,
            ),
            None if gave_way else standby,
            home,
        )
        handover = Handover(route.name, None, work.output_tokens, None, cause, lost_at=self._clock())
        work.handovers.append(handover)
        if not gave_way:
            self._metrics.handovers.labels(work.ask.model, type(decision).__name__).inc()
        match decision:
            case Restart() | Continue():
                handover.grade = str(decision.grade)
                if isinstance(decision, Restart):
                    work.forget_output()
                self._queue_again(work, decision.route, cause)
            case Fail():
                self.endings.fail(work, decision.error)
            case BecomeResumable():
                self.endings.rest(work, decision.reason)

    def _queue_again(self, work: Work, route_name: str, cause: str) -> None:
        self.requeue(work, route_name, cause)
        work.degraded_reason = cause if route_name != self._plan.home(work) else None
        if work.standby is not None and work.standby["route"] == route_name:
            work.standby = None  # it is used up
        self.pump(self.routes[work.ask.model, route_name])

    def resume(self, work: Work, route_name: str) -> int:
        """Take up a resting request: same id, next attempt, after its last token. Returns events taken back."""
        taken_back = 0
        if work.events and isinstance(work.events[-1], Ended):
            work.events.pop()  # it was the end of a delivery, not of the request
            taken_back = 1
        work.error = work.reason = work.kept_until = None
        work.durable_events = min(work.durable_events, len(work.events))
        if work.handovers and work.handovers[-1].to_route is None:
            work.handovers[-1].grade = str(Grade.CONTINUOUS)
        self.requeue(work, route_name)
        self.pump(self.routes[work.ask.model, route_name])
        return taken_back

    def withdraw(self, work: Work) -> None:
        """Its acceptance was not recorded: it never was a request. Nothing of it may go on."""
        self.works.pop(work.request_id, None)
        for route in (r for key, r in self.routes.items() if key[0] == work.ask.model):
            if work.request_id in route.running:
                route.replica.cancel(work.request_id, work.attempt)
            self._let_go(route, work)

    # ---------------------------------------------------------------- ending

    def cancel(self, work: Work, reason: str) -> None:
        """Stop it in whatever state it is. Harmless on an ended request."""
        if work.ended or work.cancel_requested:
            return
        work.cancel_requested = True
        work.cancel_reason = reason
        route = self.routes.get((work.ask.model, work.route or ""))
        if work.state is RequestState.RUNNING and route is not None:
            route.replica.cancel(work.request_id, work.attempt)  # AttemptEnded or on_lost follows
            return
        if route is not None:
            route.lane.leave(work.request_id)
        self.endings.cancel(work)

    def _expire(self, work: Work, route: Route) -> None:
        error = DeadlinePassed(f"The request waited for the {route.name} route until its deadline passed.")
        self.endings.fail(work, error)
