"""What is learned from loads: constants, pools, margins; and that none of it outlives its engine or driver."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from relevo.core.memory.learned import (
    CARD_FLOORS,
    FEW,
    MIB,
    SMALL_FLOORS,
    Basis,
    Circumstances,
    FailedAllocation,
    Key,
    Learned,
    Lessons,
    Observation,
    decode,
    encode,
    margin_bytes,
    nearest_rank,
    residual_bytes,
)
from relevo.core.memory.load import DEVICE_START, DeviceStart
from relevo.core.memory.tier import Tier

KEY = Key("sha256:8b", "gpu0", "context=8192 kv=f16 ubatch=512")
OTHER = Key("sha256:1b", "gpu0", "context=4096 kv=f16 ubatch=512")
UNDER = Circumstances("llama.cpp CUDA", "v0.5.0", "570.10")
NVIDIA = DEVICE_START["nvidia"]


def seen(key: Key = KEY, under: Circumstances = UNDER, **more: Any) -> Observation:
    """An 8B at 8k: 5543 MiB of buffers, exactly as predicted, 310 MiB of context, and 60 MiB of growth."""
    buffers = {"weights_bytes": 4403 * MIB, "kv_bytes": 1024 * MIB, "compute_bytes": 116 * MIB}
    values: dict[str, Any] = {
        "predicted": buffers | {"context_bytes": 512 * MIB, "margin_bytes": 512 * MIB},
        "reported": buffers,
        "loaded_bytes": (5543 + 310) * MIB,
        "peak_bytes": (5543 + 370) * MIB,
    }
    return Observation(key=key, under=under, at=1000.0, **(values | more))


def failed(asked: int, free: int | None = None, margin: int = 512 * MIB, key: Key = KEY) -> FailedAllocation:
    return FailedAllocation(key=key, under=UNDER, at=1001.0, asked_bytes=asked, free_bytes=free, margin_bytes=margin)


def learned(
    *records: Observation | FailedAllocation,
    key: Key = KEY,
    under: Circumstances = UNDER,
    start: DeviceStart = NVIDIA,
    tier: Tier = Tier.CLOSED_FORM,
) -> Learned:
    return Lessons(records).learned(key, under, predicted_by=tier, start=start)


# -- what no header tells


def test_before_anything_was_seen_the_start_values_hold() -> None:
    found = learned()
    assert found.start == DeviceStart(NVIDIA.context_bytes, None, 512 * MIB)
    assert (found.fragmentation_bytes, found.tier, found.basis, found.observations) == (
        0,
        Tier.CLOSED_FORM,
        Basis.NOTHING,
        0,
    )


def test_the_context_is_what_no_buffer_accounts_for_and_the_pool_what_came_after() -> None:
    found = learned(seen())
    assert (found.context_bytes, found.pool_bytes) == (310 * MIB, 60 * MIB)
    assert (found.tier, found.basis, found.observations) == (Tier.LEARNED, Basis.KEY, 1)


def test_the_context_of_a_device_holds_for_every_model_but_the_pool_only_for_its_own() -> None:
    found = learned(seen(), key=OTHER)
    assert (found.context_bytes, found.pool_bytes) == (310 * MIB, None)
    assert learned(seen(), key=msgspec.structs.replace(KEY, device="gpu1")).context_bytes == NVIDIA.context_bytes


def test_where_there_is_no_bound_the_largest_growth_on_the_device_is_charged() -> None:
    assert learned(seen(), key=OTHER, start=DeviceStart(0, 0, 0)).pool_bytes == 60 * MIB


def test_one_strange_load_does_not_move_the_context() -> None:
    usual = [seen(loaded_bytes=(5543 + mib) * MIB) for mib in (309, 310, 310, 311)]
    assert learned(*usual, seen(loaded_bytes=8000 * MIB)).context_bytes == 310 * MIB


def test_what_the_worker_itself_takes_of_the_host_is_learned_by_device() -> None:
    run = seen(host_reported_bytes=300 * MIB, host_peak_bytes=420 * MIB)
    assert learned(run).host_context_bytes == 120 * MIB
    assert learned(seen()).host_context_bytes is None


# -- residuals and margins


def test_a_prediction_that_was_right_leaves_no_residual() -> None:
    assert residual_bytes(seen(), 310 * MIB, 60 * MIB) == 0
    assert learned(seen()).margin_bytes == 256 * MIB


def test_what_was_not_observed_is_no_residual() -> None:
    assert residual_bytes(seen(loaded_bytes=None, peak_bytes=None), 0, 0) is None
    unknown = {"weights_bytes": MIB, "compute_bytes": None}
    assert residual_bytes(seen(predicted=unknown, reported={"weights_bytes": MIB}), 0, 0) is None


def test_a_part_that_was_not_predicted_is_taken_as_the_engine_reported_it() -> None:
    predicted = {"weights_bytes": 4403 * MIB, "kv_bytes": 1024 * MIB, "compute_bytes": None}
    assert residual_bytes(seen(predicted=predicted), 310 * MIB, 60 * MIB) == 0


def test_a_peak_above_the_prediction_raises_the_margin_of_its_key() -> None:
    short = {"weights_bytes": 4403 * MIB, "kv_bytes": 1024 * MIB, "compute_bytes": 16 * MIB}
    found = learned(seen(predicted=short))
    assert found.margin_bytes == (256 + 100) * MIB
    total = sum(short.values()) + found.context_bytes + (found.pool_bytes or 0) + found.margin_bytes
    assert total >= (5543 + 370) * MIB


def test_a_load_without_its_peak_is_not_enough_for_the_smaller_floor() -> None:
    found = learned(seen(peak_bytes=None))
    assert (found.tier, found.basis, found.margin_bytes) == (Tier.CLOSED_FORM, Basis.KEY, 512 * MIB)
    assert learned(seen(peak_bytes=None), tier=Tier.DRY_RUN).margin_bytes == 384 * MIB


def test_errors_of_other_models_on_the_device_count_until_the_model_itself_was_seen() -> None:
    short = seen(OTHER, predicted={"weights_bytes": 5500 * MIB})
    found = learned(short)
    assert (found.basis, found.tier, found.margin_bytes) == (Basis.DEVICE, Tier.CLOSED_FORM, (512 + 43) * MIB)
    assert learned(short, seen()).basis is Basis.KEY
    elsewhere = learned(short, key=msgspec.structs.replace(KEY, device="gpu1"))
    assert (elsewhere.basis, elsewhere.margin_bytes) == (Basis.ENGINE, (512 + 43) * MIB)


def test_few_residuals_give_the_largest_and_the_floor() -> None:
    assert margin_bytes([], 256) == 256
    assert margin_bytes([-50], 256) == 256
    assert margin_bytes([10, 300, -5], 256) == 556


def test_many_residuals_give_their_99th_percentile_and_at_least_the_floor() -> None:
    assert margin_bytes([1] * FEW, 256) == 256
    assert margin_bytes([300] * FEW, 256) == 300
    assert margin_bytes([*[100] * 199, 9000], 50) == 100  # one in two hundred
    assert margin_bytes([*[100] * 98, 700, 9000], 50) == 700


def test_the_nearest_rank_is_one_of_the_values() -> None:
    assert [nearest_rank([5, 1, 3], percent) for percent in (1, 33, 34, 50, 67, 99, 100)] == [1, 1, 3, 3, 5, 5, 5]
    with pytest.raises(ValueError, match="no values"):
        nearest_rank([], 50)


def test_a_margin_covers_99_of_100_errors_and_never_falls_below_its_floor() -> None:
    dice = random.Random(4)
    for _ in range(200):
        residuals = [dice.randrange(-500, 500) for _ in range(dice.randrange(1, 300))]
        floor = dice.randrange(300)
        margin = margin_bytes(residuals, floor)
        assert margin >= floor
        assert sum(residual > margin for residual in residuals) * 100 <= len(residuals)
        # A further error, however large, never makes it smaller than a further small one does.
        assert margin_bytes([*residuals, 1000], floor) >= margin_bytes([*residuals, 0], floor)


def test_no_real_card_is_ever_given_less_than_256_mib() -> None:
    assert min(CARD_FLOORS.values()) == 256 * MIB
    assert set(CARD_FLOORS) == set(SMALL_FLOORS) == set(Tier)
    found = Lessons([seen()]).learned(
        KEY, UNDER, predicted_by=Tier.CLOSED_FORM, start=DEVICE_START["emulated"], floors=SMALL_FLOORS
    )
    assert found.margin_bytes == 32 * MIB


# -- failures


def test_a_failed_allocation_raises_the_margin_by_what_was_missing() -> None:
    found = learned(failed(asked=1024 * MIB, free=900 * MIB))
    assert (found.margin_bytes, found.failures, found.fragmentation_bytes) == ((512 + 124) * MIB, 1, 0)
    # A second failure, with that margin held back, raises it again.
    again = learned(failed(1024 * MIB, 900 * MIB), failed(1024 * MIB, 1000 * MIB, margin=636 * MIB))
    assert again.margin_bytes == (636 + 24) * MIB
    assert learned(failed(1024 * MIB, 900 * MIB, key=OTHER)).margin_bytes == 512 * MIB


def test_where_the_free_memory_was_not_known_the_whole_buffer_was_missing() -> None:
    assert learned(failed(1024 * MIB)).margin_bytes == (512 + 1024) * MIB


def test_a_success_with_a_small_residual_does_not_undo_a_failure() -> None:
    found = learned(failed(1024 * MIB, 900 * MIB), seen())
    assert (found.tier, found.margin_bytes) == (Tier.LEARNED, 636 * MIB)


def test_a_buffer_that_failed_although_as_much_was_free_is_fragmentation_of_that_engine() -> None:
    found = learned(failed(300 * MIB, free=700 * MIB))
    assert (found.fragmentation_bytes, found.margin_bytes) == (300 * MIB, 512 * MIB)
    assert learned(failed(300 * MIB, 700 * MIB), key=OTHER).fragmentation_bytes == 300 * MIB


def test_a_second_such_failure_raises_what_the_first_had_already_raised() -> None:
    first = failed(300 * MIB, free=700 * MIB)
    second = msgspec.structs.replace(first, fragmentation_bytes=300 * MIB)
    assert learned(first, second).fragmentation_bytes == 600 * MIB


def test_a_failure_is_believed_for_a_while_and_each_further_one_for_twice_as_long() -> None:
    def margin(*records: FailedAllocation, now: float) -> int:
        lessons = Lessons(records)
        return lessons.learned(KEY, UNDER, predicted_by=Tier.CLOSED_FORM, start=NVIDIA, now=now).margin_bytes

    first = failed(200 * MIB)
    assert margin(first, now=first.at + 899) == 712 * MIB
    assert margin(first, now=first.at + 901) == 512 * MIB, "a neighbour that was quicker once does not count for ever"
    again = msgspec.structs.replace(first, at=first.at + 2000)
    assert margin(first, again, now=again.at + 1700) == 712 * MIB
    assert margin(first, again, now=again.at + 1801) == 512 * MIB


def test_the_gap_between_free_memory_and_its_largest_block_is_fragmentation() -> None:
    assert learned(seen(free_bytes=900 * MIB, largest_block_bytes=850 * MIB)).fragmentation_bytes == 50 * MIB


# -- what is forgotten, and kept


@pytest.mark.parametrize(
    "other",
    [
        Circumstances("llama.cpp CUDA", "v0.6.0", "570.10"),
        Circumstances("llama.cpp CUDA", "v0.5.0", "580.01"),
        Circumstances("llama.cpp Vulkan", "v0.5.0", "570.10"),
    ],
)
def test_nothing_learned_outlives_its_engine_build_or_driver(other: Circumstances) -> None:
    records = (seen(), failed(300 * MIB, 700 * MIB), failed(1024 * MIB))
    assert learned(*records, under=other) == learned(under=other)


def test_of_each_key_the_newest_records_are_kept() -> None:
    lessons = Lessons(kept_per_key=3)
    for number in range(5):
        lessons.add(seen(peak_bytes=(6000 + number) * MIB))
    lessons.add(seen(OTHER))
    assert len(lessons) == 4
    peaks = [r.peak_bytes for r in lessons.records(UNDER) if isinstance(r, Observation) and r.key == KEY]
    assert peaks == [6002 * MIB, 6003 * MIB, 6004 * MIB]


def test_records_survive_the_journal() -> None:
    for record in (seen(host_peak_bytes=7), failed(5, 3)):
        assert decode(encode(record)) == record
    with pytest.raises(msgspec.DecodeError):
        decode(b'{"type": "gossip"}')


def test_two_keys_never_share_a_text() -> None:
    assert Key("a", "b,c", "").text != Key("a,b", "c", "").text
    assert Key('"', "b", "c").text != Key("", '"b', "c").text
    assert all(basis.sentence.endswith(".") for basis in Basis)
