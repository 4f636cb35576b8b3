"""The states of a replica, and which may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from relevo.core.described import Described


class ReplicaState(Described):
    """Where a replica stands. The value is what status shows, the sentence what it means."""

    STOPPED = "stopped", "It has no process, and nobody asks for one."
    WAITING = "waiting", "It will start when memory, the breaker and its back-off allow."
    STARTING = "starting", "Its process loads the model."
    SERVING = "serving", "It proved with a real inference that it works, and takes work."
    SUSPECT = "suspect", "A heartbeat is overdue: it keeps its work, but gets no new work."
    FENCED = "fenced", "Nothing of it is received any more; its memory may not be free yet."
    DRAINING = "draining", "It was asked to end and takes no new work."
    GIVEN_UP = "given_up", "It failed too often and waits until somebody resumes it."


TRANSITIONS: Mapping[ReplicaState, frozenset[ReplicaState]] = MappingProxyType(
    {
        ReplicaState.STOPPED: frozenset({ReplicaState.WAITING}),
        ReplicaState.WAITING: frozenset({ReplicaState.STARTING, ReplicaState.STOPPED}),
        ReplicaState.STARTING: frozenset({ReplicaState.SERVING, ReplicaState.FENCED, ReplicaState.DRAINING}),
        ReplicaState.SERVING: frozenset({ReplicaState.SUSPECT, ReplicaState.FENCED, ReplicaState.DRAINING}),
        ReplicaState.SUSPECT: frozenset({ReplicaState.SERVING, ReplicaState.FENCED, ReplicaState.DRAINING}),
        ReplicaState.DRAINING: frozenset({ReplicaState.FENCED}),
        ReplicaState.FENCED: frozenset({ReplicaState.WAITING, ReplicaState.GIVEN_UP, ReplicaState.STOPPED}),
        ReplicaState.GIVEN_UP: frozenset({ReplicaState.WAITING, ReplicaState.STOPPED}),
    }
)
