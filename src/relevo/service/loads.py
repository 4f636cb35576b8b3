"""When and how a worker may load: the ladder's verdict, the leases taken for it, and who makes room.

Nothing is loaded before its memory is leased, on its device and on the host in one step. What the ladder decides is
kept on the berth, so that people see why a route runs as it does, or does not run.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

import msgspec

from relevo.core.breaker import BreakerState
from relevo.core.leases.lease import Lease, LeaseState, Shortfall
from relevo.core.leases.reserve import Want, reserve
from relevo.core.loads.eviction import RETURNS_WITHIN_S
from relevo.core.loads.ladder import DeviceView, Holder, LoadVerdict, LoadWish, Step, decide_load, may_restore
from relevo.core.loads.room import largest_piece_bytes
from relevo.core.memory.demand import Demand
from relevo.core.memory.dry_run import ASKED_AT_ONCE, ROUNDS
from relevo.replicas.dry_run import DryRuns
from relevo.service.berths import Berth, Figures, HeldDevice, Life, Posture, Refusal
from relevo.service.plans import load_wish
from relevo.service.scales import Scales

_log = logging.getLogger("relevo.loads")

RETRY_S = 1.0
SOON_S = 0.25
"""Memory is coming back: it is looked at as often as the device is read."""
LOADING_S = 0.05
EVICT_IDLE_S = 5.0
"""A replica that was used more recently is not idle enough to give way; nor one that takes longer to load again."""
ROOM_S = 10.0
"""How long memory that somebody was ended for is kept for the one that asked; a worker's death and return take less."""
RETURNING_S = 1.0
"""How soon memory of ended workers is expected to be seen back."""
ENDED = "a worker that has ended"
WANTED_S = 60.0
"""How long a request that had to go elsewhere counts as a wish for its model."""
CALM_S = 5.0
"""How long a device must have been calm before more is loaded on it than it holds."""


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
                granted = await self._try(berth, incarnation)
                if isinstance(granted, Life):
                    berth.posture = Posture.WANTED
                    berth.route.waiting_reason = berth.route.closed_reason = berth.said = None
                    berth.room_until = berth.refusal = None
                    return granted
                wait_s = granted
            await asyncio.sleep(wait_s)

    # ------------------------------------------------------------ what stands in the way

    def _hindrance(self, berth: Berth) -> float | None:
        """Seconds to wait before asking again; None when a load may be tried now."""
        if berth.posture is Posture.RESTING and not self._is_wanted(berth):
            berth.route.waiting_reason = berth.said = None
            return LOADING_S
        if berth.whole is not None and not self._needs_part(berth.whole):
            berth.posture = Posture.DORMANT
            berth.route.waiting_reason = Posture.DORMANT.sentence
            berth.first.set()
            return LOADING_S
        other = self._other_loading(berth) or self._before(berth)
        if other is not None:
            if berth.posture is not Posture.RESTING:  # of one that rests it would read as if it could not wake
                which = ", which is being loaded" if other.loading else ""
                berth.route.waiting_reason = f"It starts after {other.route.replica.name}{which}."
            return LOADING_S
        wait_s = self._breaker_wait_s(berth)
        return self._promised_wait_s(berth) if wait_s is None else wait_s

    def _before(self, berth: Berth) -> Berth | None:
        """At the start of the service those of higher priority, and those configured earlier, are loaded first."""
        if berth.first.is_set() or berth.whole is not None or berth.twin is None:
            return None
        order = {id(other): (-other.model.config.priority, at) for at, other in enumerate(self.berths.values())}
        for other in self.berths.values():
            same = other.held is berth.held and other.whole is None and not other.first.is_set()
            if same and order[id(other)] < order[id(berth)]:
                return other
        return None

    def _promised_wait_s(self, berth: Berth) -> float | None:
        """Memory that somebody was ended for is not for whoever happens to look first, least of all that somebody."""
        now = time.monotonic()
        for other in self.berths.values():
            promised = other.held is berth.held and other.life is None and (other.room_until or 0.0) > now
            if promised and other is not berth:
                self.hold_back(berth, f"What comes free on {berth.held.name} is for {other.route.replica.name}.")
                return SOON_S
        return None

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

    def _other_loading(self, berth: Berth) -> Berth | None:
        """Two loads at once could not be told apart in what the device reports."""
        return next((other for other in self.berths.values() if other.held is berth.held and other.loading), None)

    def wish(self, model: str) -> None:
        """A request for this model had to go elsewhere than its preferred route."""
        for berth in self.berths.values():
            if berth.model.name == model and berth.life is None and berth.whole is None and berth.twin is not None:
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
        if berth.route.waiting_reason == reason:
            return
        berth.route.waiting_reason = reason
        gist = _FIGURES.sub("", reason)
        level = logging.DEBUG if gist == berth.said else logging.WARNING  # other figures are no news
        berth.said = gist
        _log.log(level, "%s is not started: %s", berth.route.replica.name, reason)
        self._changed()

    # ------------------------------------------------------------ the ladder

    async def _try(self, berth: Berth, incarnation: int) -> Life | float:
        """What was leased for it, or seconds to wait before asking again."""
        trouble = berth.file_trouble()
        if trouble is not None:
            self.hold_back(berth, trouble)
            return RETRY_S
        if berth.kept:
            return self._wake(berth, incarnation)
        figures = self._figures_of(berth)
        if berth.refusal is not None and berth.refusal.stands(figures, time.monotonic()):
            self.hold_back(berth, berth.refusal.reason)  # the breaker, or another load, may have stood there meanwhile
            return self._patience_s(berth)
        berth.refusal = None
        berth.verdict = verdict = await self._decide(berth)
        refused = self._why_refused(berth, verdict)
        if refused is not None:
            berth.room_until = None
        elif verdict.starts_now:
            return self._take(berth, verdict, incarnation)
        elif not self._make_room(berth, verdict):
            return SOON_S
        reason = refused or verdict.reason
        berth.refusal = Refusal(figures, reason, time.monotonic())
        self.hold_back(berth, reason)
        return self._patience_s(berth)

    @staticmethod
    def _why_refused(berth: Berth, verdict: LoadVerdict) -> str | None:
        if not verdict.loads_on_device:
            return verdict.reason
        if berth.whole is not None and not berth.is_part(verdict.start):
            return "The whole model fits its device again, so no part of it is loaded."
        return None

    @staticmethod
    def _patience_s(berth: Berth) -> float:
        """How long until it is asked again: what is coming back is waited for more closely."""
        verdict = berth.verdict
        return SOON_S if verdict is not None and (verdict.waits_s > 0 or verdict.evict) else RETRY_S

    def _take(self, berth: Berth, verdict: LoadVerdict, incarnation: int) -> Life | float:
        """The leases of a verdict, if all is still as it was when it was decided."""
        if self._other_loading(berth) is not None:
            return LOADING_S
        taken = self._reserve(berth, verdict)
        if isinstance(taken, Shortfall):
            self.hold_back(berth, f"Memory is short: {taken.reason}")
            return RETRY_S
        return Life(incarnation, verdict, taken)

    async def _decide(self, berth: Berth) -> LoadVerdict:
        """The ladder's verdict; what the closed form does not know is asked of the engine, and it decides anew."""
        verdict = await self.weigh_up(berth)
        for _ in range(ROUNDS):
            # A load that was found may not be the best: what lies between it and the whole is asked for too.
            if verdict.step is Step.ADMIT or not await self._ask_engine(berth.scales):
                return verdict
            verdict = await self.weigh_up(berth)
        return verdict

    async def _ask_engine(self, scales: Scales) -> bool:
        """Have the engine plan the loads that could not be weighed. Returns whether anything new is known."""
        starts = scales.unknown[:ASKED_AT_ONCE]
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

    def _figures_of(self, berth: Berth) -> Figures:
        """What a verdict depends on: while it is the same the ladder need not be asked again."""
        device, host = self.view_of(berth.held, berth), self.view_of(berth.host, berth)
        states = [(h.holder, h.evictable, h.idle, h.frees_in_s) for h in device.holders]
        twin_held = berth.twin is not None and berth.twin.leased_bytes > 0
        return Figures(
            states=(device.pressure, states, twin_held, berth.scales.learned(berth.start)),
            device=(device.available_bytes, device.largest_block_bytes, *(h.bytes_ for h in device.holders)),
            host_bytes=host.available_bytes,
        )

    @staticmethod
    def wish_of(berth: Berth) -> LoadWish:
        """What its configuration asks for, and what it may give up, as things are now."""
        twin = berth.twin
        wish = load_wish(
            berth.route.replica.name,
            berth.start,
            berth.scales.shape,
            berth.model.config,
            None if twin is None else twin.start,
        )
        return msgspec.structs.replace(
            wish,
            offload=berth.whole is not None,
            redirect=not berth.has_part,  # where there is a hybrid route, that is where they go first
            cpu_held_bytes=0 if twin is None else twin.leased_bytes,
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
            holders=(
                *(
                    self._holder(berth, lease, asking, now)
                    for berth in self.berths.values()
                    if berth.life is not None and (lease := berth.life.lease_on(held)) is not None
                ),
                *_returning(view.returning_bytes),
            ),
        )

    def view_for_relief(self, held: HeldDevice) -> DeviceView:
        """The same, where memory has to go back to other programs: nobody asks, and everybody here may have to go."""
        view = self.view_of(held, None)
        return msgspec.structs.replace(view, holders=tuple(self._for_relief(holder) for holder in view.holders))

    def _for_relief(self, holder: Holder) -> Holder:
        berth = self.berths.get(holder.holder)
        if berth is None:
            return holder  # nobody's any more
        if berth.posture is Posture.LEAVING and berth.leaves_by is not None:
            left_s = max(0.0, berth.leaves_by - time.monotonic())
            return msgspec.structs.replace(holder, frees_in_s=min(left_s, RETURNS_WITHIN_S))
        idle = holder.idle or berth.loading  # a load under way is nobody's work
        return msgspec.structs.replace(holder, idle=idle, evictable=True, shrinks_to_bytes=None if idle else 0)

    def _holder(self, berth: Berth, lease: Lease, asking: Berth | None, now: float) -> Holder:
        idle_s = now - berth.used_at
        wanted = asking is not None and (
            berth.model is asking.model or (self._is_wanted(asking) and (asking.wanted_at or now) > berth.used_at)
        )
        ending = berth.posture is Posture.EVICTED or lease.state in (LeaseState.DRAINING, LeaseState.ORPHAN)
        long_idle = idle_s >= max(EVICT_IDLE_S, berth.load_s or 0.0)
        return Holder(
            holder=berth.route.replica.name,
            bytes_=lease.counted_bytes,
            idle=not berth.busy and berth.route.serving,
            idle_s=idle_s,
            priority=berth.model.config.priority,
            reload_s=berth.load_s,
            evictable=berth.held is not berth.host and long_idle and wanted,
            frees_in_s=RETURNING_S if ending else None,
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

    def _make_room(self, berth: Berth, verdict: LoadVerdict) -> bool:
        """End whom the verdict names. Returns False where one of them has got work since it was decided."""
        gone = [self.berths[holder.holder] for holder in verdict.evict]
        if any(other.busy or not other.route.serving for other in gone):
            return False
        if gone:
            berth.room_until = time.monotonic() + ROOM_S
        for other in gone:
            self.evict(other, f"It was idle and gave its memory to {berth.route.replica.name}.")
        return True

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
    def superfluous(berth: Berth) -> bool:
        """Whether a part of a model is on the device beside the whole of it, and does nothing."""
        return berth.life is not None and berth.whole is not None and berth.whole.route.serving and not berth.busy

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


_FIGURES = re.compile(r"[\d.]+( [KMGT]iB)?")


def _returning(bytes_: int) -> tuple[Holder, ...]:
    """Memory of ended workers that is not seen back yet: whoever needs it waits, and nobody is ended for it."""
    return (Holder(holder=ENDED, bytes_=bytes_, frees_in_s=RETURNING_S),) if bytes_ > 0 else ()


def _want(held: HeldDevice, berth: Berth, holder: str, demand: Demand, verdict: LoadVerdict) -> Want:
    """What is leased for a demand. Of weights that RAM cannot keep, only what it can."""
    from_storage = verdict.storage_bytes if held is berth.host else 0
    bytes_ = demand.known_bytes - from_storage
    return Want(held.ledger, holder, bytes_, min(bytes_, largest_piece_bytes(demand)))
