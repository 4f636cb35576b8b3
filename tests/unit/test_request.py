"""The states of a request, and the table of moves between them."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from relevo.core.errors import OurBug
from relevo.core.request import (
    CAUSES,
    TERMINAL,
    TRANSITIONS,
    IllegalTransition,
    RequestState,
    advance,
    mermaid,
    new_request_id,
)

S = RequestState


def test_every_state_has_a_sentence() -> None:
    for state in RequestState:
        assert state.sentence.endswith("."), state


def test_a_state_is_its_word() -> None:
    assert str(S.QUEUED) == "queued"
    assert RequestState("queued") is S.QUEUED
    assert msgspec.json.encode(S.QUEUED) == b'"queued"'
    assert msgspec.json.decode(b'"queued"', type=RequestState) is S.QUEUED


def test_the_states_are_those_of_the_outer_contract() -> None:
    assert list(RequestState) == ["accepted", "queued", "running", "resumable", "completed", "cancelled", "failed"]


def test_there_are_three_ends_and_nothing_leaves_them() -> None:
    assert {"completed", "cancelled", "failed"} == TERMINAL
    for end, state in itertools.product(TERMINAL, RequestState):
        with pytest.raises(IllegalTransition):
            advance(end, state)


def test_a_lost_route_sends_a_running_request_back_to_a_lane() -> None:
    assert advance(S.RUNNING, S.QUEUED) is S.QUEUED


def test_only_a_request_that_ran_can_complete() -> None:
    assert [state for state, moves in TRANSITIONS.items() if S.COMPLETED in moves] == [S.RUNNING]


def test_a_request_without_a_place_cannot_become_resumable() -> None:
    with pytest.raises(IllegalTransition):
        advance(S.ACCEPTED, S.RESUMABLE)


def test_every_state_that_is_no_end_can_be_cancelled_and_can_fail() -> None:
    for state in set(RequestState) - TERMINAL:
        assert {S.CANCELLED, S.FAILED} <= TRANSITIONS[state]


def test_every_state_is_reached_from_acceptance() -> None:
    reached = {S.ACCEPTED}
    for _ in RequestState:
        reached |= {new for old in reached for new in TRANSITIONS[old]}
    assert reached == set(RequestState)


def test_an_illegal_move_says_what_would_be_right() -> None:
    with pytest.raises(OurBug, match=r"cannot move from accepted to completed .* cancelled, failed, queued, running"):
        advance(S.ACCEPTED, S.COMPLETED)


def test_every_move_has_a_cause_and_no_cause_is_without_its_move() -> None:
    assert set(CAUSES) == {(old, new) for old, moves in TRANSITIONS.items() for new in moves}


def test_the_diagram_shows_each_move_once() -> None:
    lines = mermaid().splitlines()
    for old, new in itertools.product(RequestState, RequestState):
        shown = sum(line.startswith(f"    {old} --> {new}:") for line in lines)
        assert shown == (new in TRANSITIONS[old])


def test_an_id_is_made_of_the_bytes_given() -> None:
    assert new_request_id(bytes(range(16))) == "req_000102030405060708090a0b0c0d0e0f"
    with pytest.raises(OurBug):
        new_request_id(b"short")
