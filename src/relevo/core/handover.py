"""What becomes of a request whose route, or whose gateway, was lost.

The rule behind the table: what nobody has seen may be done again; what somebody has seen is only continued, and only
where a grade allows it; else the request rests as resumable. Nothing accepted disappears.
"""

from __future__ import annotations

from typing import Final

import msgspec

from relevo.core.admission import Policy
from relevo.core.described import Described
from relevo.core.errors import EngineFailed, OurBug, RelevoError
from relevo.core.request import TERMINAL, RequestState

LONELY_KILLS: Final = 2
"""A request that was alone in its worker when the worker died, this many times, is itself the likely cause."""

MOST_ATTEMPTS: Final = 8
"""Restarts are no help after this many; what goes on like that would go on for ever."""


class Wish(Described):
    """How the client or the operator wants handovers of started answers handled."""

    AUTO = "auto", "The certificate decides: continue where it says exact, else rest as resumable."
    CONTINUOUS = "continuous", "Continue from the last token, even where the rest may differ from an uninterrupted run."
    BOUNDARY = "boundary", "Never continue from the middle."


class Grade(Described):
    """How much of an uninterrupted run a handover keeps."""

    EXACT = "exact", "Bit-equal to an uninterrupted run, and certified."
    CONTINUOUS = "continuous", "What was delivered is kept and the random stream goes on; the rest may differ."
    BOUNDARY = "boundary", "Started again at a safe point, before any output was delivered."


class LostAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt whose replica or device is gone."""

    route: str
    delivered: bool
    """Whether any output reached a caller (or, of a kept request, may have)."""
    delivered_bytes: int = 0
    choices: int = 1
    inside_tool_call: bool = False
    """In the middle of a tool call or a constrained structure."""
    policy: Policy = Policy.AUTO
    wish: Wish = Wish.AUTO
    attempts: int = 1
    """Made so far, this one included."""
    alone_kills: int = 0
    """Workers that died while this request was the only one in them, this one included."""
    cause: str = "The route was lost."
    """A plain sentence, shown to the client."""


class Way(msgspec.Struct, frozen=True):
    """A route the request could take from here."""

    route: str
    open: bool
    """Work may be sent there, or waits in its line only for a place."""
    returns: bool = False
    """Not open now, but it is expected back by itself."""


class Restart(msgspec.Struct, frozen=True):
    """Queue it on `route` for a new attempt from its prompt, under the same id."""

    route: str
    grade: Grade
    waits_for_route: bool
    """The route is not open yet; it waits in its line until it is back or the deadline passes."""
    reason: str


class Continue(msgspec.Struct, frozen=True):
    """Queue it on `route` for a new attempt that goes on behind its last token, under the same id."""

    route: str
    grade: Grade
    waits_for_route: bool
    reason: str


class BecomeResumable(msgspec.Struct, frozen=True):
    """End this delivery with an error event `resumable`; the request rests with what exists of it."""

    reason: str


class Fail(msgspec.Struct, frozen=True):
    """End it for good."""

    error: RelevoError


class Requeue(msgspec.Struct, frozen=True):
    """After a restart of the gateway: queue it again from its prompt."""

    reason: str


class Stay(msgspec.Struct, frozen=True):
    """After a restart of the gateway: nothing is to be done."""


AfterLoss = Restart | Continue | BecomeResumable | Fail
AfterRestart = Requeue | BecomeResumable | Stay


def on_route_lost(
    lost: LostAttempt, standby: Way | None, home: Way | None, *, certified: Grade = Grade.BOUNDARY
) -> AfterLoss:
    """What becomes of a running request whose route was lost.

    `standby`: the route planned for it at admission; `home`: the route it ran on. `certified`: what the pair of
    routes was proven to keep on this machine; BOUNDARY while there is no certificate.
    """
    if lost.alone_kills >= LONELY_KILLS:
        return Fail(
            EngineFailed(
                f"The worker died {lost.alone_kills} times while it ran nothing but this request, so it is not tried "
                f"again. {lost.cause}"
            )
        )
    if lost.attempts >= MOST_ATTEMPTS and not lost.delivered:
        return Fail(EngineFailed(f"{lost.attempts} attempts were lost. The last time: {lost.cause}"))
    way = _way_on(lost, standby, home)
    if not lost.delivered:
        if way is None:
            return BecomeResumable(f"{lost.cause} No other route can take it now.")
        return Restart(way.route, Grade.BOUNDARY, not way.open, lost.cause)
    grade = _grade_to_continue(lost, certified)
    if grade is None or way is None or lost.attempts >= MOST_ATTEMPTS:
        return BecomeResumable(lost.cause)
    return Continue(way.route, grade, not way.open, lost.cause)


def _way_on(lost: LostAttempt, standby: Way | None, home: Way | None) -> Way | None:
    """An open standby, else the open home, else one that will be back. Only the policy auto may leave home."""
    ways = [home] if lost.policy is not Policy.AUTO else [standby, home]
    known = [way for way in ways if way is not None]
    return next((way for way in known if way.open), None) or next((way for way in reversed(known) if way.returns), None)


def _grade_to_continue(lost: LostAttempt, certified: Grade) -> Grade | None:
    """The grade under which delivered output may be continued; None: not at all."""
    if lost.wish is Wish.BOUNDARY:
        return None
    if certified is Grade.EXACT:
        return Grade.EXACT
    # A tool call half delivered must not go on with other arguments than it began with.
    if lost.inside_tool_call:
        return None
    if lost.wish is Wish.CONTINUOUS or certified is Grade.CONTINUOUS:
        return Grade.CONTINUOUS
    return None


# What a stopped gateway leaves behind, by state. Output that was delivered cannot be done again; everything else can,
# whether or not somebody still waits for it: its id was given out, so it must come to an end that can be looked up.
_REASON: Final = "The gateway was restarted."


def on_gateway_restart(state: RequestState, delivered: bool) -> AfterRestart:
    """What becomes of a request that the journal shows in `state`, after the gateway was killed or stopped.

    The same for kept requests and for others: a request that is not kept lost its connection with the gateway, but
    it was accepted, so it still ends completed or resumable. Raises OurBug for accepted with delivered output.
    """
    if state in TERMINAL or state is RequestState.RESUMABLE:
        return Stay()
    if delivered:
        if state is RequestState.ACCEPTED:
            raise OurBug("The journal shows delivered output of a request that never had a place in a lane.")
        return BecomeResumable(_REASON)
    return Requeue(_REASON)
