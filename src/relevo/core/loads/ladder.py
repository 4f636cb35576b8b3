"""May this model be loaded, and as what: the ladder from admit to reject, cheapest harm first.

Pure: the same wish and the same view give the same verdict. Each rung may use what the ones before it gave: a load
that has to be reduced may also wait for memory that is coming back, one that has to evict may also be reduced. So
with more memory the verdict is never a further rung. Unknown is treated as no.

The search is monotone: options that take more memory never take less of it, apart from flash attention and the KV
type, which are tried both ways. A verdict takes between one weighing and a few hundred.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
from msgspec.structs import replace

from relevo.core.events import StartModel
from relevo.core.loads.eviction import Way, Yield, candidates, least_harm, who_yields
from relevo.core.loads.offload import least_offload
from relevo.core.loads.reduction import changes_between, least_reduction, most_reduced
from relevo.core.loads.room import Load, Scales, parts_text, room_of, why_not
from relevo.core.loads.search import largest_that_fits
from relevo.core.loads.standby import Readiness, StandbyPlan, choose_standby
from relevo.core.loads.verdict import Change, LoadVerdict, Step
from relevo.core.loads.wish import CONTEXT_STEP_TOKENS, REDUCIBLE, DeviceView, Holder, LoadWish, Weigh
from relevo.core.memory.demand import Demand
from relevo.core.units import size_text

__all__ = [
    "Change",
    "DeviceView",
    "Fit",
    "Holder",
    "Load",
    "LoadVerdict",
    "LoadWish",
    "Readiness",
    "StandbyPlan",
    "Step",
    "Way",
    "Weigh",
    "Yield",
    "choose_standby",
    "decide_load",
    "fits_now",
    "largest_context",
    "may_restore",
    "who_yields",
]

MOST_CONTEXT_TOKENS: Final = 1 << 20
"""Where the header does not say what the model was trained for, no larger context is looked for."""

LEAST_WAIT_S: Final = 0.05
"""A delay is at least this long."""


def decide_load(wish: LoadWish, device: DeviceView, host: DeviceView, weigh: Weigh) -> LoadVerdict:
    """The verdict on a load. `device`: what it is to be loaded on; of a CPU route the host itself, which is then both.

    While the device is tight nothing is waited for or evicted: what comes free is somebody else's. While it is
    critical nothing is loaded there at all. Never raises: a refusal is a verdict.
    """
    return _Ladder(wish, device, host, weigh).decide()


class _Ladder:
    """One decision: what was asked, what is there, and the scales that remember."""

    def __init__(self, wish: LoadWish, device: DeviceView, host: DeviceView, weigh: Weigh) -> None:
        self.wish = wish
        self.device = device
        self.host = host
        self.scales = Scales(weigh)
        self.stored = Scales(weigh, from_storage=True)
        self.now = room_of(device, host)
        self.relaxed = device.pressure not in ("tight", "critical")
        self.coming = self._coming()
        self.able = candidates(device, wish.priority) if self.relaxed else ()
        self.in_time = self.now.with_freed(self.coming)
        self.emptied = self.in_time.with_freed(self.able)

    def _coming(self) -> list[Holder]:
        """Who gives memory back within the time this load may wait, the soonest first."""
        longest_s = self.wish.deadline_s
        if self.device.pressure == "tight" or longest_s <= 0:
            return []
        within = [h for h in self.device.holders if h.frees_in_s is not None and h.frees_in_s <= longest_s]
        return sorted(within, key=lambda h: (h.frees_in_s or 0.0, h.holder))

    def decide(self) -> LoadVerdict:
        if self.device.pressure == "critical":
            return self._wait_it_out() or self._redirect() or self._reject()
        return (
            self._admit()
            or self._delay()
            or self._reduce()
            or self._evict()
            or self._offload(from_storage=False)
            or self._offload(from_storage=True)
            or self._redirect()
            or self._reject()
        )

    # -- the rungs

    def _admit(self) -> LoadVerdict | None:
        load = self.scales.load(self.wish.start)
        if not self.now.holds(load):
            return None
        name, there = self.device.name, size_text(self.device.available_bytes)
        needs = f"{self.wish.start.model} needs {size_text(load.device_bytes)} of {name} ({parts_text(load.device)})"
        return self._verdict(Step.ADMIT, load, f"{needs}, and {there} is available.")

    def _delay(self) -> LoadVerdict | None:
        load = self.scales.load(self.wish.start)
        if not self.coming or not self.in_time.holds(load):
            return None
        return self._verdict(Step.DELAY, load, self._short())

    def _wait_it_out(self) -> LoadVerdict | None:
        """Under critical pressure: memory that is coming back may end it, and then this is decided again."""
        load = self.scales.load(self.wish.start)
        if not self.coming or not self.in_time.holds(load):
            return None
        first = self.coming[0]
        reason = f"Memory of {self.device.name} is critical; {first.holder} gives {size_text(first.bytes_)} back."
        verdict = self._verdict(Step.DELAY, load, reason)
        return verdict if verdict.waits_s > 0 else replace(verdict, waits_s=self._wait_for(first))

    def _reduce(self) -> LoadVerdict | None:
        start = least_reduction(self.wish, self.wish.start, lambda s: self.in_time.excess_bytes(self.scales.load(s)))
        return None if start is None else self._verdict(Step.REDUCE, self.scales.load(start), self._short())

    def _evict(self) -> LoadVerdict | None:
        if not self.able:
            return None
        start = least_reduction(self.wish, self.wish.start, lambda s: self.emptied.excess_bytes(self.scales.load(s)))
        return None if start is None else self._verdict(Step.EVICT, self.scales.load(start), self._short())

    def _offload(self, *, from_storage: bool) -> LoadVerdict | None:
        wish = self.wish
        if from_storage > wish.from_storage or self.host.pressure == "critical":
            return None
        if wish.on_cpu:
            load = self.stored.load(_mapped(wish.start))
            fits = from_storage and self.in_time.holds(load)
            return self._verdict(Step.OFFLOAD, self.scales.load(load.start), self._short()) if fits else None
        if not wish.offload:
            return None
        start, scales = (_mapped(wish.start), self.stored) if from_storage else (wish.start, self.scales)
        placed = self._placed(wish, start, scales)
        return None if placed is None else self._verdict(Step.OFFLOAD, self.scales.load(placed), self._short())

    def _placed(self, wish: LoadWish, start: StartModel, scales: Scales) -> StartModel | None:
        """The hybrid form, unreduced where a placement allows it: once layers are in RAM, two more weigh less than the
        context they buy. Else with the placement of the smallest form, reduced as little as that allows.
        """
        placed = least_offload(wish, start, self.emptied, scales)
        if placed is not None:
            return placed
        for smallest in most_reduced(wish, start):
            placed = least_offload(wish, smallest, self.emptied, scales)
            if placed is not None:
                hybrid = replace(
                    start, route="hybrid", gpu_layers=placed.gpu_layers, host_expert_layers=placed.host_expert_layers
                )
                return least_reduction(wish, hybrid, lambda s: self.emptied.excess_bytes(scales.load(s)))
        return None

    def _redirect(self) -> LoadVerdict | None:
        wish = self.wish
        if not wish.redirect or wish.on_cpu:
            return None
        cpu = wish.cpu_start or _on_cpu(wish.start)
        load = self.scales.load(cpu)
        need = self._cpu_bytes(load)
        if not self._host_takes(need):
            if not wish.from_storage:
                return None
            load = self.scales.load(_mapped(cpu))
            need = self._cpu_bytes(load)
            if not self._host_takes(self._cpu_bytes(self.stored.load(load.start))):
                return None
        whole = wish.cpu_held_bytes or need or 0
        beyond = 0 if wish.cpu_held_bytes else max(0, whole - (self.host.available_bytes or 0))
        takes = f"Its requests go to the {cpu.route} route, which takes {size_text(whole)} of {self.host.name}."
        if beyond:
            takes += f" {_from_storage(beyond)}"
        return LoadVerdict(
            step=Step.REDIRECT,
            start=load.start,
            device_demand=Demand(),
            host_demand=load.device if load.host_bytes == 0 else load.host,
            changes=(_rerouted(wish.start, cpu.route, self.scales.load(wish.start).device_bytes),),
            reason=f"{self._short()} {takes}",
            available_bytes=self.device.available_bytes,
            standby=self._standby(0),
            storage_bytes=beyond,
            holders=self.device.holders,
        )

    def _host_takes(self, need_bytes: int | None) -> bool:
        """Whether the CPU route is loaded already, or the host has room for it."""
        if self.wish.cpu_held_bytes > 0:
            return True
        there = self.host.available_bytes
        if need_bytes is None or there is None or self.host.pressure == "critical":
            return False
        return need_bytes <= there

    @staticmethod
    def _cpu_bytes(load: Load) -> int | None:
        """All that a CPU route's load takes, wherever the weighing put it."""
        if load.device_bytes is None or load.host_bytes is None:
            return None
        return load.device_bytes + load.host_bytes

    def _reject(self) -> LoadVerdict:
        load = self.scales.load(self.wish.start)
        change = () if self.device.pressure == "critical" else self._smallest_change()
        missing, of_host = self._missing_bytes()
        sentences = [self._short(), *self._who_holds()]
        more = [(missing, self.device.name), (of_host, self.host.name)]
        lacks = [f"{size_text(lack)} more of {name}" for lack, name in more if lack]
        if change:
            sentences += ["It would fit like this:", *(each.sentence for each in change)]
        elif self.device.pressure == "critical":
            sentences.append("It is decided anew when they give memory back.")
        elif lacks:
            form = " in its smallest form" if self.wish.allow else ""
            sentences.append(f"{' and '.join(lacks)} would be enough{form}.")
        return LoadVerdict(
            step=Step.REJECT,
            start=load.start,
            device_demand=load.device,
            host_demand=load.host,
            reason=" ".join(sentences),
            available_bytes=self.device.available_bytes,
            standby=self._standby(0),
            missing_bytes=missing,
            would_fit=change,
            holders=self.device.holders,
        )

    # -- what a refusal says

    def _missing_bytes(self) -> tuple[int | None, int | None]:
        """(of the device, of the host): what its smallest form lacks after everything that is allowed."""
        room, found = self.emptied, []
        for start in most_reduced(self.wish, self.wish.start):
            load = self.scales.load(start)
            found.append((_lack(load.device_bytes, room.device_bytes), _lack(load.host_bytes, room.host_bytes)))
        return min(found, key=lambda lacks: tuple(math.inf if lack is None else lack for lack in lacks))

    def _smallest_change(self) -> tuple[Change, ...]:
        """What would fit if its policy allowed all: the least reduction, else a part of it in RAM."""
        anything = replace(
            self.wish,
            allow=REDUCIBLE,
            least_context_tokens=CONTEXT_STEP_TOKENS,
            wanted_context_tokens=0,
            least_slots=1,
            offload=True,
        )
        start = least_reduction(anything, self.wish.start, lambda s: self.emptied.excess_bytes(self.scales.load(s)))
        if start is None and not self.wish.on_cpu and self.host.pressure != "critical":
            start = self._placed(anything, self.wish.start, self.scales)
        return () if start is None else changes_between(anything, self.wish.start, start, self.scales)

    def _who_holds(self) -> list[str]:
        held = [f"{holder.holder} {size_text(holder.bytes_)}" for holder in self.device.holders if holder.bytes_]
        total, available = self.device.total_bytes, self.device.available_bytes
        if total is not None and available is not None:
            rest = total - available - sum(holder.bytes_ for holder in self.device.holders)
            held += [f"other programs and what is kept free {size_text(rest)}"] if rest > 0 else []
        return [f"It is held by: {', '.join(held)}."] if held else []

    def _short(self) -> str:
        """Why it does not fit as it was asked for, with what the pressure forbids."""
        why = why_not(self.scales.load(self.wish.start), self.now, self.device, self.host)
        if self.device.pressure == "critical":
            fits = self.now.holds(self.scales.load(self.wish.start))
            taken = f"Other programs have taken the memory of {self.device.name}, so nothing is loaded there"
            return f"{taken}." if fits else f"{taken}. {why}"
        if self.device.pressure == "tight":
            return f"{why} Other programs want memory of {self.device.name}, so nothing is ended there for a load."
        return why

    # -- the record

    def _verdict(self, step: Step, load: Load, why: str) -> LoadVerdict:
        evict = self._gone_for(load)
        waits_s = self._waits_s(load, evict)
        changes = changes_between(self.wish, self.wish.start, load.start, self.scales)
        sentences = [why, *(change.sentence for change in changes)]
        if evict:
            names = ", ".join(f"{holder.holder} ({size_text(holder.bytes_)})" for holder in evict)
            sentences.append(f"To make room these are ended: {names}.")
        if waits_s > 0:
            sentences.append(f"What is missing is coming back in about {waits_s:.1f} s.")
        host_bytes = (load.device_bytes if self.wish.on_cpu else load.host_bytes) or 0
        beyond = max(0, host_bytes - (self.host.available_bytes or 0)) if step is Step.OFFLOAD else 0
        if beyond:
            sentences.append(_from_storage(beyond))
        return LoadVerdict(
            step=step,
            start=load.start,
            device_demand=load.device,
            host_demand=load.host,
            changes=changes,
            evict=evict,
            waits_s=waits_s,
            reason=" ".join(sentences),
            available_bytes=self.device.available_bytes,
            standby=self._standby(host_bytes - beyond),
            storage_bytes=beyond,
        )

    def _gone_for(self, load: Load) -> tuple[Holder, ...]:
        """Who has to give way so that it fits the device, with the least harm."""
        room = self.in_time
        if room.device_holds(load) or load.device_bytes is None or room.device_bytes is None:
            return ()
        block = load.block_bytes if room.block_bytes is not None and load.block_bytes > room.block_bytes else 0
        return least_harm(self.able, load.device_bytes - room.device_bytes, block) or ()

    def _waits_s(self, load: Load, evict: tuple[Holder, ...]) -> float:
        """Until enough of what is coming back is there."""
        for count in range(len(self.coming) + 1):
            if self.now.with_freed((*evict, *self.coming[:count])).device_holds(load):
                return self._wait_for(self.coming[count - 1]) if count else 0.0
        return 0.0

    def _wait_for(self, holder: Holder) -> float:
        """Never nothing: what was to be back by now is looked for again a moment later."""
        return max(holder.frees_in_s or 0.0, min(LEAST_WAIT_S, self.wish.deadline_s))

    def _standby(self, host_bytes: int) -> StandbyPlan | None:
        """How ready the CPU route is to be kept, in what this load leaves of the host."""
        wish, host = self.wish, self.host
        if wish.on_cpu or not wish.redirect:
            return None
        ram = wish.cpu_held_bytes or self._cpu_bytes(self.scales.load(wish.cpu_start or _on_cpu(wish.start)))
        if host.available_bytes is not None:
            left = max(0, host.available_bytes - host_bytes) + wish.cpu_held_bytes
            host = replace(host, available_bytes=left)
        return choose_standby(wish.recovery_budget_s, wish.cpu_load_s, wish.cpu_mapped_load_s, ram, host)


def _lack(need_bytes: int | None, there_bytes: int | None) -> int | None:
    return None if need_bytes is None or there_bytes is None else max(0, need_bytes - there_bytes)


def _from_storage(bytes_: int) -> str:
    return f"{size_text(bytes_)} of its weights are read from storage for every token."


def _mapped(start: StartModel) -> StartModel:
    """The same with its weights on the host as pages of the file, in the file's own order."""
    return replace(start, use_mmap=True, repack=False)


def _on_cpu(start: StartModel) -> StartModel:
    return replace(start, route="cpu", device="cpu", gpu_layers=0, host_expert_layers=0)


def _rerouted(start: StartModel, route: str, frees: int | None) -> Change:
    return Change("route", start.route, route, frees, f"The {route} route instead of the {start.route} route.")


# -- questions beside the ladder


class Fit(msgspec.Struct, frozen=True):
    """Whether a start fits now, exactly as it is, and by which numbers."""

    fits: bool
    device_demand: Demand
    host_demand: Demand
    reason: str


def fits_now(start: StartModel, device: DeviceView, host: DeviceView, weigh: Weigh) -> Fit:
    """Whether it fits in what is available at this moment, whatever the pressure."""
    load, room = Scales(weigh).load(start), room_of(device, host)
    return Fit(room.holds(load), load.device, load.host, why_not(load, room, device, host))


def largest_context(wish: LoadWish, device: DeviceView, host: DeviceView, weigh: Weigh) -> int:
    """The largest context that fits now with all else as asked for, in steps of 256 tokens; 0: not even one step.

    Never more than the model was trained for, or MOST_CONTEXT_TOKENS where that is not known.
    """
    scales, room = Scales(weigh), room_of(device, host)
    most = (wish.most_context_tokens or MOST_CONTEXT_TOKENS) // CONTEXT_STEP_TOKENS

    def excess(steps: int) -> int | None:
        return room.excess_bytes(scales.load(replace(wish.start, context_tokens=steps * CONTEXT_STEP_TOKENS)))

    return (largest_that_fits(1, most, excess) or 0) * CONTEXT_STEP_TOKENS if most else 0


def may_restore(
    current: StartModel, wish: LoadWish, device: DeviceView, host: DeviceView, weigh: Weigh
) -> StartModel | None:
    """The full start, where a load that was reduced or offloaded may go up to it again; None: it stays as it is.

    It goes up only when the full demand fits with `restore_slack` of itself to spare, in what is available and what
    it holds itself, and nobody else wants the memory: a second threshold, so that it does not go up and down.
    """
    if current == wish.start or device.pressure not in ("calm", "unknown"):
        return None
    load = Scales(weigh).load(wish.start)
    mine = [holder for holder in device.holders if holder.holder == wish.holder]
    mine_on_host = sum(holder.bytes_ for holder in host.holders if holder.holder == wish.holder)
    room = room_of(device, host).with_freed(mine)
    if room.host_bytes is not None:
        room = replace(room, host_bytes=room.host_bytes + mine_on_host)
    if load.device_bytes is None or room.device_bytes is None:
        return None
    slack = int(load.device_bytes * wish.restore_slack)
    room = replace(room, device_bytes=room.device_bytes - slack)
    return wish.start if room.holds(load) else None
