"""The workers: memory is leased before they start, they are journaled, their deaths reach breaker and dispatcher."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from relevo.core.breaker import Breaker, BreakerState, FaultKind, Transition
from relevo.core.errors import DeviceNotFound, RelevoError
from relevo.core.events import AttemptEnded, Prefilled, ProbeAnswer, Ready, Step
from relevo.core.ledger import Lease, LeaseState, Ledger, Reading
from relevo.devices.device import Device
from relevo.devices.host import HostDevice
from relevo.devices.soft import SoftDevice
from relevo.journal import Journal, PutFact, WorkerGone, WorkerStarted
from relevo.processes import memory as process_memory
from relevo.processes.identity import Identity
from relevo.replicas.death import Death
from relevo.replicas.process import ProcessLimits
from relevo.replicas.replica import Replica, ReplicaNotServing
from relevo.service.dispatcher import Dispatcher
from relevo.service.identity import Identities
from relevo.service.metrics import Metrics
from relevo.service.plans import Footprint
from relevo.service.records import log_failure
from relevo.service.routes import Route, ServedModel

_log = logging.getLogger("relevo.fleet")

RETRY_LEASE_S = 1.0
LOADING_S = 0.05
BREAKER_FACT = "breaker:"
CPU_OOM_SCORE = 800
"""The kernel shall rather kill a CPU worker than a neighbour."""


@dataclass(slots=True)
class HeldDevice:
    """A device with its ledger and breaker; the fleet owns both."""

    name: str
    device: Device
    ledger: Ledger
    breaker: Breaker

    @property
    def emulated(self) -> bool:
        """Whether it only plays an accelerator."""
        return self.device.emulated

    def occupy(self, identity: Identity) -> None:
        """A worker's process exists. An emulated device keeps its memory limit from here on."""
        if isinstance(self.device, SoftDevice):
            self.device.register(identity.pid, identity.start_time)

    def vacate(self, pid: int) -> None:
        """A worker's process is gone."""
        if isinstance(self.device, SoftDevice):
            self.device.forget(pid)

    def observed_bytes(self, ready: Ready) -> int | None:
        """What a worker holds here: told by the kernel where it can, else the sum of the engine's own buffer lines."""
        if isinstance(self.device, SoftDevice):
            return process_memory.data_bytes(ready.pid)
        if isinstance(self.device, HostDevice):
            return process_memory.resident_bytes(ready.pid)
        parts = (ready.model_bytes, ready.kv_bytes, ready.compute_bytes)
        return None if None in parts else sum(p or 0 for p in parts)


@dataclass(slots=True)
class _Life:
    """What is held for one incarnation of a worker."""

    incarnation: int
    lease: Lease
    identity: Identity | None = None


@dataclass(slots=True)
class Berth:
    """A route's place in the fleet."""

    route: Route
    model: ServedModel
    held: HeldDevice
    footprint: Footprint
    first: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its first start succeeded or failed: those that start after it may go."""
    waits_for: Berth | None = None
    life: _Life | None = None
    known_answer: list[int] | None = None
    probing: bool = False

    @property
    def loading(self) -> bool:
        """Whether a worker of it holds a lease and is not ready yet."""
        return self.life is not None and self.route.replica.ready is None


class Fleet:
    """Implements replicas.ReplicaEvents for every llama worker."""

    def __init__(
        self,
        journal: Journal,
        dispatcher: Dispatcher,
        metrics: Metrics,
        tasks: asyncio.TaskGroup,
        *,
        identities: Identities,
        changed: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tasks = tasks
        self._identities = identities
        self._changed = changed
        self.berths: dict[str, Berth] = {}
        self.devices: dict[str, HeldDevice] = {}

    def berth_of(self, replica: Replica) -> Berth:
        """The place of this replica."""
        return self.berths[replica.name]

    # ------------------------------------------------------------ starting

    async def may_start(self, replica: Replica, incarnation: int) -> ProcessLimits:
        """Wait for those before it, for the breaker, and for memory."""
        berth = self.berth_of(replica)
        if berth.waits_for is not None:
            berth.route.waiting_reason = f"It starts after {berth.waits_for.route.replica.name}."
            await berth.waits_for.first.wait()
        while True:
            pause_s = self._pause_s(berth)
            if pause_s is None:
                lease = berth.held.ledger.request(replica.name, berth.footprint.lease_bytes, time.monotonic())
                if isinstance(lease, Lease):
                    break
                self._hold_back(berth, f"Memory is short: {lease.reason}")
                pause_s = RETRY_LEASE_S
            await asyncio.sleep(pause_s)
        berth.route.waiting_reason = None
        berth.life = _Life(incarnation, lease)
        self._changed()
        return ProcessLimits(
            data_bytes=berth.footprint.data_limit_bytes,
            oom_score_adj=CPU_OOM_SCORE if berth.route.name == "cpu" else None,
        )

    def _pause_s(self, berth: Berth) -> float | None:
        """Seconds to wait for the breaker, or for a neighbour's load; None when a start may be tried now."""
        if any(other.loading for other in self.berths.values() if other.held is berth.held):
            return LOADING_S  # two loads at once could not be told apart in what the device reports
        breaker = berth.held.breaker
        now = time.monotonic()
        if breaker.allow_work(now) or breaker.state is BreakerState.HALF_OPEN:
            return None
        wait_s = breaker.next_probe_s(now)
        if wait_s == 0:
            return None
        self._hold_back(berth, f"The breaker of {berth.held.name} is open: {breaker.cause}")
        return min(wait_s, RETRY_LEASE_S) if wait_s is not None else RETRY_LEASE_S

    def _hold_back(self, berth: Berth, reason: str) -> None:
        berth.first.set()  # nobody else waits for one that cannot start
        if berth.route.waiting_reason != reason:
            berth.route.waiting_reason = reason
            _log.warning("%s is not started: %s", berth.route.replica.name, reason)
            self._changed()

    async def on_starting(self, replica: Replica, incarnation: int, identity: Identity) -> None:
        """Record who it is before it loads anything, so that a crash leaves no stranger."""
        berth = self.berth_of(replica)
        assert berth.life is not None and berth.life.incarnation == incarnation
        berth.life.identity = identity
        berth.held.occupy(identity)
        await self._journal.commit(
            WorkerStarted(
                pid=identity.pid,
                start_time=identity.start_time,
                model=replica.model,
                route=replica.route,
                device=replica.device,
                at=time.time(),
            )
        )

    def on_ready(self, replica: Replica, ready: Ready) -> None:
        """It proved itself: count its memory, check its answer, give it work."""
        berth = self.berth_of(replica)
        berth.first.set()
        berth.route.renew_cells(ready)
        if berth.life is not None:
            observed = berth.held.observed_bytes(ready)
            if observed is not None:
                berth.held.ledger.settle(berth.life.lease, observed)
        self._metrics.worker_up.labels(replica.model, replica.route).set(1)
        self._changed()
        berth.known_answer = berth.known_answer or ready.probe_tokens
        self._tasks.create_task(self._identify(berth, ready), name=f"identity of {replica.name}")
        if berth.held.breaker.state is BreakerState.CLOSED:
            self._dispatcher.pump(berth.route)
        else:
            self._tasks.create_task(self._earn_trust(berth), name=f"probes of {replica.name}")

    async def _identify(self, berth: Berth, ready: Ready) -> None:
        """Fingerprint it. A worker that computes otherwise than it did before is not used."""
        replica = berth.route.replica
        try:
            objection = await self._identities.identify(berth.model, berth.route, ready, berth.held.device.description)
        except RelevoError as e:
            _log.warning("%s could not be fingerprinted: %s", replica.name, e.message)
            return
        if objection is not None and replica.ready is ready:
            replica.kill(objection, FaultKind.DEVICE_CHANGED)

    async def _earn_trust(self, berth: Berth) -> None:
        """Numbered probes, one at a time, until the breaker closes or the worker is gone."""
        if berth.probing:
            return
        berth.probing = True
        breaker, replica = berth.held.breaker, berth.route.replica
        incarnation = replica.incarnation
        try:
            while breaker.state is not BreakerState.CLOSED and replica.incarnation == incarnation and replica.ready:
                permit, changed = breaker.permit_probe(time.monotonic())
                self._note(changed)
                if permit is None:
                    await asyncio.sleep(0.1)
                    continue
                ok = await self._probe(berth, permit.number)
                self._note(breaker.report_probe(permit, ok, time.monotonic()))
        finally:
            berth.probing = False
        for other in self.berths.values():
            if other.held is berth.held:
                self._dispatcher.pump(other.route)

    async def _probe(self, berth: Berth, number: int) -> bool:
        try:
            answer: ProbeAnswer = await berth.route.replica.probe(number)
        except (ReplicaNotServing, TimeoutError):
            return False
        return answer.ok and answer.tokens == berth.known_answer

    # ------------------------------------------------------------ living

    def on_frame(self, replica: Replica, frame: Step | Prefilled | AttemptEnded) -> None:
        """Pass its words on."""
        self._dispatcher.take(self.berth_of(replica).route, frame)

    def on_suspect(self, replica: Replica) -> None:
        """It gets no new work for now; `Route.serving` sees that by itself."""
        _log.warning("%s: a heartbeat is overdue; it gets no new work.", replica.name)
        self._changed()

    def on_recovered(self, replica: Replica) -> None:
        """Its heart beats again."""
        _log.info("%s: its heart beats again.", replica.name)
        self._changed()
        self._dispatcher.pump(self.berth_of(replica).route)

    # ------------------------------------------------------------ dying

    def on_lost(self, replica: Replica, incarnation: int, death: Death) -> None:  # noqa: ARG002 - one life at a time
        """It is fenced: tell the breaker, then let its work go on elsewhere."""
        berth = self.berth_of(replica)
        berth.first.set()
        self._metrics.worker_up.labels(replica.model, replica.route).set(0)
        self._metrics.worker_exits.labels(replica.model, replica.route, str(death.kind or "stopped")).inc()
        if berth.life is not None and berth.life.lease.state is not LeaseState.RELEASED:
            berth.held.ledger.drain(berth.life.lease)
        if death.kind is not None:
            self._note(berth.held.breaker.fault(death.kind, time.monotonic(), source=replica.name))
        self._dispatcher.route_lost(berth.route, death)
        self._changed()

    def on_gone(self, replica: Replica, incarnation: int) -> None:  # noqa: ARG002 - one life at a time
        """Its memory is free."""
        berth = self.berth_of(replica)
        life, berth.life = berth.life, None
        if life is None:
            return
        berth.held.ledger.release(life.lease)
        if life.identity is not None:
            berth.held.vacate(life.identity.pid)
            gone = self._journal.submit(WorkerGone(pid=life.identity.pid, start_time=life.identity.start_time))
            gone.add_done_callback(log_failure(f"the end of worker {life.identity.pid}"))
        self._changed()

    def on_given_up(self, replica: Replica, sentence: str) -> None:
        """It will not come back by itself: what waits for it looks for another way."""
        berth = self.berth_of(replica)
        berth.route.waiting_reason = sentence
        for holder in berth.route.lane.waiting_holders:
            self._dispatcher.reconsider(self._dispatcher.works[holder], berth.route)
        self._changed()

    def try_again(self, name: str) -> None:
        """A person says that the cause is mended: start what gave up, and probe now. Raises DeviceNotFound."""
        held = self.devices.get(name)
        if held is None:
            raise DeviceNotFound(f"No device is called {name!r} here. Known: {', '.join(self.devices)}.")
        held.breaker.probe_soon(time.monotonic())
        for berth in self.berths.values():
            if berth.held is held and berth.route.replica.ready is None:
                berth.route.waiting_reason = None
                berth.route.replica.resume()
        self._changed()

    # ------------------------------------------------------------ breaker

    def _note(self, transitions: tuple[Transition, ...]) -> None:
        """Log, remember and show what a breaker did."""
        for t in transitions:
            _log.warning("breaker of %s: %s -> %s: %s", t.breaker, t.from_, t.to, t.cause)
            held = self.devices[t.breaker]
            to_wall = held.breaker.export().shifted(time.time() - time.monotonic())
            fact = PutFact(key=BREAKER_FACT + t.breaker, value=msgspec.json.encode(to_wall))
            self._journal.submit(fact).add_done_callback(log_failure(f"the breaker of {t.breaker}"))
        if transitions:
            self._changed()

    # ------------------------------------------------------------ reading

    async def read_devices(self) -> None:
        """Take a reading of every device, off the loop, with a bound on how long a driver may take."""
        for held in self.devices.values():
            try:
                async with asyncio.timeout(5.0):
                    reading = await asyncio.to_thread(held.device.read)
            except TimeoutError:
                reading = Reading(
                    None, None, read_at=time.monotonic(), reason=f"{held.name} did not answer within 5 s."
                )
            held.ledger.observe(reading)
            self._recount(held)

    def _recount(self, held: HeldDevice) -> None:
        """What the workers hold now, where the device can tell it apart."""
        for berth in self.berths.values():
            life, ready = berth.life, berth.route.replica.ready
            if berth.held is not held or life is None or ready is None or life.lease.state is not LeaseState.SETTLED:
                continue
            observed = held.observed_bytes(ready)
            if observed is not None:
                held.ledger.recount(life.lease, observed)
