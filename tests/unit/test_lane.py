"""A lane: bounded, first come first served, nobody overtakes, nobody starts late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relevo.core.errors import OurBug
from relevo.core.lane import Full, Lane, Place, Starts


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
