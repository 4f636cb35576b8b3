"""When and how a worker may load: the ladder's verdict, the leases taken for it, and who makes room.

Nothing is loaded before its memory is leased, on its device and on the host in one step. What the ladder decides is
kept on the berth, so that people see why a route runs as it does, or does not run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from relevo.core.breaker import BreakerState
from relevo.core.leases.lease import Lease, LeaseState, Shortfall
from relevo.core.leases.reserve import Want, reserve
from relevo.core.loads.ladder import DeviceView, Holder, LoadVerdict, LoadWish, Step, decide_load, may_restore
from relevo.core.loads.room import largest_piece_bytes
from relevo.core.memory.demand import Demand
from relevo.replicas.dry_run import DryRuns
from relevo.service.berths import Berth, HeldDevice, Life, Posture
from relevo.service.scales import Scales

_log = logging.getLogger("relevo.loads")

RETRY_S = 1.0
LOADING_S = 0.05
EVICT_IDLE_S = 5.0
"""A replica that was used more recently is not idle enough to give way."""
WANTED_S = 60.0
"""How long a request that had to go elsewhere counts as a wish for its model."""
CALM_S = 5.0
"""How long a device must have been calm before more is loaded on it than it holds."""
DRY_RUN_ROUNDS = 4
HOST_STEP_BITS = 6
"""Free RAM changes all the time; steps of 64 MiB are looked at anew."""
DRY_RUNS_AT_ONCE = 24


class Loads:
    """Answers one question for the fleet: may this worker load now, and as what? Owns nobody's process."""

    def __init__(self, dry_runs: DryRuns, changed: Callable[[], None]) -> None:
        self.berths: dict[str, Berth] = {}
        """Every route's, by the name of its replica."""
        self._dry_runs = dry_runs
        self._changed = changed

    async def lease(self, berth: Berth, incarnation: int) -> Life:
        """Wait until it may load, and return what was leased for it. Holds nothing when it is cancelled."""
        while True:
            wait_s = self._hindrance(berth)
            if wait_s is None:
                life = await self._try(berth, incarnation)
                if life is not None:
                    berth.posture = Posture.WANTED
                    berth.route.waiting_reason = berth.route.closed_reason = None
                    return life
                wait_s = RETRY_S
            await asyncio.sleep(wait_s)

    # ------------------------------------------------------------ what stands in the way

    def _hindrance(self, berth: Berth) -> float | None:
        """Seconds to wait before asking again; None when a load may be tried now."""
        if berth.posture is Posture.RESTING and not self._is_wanted(berth):
            return LOADING_S
        if berth.whole is not None and not self._needs_part(berth.whole):
            berth.posture = Posture.DORMANT
            berth.route.waiting_reason = Posture.DORMANT.sentence
            berth.first.set()
            return LOADING_S
        if self._others_load(berth):
            return LOADING_S
        return self._breaker_wait_s(berth)

    def _breaker_wait_s(self, berth: Berth) -> float | None:
        breaker = berth.held.breaker
        now = time.monotonic()
        if breaker.allow_work(now) or breaker.state is BreakerState.HALF_OPEN:
            return None
        wait_s = breaker.next_probe_s(now)
        if wait_s == 0:
            return None
        self.hold_back(berth, f"The breaker of {berth.held.name} is open: {breaker.cause}")
        return min(wait_s, RETRY_S) if wait_s is not None else RETRY_S

    def _others_load(self, berth: Berth) -> bool:
        """Two loads at once could not be told apart in what the device reports."""
        return any(other.loading for other in self.berths.values() if other.held is berth.held)

    def wish(self, model: str) -> None:
        """A request for this model had to go elsewhere than its preferred route."""
        for berth in self.berths.values():
            if berth.model.name == model and berth.life is None and berth.whole is None:
                berth.wanted_at = time.monotonic()

    @staticmethod
    def _is_wanted(berth: Berth) -> bool:
        recently = berth.wanted_at is not None and time.monotonic() - berth.wanted_at < WANTED_S
        return berth.route.lane.queued > 0 or recently

    @staticmethod
    def _needs_part(whole: Berth) -> bool:
        """Whether a part of the model should be put on the device: the whole of it was weighed and does not fit."""
        return whole.life is None and whole.verdict is not None and whole.verdict.step in (Step.REDIRECT, Step.REJECT)

    def hold_back(self, berth: Berth, reason: str) -> None:
        """It does not load now, and why."""
        berth.first.set()  # nobody else waits for one that cannot start
        if berth.route.waiting_reason != reason:
            berth.route.waiting_reason = reason
            _log.warning("%s is not started: %s", berth.route.replica.name, reason)
            self._changed()

    # ------------------------------------------------------------ the ladder

    async def _try(self, berth: Berth, incarnation: int) -> Life | None:
        if berth.kept:
            return self._wake(berth, incarnation)
        figures = self._figures_of(berth)
        if figures == berth.refused_at:
            return None  # nothing changed since the ladder said no
        berth.refused_at = figures
        verdict = await self._decide(berth)
        berth.verdict = verdict
        if not verdict.loads_on_device or (berth.whole is not None and not berth.is_part(verdict.start)):
            self.hold_back(berth, verdict.reason)
            return None
        if not verdict.starts_now:
            self._make_room(berth, verdict)
            return None
        if self._others_load(berth):
            return None
        taken = self._reserve(berth, verdict)
        if isinstance(taken, Shortfall):
            self.hold_back(berth, f"Memory is short: {taken.reason}")
            return None
        berth.refused_at = None
        return Life(incarnation, verdict, taken)

    async def _decide(self, berth: Berth) -> LoadVerdict:
        """The ladder's verdict; what the closed form does not know is asked of the engine, and it decides anew."""
        verdict = await self.weigh_up(berth)
        for _ in range(DRY_RUN_ROUNDS):
            if verdict.loads_on_device or not await self._ask_engine(berth.scales):
                return verdict
            verdict = await self.weigh_up(berth)
        return verdict

    async def _ask_engine(self, scales: Scales) -> bool:
        """Have the engine plan the loads that could not be weighed. Returns whether anything new is known."""
        starts = scales.unknown[:DRY_RUNS_AT_ONCE]
        if not starts:
            return False
        for start, answer in zip(starts, await self._dry_runs.run(starts), strict=True):
            scales.learn(start, answer)
        return True

    async def weigh_up(self, berth: Berth) -> LoadVerdict:
        """The ladder's verdict by the figures of now. In a thread: a search may weigh hundreds of loads."""
        return await asyncio.to_thread(
            decide_load,
            self.wish_of(berth),
            self.view_of(berth.held, berth),
            self.view_of(berth.host, berth),
            berth.weigh,
        )

    def _figures_of(self, berth: Berth) -> object:
        """What a verdict depends on, coarsely: while it is the same the ladder need not be asked again."""
        device, host = self.view_of(berth.held, berth), self.view_of(berth.host, berth)
        free = [None if view.available_bytes is None else view.available_bytes >> 20 for view in (device, host)]
        holders = [(h.holder, h.bytes_ >> 20, h.evictable, h.idle, h.frees_in_s) for h in device.holders]
        host_free = None if free[1] is None else free[1] >> HOST_STEP_BITS
        return (
            free[0],
            device.largest_block_bytes,
            device.pressure,
            host_free,
            holders,
            berth.scales.learned(berth.start),
        )

    @staticmethod
    def wish_of(berth: Berth) -> LoadWish:
        """What its configuration asks for, and what it may give up."""
        config, shape = berth.model.config, berth.scales.shape
        twin = berth.twin
        return LoadWish(
            holder=berth.route.replica.name,
            start=berth.start,
            layers=shape.layer_count,
            expert_layers=sum(1 for layer in shape.layers if layer.expert_bytes),
            allow=frozenset(config.reduce),
            least_context_tokens=min(config.least_context_tokens or 4096, berth.start.context_tokens),
            offload=berth.whole is not None,
            redirect=not berth.has_part,  # where there is a hybrid route, that is where they go first
            from_storage=config.from_storage,
            priority=config.priority,
            most_context_tokens=shape.context_trained_tokens,
            cpu_start=None if twin is None else twin.start,
            cpu_held_bytes=0 if twin is None else twin.leased_bytes,
            recovery_budget_s=config.recovery_budget_s,
            cpu_mapped_load_s=None if twin is None else twin.load_s,
        )

    def view_of(self, held: HeldDevice, asking: Berth | None) -> DeviceView:
        """A device as the ladder sees it. Its holders are only those that could give way to the one that asks."""
        view = held.ledger.snapshot()
        now = time.monotonic()
        return DeviceView(
            name=held.name,
            available_bytes=view.available_bytes,
            total_bytes=view.total_bytes,
            largest_block_bytes=view.largest_block_bytes,
            reason=view.reason,
            pressure=str(view.stage),
            holders=tuple(
                self._holder(berth, lease, asking, now)
                for berth in self.berths.values()
                if berth.life is not None and (lease := berth.life.lease_on(held)) is not None
            ),
        )

    def view_for_relief(self, held: HeldDevice) -> DeviceView:
        """The same, where memory has to go back to other programs: nobody asks, and everybody here may have to go."""
        view = self.view_of(held, None)
        return msgspec.structs.replace(
            view,
            holders=tuple(
                msgspec.structs.replace(holder, evictable=True, shrinks_to_bytes=0 if not holder.idle else None)
                for holder in view.holders
            ),
        )

    def _holder(self, berth: Berth, lease: Lease, asking: Berth | None, now: float) -> Holder:
        idle_s = now - berth.last_used
        wanted = asking is not None and (
            berth.model is asking.model or (self._is_wanted(asking) and (asking.wanted_at or now) > berth.last_used)
        )
        return Holder(
            holder=berth.route.replica.name,
            bytes_=lease.counted_bytes,
            idle=not berth.busy and berth.route.serving,
            idle_s=idle_s,
            priority=berth.model.config.priority,
            reload_s=berth.load_s,
            evictable=berth.held is not berth.host and idle_s >= EVICT_IDLE_S and wanted,
            frees_in_s=1.0 if lease.state in (LeaseState.DRAINING, LeaseState.ORPHAN) else None,
        )

    @staticmethod
    def _reserve(berth: Berth, verdict: LoadVerdict) -> list[tuple[HeldDevice, Lease]] | Shortfall:
        holder = berth.route.replica.name
        wants = [(berth.held, verdict.device_demand)]
        if berth.held is not berth.host and verdict.host_demand.known_bytes:
            wants.append((berth.host, verdict.host_demand))
        taken = reserve([_want(held, berth, holder, demand, verdict) for held, demand in wants], time.monotonic())
        if isinstance(taken, Shortfall):
            return taken
        return [(held, lease) for (held, _), lease in zip(wants, taken, strict=True)]

    # ------------------------------------------------------------ making room

    def _make_room(self, berth: Berth, verdict: LoadVerdict) -> None:
        self.hold_back(berth, verdict.reason)
        for holder in verdict.evict:
            self.evict(self.berths[holder.holder], f"It was idle and gave its memory to {berth.route.replica.name}.")

    def evict(self, berth: Berth, reason: str) -> None:
        """End an idle worker, so that others have its memory. Its lease returns when the memory has."""
        berth.posture = Posture.EVICTED
        berth.wanted_at = None
        berth.route.replica.kill(reason, None)

    def restorable(self, berth: Berth) -> bool:
        """Whether a load that was reduced could be loaded again in full, with something to spare."""
        life = berth.life
        if life is None or not life.verdict.changes or berth.busy or not self._has_been_calm(berth.held):
            return False
        better = may_restore(
            life.start,
            self.wish_of(berth),
            self.view_of(berth.held, berth),
            self.view_of(berth.host, berth),
            berth.weigh,
        )
        return better is not None

    @staticmethod
    def _has_been_calm(held: HeldDevice) -> bool:
        return held.calm_since is not None and time.monotonic() - held.calm_since >= CALM_S

    # ------------------------------------------------------------ rest

    @staticmethod
    def give_back(berth: Berth, life: Life) -> None:
        """Its process is gone, and its leases with it. A worker that rests keeps its claim: nobody else is asked."""
        now = time.monotonic()
        for held, lease in life.leases:
            if berth.posture is Posture.RESTING:
                berth.kept.append((held, held.ledger.renew(lease, now)))
                held.ledger.rest(berth.kept[-1][1])
            elif lease.state is LeaseState.GRANTED and life.identity is None:
                held.ledger.cancel(lease)  # no process was ever started for it
            else:
                held.ledger.release(lease, now)

    @staticmethod
    def _wake(berth: Berth, incarnation: int) -> Life:
        assert berth.verdict is not None
        kept, berth.kept = berth.kept, []
        for held, lease in kept:
            held.ledger.begin(lease)
        return Life(incarnation, berth.verdict, kept)


def _want(held: HeldDevice, berth: Berth, holder: str, demand: Demand, verdict: LoadVerdict) -> Want:
    """What is leased for a demand. Of weights that RAM cannot keep, only what it can."""
    from_storage = verdict.storage_bytes if held is berth.host else 0
    bytes_ = demand.known_bytes - from_storage
    return Want(held.ledger, holder, bytes_, min(bytes_, largest_piece_bytes(demand)))
