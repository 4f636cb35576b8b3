"""What the ladder says about a load."""

from __future__ import annotations

import msgspec

from relevo.core.described import Described
from relevo.core.events import StartModel
from relevo.core.loads.standby import StandbyPlan
from relevo.core.loads.wish import Holder
from relevo.core.memory.demand import Demand


class Step(Described):
    """The rungs of the ladder, cheapest harm first. A verdict names the furthest one it needs."""

    ADMIT = "admit", "It fits as it was asked for."
    DELAY = "delay", "It fits as it was asked for when memory is back that is coming back anyway."
    REDUCE = "reduce", "It fits with less of something that it may take less of."
    EVICT = "evict", "It fits when idle replicas have given way."
    OFFLOAD = "offload", "It fits when a part of the model stays in the host's RAM."
    REDIRECT = "redirect", "It does not fit; its requests go to its CPU route."
    REJECT = "reject", "It fits nowhere."


class Change(msgspec.Struct, frozen=True):
    """One thing that is not as it was asked for."""

    what: str
    """The field of StartModel."""
    from_: int | str | bool
    to: int | str | bool
    frees_bytes: int | None
    """Of the device, after the changes before it; negative where it takes more; None where either is not known."""
    sentence: str


class LoadVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on a load, with its numbers.

    Whatever the step: what is in `evict` gives way first, then `waits_s` pass, then `start` is loaded on leases of
    `device_demand` and `host_demand`. Of a redirect, `start` is the CPU route's; of a refusal, the one asked for.
    """

    step: Step
    start: StartModel
    device_demand: Demand
    host_demand: Demand
    changes: tuple[Change, ...] = ()
    evict: tuple[Holder, ...] = ()
    waits_s: float = 0.0
    reason: str
    """Plain sentences for people."""
    available_bytes: int | None = None
    """Of the device, when this was decided."""
    standby: StandbyPlan | None = None
    """How ready its CPU route is to be kept; None where this is the CPU route, or it has none."""
    storage_bytes: int = 0
    """Of the weights on the host, what its RAM cannot keep: read from storage for every token."""
    missing_bytes: int | None = None
    """Of a refusal: what is missing of the device even after everything that is allowed; None: not known."""
    would_fit: tuple[Change, ...] = ()
    """Of a refusal: the smallest change that would fit, where one is known that its policy forbids."""
    holders: tuple[Holder, ...] = ()
    """Of a redirect or refusal: who holds the device's memory."""

    @property
    def loads_on_device(self) -> bool:
        """Whether something is to be loaded on the device that was asked for."""
        return self.step not in (Step.REDIRECT, Step.REJECT)

    @property
    def starts_now(self) -> bool:
        """Whether it can be loaded there at once: nobody has to give way, and nothing is waited for."""
        return self.loads_on_device and not self.evict and self.waits_s <= 0
