"""Leases on a device: nothing is promised twice, and unknown is no."""

from __future__ import annotations

import pytest

from relevo.core.errors import OurBug
from relevo.core.leases.lease import TRANSITIONS, Lease, LeaseState, Shortfall
from relevo.core.leases.ledger import Ledger
from relevo.core.leases.pressure import PressureStage
from relevo.core.leases.reading import Reading
from relevo.core.leases.reserve import Want, reserve

GIB = 1 << 30


def reading(total: int, used: int, at: float = 0.0, reserved: int = 0) -> Reading:
    return Reading(total_bytes=total, free_bytes=total - used - reserved, driver_reserved_bytes=reserved, read_at=at)


def card(total: int = 24 * GIB, used: int = 0, headroom: int = 0, **more: float) -> Ledger:
    ledger = Ledger("gpu0", headroom_bytes=headroom, **more)  # type: ignore[arg-type]
    ledger.observe(reading(total, used))
    return ledger


def granted(ledger: Ledger, bytes_: int, holder: str = "chat/gpu", now: float = 0.0) -> Lease:
    lease = ledger.request(holder, bytes_, now)
    assert isinstance(lease, Lease), lease
    return lease


def test_an_empty_card_has_all_but_its_headroom() -> None:
    assert card(24 * GIB, headroom=GIB).available_bytes == 23 * GIB


def test_headroom_is_a_twentieth_of_the_card_and_at_most_half_a_gibibyte() -> None:
    small, large = Ledger("small"), Ledger("large")
    small.observe(reading(2 * GIB, 0))
    large.observe(reading(24 * GIB, 0))
    assert small.headroom_bytes == 2 * GIB // 20
    assert large.headroom_bytes == GIB // 2


def test_what_the_driver_keeps_is_not_leased() -> None:
    ledger = Ledger("gpu0", headroom_bytes=0)
    ledger.observe(reading(24 * GIB, 0, reserved=GIB))
    assert ledger.available_bytes == 23 * GIB
    assert ledger.external_bytes == 0


def test_a_lease_counts_before_the_device_shows_it() -> None:
    ledger = card()
    granted(ledger, 20 * GIB)
    assert ledger.available_bytes == 4 * GIB
    assert repr(ledger) == f"<Ledger gpu0: {20 * GIB} of {24 * GIB} bytes leased in 1 leases, {4 * GIB} available>"


def test_a_lease_that_becomes_visible_is_not_counted_twice() -> None:
    ledger = card()
    granted(ledger, 20 * GIB)
    for used in (5 * GIB, 12 * GIB, 20 * GIB):
        ledger.observe(reading(24 * GIB, used, at=1.0))
        assert ledger.available_bytes == 4 * GIB
        assert ledger.external_bytes == 0


def test_what_is_too_large_is_refused_with_the_numbers_and_the_holders() -> None:
    ledger = card()
    granted(ledger, 20 * GIB, holder="chat/gpu")
    refused = ledger.request("speech/gpu", 5 * GIB, 0.0)
    assert isinstance(refused, Shortfall)
    assert (refused.need_bytes, refused.available_bytes) == (5 * GIB, 4 * GIB)
    assert [(h.holder, h.bytes_, h.state) for h in refused.holders] == [("chat/gpu", 20 * GIB, "granted")]
    assert refused.reason == "speech/gpu needs 5.0 GiB of gpu0; 4.0 GiB is free to lease."
    assert len(ledger.leases) == 1


def test_a_neighbours_memory_is_external() -> None:
    ledger = card(used=6 * GIB)
    assert ledger.external_bytes == 6 * GIB
    assert ledger.available_bytes == 18 * GIB


def test_a_settled_lease_keeps_its_promise_beside_a_neighbour() -> None:
    # Leased 10, uses 8, and a neighbour uses 2: what is left is 12, although the device reports 14 free.
    ledger = card()
    lease = granted(ledger, 10 * GIB)
    ledger.settle(lease, 8 * GIB)
    ledger.observe(reading(24 * GIB, 10 * GIB, at=1.0))
    assert ledger.external_bytes == 2 * GIB
    assert ledger.available_bytes == 12 * GIB


def test_use_beyond_the_lease_counts_in_full() -> None:
    ledger = card()
    lease = granted(ledger, 10 * GIB)
    ledger.settle(lease, 11 * GIB)
    ledger.observe(reading(24 * GIB, 11 * GIB, at=1.0))
    assert ledger.leased_bytes == 11 * GIB
    assert ledger.external_bytes == 0
    assert ledger.available_bytes == 13 * GIB
    ledger.recount(lease, 9 * GIB)
    assert ledger.leased_bytes == 10 * GIB


def test_a_neighbour_is_believed_at_once_and_its_leaving_slowly() -> None:
    ledger = card(external_half_life_s=10.0)
    ledger.observe(reading(24 * GIB, 8 * GIB, at=1.0))
    assert ledger.external_bytes == 8 * GIB
    ledger.observe(reading(24 * GIB, 0, at=11.0))
    assert ledger.external_bytes == 4 * GIB
    assert ledger.available_bytes == 20 * GIB
    ledger.observe(reading(24 * GIB, 0, at=300.0))
    assert ledger.external_bytes == 0


def test_external_rests_while_a_load_is_under_way() -> None:
    ledger = card(used=2 * GIB)
    lease = granted(ledger, 10 * GIB)
    ledger.observe(reading(24 * GIB, 7 * GIB, at=1.0))
    assert ledger.external_bytes == 2 * GIB
    ledger.settle(lease, 10 * GIB)
    ledger.observe(reading(24 * GIB, 12 * GIB, at=2.0))
    assert ledger.external_bytes == 2 * GIB


def test_use_that_no_load_explains_is_external_even_during_the_load() -> None:
    ledger = card()
    granted(ledger, 10 * GIB)
    ledger.observe(reading(24 * GIB, 13 * GIB, at=1.0))
    assert ledger.external_bytes == 3 * GIB
    assert ledger.available_bytes == 11 * GIB


def settled(ledger: Ledger, bytes_: int, total: int = 24 * GIB, at: float = 10.0) -> Lease:
    """A lease whose use has been visible for longer than readings lag behind, and nothing else on the card."""
    lease = granted(ledger, bytes_, now=at - 5.0)
    ledger.settle(lease, bytes_)
    ledger.observe(reading(total, bytes_, at=at - 4.0))
    ledger.observe(reading(total, bytes_, at=at))
    return lease


def test_a_draining_lease_counts_until_it_is_released() -> None:
    ledger = card()
    lease = settled(ledger, 20 * GIB)
    ledger.drain(lease)
    ledger.drain(lease)
    ledger.observe(reading(24 * GIB, 0, at=11.0))
    assert ledger.available_bytes == 4 * GIB
    ledger.orphan(lease)
    assert ledger.available_bytes == 4 * GIB
    ledger.release(lease)
    assert (ledger.leased_bytes, ledger.available_bytes, ledger.leases) == (0, 24 * GIB, ())


def test_a_lease_is_released_once() -> None:
    ledger = card()
    lease = granted(ledger, GIB)
    ledger.release(lease)
    assert lease.counted_bytes == 0
    with pytest.raises(OurBug, match="is not \\(or no longer\\) a lease of gpu0"):
        ledger.release(lease)
    with pytest.raises(OurBug):
        ledger.drain(lease)
    with pytest.raises(OurBug):
        ledger.settle(lease, GIB)


def test_a_lease_of_another_device_is_refused() -> None:
    lease = granted(card(), GIB)
    other = card()
    granted(other, GIB)
    with pytest.raises(OurBug):
        other.release(lease)


def test_unknown_is_no() -> None:
    ledger = Ledger("gpu0")
    refused = ledger.request("chat/gpu", 1, 0.0)
    assert isinstance(refused, Shortfall)
    assert (refused.available_bytes, refused.reason) == (None, "The memory of gpu0 was not read yet.")
    ledger.observe(Reading(total_bytes=None, free_bytes=None, reason="The driver does not answer."))
    refused = ledger.request("chat/gpu", 1, 0.0)
    assert isinstance(refused, Shortfall)
    assert refused.reason == "The driver does not answer."
    assert ledger.pressure is None


def test_a_declared_total_answers_where_the_device_cannot() -> None:
    ledger = Ledger("igpu", declared_bytes=8 * GIB, headroom_bytes=GIB)
    ledger.observe(Reading(total_bytes=None, free_bytes=None, reason="No interface."))
    assert ledger.available_bytes == 7 * GIB
    granted(ledger, 7 * GIB)
    assert ledger.available_bytes == 0
    view = ledger.snapshot()
    assert (view.external_bytes, view.read_at, view.reason) == (None, None, "No interface.")


def test_a_declared_total_bounds_what_may_be_leased_of_a_larger_device() -> None:
    host = Ledger("host", declared_bytes=4 * GIB, headroom_bytes=2 * GIB)
    host.observe(reading(32 * GIB, 10 * GIB))
    assert host.available_bytes == 4 * GIB
    granted(host, 3 * GIB, holder="chat/cpu")
    assert host.available_bytes == GIB
    host.observe(reading(32 * GIB, 32 * GIB, at=1.0))
    assert host.available_bytes == 0


def test_a_stale_reading_is_unknown() -> None:
    ledger = card(stale_after_s=30.0)
    assert isinstance(ledger.request("chat/gpu", GIB, 30.0), Lease)
    refused = ledger.request("chat/gpu", GIB, 30.5)
    assert isinstance(refused, Shortfall)
    assert refused.reason == "The last reading of gpu0 is older than 30 s."


def test_after_a_doubt_nothing_is_granted_until_the_device_was_read_again() -> None:
    ledger = card()
    lease = granted(ledger, 4 * GIB)
    ledger.settle(lease, 4 * GIB)
    ledger.doubt("The machine was suspended.", 5.0)
    assert lease.state is LeaseState.UNVERIFIED
    refused = ledger.request("speech/gpu", GIB, 5.0)
    assert isinstance(refused, Shortfall)
    assert refused.reason == "The machine was suspended."
    ledger.observe(reading(24 * GIB, 4 * GIB, at=6.0))
    ledger.settle(lease, 4 * GIB)
    assert ledger.available_bytes == 20 * GIB


def test_what_a_leftover_process_holds_is_booked_even_where_nothing_is_left() -> None:
    ledger = card(total=8 * GIB, used=8 * GIB)
    assert ledger.available_bytes == 0
    lease = ledger.adopt("chat/gpu pid 4242", 8 * GIB, 0.0)
    ledger.observe(reading(8 * GIB, 8 * GIB, at=0.5))
    assert ledger.available_bytes == 0
    ledger.orphan(lease)
    ledger.release(lease)
    ledger.observe(reading(8 * GIB, 0, at=1.0))
    assert ledger.available_bytes == 8 * GIB


def test_a_leftovers_memory_is_not_a_neighbours_as_well() -> None:
    ledger = card(used=8 * GIB)
    ledger.adopt("chat/gpu pid 4242", 6 * GIB, 0.0)
    assert (ledger.external_bytes, ledger.leased_bytes, ledger.available_bytes) == (2 * GIB, 6 * GIB, 16 * GIB)


def test_pressure_runs_from_nothing_to_all() -> None:
    ledger = card(total=20 * GIB, headroom=4 * GIB)
    assert ledger.pressure == 0.0
    granted(ledger, 8 * GIB)
    assert ledger.pressure == 0.5
    ledger.observe(reading(20 * GIB, 19 * GIB, at=1.0))
    assert ledger.pressure == 1.0


def test_the_snapshot_shows_what_the_status_needs() -> None:
    ledger = card(total=24 * GIB, headroom=GIB)
    lease = granted(ledger, 10 * GIB)
    ledger.settle(lease, 10 * GIB)
    ledger.observe(reading(24 * GIB, 12 * GIB, at=3.0))
    view = ledger.snapshot()
    assert (view.total_bytes, view.leased_bytes, view.external_bytes) == (24 * GIB, 10 * GIB, 2 * GIB)
    assert (view.available_bytes, view.headroom_bytes, view.read_at) == (11 * GIB, GIB, 3.0)
    assert view.reason is None
    assert [(h.holder, h.state) for h in view.leases] == [("chat/gpu", "settled")]


def test_a_negative_lease_is_our_bug() -> None:
    with pytest.raises(OurBug):
        card().request("chat/gpu", -1, 0.0)


def test_every_state_of_a_lease_has_a_sentence_and_leads_to_its_release() -> None:
    for state in LeaseState:
        assert state.sentence.endswith(".")
        reached = {state}
        for _ in LeaseState:
            reached |= {new for old in reached for new in TRANSITIONS[old]}
        assert LeaseState.RELEASED in reached
    assert repr(granted(card(), 5)) == "<Lease 1 on gpu0: chat/gpu granted 5 bytes>"


def test_what_is_missing_is_told() -> None:
    ledger = card()
    granted(ledger, 20 * GIB)
    refused = ledger.request("speech/gpu", 7 * GIB, 0.0)
    assert isinstance(refused, Shortfall)
    assert (refused.holder, refused.missing_bytes) == ("speech/gpu", 3 * GIB)
    assert ledger.shortfall("speech/gpu", 4 * GIB, 0.0) is None
    unknown = Ledger("gpu1").request("speech/gpu", 7 * GIB, 0.0)
    assert isinstance(unknown, Shortfall)
    assert unknown.missing_bytes is None


def test_bytes_without_a_block_large_enough_are_not_enough() -> None:
    ledger = Ledger("gpu0", headroom_bytes=0)
    ledger.observe(Reading(24 * GIB, 12 * GIB, largest_block_bytes=5 * GIB))
    assert isinstance(ledger.request("chat/gpu", 1 * GIB, 0.0, largest_allocation_bytes=GIB), Lease)
    refused = ledger.request("speech/gpu", 8 * GIB, 0.0, largest_allocation_bytes=6 * GIB)
    assert isinstance(refused, Shortfall)
    assert (refused.available_bytes, refused.missing_bytes) == (11 * GIB, 0)
    # The first load is not visible yet: it may come out of the largest block.
    assert (refused.largest_allocation_bytes, refused.largest_block_bytes) == (6 * GIB, 4 * GIB)
    assert refused.reason == (
        "speech/gpu needs a single buffer of 6.0 GiB on gpu0, where 11.0 GiB is free to lease, but no block is larger "
        "than 4.0 GiB."
    )
    assert isinstance(ledger.request("speech/gpu", 8 * GIB, 0.0, largest_allocation_bytes=4 * GIB), Lease)


def test_a_device_that_does_not_tell_its_blocks_is_judged_by_its_bytes() -> None:
    assert isinstance(card().request("chat/gpu", 8 * GIB, 0.0, largest_allocation_bytes=8 * GIB), Lease)


def test_a_buffer_larger_than_its_lease_is_our_bug() -> None:
    with pytest.raises(OurBug):
        card().request("chat/gpu", 1, 0.0, largest_allocation_bytes=2)


def test_a_lease_that_nobody_used_is_cancelled_without_a_wait() -> None:
    ledger = card()
    lease = granted(ledger, 20 * GIB)
    ledger.cancel(lease)
    assert (ledger.available_bytes, ledger.returning_bytes, ledger.leases) == (24 * GIB, 0, ())
    with pytest.raises(OurBug):
        ledger.cancel(settled(ledger, GIB))


def test_a_settled_lease_can_be_shrunk_to_its_measured_peak_but_not_grown() -> None:
    ledger = card()
    lease = granted(ledger, 10 * GIB)
    ledger.settle(lease, 7 * GIB)
    ledger.observe(reading(24 * GIB, 7 * GIB, at=1.0))
    ledger.shrink(lease, 8 * GIB)
    assert (ledger.leased_bytes, ledger.available_bytes) == (8 * GIB, 16 * GIB)
    with pytest.raises(OurBug):
        ledger.shrink(lease, 9 * GIB)


def test_the_pressure_of_a_device_follows_its_neighbours_and_not_our_leases() -> None:
    ledger = card(total=24 * GIB, headroom=4 * GIB, pressure_stay_s=2.0)
    granted(ledger, 20 * GIB)
    ledger.observe(reading(24 * GIB, 0, at=0.5))
    assert (ledger.snapshot().stage, ledger.snapshot().slack_bytes) == (PressureStage.CALM, 4 * GIB)
    ledger.observe(reading(24 * GIB, 22 * GIB, at=1.0))
    assert ledger.snapshot().stage is PressureStage.TIGHT
    ledger.observe(reading(24 * GIB, 24 * GIB, at=1.5))
    view = ledger.snapshot()
    assert (view.stage, view.slack_bytes, view.available_bytes) == (PressureStage.CRITICAL, 0, 0)


def test_pressure_is_unknown_with_its_reason_where_figures_are() -> None:
    ledger = Ledger("gpu0", declared_bytes=GIB)
    assert (ledger.snapshot().stage, ledger.snapshot().stage_reason) == (PressureStage.UNKNOWN, "It was not read yet.")
    ledger.observe(Reading(None, None, read_at=1.0, reason="No interface."))
    assert ledger.snapshot().stage_reason == "No interface."
    ledger.observe(reading(24 * GIB, 0, at=2.0))
    assert ledger.snapshot(now=3.0).stage is PressureStage.CALM
    view = ledger.snapshot(now=60.0)
    assert (view.stage, view.stage_reason) == (
        PressureStage.UNKNOWN,
        "The last reading of gpu0 is older than 30 s.",
    )


def test_the_snapshot_shows_what_is_not_visible_yet_and_what_is_coming_back() -> None:
    ledger = Ledger("gpu0", headroom_bytes=GIB)
    ledger.observe(Reading(24 * GIB, 23 * GIB, GIB, read_at=0.0, largest_block_bytes=22 * GIB))
    granted(ledger, 3 * GIB)
    ledger.release(granted(ledger, 2 * GIB))
    view = ledger.snapshot()
    assert (view.driver_reserved_bytes, view.reported_free_bytes, view.largest_block_bytes) == (
        GIB,
        23 * GIB,
        22 * GIB,
    )
    assert (view.granted_not_visible_bytes, view.returning_bytes, view.leased_bytes) == (3 * GIB, 2 * GIB, 3 * GIB)
    assert (view.slack_bytes, view.available_bytes) == (18 * GIB, 17 * GIB)
    assert (view.unverified_bytes, view.disbelief) == (0, None)


def test_after_a_doubt_an_old_reading_does_not_count() -> None:
    ledger = card()
    lease = settled(ledger, 4 * GIB)
    ledger.doubt("The machine was suspended.", 20.0)
    ledger.observe(reading(24 * GIB, 4 * GIB, at=19.0))  # taken before, and late
    assert ledger.available_bytes is None
    ledger.observe(reading(24 * GIB, 4 * GIB, at=21.0))
    assert ledger.unverified == (lease,)
    assert ledger.snapshot().unverified_bytes == 4 * GIB
    assert ledger.available_bytes == 20 * GIB
    ledger.settle(lease, 4 * GIB)
    assert (ledger.unverified, ledger.available_bytes) == ((), 20 * GIB)


def test_after_a_doubt_a_declared_total_does_not_answer_either_until_the_device_was_asked() -> None:
    ledger = Ledger("igpu", declared_bytes=8 * GIB, headroom_bytes=0)
    ledger.observe(Reading(None, None, reason="No interface."))
    ledger.doubt("The driver was reset.", 5.0)
    refused = ledger.request("chat/gpu", GIB, 5.0)
    assert isinstance(refused, Shortfall)
    assert refused.reason == "The driver was reset."
    ledger.observe(Reading(None, None, read_at=6.0, reason="No interface."))
    assert ledger.available_bytes == 8 * GIB


def test_several_leases_are_had_together_or_not_at_all() -> None:
    device, host = card(8 * GIB), Ledger("host", headroom_bytes=0)
    host.observe(reading(16 * GIB, 4 * GIB))
    both = [Want(device, "chat/gpu", 6 * GIB), Want(host, "chat/gpu", 2 * GIB)]
    leases = reserve(both, 0.0)
    assert isinstance(leases, tuple)
    assert [(lease.device, lease.bytes_) for lease in leases] == [("gpu0", 6 * GIB), ("host", 2 * GIB)]
    refused = reserve([Want(host, "speech/gpu", GIB), Want(device, "speech/gpu", 3 * GIB)], 0.0)
    assert isinstance(refused, Shortfall)
    assert (refused.device, refused.missing_bytes) == ("gpu0", GIB)
    assert (device.leased_bytes, host.leased_bytes) == (6 * GIB, 2 * GIB)
    assert (len(host.leases), host.returning_bytes) == (1, 0)


def test_wants_of_one_device_are_added_up() -> None:
    device = card(8 * GIB)
    refused = reserve([Want(device, "chat/gpu", 5 * GIB), Want(device, "draft/gpu", 4 * GIB)], 0.0)
    assert isinstance(refused, Shortfall)
    assert (refused.holder, refused.available_bytes, refused.missing_bytes) == ("draft/gpu", 3 * GIB, GIB)
    assert device.leases == ()
    block = Ledger("gpu1", headroom_bytes=0)
    block.observe(Reading(8 * GIB, 8 * GIB, largest_block_bytes=6 * GIB))
    second = Want(block, "draft/gpu", 3 * GIB, 3 * GIB)
    assert isinstance(reserve([Want(block, "chat/gpu", 4 * GIB, 4 * GIB), second], 0.0), Shortfall)
    assert isinstance(reserve([Want(block, "chat/gpu", 3 * GIB, 3 * GIB), second], 0.0), tuple)


def test_what_free_memory_cannot_exceed_lowers_a_declared_total() -> None:
    ledger = Ledger("apu", declared_bytes=8 * GIB, headroom_bytes=0)
    ledger.observe(Reading(16 * GIB, None, free_at_most_bytes=5 * GIB, reason="Shared with the host."))
    assert ledger.available_bytes == 5 * GIB
    granted(ledger, 4 * GIB)
    assert ledger.available_bytes == GIB
