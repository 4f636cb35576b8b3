"""What becomes of a request whose route, or whose gateway, was lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from relevo.core.admission import Policy
from relevo.core.errors import EngineFailed, OurBug
from relevo.core.handover import (
    MOST_ATTEMPTS,
    AfterLoss,
    BecomeResumable,
    Continue,
    Fail,
    Grade,
    LostAttempt,
    Requeue,
    Restart,
    Stay,
    Way,
    Wish,
    on_gateway_restart,
    on_route_lost,
)
from relevo.core.request import TERMINAL, TRANSITIONS, RequestState

DIED = "The worker died."
CPU = Way("cpu", open=True)
CPU_CLOSED = Way("cpu", open=False)
GPU_BACK_SOON = Way("gpu", open=False, returns=True)
GPU_GONE = Way("gpu", open=False)
GPU_OPEN = Way("gpu", open=True)


def lost(delivered: bool = False, **more: Any) -> LostAttempt:
    return LostAttempt(route="gpu", delivered=delivered, cause=DIED, **more)


def after(attempt: LostAttempt, standby: Way | None = CPU, home: Way | None = GPU_BACK_SOON) -> AfterLoss:
    return on_route_lost(attempt, standby, home)


def test_what_nobody_saw_starts_again_on_the_standby() -> None:
    assert after(lost()) == Restart("cpu", Grade.BOUNDARY, False, DIED)


def test_without_an_open_standby_it_waits_for_its_own_route() -> None:
    assert after(lost(), CPU_CLOSED) == Restart("gpu", Grade.BOUNDARY, True, DIED)
    assert after(lost(), None) == Restart("gpu", Grade.BOUNDARY, True, DIED)


def test_a_route_that_is_back_already_is_used_when_the_standby_is_closed() -> None:
    assert after(lost(), CPU_CLOSED, GPU_OPEN) == Restart("gpu", Grade.BOUNDARY, False, DIED)


def test_a_standby_that_will_be_back_is_waited_for_when_home_will_not() -> None:
    standby = Way("cpu", open=False, returns=True)
    assert after(lost(), standby, GPU_GONE) == Restart("cpu", Grade.BOUNDARY, True, DIED)


def test_with_no_way_on_it_rests_and_is_not_lost() -> None:
    for standby in (None, CPU_CLOSED):
        for home in (None, GPU_GONE):
            assert after(lost(), standby, home) == BecomeResumable("The worker died. No other route can take it now.")


def test_who_insists_on_the_gpu_waits_for_it() -> None:
    assert after(lost(policy=Policy.GPU_ONLY)) == Restart("gpu", Grade.BOUNDARY, True, DIED)
    assert isinstance(after(lost(policy=Policy.GPU_ONLY), CPU, GPU_GONE), BecomeResumable)


def test_delivered_output_is_never_done_again() -> None:
    assert after(lost(delivered=True, delivered_bytes=12)) == BecomeResumable(DIED)


@pytest.mark.parametrize(
    ("wish", "certified", "inside_tool_call", "grade"),
    [
        (Wish.AUTO, Grade.BOUNDARY, False, None),
        (Wish.AUTO, Grade.CONTINUOUS, False, Grade.CONTINUOUS),
        (Wish.AUTO, Grade.EXACT, False, Grade.EXACT),
        (Wish.AUTO, Grade.EXACT, True, Grade.EXACT),
        (Wish.AUTO, Grade.CONTINUOUS, True, None),
        (Wish.CONTINUOUS, Grade.BOUNDARY, False, Grade.CONTINUOUS),
        (Wish.CONTINUOUS, Grade.BOUNDARY, True, None),
        (Wish.CONTINUOUS, Grade.EXACT, False, Grade.EXACT),
        (Wish.BOUNDARY, Grade.EXACT, False, None),
    ],
)
def test_delivered_output_goes_on_only_where_a_grade_allows_it(
    wish: Wish, certified: Grade, inside_tool_call: bool, grade: Grade | None
) -> None:
    attempt = lost(delivered=True, wish=wish, inside_tool_call=inside_tool_call)
    expected = BecomeResumable(DIED) if grade is None else Continue("cpu", grade, False, DIED)
    assert on_route_lost(attempt, CPU, GPU_BACK_SOON, certified=certified) == expected


def test_a_continuation_without_a_way_on_rests() -> None:
    attempt = lost(delivered=True, wish=Wish.CONTINUOUS)
    assert on_route_lost(attempt, None, GPU_GONE) == BecomeResumable(DIED)


def test_a_request_that_alone_kills_a_worker_twice_is_not_tried_again() -> None:
    assert isinstance(after(lost(alone_kills=1)), Restart)
    for delivered in (False, True):
        verdict = after(lost(delivered=delivered, alone_kills=2))
        assert isinstance(verdict, Fail)
        assert isinstance(verdict.error, EngineFailed)
        assert verdict.error.message == (
            "The worker died 2 times while it ran nothing but this request, so it is not tried again. The worker died."
        )


def test_restarts_come_to_an_end() -> None:
    assert isinstance(after(lost(attempts=MOST_ATTEMPTS - 1)), Restart)
    assert isinstance(after(lost(attempts=MOST_ATTEMPTS)), Fail)
    assert isinstance(after(lost(delivered=True, attempts=MOST_ATTEMPTS, wish=Wish.CONTINUOUS)), BecomeResumable)


@pytest.mark.parametrize("state", [RequestState.ACCEPTED, RequestState.QUEUED, RequestState.RUNNING])
def test_after_a_gateway_restart_what_nobody_saw_is_queued_again(state: RequestState) -> None:
    assert on_gateway_restart(state, delivered=False) == Requeue("The gateway was restarted.")


@pytest.mark.parametrize("state", [RequestState.QUEUED, RequestState.RUNNING])
def test_after_a_gateway_restart_delivered_output_rests(state: RequestState) -> None:
    assert on_gateway_restart(state, delivered=True) == BecomeResumable("The gateway was restarted.")


def test_after_a_gateway_restart_ends_and_resting_requests_stay() -> None:
    for state, delivered in itertools.product((*TERMINAL, RequestState.RESUMABLE), (False, True)):
        assert on_gateway_restart(state, delivered) == Stay()


def test_delivered_output_of_a_request_without_a_place_is_our_bug() -> None:
    with pytest.raises(OurBug):
        on_gateway_restart(RequestState.ACCEPTED, delivered=True)


def test_every_decision_is_a_legal_move() -> None:
    for state, delivered in itertools.product(RequestState, (False, True)):
        if state is RequestState.ACCEPTED and delivered:
            continue
        decision = on_gateway_restart(state, delivered)
        if isinstance(decision, BecomeResumable):
            assert RequestState.RESUMABLE in TRANSITIONS[state]
        elif isinstance(decision, Requeue) and state is not RequestState.QUEUED:
            assert RequestState.QUEUED in TRANSITIONS[state]
