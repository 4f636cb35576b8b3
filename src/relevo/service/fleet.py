"""The workers: memory is leased before they start, they are journaled, their deaths reach breaker and dispatcher."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

import msgspec

from relevo.core.breaker import BreakerState, FaultKind, Transition
from relevo.core.errors import DeviceNotFound, RelevoError
from relevo.core.events import AttemptEnded, Prefilled, ProbeAnswer, Ready, StartModel, Step
from relevo.journal import Journal, PutFact, WorkerGone, WorkerStarted
from relevo.processes.identity import Identity
from relevo.replicas.death import Death
from relevo.replicas.process import ProcessLimits
from relevo.replicas.replica import Replica, ReplicaNotServing
from relevo.replicas.state import ReplicaState
from relevo.service.berths import Berth, HeldDevice, Posture
from relevo.service.dispatcher import Dispatcher
from relevo.service.identity import Identities
from relevo.service.learning import Learning
from relevo.service.loads import Loads
from relevo.service.metrics import Metrics
from relevo.service.plans import data_limit_bytes
from relevo.service.records import log_failure

_log = logging.getLogger("relevo.fleet")

BREAKER_FACT = "breaker:"
_probe_numbers = itertools.count(1 << 32)  # apart from those of breakers
ITS_OWN = frozenset({FaultKind.ALLOCATION, FaultKind.PROBE_FAILED})
"""Faults that say nothing of a device on which other workers compute: their models, or their files, are the cause."""
CPU_OOM_SCORE = 800
"""The kernel shall rather kill a CPU worker than a neighbour."""


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
        learning: Learning,
        loads: Loads,
        changed: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tasks = tasks
        self._identities = identities
        self._changed = changed
        self._learning = learning
        self.loads = loads
        self.berths = loads.berths
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
        berth.life = await self.loads.lease(berth, incarnation)
        self._changed()
        return ProcessLimits(
            data_bytes=data_limit_bytes(berth.life.demand) if berth.held is berth.host else None,
            oom_score_adj=CPU_OOM_SCORE if berth.route.name == "cpu" else None,
        )

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
        berth.proved = True
        berth.load_s = ready.load_ms / 1000
        berth.last_used = time.monotonic()
        self._settle(berth, ready)
        self._metrics.worker_up.labels(replica.model, replica.route).set(1)
        self._changed()
        berth.known_answer = ready.probe_tokens  # one that differs from earlier workers' is found by its fingerprint
        self._tasks.create_task(self._identify(berth, ready, berth.planned()), name=f"identity of {replica.name}")
        if berth.held.breaker.state is BreakerState.CLOSED:
            self._dispatcher.pump(berth.route)
        else:
            self._tasks.create_task(self._earn_trust(berth), name=f"probes of {replica.name}")

    def _settle(self, berth: Berth, ready: Ready) -> None:
        """Count what it holds now, on its device and on the host, and learn from it."""
        life = berth.life
        if life is None:
            return
        cells = ready.cells if berth.route.shared else ready.cells * ready.slots
        berth.route.cell_bytes = None if life.demand.kv_bytes is None else life.demand.kv_bytes / cells
        for held, lease in life.leases:
            observed = berth.observed_on(held, ready)
            if observed is not None:
                held.ledger.settle(lease, observed)
        self._learning.loaded(berth, ready)

    async def _identify(self, berth: Berth, ready: Ready, start: StartModel) -> None:
        """Fingerprint it. A worker that computes otherwise than it did before is not used."""
        replica = berth.route.replica
        where = berth.held.device.description
        try:
            objection = await self._identities.identify(berth.model, berth.route, ready, start, where)
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

    def probe_all(self) -> None:
        """After a suspend: a worker that does not give its known answer any more is replaced."""
        for berth in self.berths.values():
            if berth.route.serving and not berth.probing:
                self._tasks.create_task(self._prove_again(berth), name=f"probe of {berth.route.replica.name}")

    async def _prove_again(self, berth: Berth) -> None:
        incarnation = berth.route.replica.incarnation
        if not await self._probe(berth, next(_probe_numbers)) and berth.route.replica.incarnation == incarnation:
            berth.route.replica.kill("After the machine had slept it gave no right answer.", FaultKind.STICKY_DEVICE)

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
        if berth.life is not None and berth.life.identity is not None:
            for held, lease in berth.life.leases:
                held.ledger.drain(lease)
        if berth.posture is Posture.LEAVING:
            berth.posture = Posture.EVICTED
        berth.leaves_by = berth.route.closed_reason = None
        self._learning.lost(berth, death)
        if death.kind is not None and not self._is_its_own(berth, death.kind):
            self._note(berth.held.breaker.fault(death.kind, time.monotonic(), source=replica.name))
        self._dispatcher.route_lost(berth.route, death)
        self._changed()

    def _is_its_own(self, berth: Berth, kind: FaultKind) -> bool:
        """Whether a fault is this worker's alone: others compute well on the device. Its back-off takes care of it."""
        others = (other for other in self.berths.values() if other.held is berth.held and other is not berth)
        return kind in ITS_OWN and any(other.route.serving for other in others)

    def on_gone(self, replica: Replica, incarnation: int) -> None:  # noqa: ARG002 - one life at a time
        """Its memory is free."""
        berth = self.berth_of(replica)
        life, berth.life = berth.life, None
        if life is None:
            return
        self.loads.give_back(berth, life)
        if life.identity is not None:
            berth.held.vacate(life.identity.pid)
            gone = self._journal.submit(WorkerGone(pid=life.identity.pid, start_time=life.identity.start_time))
            gone.add_done_callback(log_failure(f"the end of worker {life.identity.pid}"))
        self._changed()

    def on_given_up(self, replica: Replica, sentence: str) -> None:
        """It will not come back by itself: what waits for it looks for another way."""
        berth = self.berth_of(replica)
        berth.route.waiting_reason = sentence
        self._dispatcher.reconsider_waiting(berth.route)
        self._changed()

    def try_again(self, name: str) -> None:
        """A person says that the cause is mended: start what gave up, and probe now. Raises DeviceNotFound."""
        held = self.devices.get(name)
        if held is None:
            raise DeviceNotFound(f"No device is called {name!r} here. Known: {', '.join(self.devices)}.")
        held.breaker.probe_soon(time.monotonic())
        for berth in self.berths.values():
            if berth.held is held and berth.route.replica.ready is None and berth.shown:
                if berth.route.replica.state is ReplicaState.GIVEN_UP:
                    berth.route.waiting_reason = None
                berth.refusal = None
                berth.route.replica.resume()
        self._changed()

    # ------------------------------------------------------------ breaker

    def device_fault(self, held: HeldDevice, kind: FaultKind, sentence: str) -> None:
        """The driver or the kernel told of a fault of the whole device: nothing is sent there, and its workers go."""
        self._note(held.breaker.fault(kind, time.monotonic(), source=held.name))
        for berth in self.berths.values():
            if berth.held is held and berth.life is not None:
                berth.route.replica.kill(sentence, None)  # the worker is not to blame, and does not back off

    def _note(self, transitions: tuple[Transition, ...]) -> None:
        """Log, remember and show what a breaker did; workers that live on must earn its trust again."""
        for t in transitions:
            _log.warning("breaker of %s: %s -> %s: %s", t.breaker, t.from_, t.to, t.cause)
            held = self.devices[t.breaker]
            to_wall = held.breaker.export().shifted(time.time() - time.monotonic())
            fact = PutFact(key=BREAKER_FACT + t.breaker, value=msgspec.json.encode(to_wall))
            self._journal.submit(fact).add_done_callback(log_failure(f"the breaker of {t.breaker}"))
            if t.to is BreakerState.OPEN:
                for berth in self.berths.values():
                    if berth.held is held and berth.route.replica.ready is not None:
                        self._tasks.create_task(self._earn_trust(berth), name=f"probes of {berth.route.replica.name}")
        if transitions:
            self._changed()
