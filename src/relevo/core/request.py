"""The states of a request and the one table of moves between them.

The same table is the law (`advance`), the docs' diagram (`mermaid`) and the oracle of the property test.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from relevo.core.described import Described, IllegalTransition, move
from relevo.core.errors import OurBug

__all__ = ["TERMINAL", "TRANSITIONS", "IllegalTransition", "RequestState", "advance", "mermaid", "new_request_id"]

ID_BYTES: Final = 16


class RequestState(Described):
    """Where an accepted request is. Before acceptance there is no request, only a refusal."""

    ACCEPTED = "accepted", "Its acceptance is in the journal; it has no place in a lane yet."
    QUEUED = (
        "queued",
        "It waits in a lane: for the first time, for a restart on another route, or to go on after a resume.",
    )
    RUNNING = "running", "An attempt of it runs on a replica."
    RESUMABLE = "resumable", "It rests with what was delivered so far, until it is resumed, cancelled, or expires."
    COMPLETED = "completed", "It ended with its whole answer."
    CANCELLED = "cancelled", "It ended because its client or its operator stopped it."
    FAILED = "failed", "It ended without its whole answer, for the reason in its record."


_S = RequestState

# accepted -> resumable is missing on purpose: nothing can have been delivered before a first place in a lane, so
# such a request is queued again. queued -> resumable is there for one that was resumed, waits with delivered output
# for a route, and then loses that route or the gateway. A restart passes through queued, so running -> running is
# missing too: each attempt has a lane's leave to start.
TRANSITIONS: Final[Mapping[RequestState, frozenset[RequestState]]] = MappingProxyType(
    {
        _S.ACCEPTED: frozenset({_S.QUEUED, _S.RUNNING, _S.CANCELLED, _S.FAILED}),
        _S.QUEUED: frozenset({_S.RUNNING, _S.RESUMABLE, _S.CANCELLED, _S.FAILED}),
        _S.RUNNING: frozenset({_S.QUEUED, _S.RESUMABLE, _S.COMPLETED, _S.CANCELLED, _S.FAILED}),
        _S.RESUMABLE: frozenset({_S.QUEUED, _S.RUNNING, _S.CANCELLED, _S.FAILED}),
        _S.COMPLETED: frozenset(),
        _S.CANCELLED: frozenset(),
        _S.FAILED: frozenset(),
    }
)

TERMINAL: Final[frozenset[RequestState]] = frozenset(state for state, moves in TRANSITIONS.items() if not moves)
"""The ends: a request reaches exactly one of them, and never leaves it."""

# What makes each move happen; the labels of the docs' diagram.
CAUSES: Final[Mapping[tuple[RequestState, RequestState], str]] = MappingProxyType(
    {
        (_S.ACCEPTED, _S.QUEUED): "takes a place in a lane",
        (_S.ACCEPTED, _S.RUNNING): "starts at once",
        (_S.ACCEPTED, _S.CANCELLED): "cancelled",
        (_S.ACCEPTED, _S.FAILED): "cannot be served any more",
        (_S.QUEUED, _S.RUNNING): "an attempt starts",
        (_S.QUEUED, _S.RESUMABLE): "had been resumed, and its route is lost again",
        (_S.QUEUED, _S.CANCELLED): "cancelled",
        (_S.QUEUED, _S.FAILED): "deadline passed, or cannot be served any more",
        (_S.RUNNING, _S.QUEUED): "route lost before any output was delivered",
        (_S.RUNNING, _S.RESUMABLE): "route lost after output was delivered",
        (_S.RUNNING, _S.COMPLETED): "the whole answer is durable",
        (_S.RUNNING, _S.CANCELLED): "cancelled",
        (_S.RUNNING, _S.FAILED): "the engine refuses it on every route",
        (_S.RESUMABLE, _S.QUEUED): "resumed, waits",
        (_S.RESUMABLE, _S.RUNNING): "resumed at once",
        (_S.RESUMABLE, _S.CANCELLED): "cancelled",
        (_S.RESUMABLE, _S.FAILED): "expired",
    }
)


def advance(old: RequestState, new: RequestState) -> RequestState:
    """Return `new` where a request may move there from `old`. Raises IllegalTransition: that is our bug."""
    return move("A request", TRANSITIONS, old, new)


def new_request_id(random_bytes: bytes) -> str:
    """`req_` and 32 hex digits, from 16 random bytes that the caller draws."""
    if len(random_bytes) != ID_BYTES:
        raise OurBug(f"A request id is made from {ID_BYTES} random bytes, not {len(random_bytes)}.")
    return "req_" + random_bytes.hex()


def mermaid() -> str:
    """The table as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2", "    [*] --> accepted: the acceptance is durable"]
    for old, moves in TRANSITIONS.items():
        lines += [f"    {old} --> {new}: {CAUSES[old, new]}" for new in RequestState if new in moves]
        if not moves:
            lines.append(f"    {old} --> [*]")
    return "\n".join(lines) + "\n"
