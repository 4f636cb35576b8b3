"""Traces of readings as devices give them: late, partial, with neighbours, and false. No byte is booked twice."""

from __future__ import annotations

import pytest

from relevo.core.errors import OurBug
from relevo.core.leases.lease import Lease, Shortfall
from relevo.core.leases.ledger import Ledger
from relevo.core.leases.pressure import PressureStage
from relevo.core.leases.reading import Reading

GIB = 1 << 30
TOTAL = 24 * GIB


def reading(used: int, at: float) -> Reading:
    return Reading(total_bytes=TOTAL, free_bytes=TOTAL - used, read_at=at)


def card(used: int = 0, **more: float) -> Ledger:
    ledger = Ledger("gpu0", headroom_bytes=0, **more)  # type: ignore[arg-type]
    ledger.observe(reading(used, 0.0))
    return ledger


def granted(ledger: Ledger, bytes_: int, now: float = 0.0) -> Lease:
    lease = ledger.request("chat/gpu", bytes_, now)
    assert isinstance(lease, Lease), lease
    return lease


def living(ledger: Ledger, bytes_: int, neighbour: int = 0) -> Lease:
    """A lease that has been settled and visible for a while, at second 10."""
    lease = granted(ledger, bytes_)
    ledger.settle(lease, bytes_)
    for at in (5.0, 7.5, 10.0):
        ledger.observe(reading(bytes_ + neighbour, at))
    return lease


# -- loads


def test_a_load_that_readings_do_not_show_yet_hides_no_neighbour() -> None:
    # 8 GiB are a neighbour's. Ours are loaded and settled, and for 1.4 s the device still shows the neighbour alone.
    ledger = card(used=8 * GIB)
    lease = granted(ledger, 10 * GIB)
    ledger.settle(lease, 10 * GIB)
    for at in (0.2, 0.7, 1.2, 1.6):
        ledger.observe(reading(8 * GIB, at))
        assert (ledger.external_bytes, ledger.available_bytes) == (8 * GIB, 6 * GIB)
    for at in (1.7, 2.7, 3.7):
        ledger.observe(reading(18 * GIB, at))
        assert (ledger.external_bytes, ledger.available_bytes) == (8 * GIB, 6 * GIB)


def test_a_neighbour_that_grew_during_a_load_is_known_when_the_load_is_settled() -> None:
    ledger = card()
    lease = granted(ledger, 10 * GIB)
    ledger.observe(reading(8 * GIB, 1.0))
    assert ledger.external_bytes == 0
    ledger.settle(lease, 5 * GIB)
    ledger.observe(reading(8 * GIB, 2.0))
    assert ledger.external_bytes == 3 * GIB
    assert ledger.available_bytes == 11 * GIB


def test_a_holder_that_grows_within_its_lease_changes_nothing_while_readings_lag() -> None:
    ledger = card()
    lease = granted(ledger, 10 * GIB)
    ledger.settle(lease, 4 * GIB)
    for at in (2.0, 4.0, 6.0):
        ledger.observe(reading(4 * GIB + 6 * GIB, at))
    assert (ledger.external_bytes, ledger.available_bytes) == (6 * GIB, 8 * GIB)
    ledger.recount(lease, 9 * GIB)
    for used, at in ((10, 6.5), (10, 7.4), (15, 7.9), (15, 8.9)):
        ledger.observe(reading(used * GIB, at))
        assert (ledger.external_bytes, ledger.available_bytes) == (6 * GIB, 8 * GIB)


def test_what_a_holder_gives_back_is_not_taken_for_a_neighbours() -> None:
    ledger = card()
    lease = living(ledger, 10 * GIB)
    ledger.recount(lease, 4 * GIB)
    for used, at in ((10, 10.2), (10, 11.2), (4, 11.6), (4, 12.6)):
        ledger.observe(reading(used * GIB, at))
        assert ledger.external_bytes == 0


# -- unloads


def test_memory_that_comes_back_at_once_is_free_with_the_next_reading() -> None:
    ledger = card()
    ledger.release(living(ledger, 10 * GIB), 10.1)
    assert (ledger.available_bytes, ledger.returning_bytes) == (14 * GIB, 10 * GIB)
    ledger.observe(reading(0, 10.2))
    assert (ledger.available_bytes, ledger.returning_bytes) == (24 * GIB, 0)


def test_memory_that_comes_back_late_counts_until_it_is_seen_to_be_back() -> None:
    ledger = card()
    ledger.release(living(ledger, 10 * GIB), 10.1)
    for at in (10.3, 11.0, 11.6):
        ledger.observe(reading(10 * GIB, at))
        assert (ledger.available_bytes, ledger.external_bytes) == (14 * GIB, 0)
    ledger.observe(reading(0, 11.7))
    assert (ledger.available_bytes, ledger.external_bytes) == (24 * GIB, 0)


def test_a_part_that_is_back_frees_nothing_until_it_is_three_quarters() -> None:
    ledger = card()
    ledger.release(living(ledger, 10 * GIB), 10.1)
    ledger.observe(reading(4 * GIB, 10.5))
    assert (ledger.available_bytes, ledger.returning_bytes) == (14 * GIB, 10 * GIB)
    ledger.observe(reading(2 * GIB, 11.0))
    assert (ledger.available_bytes, ledger.returning_bytes) == (22 * GIB, 2 * GIB)
    ledger.observe(reading(0, 11.5))
    assert (ledger.available_bytes, ledger.external_bytes) == (24 * GIB, 0)


def test_the_part_that_is_not_back_after_five_seconds_is_a_neighbours() -> None:
    ledger = card()
    ledger.release(living(ledger, 10 * GIB), 10.0)
    ledger.observe(reading(4 * GIB, 14.9))
    assert (ledger.returning_bytes, ledger.external_bytes) == (10 * GIB, 0)
    ledger.observe(reading(4 * GIB, 15.0))
    assert (ledger.returning_bytes, ledger.external_bytes, ledger.available_bytes) == (0, 4 * GIB, 20 * GIB)


def test_memory_that_never_comes_back_is_a_neighbours_and_leaves_as_slowly() -> None:
    ledger = card(external_half_life_s=10.0)
    ledger.release(living(ledger, 8 * GIB))
    for at in (11.0, 13.0, 15.9):
        ledger.observe(reading(8 * GIB, at))
        assert (ledger.returning_bytes, ledger.external_bytes) == (8 * GIB, 0)
    ledger.observe(reading(8 * GIB, 16.0))
    assert (ledger.returning_bytes, ledger.external_bytes, ledger.available_bytes) == (0, 8 * GIB, 16 * GIB)
    ledger.observe(reading(0, 26.0))
    assert ledger.external_bytes == 4 * GIB


def test_a_neighbour_that_grows_while_memory_comes_back_is_not_lost_sight_of() -> None:
    ledger = card()
    ledger.release(living(ledger, 10 * GIB), 10.0)
    ledger.observe(reading(16 * GIB, 10.5))  # nothing is back, and somebody took 6
    assert (ledger.external_bytes, ledger.available_bytes) == (6 * GIB, 8 * GIB)
    ledger.observe(reading(6 * GIB, 11.0))
    assert (ledger.returning_bytes, ledger.external_bytes, ledger.available_bytes) == (0, 6 * GIB, 18 * GIB)


def test_a_neighbour_that_takes_what_comes_back_costs_no_byte_twice() -> None:
    ledger = card()
    ledger.release(living(ledger, 10 * GIB), 10.0)
    ledger.observe(reading(6 * GIB, 10.5))  # all is back, and somebody took 6: it looks like a part
    assert ledger.available_bytes == 14 * GIB
    ledger.observe(reading(6 * GIB, 15.0))
    assert (ledger.external_bytes, ledger.available_bytes) == (6 * GIB, 18 * GIB)


def test_a_neighbour_that_leaves_while_memory_comes_back_frees_nothing_of_ours() -> None:
    ledger = card(used=8 * GIB)
    ledger.release(living(ledger, 10 * GIB, neighbour=8 * GIB), 10.0)
    assert ledger.available_bytes == 6 * GIB
    ledger.observe(reading(10 * GIB, 10.5))  # the neighbour is gone, and nothing of ours is back
    assert ledger.available_bytes == 14 * GIB
    ledger.observe(reading(0, 11.0))
    available = ledger.available_bytes
    assert available is not None
    assert 16 * GIB <= available <= 24 * GIB  # a neighbour's fall is believed slowly


def test_of_a_load_that_was_never_visible_a_reading_without_it_proves_nothing_yet() -> None:
    # Loaded and dead before the device showed anything; it shows the load for a moment, late.
    ledger = card()
    lease = granted(ledger, 10 * GIB)
    ledger.settle(lease, 10 * GIB)
    ledger.release(lease, 0.4)
    for used, at in ((0, 0.5), (0, 1.0), (10, 1.3), (0, 1.8)):
        ledger.observe(reading(used * GIB, at))
        assert (ledger.available_bytes, ledger.external_bytes) == (14 * GIB, 0)
    ledger.observe(reading(0, 2.1))
    assert ledger.available_bytes == 24 * GIB


def test_a_holder_that_grew_and_died_at_once_is_not_back_because_its_growth_was_never_shown() -> None:
    ledger = card()
    lease = granted(ledger, 10 * GIB)
    ledger.settle(lease, 0)
    for at in (5.0, 7.5, 10.0):
        ledger.observe(reading(0, at))
    ledger.recount(lease, 10 * GIB)
    ledger.release(lease, 10.2)
    for used, at in ((0, 10.3), (10, 11.0)):
        ledger.observe(reading(used * GIB, at))
        assert (ledger.available_bytes, ledger.external_bytes) == (14 * GIB, 0)
    ledger.observe(reading(0, 11.9))
    assert ledger.available_bytes == 24 * GIB


def test_one_holders_visible_memory_does_not_vouch_for_another_that_has_just_grown() -> None:
    ledger = card()
    other = granted(ledger, 12 * GIB)
    ledger.settle(other, 0)
    lease = living(ledger, 4 * GIB)
    ledger.recount(other, 12 * GIB)  # no reading shows it yet
    ledger.release(lease, 10.1)
    assert (ledger.returning_bytes, ledger.available_bytes) == (4 * GIB, 8 * GIB)


def test_where_the_kernel_itself_counts_the_next_reading_is_proof() -> None:
    ledger = card(lag_s=0.0)
    ledger.release(granted(ledger, 10 * GIB), 0.4)
    assert ledger.available_bytes == 14 * GIB
    ledger.observe(reading(0, 0.5))
    assert ledger.available_bytes == 24 * GIB


def test_the_next_load_gets_no_byte_that_is_still_coming_back() -> None:
    ledger = card()
    ledger.release(living(ledger, 10 * GIB), 10.0)
    following = granted(ledger, 4 * GIB, now=10.0)
    assert ledger.available_bytes == 10 * GIB
    for used, at in ((10, 10.1), (4, 10.5)):  # is it the load that is visible, or a rest of what was released?
        ledger.observe(reading(used * GIB, at))
        assert ledger.available_bytes == 10 * GIB
    ledger.settle(following, 4 * GIB)
    for at in (10.7, 12.3):
        ledger.observe(reading(4 * GIB, at))
    assert (ledger.available_bytes, ledger.external_bytes, ledger.returning_bytes) == (20 * GIB, 0, 0)


def test_two_holders_that_end_together_come_back_one_after_the_other() -> None:
    ledger = card()
    first = granted(ledger, 8 * GIB)
    ledger.settle(first, 8 * GIB)
    second = living(ledger, 4 * GIB, neighbour=8 * GIB)
    ledger.release(first, 10.0)
    ledger.release(second, 10.0)
    assert ledger.returning_bytes == 12 * GIB
    ledger.observe(reading(4 * GIB, 10.5))
    assert (ledger.returning_bytes, ledger.available_bytes) == (4 * GIB, 20 * GIB)
    ledger.observe(reading(0, 11.0))
    assert ledger.available_bytes == 24 * GIB


def test_where_no_reading_will_tell_a_release_counts_for_five_seconds() -> None:
    ledger = Ledger("igpu", declared_bytes=8 * GIB, headroom_bytes=0)
    ledger.observe(Reading(None, None, reason="No interface."))
    ledger.release(granted(ledger, 6 * GIB), 1.0)
    assert isinstance(ledger.request("chat/gpu", 6 * GIB, 5.9), Shortfall)
    assert isinstance(ledger.request("chat/gpu", 6 * GIB, 6.0), Lease)


# -- claims without a process


def test_a_claim_that_rests_hides_no_neighbour() -> None:
    ledger = card()
    lease = granted(ledger, 10 * GIB)
    ledger.rest(lease)
    assert ledger.available_bytes == 14 * GIB
    ledger.observe(reading(6 * GIB, 1.0))
    assert (ledger.external_bytes, ledger.available_bytes) == (6 * GIB, 8 * GIB)
    ledger.observe(reading(0, 11.0))
    assert ledger.external_bytes == 3 * GIB  # and a neighbour's leaving is seen
    ledger.begin(lease)
    ledger.observe(reading(9 * GIB, 12.0))
    assert (ledger.external_bytes, ledger.leased_bytes) == (3 * GIB, 10 * GIB)


def test_a_claim_that_rests_is_given_up_without_a_wait_and_is_not_in_doubt() -> None:
    ledger = card()
    lease = granted(ledger, 10 * GIB)
    ledger.rest(lease)
    ledger.doubt("The machine was suspended.", 5.0)
    assert ledger.unverified == ()
    ledger.observe(reading(0, 6.0))
    ledger.release(lease, 6.0)
    assert (ledger.available_bytes, ledger.returning_bytes) == (24 * GIB, 0)


def test_a_renewed_claim_counts_beside_what_its_last_process_has_not_given_back() -> None:
    ledger = card()
    renewed = ledger.renew(living(ledger, 10 * GIB), 10.1)
    assert (ledger.leased_bytes, ledger.returning_bytes, ledger.available_bytes) == (10 * GIB, 10 * GIB, 4 * GIB)
    ledger.rest(renewed)
    ledger.observe(reading(0, 10.5))
    assert (ledger.returning_bytes, ledger.available_bytes) == (0, 14 * GIB)
    with pytest.raises(OurBug):
        ledger.rest(living(card(), GIB))


# -- devices that do not tell the truth


def test_a_device_that_always_says_that_all_is_free_is_bounded_by_what_was_promised() -> None:
    ledger = card()
    lease = granted(ledger, 16 * GIB)
    ledger.settle(lease, 16 * GIB)
    for at in (1.0, 2.0, 3.0, 40.0):
        ledger.observe(reading(0, at))
        assert ledger.available_bytes == 8 * GIB
    view = ledger.snapshot()
    assert view.disbelief == "gpu0 reports 0 B in use, while holders that live are known to use 16.0 GiB."
    assert (view.external_bytes, view.reason, view.stage) == (None, view.disbelief, PressureStage.UNKNOWN)
    # Nor does it prove that memory is back.
    ledger.release(lease, 40.0)
    ledger.observe(reading(0, 41.0))
    assert ledger.available_bytes == 8 * GIB
    ledger.observe(reading(0, 45.0))
    assert ledger.available_bytes == 24 * GIB


def test_a_used_figure_that_falls_to_nothing_while_holders_live_is_not_believed() -> None:
    ledger = card(used=4 * GIB)
    living(ledger, 10 * GIB, neighbour=4 * GIB)
    ledger.observe(reading(0, 11.0))
    assert ledger.disbelief is not None
    assert ledger.available_bytes == 10 * GIB  # the neighbour is still counted
    ledger.observe(reading(0, 600.0))
    assert ledger.available_bytes == 10 * GIB
    ledger.observe(reading(14 * GIB, 601.0))
    view = ledger.snapshot()
    assert (view.disbelief, view.external_bytes) == (None, 4 * GIB)


def test_a_device_that_showed_use_before_is_believed_again_when_its_holders_are_gone() -> None:
    ledger = card()
    lease = living(ledger, 10 * GIB)
    ledger.observe(reading(0, 11.0))  # the driver was reset: the workers are dying
    ledger.release(lease, 11.1)
    ledger.observe(reading(0, 11.2))
    assert ledger.snapshot().disbelief is None
    assert ledger.available_bytes == 24 * GIB


def test_more_free_memory_than_there_is_is_not_believed() -> None:
    ledger = Ledger("gpu0", headroom_bytes=GIB)
    ledger.observe(Reading(TOTAL, 60 * GIB))
    assert ledger.available_bytes == 23 * GIB
    assert ledger.disbelief == "gpu0 reports 60.0 GiB of free memory and has only 24.0 GiB."


def test_a_reading_that_was_overtaken_is_passed_over() -> None:
    ledger = card()
    ledger.observe(reading(6 * GIB, 2.0))
    ledger.observe(reading(0, 1.0))
    assert ledger.external_bytes == 6 * GIB


@pytest.mark.parametrize("reserved", [0, GIB])
def test_a_device_lost_in_between_is_unknown_and_comes_back_with_all_its_leases(reserved: int) -> None:
    ledger = card()
    living(ledger, 10 * GIB)
    ledger.observe(Reading(None, None, read_at=11.0, reason="The device fell off the bus."))
    assert (ledger.available_bytes, ledger.unknown_reason) == (None, "The device fell off the bus.")
    ledger.observe(Reading(TOTAL, TOTAL - 10 * GIB - reserved, reserved, read_at=12.0))
    assert ledger.available_bytes == 14 * GIB - reserved
