"""The gateway's handle on one worker: it starts it, watches it, fences it, and starts it again.

One task (`run`) owns the state. Everything the worker says is passed on synchronously, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from relevo.core.backoff import Backoff, GivenUp
from relevo.core.breaker import FaultKind
from relevo.core.described import move
from relevo.core.errors import RelevoError
from relevo.core.events import (
    AttemptEnded,
    Cancel,
    Extend,
    FromWorker,
    Prefilled,
    Probe,
    ProbeAnswer,
    Ready,
    StartModel,
    Step,
    Submit,
)
from relevo.processes.identity import Identity
from relevo.replicas.death import Death
from relevo.replicas.incarnation import Incarnation, LifeSettings
from relevo.replicas.liveness import LivenessLimits, Sign
from relevo.replicas.process import ProcessLimits, worker_command, worker_environment
from relevo.replicas.state import TRANSITIONS, ReplicaState
from relevo.replicas.wire import WireError

_log = logging.getLogger("relevo.replica")

T = TypeVar("T")


class ReplicaNotServing(Exception):
    """The replica takes no work now. The message says why; nothing was sent."""


class ReplicaEvents(Protocol):
    """What a replica tells its owner. All but the two coroutines are called from the loop and must not block.

    For each incarnation for which `may_start` returned, `on_lost` is called exactly once, and after it
    `on_gone` exactly once (unless a process hangs in the kernel beyond the end of `run`).
    """

    async def may_start(self, replica: Replica, incarnation: int) -> ProcessLimits:
        """Wait until this incarnation may take memory and a device; the lease is the caller's until `on_gone`.

        May be cancelled while it waits (the replica is being stopped), and must hold nothing then.
        """
        ...

    async def on_starting(self, replica: Replica, incarnation: int, identity: Identity) -> None:
        """The process exists, and loads nothing before this returns: record who it is."""
        ...

    def on_ready(self, replica: Replica, ready: Ready) -> None:
        """It proved that it works and takes work from now on."""
        ...

    def on_frame(self, replica: Replica, frame: Step | Prefilled | AttemptEnded) -> None:
        """What the worker says about its attempts."""
        ...

    def on_suspect(self, replica: Replica) -> None:
        """A heartbeat is overdue. `submit` refuses until it recovered."""
        ...

    def on_recovered(self, replica: Replica) -> None:
        """Its heart beats again; it takes work."""
        ...

    def on_lost(self, replica: Replica, incarnation: int, death: Death) -> None:
        """Nothing of this incarnation will be received any more: its attempts may be dispatched elsewhere."""
        ...

    def on_gone(self, replica: Replica, incarnation: int) -> None:
        """Its processes are gone and their memory is free: the lease may be released."""
        ...

    def on_given_up(self, replica: Replica, sentence: str) -> None:
        """It will not start again until `resume`. The sentence says why, and what to do."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How a replica's worker is started, and the patience with it. Seconds."""

    liveness: LivenessLimits = field(default_factory=LivenessLimits)
    start_silence_s: float = 20.0
    load_timeout_s: float = 600.0
    gone_timeout_s: float = 10.0
    """How long the end of `run` waits for a killed process to be gone."""
    extra_environment: Mapping[str, str] = field(default_factory=dict)
    command: Callable[[int], Sequence[str]] | None = None
    """Another program than the kind's own worker, given the socket's descriptor number."""
    new_backoff: Callable[[str], Backoff] = Backoff
    """Makes the replica's back-off, given the sentence that tells a person how to resume it."""


class Replica:
    """One model on one route on one device, served by one worker process after the other."""

    def __init__(
        self,
        name: str,
        *,
        model: str,
        route: str,
        device: str,
        kind: str,
        plan: Callable[[], StartModel],
        events: ReplicaEvents,
        settings: ReplicaSettings | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.route = route
        self.device = device
        self.kind = kind
        self.last_death: Death | None = None
        self.next_start_at: float | None = None
        """Loop time of the next start while it backs off."""
        self._plan = plan
        self._events = events
        self._settings = settings or ReplicaSettings()
        self._backoff = self._settings.new_backoff(
            f"When its cause is mended, start it again with `relevo devices probe {device}`."
        )
        self._state = ReplicaState.STOPPED
        self._number = 0
        self._life: Incarnation | None = None
        self._ready: Ready | None = None
        self._probes: dict[int, asyncio.Future[ProbeAnswer]] = {}
        self._stopping = False
        self._wake = asyncio.Event()
        self._finished = asyncio.Event()
        self._finished.set()
        self._wait: tuple[asyncio.Timeout, float] | None = None

    # --- what it is now

    @property
    def state(self) -> ReplicaState:
        """Where it stands."""
        return self._state

    @property
    def incarnation(self) -> int:
        """Number of the present or last process; 0 before the first."""
        return self._number

    @property
    def identity(self) -> Identity | None:
        """The present process, None when there is none."""
        process = self._life.process if self._life is not None else None
        return process.identity if process is not None else None

    @property
    def pid(self) -> int | None:
        """Its process id, None when there is none."""
        identity = self.identity
        return identity.pid if identity is not None else None

    @property
    def ready(self) -> Ready | None:
        """What the present worker said when it was ready; None when it is not."""
        return self._ready

    @property
    def last_heartbeat(self) -> float | None:
        """Loop time of the present process's last heartbeat."""
        return self._life.last_heartbeat if self._life is not None else None

    @property
    def rss_bytes(self) -> int | None:
        """Resident memory as the worker last told it."""
        return self._life.rss_bytes if self._life is not None else None

    @property
    def log_tail(self) -> tuple[str, ...]:
        """The last lines of the present process, or of the last one."""
        process = self._life.process if self._life is not None else None
        if process is not None:
            return process.log_tail
        return self.last_death.log_tail if self.last_death is not None else ()

    # --- what one may ask of it

    def submit(self, frame: Submit) -> None:
        """Start an attempt. Raises ReplicaNotServing (nothing was sent), or WireError when the frame is too large."""
        life = self._serving_life()
        life.send(frame)

    def extend(self, frame: Extend) -> None:
        """Let a choice of an attempt go further. Harmless when there is no worker any more."""
        if self._life is not None:
            with contextlib.suppress(WireError):
                self._life.send(frame)

    def cancel(self, request_id: str, attempt: int) -> None:
        """Stop an attempt at the end of its step. Harmless when there is no worker any more."""
        if self._life is not None:
            with contextlib.suppress(WireError):
                self._life.send(Cancel(request_id, attempt))

    async def probe(self, number: int, *, tokens: int = 4, timeout_s: float = 30.0) -> ProbeAnswer:
        """Ask for a small real inference. An answer that comes after the time-out is dropped.

        Raises ReplicaNotServing when it takes no work or dies meanwhile, TimeoutError when no answer came.
        """
        life = self._serving_life()
        answer: asyncio.Future[ProbeAnswer] = asyncio.get_running_loop().create_future()
        self._probes[number] = answer
        try:
            life.send(Probe(number, tokens))
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._probes.pop(number, None)

    def kill(self, reason: str, kind: FaultKind | None = None) -> None:
        """Kill the present process. `reason` is a sentence; `kind` None means that it is nobody's fault.

        The replica starts again by its own rules.
        """
        if self._life is not None:
            self._life.kill(reason, kind)

    def resume(self) -> None:
        """Start now instead of later: ends a back-off and a give-up, and forgets the failures that led there."""
        self._backoff.reset()
        self._wake.set()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Stop the worker and end `run`. Harmless when it does not run.

        First the Shutdown frame, then SIGTERM, after `grace_s` SIGKILL. Being cancelled stops only the waiting.
        """
        self._stopping = True
        self._wake.set()
        if self._wait is not None:
            limit, allowance_s = self._wait
            limit.reschedule(asyncio.get_running_loop().time() + allowance_s)
        if self._life is not None and not self._life.ended.done():
            if self._state is not ReplicaState.DRAINING:
                self._become(ReplicaState.DRAINING)
            self._life.shut_down(grace_s)
        await self._finished.wait()

    def run(self) -> Coroutine[Any, Any, None]:
        """Live until `stop`. Belongs into the owner's task group; may be run again after it ended.

        A stop that comes before the task's first step counts. Raises only what the owner's own methods raised;
        the worker is fenced and gone by then.
        """
        if not self._finished.is_set():
            raise RuntimeError(f"The replica {self.name} runs already.")
        self._stopping = False
        return self._run()

    async def _run(self) -> None:
        self._finished.clear()
        try:
            while not self._stopping:
                self._become(ReplicaState.WAITING)
                self._number += 1
                limits = await self._unless_stopped(self._events.may_start(self, self._number), 0.0)
                if limits is not None:
                    death = await self._live(limits)
                    await self._pause(death)
        finally:
            self.next_start_at = None
            self._become(ReplicaState.STOPPED)
            self._finished.set()

    # --- one life

    async def _live(self, limits: ProcessLimits) -> Death:
        self._become(ReplicaState.STARTING)
        plan, refusal = None, None
        try:
            plan = self._plan()
        except Exception as e:
            refusal = e
        life = Incarnation(self._number, self.name, self._life_settings(plan), self._take, self._judge_sign)
        self._life = life
        try:
            if self._stopping:
                life.kill("It was asked to end before it had started.", None)
            elif plan is None:
                life.mistake = refusal if not isinstance(refusal, RelevoError) else None
                life.kill(f"The start of {self.name} could not be planned: {refusal}", FaultKind.UNCLASSIFIED_DEATH)
            else:
                await self._start(life, limits, plan)
            await asyncio.shield(life.ended)
        except BaseException:
            self._stopping = True  # from here on no wait is without a bound
            raise
        finally:
            death = await self._bury(life)
        if life.mistake is not None:
            raise life.mistake
        return death

    async def _start(self, life: Incarnation, limits: ProcessLimits, plan: StartModel) -> None:
        try:
            await life.start(limits)
        except OSError as e:
            life.kill(f"The worker of {self.name} could not be started: {e}.", FaultKind.UNCLASSIFIED_DEATH)
            return
        assert life.process is not None
        await self._events.on_starting(self, life.number, life.process.identity)
        with contextlib.suppress(WireError):  # it ended already, and its life says why
            life.send(plan)

    async def _bury(self, life: Incarnation) -> Death:
        """Fence it, tell that it is lost, wait until it is gone, tell that."""
        self._become(ReplicaState.FENCED)
        self._ready = None
        try:
            death = await life.fence()
            self.last_death = death
            self._life = None
            self._fail_probes(death)
            _log.info("%s, process %d: %s", self.name, life.number, death.cause)
            self._events.on_lost(self, life.number, death)
            if await self._unless_stopped(_then(life.wait_gone(), True), self._settings.gone_timeout_s):
                self._events.on_gone(self, life.number)
            else:
                _log.error("%s: the process would not go after SIGKILL; its memory stays leased.", self.name)
        finally:
            self._life = None
            life.abandon()
        return death

    async def _pause(self, death: Death) -> None:
        """What comes between two lives: nothing, a back-off, or giving up."""
        if self._stopping or death.kind is None:
            return
        self._wake.clear()  # a resume while it served was not about this
        loop = asyncio.get_running_loop()
        verdict = self._backoff.failed(loop.time(), random.random())  # noqa: S311 - spreads restarts, guards nothing
        if isinstance(verdict, GivenUp):
            self._become(ReplicaState.GIVEN_UP)
            sentence = f"{self.name} is given up. The last time: {death.cause} {verdict.sentence}"
            _log.error("%s", sentence)
            self._events.on_given_up(self, sentence)
            await self._wake.wait()
            return
        self._become(ReplicaState.WAITING)
        self.next_start_at = loop.time() + verdict.delay_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(verdict.delay_s):
                await self._wake.wait()
        self.next_start_at = None

    async def _unless_stopped(self, work: Awaitable[T], allowance_s: float) -> T | None:
        """Await `work` for as long as it takes, but once a stop is asked for only `allowance_s` more; None then."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._wait = (limit, allowance_s)
                if self._stopping:
                    limit.reschedule(asyncio.get_running_loop().time() + allowance_s)
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            self._wait = None

    def _life_settings(self, plan: StartModel | None) -> LifeSettings:
        settings = self._settings
        return LifeSettings(
            command=settings.command or (lambda fd: worker_command(self.kind, fd)),
            environment=worker_environment(plan.threads if plan else 1, settings.extra_environment),
            incoming=FromWorker,
            liveness=settings.liveness,
            start_silence_s=settings.start_silence_s,
            load_timeout_s=settings.load_timeout_s,
        )

    # --- called synchronously from the life

    def _take(self, frame: Any) -> None:
        kind = type(frame)
        if kind is ProbeAnswer:
            answer = self._probes.get(frame.number)
            if answer is not None and not answer.done():
                answer.set_result(frame)
        elif kind is Ready:
            self._take_ready(frame)
        else:
            self._events.on_frame(self, frame)

    def _take_ready(self, ready: Ready) -> None:
        if self._life is None or self._state is not ReplicaState.STARTING:
            return
        self._life.ready()
        self._ready = ready
        self._backoff.serving(asyncio.get_running_loop().time())
        self._become(ReplicaState.SERVING)
        self._events.on_ready(self, ready)

    def _judge_sign(self, sign: Sign) -> None:
        if sign is Sign.SUSPECT and self._state is ReplicaState.SERVING:
            self._become(ReplicaState.SUSPECT)
            self._events.on_suspect(self)
        elif sign is Sign.ALIVE and self._state is ReplicaState.SUSPECT:
            self._become(ReplicaState.SERVING)
            self._events.on_recovered(self)

    # --- small change

    def _serving_life(self) -> Incarnation:
        life = self._life
        if self._state is not ReplicaState.SERVING or life is None:
            raise ReplicaNotServing(f"{self.name} is {self._state}: {self._state.sentence}")
        if life.is_over:
            raise ReplicaNotServing(f"{self.name} has died a moment ago.")
        return life

    def _fail_probes(self, death: Death) -> None:
        for answer in self._probes.values():
            if not answer.done():
                answer.set_exception(ReplicaNotServing(death.cause))

    def _become(self, state: ReplicaState) -> None:
        if state is self._state:
            return
        _log.debug("%s: %s -> %s", self.name, self._state, state)
        self._state = move(f"The replica {self.name}", TRANSITIONS, self._state, state)


async def _then(work: Awaitable[None], value: T) -> T:
    await work
    return value
