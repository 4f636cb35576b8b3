"""A worker that died comes back by itself, later each time, and not for ever."""

from __future__ import annotations

from relevo.core.backoff import Backoff, GivenUp, Wait

RESUME = "Start it with `relevo devices probe gpu0`."
LATEST = 1.0


def delays(backoff: Backoff, times: int, jitter: float = LATEST) -> list[float]:
    found = []
    for at in range(times):
        answer = backoff.failed(float(at), jitter)
        assert isinstance(answer, Wait)
        found.append(answer.delay_s)
    return found


def test_each_failure_doubles_the_wait_up_to_a_cap() -> None:
    backoff = Backoff(RESUME, first_s=0.5, longest_s=5.0, give_up_after=100)
    assert delays(backoff, 6) == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_jitter_shortens_the_wait_by_at_most_half() -> None:
    assert delays(Backoff(RESUME, first_s=4.0), 1, jitter=0.0) == [2.0]
    assert delays(Backoff(RESUME, first_s=4.0), 1, jitter=0.5) == [3.0]
    assert delays(Backoff(RESUME, first_s=4.0), 1, jitter=99.0) == [4.0]


def test_too_many_failures_within_the_window_give_up_and_say_how_to_resume() -> None:
    backoff = Backoff(RESUME, give_up_after=3, window_s=600.0)
    delays(backoff, 2)
    given_up = backoff.failed(2.0, LATEST)
    assert given_up == GivenUp(3, 600.0, RESUME)
    assert given_up.sentence == (
        "It failed 3 times in 600 s and is not started again. Start it with `relevo devices probe gpu0`."
    )
    assert backoff.given_up == given_up


def test_given_up_stays_given_up_even_when_the_window_has_passed() -> None:
    backoff = Backoff(RESUME, give_up_after=2, window_s=10.0)
    delays(backoff, 1)
    backoff.failed(1.0, LATEST)
    assert isinstance(backoff.failed(1000.0, LATEST), GivenUp)


def test_failures_far_apart_never_give_up() -> None:
    backoff = Backoff(RESUME, give_up_after=2, window_s=600.0)
    for at in range(5):
        assert isinstance(backoff.failed(at * 601.0, LATEST), Wait)


def test_a_healthy_time_forgets_the_past() -> None:
    backoff = Backoff(RESUME, first_s=0.5, healthy_s=60.0, give_up_after=3)
    delays(backoff, 2)
    backoff.serving(10.0)
    assert backoff.failed(70.0, LATEST) == Wait(0.5, 1)


def test_a_short_time_of_serving_forgets_nothing() -> None:
    backoff = Backoff(RESUME, first_s=0.5, healthy_s=60.0, give_up_after=9)
    delays(backoff, 2)
    backoff.serving(10.0)
    assert backoff.failed(69.0, LATEST) == Wait(2.0, 3)


def test_health_is_time_in_one_piece() -> None:
    backoff = Backoff(RESUME, first_s=0.5, healthy_s=60.0, give_up_after=9)
    backoff.serving(0.0)
    backoff.failed(40.0, LATEST)
    backoff.serving(41.0)
    assert backoff.failed(81.0, LATEST) == Wait(1.0, 2)


def test_a_person_can_reset_it() -> None:
    backoff = Backoff(RESUME, give_up_after=1)
    assert isinstance(backoff.failed(0.0, LATEST), GivenUp)
    assert repr(backoff) == "<Backoff given up, 1 failures in a row, 1 remembered>"
    backoff.reset()
    assert (backoff.given_up, backoff.failures) == (None, 0)
    assert repr(backoff) == "<Backoff waiting, 0 failures in a row, 0 remembered>"
