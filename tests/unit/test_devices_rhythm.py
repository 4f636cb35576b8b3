"""When devices are read, and whether the machine slept: both from clocks that are passed in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relevo.devices.cadence import CALM_S, QUICK_FOR_S, QUICK_S, Cadence, Change
from relevo.devices.suspend import Clocks, SleepDetector, read_clocks


def test_a_device_at_rest_is_read_every_second() -> None:
    cadence = Cadence()
    assert cadence.wait_s(None, 50.0) == 0.0
    assert cadence.wait_s(50.0, 50.0) == CALM_S
    assert cadence.wait_s(50.0, 50.75) == pytest.approx(0.25)
    assert cadence.wait_s(50.0, 90.0) == 0.0


@pytest.mark.parametrize("change", list(Change))
def test_after_a_change_it_is_read_often_for_a_while(change: Change) -> None:
    cadence = Cadence()
    cadence.changed(change, 10.0)
    assert cadence.last_change is change
    assert cadence.interval_s(10.0) == cadence.interval_s(10.0 + QUICK_FOR_S - 0.01) == QUICK_S
    assert cadence.interval_s(10.0 + QUICK_FOR_S) == CALM_S


def test_it_is_read_often_while_a_load_is_under_way_or_memory_is_pressed() -> None:
    cadence = Cadence()
    assert cadence.interval_s(0.0, under_way=True) == QUICK_S
    assert cadence.interval_s(0.0, calm=False) == QUICK_S
    assert cadence.interval_s(0.0) == CALM_S


def test_a_change_learned_late_does_not_shorten_the_time_of_a_later_one() -> None:
    cadence = Cadence()
    cadence.changed(Change.LOAD, 20.0)
    cadence.changed(Change.DEATH, 18.0)
    assert cadence.interval_s(20.0 + QUICK_FOR_S - 0.01) == QUICK_S


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(list(Change)))), st.floats(0, 200), st.floats(0, 200))
def test_it_never_waits_longer_than_a_second_nor_less_than_nothing(
    changes: list[tuple[float, Change]], read_at: float, now: float
) -> None:
    cadence = Cadence()
    for at, change in changes:
        cadence.changed(change, at)
    wait_s = cadence.wait_s(read_at, max(read_at, now))
    assert 0.0 <= wait_s <= CALM_S


def test_a_clock_that_went_on_while_the_other_stood_still_means_sleep() -> None:
    detector = SleepDetector(Clocks(100.0, 1100.0))
    assert detector.look(Clocks(101.0, 1101.0)) is None
    slept = detector.look(Clocks(102.0, 4702.0))
    assert slept is not None and slept.slept_s == pytest.approx(3600.0) and slept.certain
    assert slept.sentence.startswith("The machine slept for 3600 s")
    assert detector.look(Clocks(103.0, 4703.0)) is None


def test_a_pause_between_reading_the_two_clocks_is_no_sleep() -> None:
    detector = SleepDetector(Clocks(100.0, 1100.0))
    assert detector.look(Clocks(108.0, 1101.0)) is None  # the one that goes on was read 7 s before the other
    assert detector.look(Clocks(109.0, 1109.0)) is None
    slept = detector.look(Clocks(110.0, 1115.0))
    assert slept is not None and slept.slept_s == pytest.approx(5.0)


def test_a_wall_clock_must_jump_further_and_is_not_certain() -> None:
    detector = SleepDetector(Clocks(0.0, 1000.0, certain=False))
    assert detector.look(Clocks(1.0, 1006.0, certain=False)) is None
    slept = detector.look(Clocks(2.0, 1037.0, certain=False))
    assert slept is not None and not slept.certain and "or its clock was set forward" in slept.sentence
    assert detector.look(Clocks(3.0, 500.0, certain=False)) is None  # set back
    assert detector.look(Clocks(4.0, 501.0, certain=False)) is None


def test_this_machines_clocks_show_no_sleep_between_two_looks() -> None:
    detector = SleepDetector(read_clocks())
    assert all(detector.look(read_clocks()) is None for _ in range(100))
