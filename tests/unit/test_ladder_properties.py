"""Whatever is wished and whatever is there: what the ladder promises about every verdict."""

from __future__ import annotations

from itertools import combinations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from relevo.core.events import StartModel
from relevo.core.loads.eviction import harm_of, least_harm
from relevo.core.loads.ladder import (
    DeviceView,
    Holder,
    LoadVerdict,
    LoadWish,
    Step,
    Way,
    decide_load,
    largest_context,
    may_restore,
    who_yields,
)
from relevo.core.loads.reduction import floor_tokens
from relevo.core.loads.wish import REDUCIBLE
from tests.unit.small_model import MIB, START, SmallModel

QUICK = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
STEPS = list(Step)
PARTS_OF = {
    "ubatch_tokens": "ubatch",
    "slots": "slots",
    "kv_type": "kv_type",
    "context_tokens": "context",
    "flash_attention": "flash_attention",
}

models = st.builds(
    SmallModel,
    layers=st.integers(1, 12),
    layer_bytes=st.integers(40, 120).map(lambda n: n * MIB),
    expert_bytes=st.sampled_from([0, 0, 30 * MIB]),
    head_bytes=st.integers(0, 60).map(lambda n: n * MIB),
    kv_bytes=st.integers(1, 3 * MIB),
    copies_quantized_kv=st.booleans(),
)
starts = st.builds(
    lambda **more: replace(START, **more),
    context_tokens=st.integers(1, 12_000),
    slots=st.integers(1, 9),
    ubatch_tokens=st.sampled_from([64, 100, 128, 512]),
    kv_type=st.sampled_from(["f16", "f16", "q8_0"]),
    flash_attention=st.booleans(),
    profile=st.sampled_from(["fast", "fast", "strict"]),
    gpu_layers=st.sampled_from([999, 999, 5]),
    repack=st.booleans(),
)
holders = st.lists(
    st.builds(
        Holder,
        holder=st.text("abc", min_size=1, max_size=3),
        bytes_=st.integers(0, 900).map(lambda n: n * MIB),
        idle=st.booleans(),
        idle_s=st.floats(0, 1e5),
        priority=st.integers(-2, 2),
        reload_s=st.none() | st.floats(0, 300),
        evictable=st.booleans(),
        frees_in_s=st.none() | st.none() | st.floats(0, 9),
        shrinks_to_bytes=st.none() | st.integers(0, 900).map(lambda n: n * MIB),
    ),
    max_size=5,
).map(tuple)
sizes = st.none() | st.integers(0, 3000).map(lambda n: n * MIB) | st.integers(0, 3000 * MIB)
pressures = st.sampled_from(["calm", "calm", "tight", "critical", "unknown"])
devices = st.builds(
    DeviceView,
    name=st.just("gpu0"),
    available_bytes=sizes,
    total_bytes=st.none() | st.just(4000 * MIB),
    largest_block_bytes=st.none() | st.none() | st.integers(0, 1500).map(lambda n: n * MIB),
    pressure=pressures,
    holders=holders,
)
hosts = st.builds(DeviceView, name=st.just("host"), available_bytes=sizes, pressure=pressures)


@st.composite
def cases(draw: st.DrawFn) -> tuple[LoadWish, DeviceView, DeviceView, SmallModel]:
    model = draw(models)
    wish = draw(
        st.builds(
            LoadWish,
            holder=st.just("chat/gpu"),
            start=starts,
            layers=st.just(model.layers),
            expert_layers=st.just(model.layers if model.expert_bytes else 0),
            allow=st.frozensets(st.sampled_from(sorted(REDUCIBLE))),
            least_context_tokens=st.integers(1, 6000),
            wanted_context_tokens=st.integers(0, 4000),
            least_slots=st.integers(1, 4),
            offload=st.booleans(),
            redirect=st.booleans(),
            from_storage=st.booleans(),
            priority=st.integers(-1, 1),
            deadline_s=st.floats(0, 10),
            cpu_held_bytes=st.sampled_from([0, 0, 900 * MIB]),
        )
    )
    if wish.start.kv_type != "f16":  # a configuration may not ask for a quantized cache without it
        wish = replace(wish, start=replace(wish.start, flash_attention=True))
    return wish, draw(devices), draw(hosts), model


Case = tuple[LoadWish, DeviceView, DeviceView, SmallModel]


def decide(case: Case) -> LoadVerdict:
    wish, device, host, model = case
    return decide_load(wish, device, host, model.weigh)


@QUICK
@given(cases())
def test_the_same_case_gives_the_same_verdict(case: Case) -> None:
    wish, device, host, model = case
    shuffled = replace(device, holders=device.holders[::-1])
    verdict = decide(case)
    assert decide(case) == verdict
    other = decide_load(wish, shuffled, host, model.weigh)
    assert (other.step, other.start, other.waits_s) == (verdict.step, verdict.start, verdict.waits_s)
    assert sum(map(harm_of, other.evict)) == sum(map(harm_of, verdict.evict))


@QUICK
@given(cases(), st.integers(0, 2000 * MIB), st.integers(0, 2000 * MIB))
def test_more_memory_never_gives_a_further_step(case: Case, on_device: int, on_host: int) -> None:
    wish, device, host, model = case
    before = decide(case)
    more_device = replace(device, available_bytes=(device.available_bytes or 0) + on_device)
    if more_device.largest_block_bytes is not None:
        more_device = replace(more_device, largest_block_bytes=(more_device.largest_block_bytes or 0) + on_device)
    more_host = replace(host, available_bytes=(host.available_bytes or 0) + on_host)
    after = decide_load(wish, more_device, more_host, model.weigh)
    assert STEPS.index(after.step) <= STEPS.index(before.step)


@QUICK
@given(cases())
def test_what_is_to_be_loaded_fits_what_will_be_there(case: Case) -> None:
    wish, device, host, model = case
    verdict = decide(case)
    if not verdict.loads_on_device:
        return
    of_device, of_host = model.weigh(verdict.start)
    assert (verdict.device_demand, verdict.host_demand) == (of_device, of_host)
    assert of_device.total_bytes is not None
    assert of_host.total_bytes is not None
    back = [h.bytes_ for h in device.holders if h.frees_in_s is not None and h.frees_in_s <= verdict.waits_s]
    room = (device.available_bytes or 0) + sum(back) * (verdict.waits_s > 0) + sum(h.bytes_ for h in verdict.evict)
    assert of_device.total_bytes <= room
    assert verdict.waits_s <= wish.deadline_s
    assert of_host.total_bytes - verdict.storage_bytes <= (host.available_bytes or 0)
    assert verdict.storage_bytes <= (of_host.mapped_bytes if wish.from_storage else 0)
    if verdict.step is Step.ADMIT:
        assert verdict.start == wish.start
        assert verdict.starts_now


@QUICK
@given(cases())
def test_the_numbers_of_a_verdict_add_up(case: Case) -> None:
    wish, device, _, model = case
    verdict = decide(case)
    whole = model.weigh(wish.start)[0].total_bytes or 0
    if verdict.loads_on_device:
        freed = sum(change.frees_bytes or 0 for change in verdict.changes)
        assert verdict.device_demand.total_bytes == whole - freed
        assert verdict.device_demand.total_bytes == sum(value or 0 for value in verdict.device_demand.parts().values())
    now = wish.start
    if verdict.step is not Step.REDIRECT:
        for change in verdict.changes:
            assert getattr(now, change.what) == change.from_
            now = replace(now, **{change.what: change.to})
        assert now == verdict.start
    for change in verdict.changes + verdict.would_fit:
        assert change.sentence.endswith(".")
    assert verdict.reason.endswith(".")
    assert verdict.available_bytes == device.available_bytes


@QUICK
@given(cases())
def test_nobody_busy_or_of_a_higher_priority_gives_way_for_a_load(case: Case) -> None:
    wish, device, _, _ = case
    verdict = decide(case)
    for gone in verdict.evict:
        assert gone.idle
        assert gone.evictable
        assert gone.priority <= wish.priority
    assert len(set(map(id, verdict.evict))) == len(verdict.evict) <= len(device.holders)
    if device.pressure in ("tight", "critical"):
        assert not verdict.evict
    if device.pressure == "critical":
        assert verdict.step in (Step.DELAY, Step.REDIRECT, Step.REJECT)


@QUICK
@given(cases())
def test_nothing_is_reduced_that_may_not_be_or_below_the_least(case: Case) -> None:
    wish, _, _, _ = case
    verdict = decide(case)
    if not verdict.loads_on_device:
        return
    start = verdict.start
    assert start.context_tokens >= min(wish.start.context_tokens, floor_tokens(wish))
    assert start.context_tokens >= min(wish.start.context_tokens, wish.least_context_tokens, 1)
    assert start.slots >= min(wish.start.slots, wish.least_slots)
    assert start.kv_type == "f16" or start.flash_attention or wish.start.kv_type != "f16"
    for change in verdict.changes:
        if change.what in PARTS_OF:
            assert PARTS_OF[change.what] in wish.allow
        elif change.what in ("use_mmap", "repack"):
            assert wish.from_storage
        else:
            assert wish.offload
    if verdict.step is Step.DELAY:
        assert start == wish.start


@QUICK
@given(cases())
def test_no_single_change_of_a_reduced_load_could_have_been_left_out(case: Case) -> None:
    """The verdict holds nothing back: with any one change undone it does not fit any more."""
    wish, _, _, model = case
    verdict = decide(case)
    if verdict.step is not Step.REDUCE:
        return
    for change in verdict.changes:
        without = replace(verdict.start, **{change.what: change.from_})
        if without.kv_type != "f16" and not without.flash_attention:
            continue
        strictly = replace(wish, start=without, allow=frozenset())
        again = decide_load(strictly, case[1], case[2], model.weigh)
        assert again.step not in (Step.ADMIT, Step.DELAY)


@QUICK
@given(cases())
def test_a_refusals_change_would_really_fit(case: Case) -> None:
    wish, device, host, model = case
    verdict = decide(case)
    if not verdict.would_fit:
        return
    changed: StartModel = wish.start
    for change in verdict.would_fit:
        changed = replace(changed, **{change.what: change.to})
    again = decide_load(replace(wish, start=changed, allow=frozenset(), offload=False), device, host, model.weigh)
    assert again.loads_on_device


@QUICK
@given(cases())
def test_what_goes_up_again_would_be_admitted(case: Case) -> None:
    wish, device, host, model = case
    current = replace(wish.start, slots=wish.start.slots + 1)
    better = may_restore(current, wish, device, host, model.weigh)
    if better is not None:
        assert better == wish.start
        mine = sum(h.bytes_ for h in device.holders if h.holder == wish.holder)
        room = replace(device, available_bytes=(device.available_bytes or 0) + mine)
        assert decide_load(wish, room, host, model.weigh).step is Step.ADMIT


@QUICK
@given(cases())
def test_the_largest_context_fits_and_one_step_more_does_not(case: Case) -> None:
    wish, device, host, model = case
    device, host = replace(device, pressure="calm"), replace(host, pressure="calm")
    tokens = largest_context(wish, device, host, model.weigh)

    def fits(tokens: int) -> bool:
        asked = replace(wish, start=replace(wish.start, context_tokens=tokens))
        return decide_load(asked, device, host, model.weigh).step is Step.ADMIT

    assert tokens == 0 or fits(tokens)
    assert tokens >= 1 << 20 or not fits(tokens + 256)


@QUICK
@given(holders, st.integers(0, 2500 * MIB), st.sampled_from([0, 0, 200 * MIB, 700 * MIB]))
def test_no_other_set_of_holders_would_do_less_harm(able: tuple[Holder, ...], gap: int, block: int) -> None:
    found = least_harm(able, gap, block)
    sets = [chosen for n in range(len(able) + 1) for chosen in combinations(able, n)]
    covering = [
        chosen
        for chosen in sets
        if sum(h.bytes_ for h in chosen) >= gap and max((h.bytes_ for h in chosen), default=0) >= block
    ]
    if not covering:
        assert found is None
        return
    assert found is not None

    def cost(chosen: tuple[Holder, ...]) -> tuple[int, float]:
        return max((h.priority for h in chosen), default=-99), round(sum(map(harm_of, chosen)), 6)

    assert cost(found) == min(map(cost, covering))


@QUICK
@given(devices, st.integers(0, 3000 * MIB))
def test_yielding_ends_no_running_work_and_stops_when_it_is_enough(device: DeviceView, need: int) -> None:
    given_back = who_yields(device, need)
    coming = sum(h.bytes_ for h in device.holders if h.frees_in_s is not None)
    for each in given_back:
        assert each.frees_bytes > 0
        assert each.holder.frees_in_s is None
        if each.way is Way.EVICT:
            assert each.holder.idle
            assert each.holder.evictable
    ways = [each.way for each in given_back]
    assert ways == sorted(ways)
    assert coming + sum(each.frees_bytes for each in given_back[:-1]) < need or not given_back
