"""The table of a replica's states."""

from __future__ import annotations

import pytest

from relevo.core.described import IllegalTransition, move
from relevo.replicas.state import TRANSITIONS, ReplicaState


def test_every_state_has_a_sentence_a_way_in_and_a_way_to_stopped() -> None:
    assert set(TRANSITIONS) == set(ReplicaState)
    for state in ReplicaState:
        assert state.sentence.endswith(".")
        assert any(state in targets for targets in TRANSITIONS.values())
        seen, new = {state}, {state}
        while new:
            new = {target for old in new for target in TRANSITIONS[old]} - seen
            seen |= new
        assert ReplicaState.STOPPED in seen


def test_only_a_worker_that_was_fenced_may_start_again() -> None:
    living = {ReplicaState.STARTING, ReplicaState.SERVING, ReplicaState.SUSPECT, ReplicaState.DRAINING}
    for state in living:
        assert not TRANSITIONS[state] & {ReplicaState.WAITING, ReplicaState.STARTING, ReplicaState.STOPPED}


def test_a_move_that_is_not_in_the_table_is_our_bug() -> None:
    with pytest.raises(IllegalTransition, match="cannot move from stopped to serving"):
        move("The replica x", TRANSITIONS, ReplicaState.STOPPED, ReplicaState.SERVING)
