"""How ready a model's CPU route is kept, from how long a loss may last and how long a load takes here."""

from __future__ import annotations

import msgspec

from relevo.core.described import Described
from relevo.core.loads.wish import DeviceView
from relevo.core.units import size_text


class Readiness(Described):
    """How ready a CPU route is kept."""

    WARM = "warm", "Its worker runs and takes over at once."
    MAPPED = "mapped", "Its worker is not running; its file's pages are kept likely in the cache, so a load is quick."
    ON_DEMAND = "on-demand", "Its worker is loaded when it is needed."


class StandbyPlan(msgspec.Struct, frozen=True):
    """How ready the CPU route is kept, and what that costs."""

    readiness: Readiness
    ram_bytes: int | None
    """What its worker takes of the host; None: not known."""
    lease_bytes: int
    """To lease of the host from the start, so that it is there when it is needed; 0 where it is not there now."""
    recovers_in_s: float | None
    """From the loss of the other route until it serves; None: not measured yet."""
    reason: str


def choose_standby(
    recovery_budget_s: float,
    load_s: float | None,
    mapped_load_s: float | None,
    ram_bytes: int | None,
    host: DeviceView,
) -> StandbyPlan:
    """The least costly readiness that keeps the budget; warm where no load was timed, because nobody knows then.

    `load_s`: a load from storage; `mapped_load_s`: one with the file's pages in the cache. None: not measured.
    """
    fits = ram_bytes is not None and host.available_bytes is not None and ram_bytes <= host.available_bytes
    lease = ram_bytes if fits and ram_bytes is not None else 0
    budget = f"the budget of {recovery_budget_s:g} s"
    if load_s is not None and load_s <= recovery_budget_s:
        short = "" if fits else f" {_too_little(ram_bytes, host)}"
        reason = f"A load from storage takes {load_s:.1f} s, which is within {budget}.{short}"
        return StandbyPlan(Readiness.ON_DEMAND, ram_bytes, lease, load_s, reason)
    if mapped_load_s is not None and mapped_load_s <= recovery_budget_s:
        from_storage = "was not timed yet" if load_s is None else f"takes {load_s:.1f} s"
        short = "" if fits else f" {_too_little(ram_bytes, host)}"
        quick = f"A load takes {mapped_load_s:.1f} s with the file in the cache, within {budget}"
        reason = f"{quick}; from storage it {from_storage}.{short}"
        return StandbyPlan(Readiness.MAPPED, ram_bytes, lease, mapped_load_s, reason)
    timed = mapped_load_s if load_s is None else load_s
    slow = "No load was timed here yet" if timed is None else f"A load takes {timed:.1f} s, longer than {budget}"
    if fits and host.pressure != "critical":
        reason = f"{slow}, so its worker is kept running in {size_text(ram_bytes)} of RAM."
        return StandbyPlan(Readiness.WARM, ram_bytes, lease, 0.0, reason)
    why = f"{host.name} is under pressure." if fits else _too_little(ram_bytes, host)
    return StandbyPlan(Readiness.ON_DEMAND, ram_bytes, 0, timed, f"{slow}, but it cannot be kept running: {why}")


def _too_little(ram_bytes: int | None, host: DeviceView) -> str:
    if ram_bytes is None:
        return "What it needs of RAM is not known."
    if host.available_bytes is None:
        return f"What is free on {host.name} is not known."
    return f"It needs {size_text(ram_bytes)} of {host.name}, and {size_text(host.available_bytes)} is available."
