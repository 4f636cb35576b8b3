"""A lane: bounded, the higher priority first, then first come first served; nobody starves, nobody starts late."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relevo.core.errors import OurBug
from relevo.core.lane import SECONDS_A_POINT, Full, Lane, Place, Starts, rank, risen


def everyone(_: str) -> bool:
    return True


def nobody(_: str) -> bool:
    return False


def only(*names: str) -> Callable[[str], bool]:
    return lambda holder: holder in names


def line_of(*names: str, queue: int = 8, concurrency: int = 2) -> Lane:
    lane = Lane("chat/gpu", queue, concurrency)
    for i, name in enumerate(names):
        assert lane.enter(name, float(i), None, "anna") == Place("chat/gpu", i + 1)
    return lane


def test_they_start_in_the_order_they_came() -> None:
    lane = line_of("a", "b", "c")
    assert lane.start_next(5.0, everyone) == Starts(start=("a", "b"))
    assert lane.position("c") == 1
    assert repr(lane) == "<Lane chat/gpu: 2 of 2 running, 1 of 8 queued>"


def test_nobody_overtakes_one_that_does_not_fit_yet() -> None:
    lane = line_of("large", "small")
    assert lane.start_next(5.0, only("small")) == Starts()
    assert lane.start_next(6.0, everyone) == Starts(start=("large", "small"))


def test_fits_is_asked_once_for_each_that_starts() -> None:
    lane = line_of("a", "b", "c", concurrency=8)
    asked: list[str] = []

    def fits(holder: str) -> bool:
        asked.append(holder)
        return holder != "c"

    assert lane.start_next(5.0, fits).start == ("a", "b")
    assert asked == ["a", "b", "c"]


def test_a_full_line_refuses_and_changes_nothing() -> None:
    lane = line_of("a", "b", queue=2)
    assert lane.enter("c", 3.0, None, "anna") == Full("chat/gpu", queued=2, limit=2)
    assert lane.queued == 2
    assert lane.position("c") is None


def test_work_that_runs_takes_no_place_in_the_line() -> None:
    lane = line_of("a", queue=1, concurrency=1)
    lane.start_next(1.0, everyone)
    assert lane.enter("b", 1.0, None, "anna") == Place("chat/gpu", 1)


def test_handed_over_work_goes_first_and_is_not_refused_for_those_who_wait() -> None:
    lane = line_of("a", "b", queue=2)
    assert lane.enter("x", 3.0, None, "anna", handed_over=True) == Place("chat/gpu", 1)
    assert lane.enter("y", 3.0, None, "anna", handed_over=True) == Place("chat/gpu", 2)
    assert lane.waiting_holders == ("x", "y", "a", "b")
    assert lane.start_next(4.0, everyone).start == ("x", "y")


def test_the_line_does_not_overtake_handed_over_work_that_does_not_fit_yet() -> None:
    lane = line_of("a", "b")
    lane.enter("x", 3.0, None, "anna", handed_over=True)
    assert lane.start_next(4.0, only("a", "b")) == Starts()


def test_handed_over_work_has_its_own_bound() -> None:
    lane = Lane("chat/cpu", 1, 1, handover_limit=1)
    lane.enter("x", 0.0, None, "anna", handed_over=True)
    assert lane.enter("y", 0.0, None, "anna", handed_over=True) == Full("chat/cpu", queued=1, limit=1)
    assert lane.enter("a", 0.0, None, "anna") == Place("chat/cpu", 2)


def test_nobody_starts_at_or_after_its_deadline() -> None:
    lane = Lane("chat/gpu", 8, 8)
    lane.enter("late", 0.0, 5.0, "anna")
    lane.enter("in time", 0.0, 6.0, "anna")
    assert lane.next_deadline() == 5.0
    assert lane.start_next(5.0, everyone) == Starts(start=("in time",), expired=("late",))
    assert not lane.leave("late")


def test_deadlines_pass_behind_a_head_that_does_not_fit() -> None:
    lane = Lane("chat/gpu", 8, 8)
    lane.enter("head", 0.0, None, "anna")
    lane.enter("late", 0.0, 5.0, "anna")
    lane.enter("moved", 0.0, 4.0, "anna", handed_over=True)
    assert lane.start_next(9.0, nobody) == Starts(expired=("moved", "late"))
    assert lane.waiting_holders == ("head",)


def test_leaving_works_in_any_state_and_twice_is_harmless() -> None:
    lane = line_of("runs", "waits", concurrency=1)
    lane.start_next(1.0, everyone)
    lane.enter("moved", 2.0, None, "anna", handed_over=True)
    for holder in ("runs", "waits", "moved"):
        assert lane.leave(holder)
        assert not lane.leave(holder)
    assert (lane.queued, lane.running) == (0, 0)


def test_leaving_makes_room() -> None:
    lane = line_of("a", "b", concurrency=1)
    lane.start_next(1.0, everyone)
    assert lane.start_next(2.0, everyone) == Starts()
    lane.leave("a")
    assert lane.start_next(3.0, everyone) == Starts(start=("b",))


def test_nobody_is_in_a_lane_twice() -> None:
    lane = line_of("a", "b", concurrency=1)
    lane.start_next(1.0, everyone)
    for holder in ("a", "b"):
        with pytest.raises(OurBug, match="is in lane chat/gpu already"):
            lane.enter(holder, 2.0, None, "anna", handed_over=True)


def test_a_lane_without_places_takes_only_handed_over_work() -> None:
    lane = Lane("chat/cpu", 0, 1)
    assert isinstance(lane.enter("a", 0.0, None, "anna"), Full)
    assert isinstance(lane.enter("x", 0.0, None, "anna", handed_over=True), Place)


def test_the_oldest_age_is_of_those_who_wait() -> None:
    lane = line_of("a", "b", concurrency=1)
    assert lane.oldest_age_ms(3.0) == 3000.0
    lane.start_next(3.0, everyone)
    assert lane.oldest_age_ms(3.0) == 2000.0
    lane.leave("b")
    assert lane.oldest_age_ms(3.0) == 0.0


def test_an_owners_share_counts_waiting_and_running() -> None:
    lane = line_of("a", "b", concurrency=1)
    lane.start_next(1.0, everyone)
    lane.enter("c", 2.0, None, "ben")
    assert (lane.held_by("anna"), lane.held_by("ben"), lane.held_by("carla")) == (2, 1, 0)


def test_the_snapshot_shows_what_the_status_needs() -> None:
    lane = line_of("a", "b", concurrency=1)
    lane.start_next(1.0, everyone)
    view = lane.snapshot(2.0)
    assert (view.name, view.queued, view.running, view.oldest_age_ms, view.limit) == ("chat/gpu", 1, 1, 1000.0, 8)


def test_a_lane_where_nothing_can_run_is_our_bug() -> None:
    with pytest.raises(OurBug):
        Lane("chat/gpu", 1, 0)


# -- priorities


def test_the_higher_priority_goes_first_and_equals_as_they_came() -> None:
    lane = Lane("chat/gpu", 8, 8)
    for name, priority in (("a", 0), ("low", -1), ("b", 0), ("high", 5), ("also high", 5)):
        lane.enter(name, 1.0, None, priority=priority)
    assert lane.waiting_holders == ("high", "also high", "a", "b", "low")
    assert [lane.position(name) for name in lane.waiting_holders] == [1, 2, 3, 4, 5]
    assert lane.start_next(1.0, everyone).start == ("high", "also high", "a", "b", "low")


def test_the_place_that_is_given_is_the_one_it_has() -> None:
    lane = line_of("a", "b")
    assert lane.enter("high", 2.0, None, priority=9) == Place("chat/gpu", 1)
    assert lane.enter("low", 2.0, None, priority=-9) == Place("chat/gpu", 4)
    lane.enter("moved", 2.0, None, handed_over=True, priority=-50)
    assert lane.position("high") == 2


def test_handed_over_work_of_a_low_priority_still_goes_first() -> None:
    lane = Lane("chat/cpu", 8, 8)
    lane.enter("new", 0.0, None, priority=100)
    lane.enter("moved", 0.0, None, handed_over=True, priority=-100)
    lane.enter("moved, dearer", 0.0, None, handed_over=True)
    assert lane.start_next(0.0, everyone).start == ("moved, dearer", "moved", "new")


def test_who_waits_rises_past_those_who_come_later_with_more() -> None:
    lane = Lane("chat/gpu", 8, 8)
    lane.enter("waits", 0.0, None, priority=0)
    gap_s = 5 * SECONDS_A_POINT
    lane.enter("too late to pass", gap_s + 0.1, None, priority=5)
    lane.enter("in time to pass", gap_s - 0.1, None, priority=5)
    assert lane.waiting_holders == ("in time to pass", "waits", "too late to pass")


def test_nobody_starves_under_an_endless_stream_of_the_highest_priority() -> None:
    lane = Lane("chat/gpu", 1000, 1)
    lane.enter("lowest", 0.0, None, priority=-100)
    for second in range(1000):
        now = float(second)
        lane.enter(f"high {second}", now, None, priority=100)
        [started] = lane.start_next(now, everyone).start
        lane.leave(started)
        if started == "lowest":
            break
        assert second * 1.0 <= 200 * SECONDS_A_POINT
    assert lane.position("lowest") is None


def test_a_full_line_refuses_the_highest_priority_too() -> None:
    lane = line_of("a", "b", queue=2)
    assert isinstance(lane.enter("high", 3.0, None, priority=100), Full)
    assert lane.waiting_holders == ("a", "b")


def test_the_large_one_is_not_overtaken_by_a_small_one_of_its_own_priority() -> None:
    lane = Lane("chat/gpu", 8, 8)
    lane.enter("large", 0.0, None, priority=5)
    lane.enter("small", 0.0, None, priority=5)
    lane.enter("smaller", 0.0, None)
    assert lane.start_next(1.0, only("small", "smaller")) == Starts()


def test_how_many_are_ahead_is_told_before_it_enters() -> None:
    lane = line_of("a", "b")
    lane.enter("moved", 2.0, None, handed_over=True)
    assert [lane.ahead_of(priority, 2.0) for priority in (0, 100, -100)] == [3, 1, 3]
    assert lane.ahead_of(1, 2.0) == 2, "b came one second ago, and a point is worth two"


@given(
    st.lists(st.tuples(st.integers(-100, 100), st.integers(0, 500)), min_size=2, max_size=8), st.integers(500, 10_000)
)
def test_the_order_is_that_of_the_risen_priorities_at_any_time(came: list[tuple[int, int]], now: int) -> None:
    by_rank = sorted(came, key=lambda c: rank(c[0], float(c[1])))
    figures = [risen(priority, float(now - since)) for priority, since in by_rank]
    assert figures == sorted(figures, reverse=True)
