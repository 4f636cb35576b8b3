"""The ladder for loads: the cheapest harm that fits, with its numbers."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from relevo.core.events import StartModel
from relevo.core.loads.ladder import (
    LoadVerdict,
    Readiness,
    Step,
    Way,
    choose_standby,
    decide_load,
    fits_now,
    largest_context,
    may_restore,
    who_yields,
)
from relevo.core.loads.search import largest_that_fits
from relevo.core.memory.demand import Demand
from tests.unit.small_model import DENSE, EXPERTS, FULL, MIB, START, SmallModel, gpu, holder, idle, ram, wish

ALL = frozenset({"flash_attention", "ubatch", "slots", "kv_type", "context"})


def decide(mib: int | None, *holders: Any, model: SmallModel = DENSE, host: Any = None, **more: Any) -> LoadVerdict:
    view = {
        name: more.pop(name) for name in ("pressure", "largest_block_bytes", "reason", "total_bytes") if name in more
    }
    return decide_load(wish(model, **more), gpu(mib, *holders, **view), host or ram(), model.weigh)


def changed(verdict: LoadVerdict) -> dict[str, Any]:
    return {change.what: change.to for change in verdict.changes}


# -- admit and delay


def test_what_fits_is_admitted_as_it_was_asked_for() -> None:
    verdict = decide(1528)
    assert (verdict.step, verdict.start, verdict.changes, verdict.evict) == (Step.ADMIT, START, (), ())
    assert verdict.device_demand.total_bytes == FULL
    assert verdict.starts_now
    assert verdict.reason == (
        "chat needs 1.5 GiB of gpu0 (weights 1.0 GiB, KV 320 MiB, compute 128 MiB, driver context 20.0 MiB, "
        "margin 10.0 MiB), and 1.5 GiB is available."
    )


def test_one_byte_too_little_is_too_little() -> None:
    view = replace(gpu(0), available_bytes=FULL - 1)
    assert decide_load(wish(redirect=False), view, ram(), DENSE.weigh).step is Step.REJECT


def test_memory_that_comes_back_in_time_is_waited_for() -> None:
    later = holder("a", 500, frees_in_s=4.0)
    soon = holder("b", 300, frees_in_s=1.5)
    verdict = decide(1300, later, soon, allow=ALL)
    assert (verdict.step, verdict.waits_s, verdict.starts_now) == (Step.DELAY, 1.5, False)
    assert verdict.reason.endswith("What is missing is coming back in about 1.5 s.")
    assert decide(1000, later, soon, allow=ALL).waits_s == 4.0


def test_nobody_waits_longer_than_the_wish_allows() -> None:
    late = holder("a", 500, frees_in_s=6.0)
    assert decide(1300, late, deadline_s=5.0).step is Step.REDIRECT
    assert decide(1300, late, deadline_s=6.0).step is Step.DELAY


# -- reduce


def test_the_least_harm_comes_first() -> None:
    assert changed(decide(1490, allow=ALL)) == {"ubatch_tokens": 256}
    assert changed(decide(1420, allow=ALL)) == {"ubatch_tokens": 64}
    assert changed(decide(1280, allow=ALL)) == {"ubatch_tokens": 128, "kv_type": "q8_0"}
    assert changed(decide(1180, allow=ALL)) == {"ubatch_tokens": 64, "kv_type": "q8_0", "context_tokens": 4096}


def test_only_what_may_be_reduced_is() -> None:
    assert changed(decide(1300, allow=frozenset({"context"}), least_context_tokens=1024)) == {"context_tokens": 2304}
    assert changed(decide(1368, allow=frozenset({"kv_type"}))) == {"kv_type": "q8_0"}
    assert decide(1367, allow=frozenset({"kv_type"})).step is Step.REDIRECT


def test_the_context_is_never_less_than_what_is_needed_or_allowed() -> None:
    context = frozenset({"context"})
    assert decide(1300, allow=context, wanted_context_tokens=2305).step is Step.REDIRECT
    assert decide(1300, allow=context, wanted_context_tokens=2300).start.context_tokens == 2304
    assert decide(1300, allow=context, least_context_tokens=4096).step is Step.REDIRECT


def test_slots_are_reduced_where_each_has_a_cache_of_its_own() -> None:
    strict = replace(START, profile="strict", kv_type="q8_0", context_tokens=2048)  # a slot: 40 MiB
    verdict = decide(1400, start=strict, allow=ALL, least_slots=2)  # ubatch 64 would leave 1416
    assert changed(verdict) == {"slots": 4}
    assert decide(1260, start=strict, allow=frozenset({"slots"}), least_slots=2).step is Step.REDIRECT
    assert decide(1288, start=strict, allow=frozenset({"slots"}), least_slots=2).start.slots == 2


def test_flash_attention_is_switched_on_first_and_before_a_quantized_cache() -> None:
    without = replace(START, flash_attention=False)  # 32 MiB of scores more
    assert changed(decide(1528, start=without, allow=ALL)) == {"flash_attention": True}
    only_kv = frozenset({"kv_type"})
    assert decide(1400, start=without, allow=only_kv).step is Step.REDIRECT
    both = decide(1400, start=without, allow=only_kv | {"flash_attention"})
    assert changed(both) == {"flash_attention": True, "kv_type": "q8_0"}


def test_a_quantized_cache_that_brings_a_larger_copy_is_not_chosen() -> None:
    one_layer = SmallModel(layers=1, layer_bytes=1000 * MIB, copies_quantized_kv=True)
    start = replace(START, gpu_layers=2)
    verdict = decide_load(
        wish(one_layer, start=start, allow=frozenset({"kv_type", "ubatch"})), gpu(1150), ram(), one_layer.weigh
    )
    assert changed(verdict) == {"ubatch_tokens": 128}


def test_each_change_says_what_it_frees_and_they_add_up() -> None:
    verdict = decide(1180, allow=ALL)
    assert [change.frees_bytes for change in verdict.changes] == [112 * MIB, 160 * MIB, 80 * MIB]
    freed = sum(change.frees_bytes or 0 for change in verdict.changes)
    assert verdict.device_demand.total_bytes == FULL - freed
    assert verdict.changes[0].sentence == "Prompts are read 64 tokens at a time instead of 512, which frees 112 MiB."


# -- evict


def test_idle_replicas_give_way_the_least_harmful_first() -> None:
    quick = idle("quick", 600, reload_s=2.0)
    slow = idle("slow", 600, reload_s=60.0)
    forgotten = idle("forgotten", 600, reload_s=60.0, idle_s=36_000.0)
    assert [h.holder for h in decide(1000, slow, quick).evict] == ["quick"]
    assert [h.holder for h in decide(1000, slow, quick, forgotten).evict] == ["forgotten"]
    verdict = decide(400, slow, quick, forgotten)
    assert (verdict.step, [h.holder for h in verdict.evict]) == (Step.EVICT, ["forgotten", "quick"])
    assert not verdict.starts_now


def test_a_combination_is_chosen_by_its_total_harm() -> None:
    several = [idle(f"small{n}", 200, reload_s=2.0) for n in range(3)]
    large = idle("large", 600, reload_s=5.0)
    assert [h.holder for h in decide(1000, large, *several).evict] == ["large"]  # 6 against 9
    large = idle("large", 600, reload_s=9.0)
    assert [h.holder for h in decide(1000, large, *several).evict] == ["small0", "small1", "small2"]


def test_an_unknown_reload_counts_as_a_long_one() -> None:
    assert [h.holder for h in decide(1000, idle("new", 600, reload_s=None), idle("old", 600)).evict] == ["old"]


def test_a_lower_priority_gives_way_first_and_a_higher_one_never() -> None:
    low, equal, high = idle("low", 600, priority=-5, reload_s=90.0), idle("equal", 600), idle("high", 600, priority=1)
    assert [h.holder for h in decide(1000, equal, low, high).evict] == ["low"]
    assert [h.holder for h in decide(400, equal, low, high).evict] == ["equal", "low"]
    assert decide(1000, high).step is Step.REDIRECT
    assert decide(1000, high, priority=1).step is Step.EVICT


def test_a_busy_one_is_never_ended_for_a_load() -> None:
    assert decide(1000, holder("busy", 900, evictable=True)).step is Step.REDIRECT


def test_eviction_adds_to_waiting_and_reducing() -> None:
    verdict = decide(720, idle("idle", 600), holder("leaving", 100, frees_in_s=1.0), allow=frozenset({"ubatch"}))
    assert (verdict.step, verdict.start.ubatch_tokens, verdict.waits_s) == (Step.EVICT, 64, 1.0)
    assert [h.holder for h in verdict.evict] == ["idle"]


def test_reducing_is_less_harm_than_evicting() -> None:
    assert decide(1450, idle("idle", 600), allow=frozenset({"ubatch"})).step is Step.REDUCE


# -- offload and redirect


def test_as_many_layers_as_fit_stay_on_the_device() -> None:
    verdict = decide(1300, offload=True)
    assert (verdict.step, verdict.start.gpu_layers, verdict.start.route) == (Step.OFFLOAD, 9, "hybrid")
    assert verdict.device_demand.total_bytes == FULL - 2 * 132 * MIB
    assert [change.frees_bytes for change in verdict.changes] == [264 * MIB, 0]
    assert fits_now(replace(verdict.start, gpu_layers=10), gpu(1300), ram(), DENSE.weigh).fits is False


def test_of_experts_as_few_as_possible_leave_the_device() -> None:
    verdict = decide(4000, model=EXPERTS, offload=True)
    assert changed(verdict) == {"host_expert_layers": 4, "route": "hybrid"}  # 5528 - 4 * 400
    verdict = decide(1400, model=EXPERTS, offload=True)
    assert changed(verdict) == {"host_expert_layers": 10, "gpu_layers": 10, "route": "hybrid"}


def test_what_is_offloaded_has_to_fit_the_host() -> None:
    assert decide(1300, offload=True, host=ram(281)).step is Step.REJECT
    assert decide(1300, offload=True, host=ram(282)).step is Step.OFFLOAD  # 2 * 132 + 18


def test_where_not_even_two_layers_fit_the_options_are_reduced_too() -> None:
    verdict = decide(300, offload=True, allow=frozenset({"ubatch"}))
    assert changed(verdict) == {"ubatch_tokens": 256, "gpu_layers": 2, "route": "hybrid"}


def test_idle_replicas_give_way_before_layers_leave_the_device() -> None:
    verdict = decide(500, idle("idle", 700), offload=True)
    assert (verdict.step, verdict.start.gpu_layers) == (Step.OFFLOAD, 8)
    assert [h.holder for h in verdict.evict] == ["idle"]


def test_what_does_not_fit_goes_to_the_cpu_route_if_the_host_holds_it() -> None:
    verdict = decide(1000, host=ram(1516))
    assert (verdict.step, verdict.start.route, verdict.start.gpu_layers) == (Step.REDIRECT, "cpu", 0)
    assert verdict.host_demand.total_bytes == 1516 * MIB
    assert verdict.device_demand == Demand()
    assert "Its requests go to the cpu route, which takes 1.5 GiB of host." in verdict.reason
    assert decide(1000, host=ram(1515)).step is Step.REJECT


def test_a_cpu_route_that_runs_already_needs_nothing_more() -> None:
    assert decide(1000, host=ram(0), cpu_held_bytes=1516 * MIB).step is Step.REDIRECT
    assert decide(1000, host=ram(100, pressure="critical"), cpu_held_bytes=1516 * MIB).step is Step.REDIRECT
    assert decide(1000, host=ram(9000, pressure="critical")).step is Step.REJECT


def test_a_model_larger_than_all_memory_is_read_from_storage_where_that_is_allowed() -> None:
    small = ram(400)
    assert decide(700, offload=True, host=small).step is Step.REJECT
    verdict = decide(700, offload=True, host=small, from_storage=True, start=replace(START, repack=False))
    assert (verdict.step, verdict.start.gpu_layers) == (Step.OFFLOAD, 4)
    assert verdict.storage_bytes == (7 * 132 + 18 - 400) * MIB
    assert "are read from storage for every token" in verdict.reason
    verdict = decide(10, host=ram(500), from_storage=True)
    assert (verdict.step, verdict.start.repack, verdict.start.use_mmap) == (Step.REDIRECT, False, True)
    assert verdict.storage_bytes == (1516 - 500) * MIB
    assert verdict.reason.endswith("1016 MiB of its weights are read from storage for every token.")


def test_a_cpu_route_is_weighed_against_the_host_alone() -> None:
    start = replace(START, route="cpu", device="cpu", gpu_layers=0)
    for weigh in (DENSE.weigh, lambda s: DENSE.weigh(s)[::-1]):
        verdict = decide_load(wish(start=start), ram(1516), ram(1516), weigh)
        assert (verdict.step, verdict.device_demand.total_bytes, verdict.standby) == (Step.ADMIT, 1516 * MIB, None)
        room = ram(1000, idle("other", 600))
        assert decide_load(wish(start=start, offload=True), room, room, weigh).step is Step.EVICT
        verdict = decide_load(wish(start=start), ram(600), ram(600), weigh)
        assert verdict.step is Step.REJECT
        mapped = decide_load(wish(start=start, from_storage=True), ram(600), ram(600), weigh)
        assert (mapped.step, mapped.storage_bytes, mapped.start.repack) == (Step.OFFLOAD, 916 * MIB, False)


# -- reject


def test_a_refusal_says_what_is_needed_who_holds_it_and_the_smallest_change() -> None:
    verdict = decide(1300, holder("speech", 500), total_bytes=2000 * MIB, redirect=False)
    assert verdict.step is Step.REJECT
    assert verdict.reason == (
        "chat needs 1.5 GiB of gpu0 (weights 1.0 GiB, KV 320 MiB, compute 128 MiB, driver context 20.0 MiB, "
        "margin 10.0 MiB), and 1.3 GiB is available: 228 MiB too little. It is held by: speech 500 MiB, other programs "
        "and what is kept free 200 MiB. It would fit like this: Prompts are read 128 tokens at a time instead of 512, "
        "which frees 96.0 MiB. The KV cache is kept as q8_0 instead of f16, which frees 160 MiB."
    )
    assert {change.what: change.to for change in verdict.would_fit} == {"ubatch_tokens": 128, "kv_type": "q8_0"}
    assert verdict.missing_bytes == 228 * MIB


def test_a_refusal_that_no_change_can_help_says_how_much_is_missing() -> None:
    verdict = decide(100, redirect=False, host=ram(100))
    assert (verdict.would_fit, verdict.missing_bytes) == ((), 1428 * MIB)
    assert verdict.reason.endswith("1.4 GiB more of gpu0 would be enough.")
    verdict = decide(100, redirect=False, host=ram(5), allow=frozenset({"ubatch"}))
    assert verdict.reason.endswith(
        "1.3 GiB more of gpu0 and 13.0 MiB more of host would be enough in its smallest form."
    )
    assert decide(2000, redirect=False, host=ram(5)).reason.endswith("13.0 MiB more of host would be enough.")


# -- unknown is no


def test_an_unknown_device_holds_nothing() -> None:
    verdict = decide(None, reason="The driver does not answer.", allow=ALL, offload=True)
    assert verdict.step is Step.REDIRECT
    assert verdict.reason.startswith("What is free on gpu0 is not known. The driver does not answer.")


def test_an_unknown_part_is_named() -> None:
    def weigh(start: StartModel) -> tuple[Demand, Demand]:
        device, host = DENSE.weigh(start)
        if start.route == "cpu":
            return device, host
        return replace(device, compute_bytes=None, reasons={"compute_bytes": "It has no closed form."}), host

    verdict = decide_load(wish(allow=ALL, offload=True), gpu(9000), ram(), weigh)
    assert verdict.step is Step.REDIRECT
    assert verdict.reason.startswith(
        "What chat needs of gpu0 is not known. Its compute is not known: It has no closed form."
    )


def test_free_memory_without_a_large_enough_piece_is_not_enough() -> None:
    verdict = decide(2000, largest_block_bytes=800 * MIB)
    assert verdict.step is Step.REDIRECT
    assert "in one piece, and the largest free one is 800 MiB." in verdict.reason
    assert decide(2000, largest_block_bytes=1050 * MIB).step is Step.ADMIT
    evicting = decide(2000, idle("a", 100), idle("b", 1100), largest_block_bytes=800 * MIB)
    assert [h.holder for h in evicting.evict] == ["b"]


# -- pressure


def test_a_tight_device_takes_what_fits_but_nobody_gives_way_for_a_load() -> None:
    assert decide(1528, pressure="tight").step is Step.ADMIT
    assert decide(1490, pressure="tight", allow=ALL).step is Step.REDUCE
    leaving, sleeping = holder("leaving", 600, frees_in_s=1.0), idle("sleeping", 600)
    verdict = decide(1000, leaving, sleeping, pressure="tight")
    assert verdict.step is Step.REDIRECT
    assert "Other programs want memory of gpu0" in verdict.reason
    assert decide(1000, leaving, sleeping, pressure="tight", offload=True).step is Step.OFFLOAD


def test_a_critical_device_takes_nothing() -> None:
    assert decide(9000, pressure="critical").step is Step.REDIRECT
    verdict = decide(1528, holder("leaving", 600, frees_in_s=1.0), pressure="critical")
    assert (verdict.step, verdict.waits_s) == (Step.DELAY, 1.0)
    verdict = decide(1528, pressure="critical", redirect=False)
    assert verdict.step is Step.REJECT
    assert verdict.reason.startswith("Other programs have taken the memory of gpu0, so nothing is loaded there.")


# -- back up


def test_a_reduced_load_goes_up_again_only_with_room_to_spare() -> None:
    reduced = replace(START, context_tokens=4096)
    mine = holder("chat/gpu", 1368)
    asked = wish(restore_slack=0.1)
    least = 1528 - 1368 + 152
    assert may_restore(reduced, asked, gpu(least + 1, mine), ram(), DENSE.weigh) == START
    assert may_restore(reduced, asked, gpu(least, mine), ram(), DENSE.weigh) is None
    assert may_restore(reduced, asked, gpu(9000, mine, pressure="tight"), ram(), DENSE.weigh) is None
    assert may_restore(reduced, asked, gpu(None, mine), ram(), DENSE.weigh) is None
    assert may_restore(START, asked, gpu(9000, mine), ram(), DENSE.weigh) is None


def test_the_two_thresholds_do_not_meet() -> None:
    """Whatever is free: what was just reduced is not restored at once, and what was restored fits."""
    for mib in range(1200, 2200, 20):
        verdict = decide(mib, allow=frozenset({"context"}))
        if verdict.step is Step.REDUCE:
            taken = (verdict.device_demand.total_bytes or 0) // MIB
            view = gpu(mib - taken, holder("chat/gpu", taken))
            assert may_restore(verdict.start, wish(), view, ram(), DENSE.weigh) is None


# -- few looks


def test_a_decision_weighs_few_starts() -> None:
    """A weighing may replay the engine's layout, so a search must not try everything."""
    weighed: list[StartModel] = []

    def weigh(start: StartModel) -> tuple[Demand, Demand]:
        weighed.append(start)
        return DENSE.weigh(start)

    for mib in range(0, 1600, 100):
        weighed.clear()
        decide_load(wish(allow=ALL, offload=True, least_context_tokens=512), gpu(mib), ram(), weigh)
        assert len(weighed) == len(set(weighed)) <= 40
    weighed.clear()
    largest_context(wish(), gpu(1528), ram(), weigh)
    assert len(weighed) <= 6


def test_the_largest_that_fits_is_found_however_uneven_the_growth() -> None:
    for limit in range(101):
        for grows in (lambda n: n, lambda n: n * n, lambda n: 0 if n < 60 else 10_000 * n, lambda n: n // 7):
            fitting = [n for n in range(3, 101) if grows(n) <= grows(limit)]
            found = largest_that_fits(3, 100, lambda n, grows=grows, limit=limit: grows(n) - grows(limit))
            assert found == (max(fitting) if fitting else None)
    assert largest_that_fits(0, 9, lambda n: None if n > 4 else 0) == 4
    assert largest_that_fits(0, 9, lambda n: None) is None


# -- beside the ladder


def test_the_largest_context_is_exact_to_a_step() -> None:
    asked = wish()
    assert largest_context(asked, gpu(1528), ram(), DENSE.weigh) == 8192
    assert largest_context(asked, gpu(1527), ram(), DENSE.weigh) == 8192 - 256
    assert largest_context(asked, gpu(1217), ram(), DENSE.weigh) == 0
    assert largest_context(wish(most_context_tokens=4096), gpu(9000), ram(), DENSE.weigh) == 4096


def test_standby_is_as_ready_as_the_budget_needs() -> None:
    plan = choose_standby(10.0, 4.0, 1.0, 500 * MIB, ram(1000))
    assert (plan.readiness, plan.recovers_in_s, plan.lease_bytes) == (Readiness.ON_DEMAND, 4.0, 500 * MIB)
    assert choose_standby(2.0, 4.0, 1.0, 500 * MIB, ram(1000)).readiness is Readiness.MAPPED
    assert choose_standby(0.5, 4.0, 1.0, 500 * MIB, ram(1000)).readiness is Readiness.WARM
    plan = choose_standby(10.0, None, None, 500 * MIB, ram(1000))
    assert plan.reason == "No load was timed here yet, so its worker is kept running in 500 MiB of RAM."


def test_a_standby_that_the_host_cannot_hold_is_said_to_be_so() -> None:
    plan = choose_standby(0.5, 4.0, 1.0, 500 * MIB, ram(400))
    assert (plan.readiness, plan.lease_bytes) == (Readiness.ON_DEMAND, 0)
    assert plan.reason == (
        "A load takes 4.0 s, longer than the budget of 0.5 s, but it cannot be kept running: "
        "It needs 500 MiB of host, and 400 MiB is available."
    )
    assert choose_standby(0.5, 4.0, 1.0, None, ram(400)).lease_bytes == 0


def test_a_verdict_plans_the_standby_in_what_the_load_leaves_of_the_host() -> None:
    standby = decide(1300, offload=True, host=ram(1600)).standby
    assert standby is not None
    assert (standby.readiness, standby.ram_bytes) == (Readiness.ON_DEMAND, 1516 * MIB)
    standby = decide(1300, offload=True, host=ram(2000)).standby
    assert standby is not None
    assert standby.readiness is Readiness.WARM


# -- who yields


def test_idle_holders_yield_before_any_that_run() -> None:
    view = gpu(
        0,
        holder("busy", 900, shrinks_to_bytes=300 * MIB),
        holder("urgent", 900, shrinks_to_bytes=300 * MIB, priority=9),
        idle("idle", 400, priority=9),
        pressure="critical",
    )
    assert [(y.holder.holder, y.way) for y in who_yields(view, 300 * MIB)] == [("idle", Way.EVICT)]
    given = who_yields(view, 800 * MIB)
    assert [(y.holder.holder, y.way) for y in given] == [("idle", Way.EVICT), ("busy", Way.SHRINK)]
    assert sum(y.frees_bytes for y in given) == 1000 * MIB
    assert [y.holder.holder for y in who_yields(view, 5000 * MIB)] == ["idle", "busy", "urgent"]
    assert given[1].sentence == "busy parks its work and shrinks to 300 MiB, which gives back 600 MiB."


def test_nobody_yields_twice_or_for_what_is_coming_back_anyway() -> None:
    leaving = idle("leaving", 500, frees_in_s=2.0)
    assert who_yields(gpu(0, leaving, idle("idle", 500)), 500 * MIB) == ()
    assert [y.holder.holder for y in who_yields(gpu(0, leaving, idle("idle", 500)), 600 * MIB)] == ["idle"]
    assert who_yields(gpu(0, holder("busy", 500)), 600 * MIB) == ()
    assert who_yields(gpu(0, idle("idle", 500)), 0) == ()
