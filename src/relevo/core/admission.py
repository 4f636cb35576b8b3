"""The decision at the door: where a request goes, what it may use there, and where it would go if that route were lost.

Pure: the same request and the same view of the routes give the same verdict. The ladder, cheapest harm first: admit,
delay, redirect, reject; a limit that the client did not name, or allows to be cut, is reduced on the way. A refusal
carries its numbers (`core/refusals.py`). Sentences are written only for those who are shown them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relevo.core import cells as cell_rules
from relevo.core import refusals
from relevo.core.errors import RelevoError
from relevo.core.forecast import Eta, Load, Unknown, estimate, wait_ms
from relevo.core.refusals import limit_of, seconds_text
from relevo.core.route_view import PREFERENCE, Policy, RouteState, RouteView, Weighed, in_preference

__all__ = [
    "PREFERENCE",
    "Admit",
    "Delay",
    "NoStandby",
    "Policy",
    "Redirect",
    "Reject",
    "RouteState",
    "RouteView",
    "Standby",
    "Verdict",
    "Weighed",
    "allows",
    "decide",
    "granted_outputs",
    "in_preference",
]


class Standby(msgspec.Struct, frozen=True, gc=False):
    """Where the request would go if its route were lost, checked now and not when it is too late."""

    route: str
    device: str
    outputs: tuple[int, ...]
    estimate_ms: float | None
    """To the end of its answer, from the loss; None: nothing was learned yet."""
    limits: dict[str, int]


class NoStandby(msgspec.Struct, frozen=True, gc=False):
    """There is no second route for this request, and why."""

    reason: str


class _Placed(msgspec.Struct, frozen=True, gc=False):
    """Common to all verdicts but a refusal."""

    route: str
    device: str
    outputs: tuple[int, ...]
    """Granted output tokens of each choice."""
    standby: Standby | NoStandby
    position: int
    """In the route's line; 0: it can start now."""
    starts_in_ms: float | None
    eta: Eta | Unknown
    cut_from: tuple[int, ...] | None = None
    """The limits that the client named, where it allowed less and less was granted; else None."""


class Admit(_Placed, frozen=True, gc=False):
    """It can start now, on the route it prefers."""


class Delay(_Placed, frozen=True, gc=False):
    """It waits in the line of the route it prefers."""


class Redirect(_Placed, frozen=True, kw_only=True, gc=False):
    """It goes to another route than the one it prefers: at once, or into its line."""

    reason: str
    """A plain sentence that the client is shown."""


class Reject(msgspec.Struct, frozen=True):
    """It is refused, and nothing was changed."""

    error: RelevoError


Verdict = Admit | Delay | Redirect | Reject


# -- does it fit?


def granted_outputs(weighed: Weighed, route: RouteView) -> tuple[int, ...] | None:
    """Output each choice may have on this route when it is empty; None where the request can never fit.

    Only limits that the client did not name, or allows to be cut, are reduced, and to one token at least.
    """
    outputs, prompt, cells = weighed.outputs, weighed.prompt_tokens, route.cells
    if not outputs or len(outputs) > route.slots:
        return None
    context = cells if route.max_context_tokens is None else min(cells, route.max_context_tokens)
    most = context - prompt
    if route.max_output_tokens is not None and route.max_output_tokens < most:
        most = route.max_output_tokens
    if weighed.output_is_default or weighed.may_be_cut:
        share = min(most, (cells - prompt) // len(outputs)) if route.shared else most
        if max(outputs) > share:
            outputs = tuple([min(output, share) for output in outputs])
    if min(outputs) < 1 or max(outputs) > most:
        return None
    return None if route.shared and prompt + sum(outputs) > cells else outputs


def allows(policy: Policy, route: RouteView) -> bool:
    """Whether the client's policy allows this route at all. A hybrid needs the accelerator, so gpu-only allows it."""
    return policy is Policy.AUTO or (policy is Policy.CPU_ONLY) == route.on_cpu


class _Option(msgspec.Struct, frozen=True, gc=False):
    """A route that could take the request, and how it would go there."""

    view: RouteView
    outputs: tuple[int, ...]
    starts_now: bool
    starts_in_ms: float | None
    eta: Eta | Unknown

    @property
    def total_ms(self) -> float | None:
        return self.eta.total_ms if isinstance(self.eta, Eta) else None

    @property
    def position(self) -> int:
        return 0 if self.starts_now else self.view.before_it + 1

    @property
    def has_room(self) -> bool:
        """Whether it starts now, or its line takes one more."""
        return self.starts_now or self.view.has_room

    def misses(self, deadline_s: float | None) -> bool:
        """Whether its estimate says that it would answer too late. Without an estimate it may try."""
        return deadline_s is not None and isinstance(self.eta, Eta) and self.eta.first_token_ms > deadline_s * 1000


def _needed_now(weighed: Weighed, view: RouteView, outputs: tuple[int, ...]) -> int:
    """Cells that have to be free for it to start: where its lease may grow, those it is likely to need."""
    expected = weighed.expected_outputs
    if expected is not None and weighed.output_is_default and view.shared and len(expected) == len(outputs):
        outputs = tuple([max(1, min(pair)) for pair in zip(expected, outputs, strict=True)])
    return cell_rules.need_cells(weighed.prompt_tokens, outputs, view.cells, view.shared)


def _option(weighed: Weighed, view: RouteView) -> _Option | None:
    """How the request would go on this route; None where it can never fit there."""
    outputs = granted_outputs(weighed, view)
    if outputs is None:
        return None
    serves = view.open
    # Nothing runs on a route that is not up yet.
    fits_now = not serves or (
        len(outputs) <= view.slots_free and _needed_now(weighed, view, outputs) <= view.cells_free
    )
    load = Load(
        queued_ahead=view.before_it,
        running=view.running,
        concurrency=view.concurrency,
        must_wait=not fits_now,
        ready_in_ms=0.0 if serves else (view.load_eta_ms or 0.0),
    )
    if serves and view.shut:
        return _Option(view, outputs, False, None, Unknown(view.why_pressed()))
    starts_now = serves and fits_now and view.before_it == 0 and view.running < view.concurrency
    if not serves and view.load_eta_ms is None:
        eta: Eta | Unknown = Unknown("The model is being loaded, and no load of it was timed here yet.")
        return _Option(view, outputs, starts_now, None, eta)
    eta = estimate(view.rates, weighed.prompt_tokens, outputs, load, output_is_default=weighed.output_is_default)
    return _Option(view, outputs, starts_now, 0.0 if starts_now else wait_ms(view.rates, load), eta)


# -- the ladder


_Known = dict[str, _Option | None]
"""Options looked at already, by route; None: it can never fit there."""


def decide(weighed: Weighed, routes: Sequence[RouteView]) -> Verdict:
    """The verdict on a request. `routes`: all of its model, in order of preference (`in_preference`).

    Never raises: a refusal is a Reject whose error is raised (or rendered) by the caller.
    """
    policy = weighed.policy
    home = next((view for view in routes if allows(policy, view)), None)
    known: _Known = {}
    if home is not None and home.open and not home.pressed:
        known[home.route] = option = _option(weighed, home)
        # Nothing can be better than to start now where it prefers to be; the others are looked at only for a standby.
        if option is not None and option.starts_now and not option.misses(weighed.deadline_s):
            return _placed(Admit, weighed, option, _standby(weighed, option, routes, known))
    return _decide_among_all(weighed, routes, known)


def _decide_among_all(weighed: Weighed, routes: Sequence[RouteView], known: _Known) -> Verdict:
    for view in routes:
        if view.route not in known:
            known[view.route] = _option(weighed, view)
    by_route = {route: option for route, option in known.items() if option is not None}
    if not by_route:
        return Reject(refusals.never_fits(weighed, routes))
    allowed = [view for view in routes if allows(weighed.policy, view)]
    options = [by_route[view.route] for view in allowed if view.route in by_route]
    candidates = [option for option in options if option.view.open]
    if not candidates:
        candidates = [o for o in options if o.view.state is RouteState.STARTING and not o.view.breaker_open]
    if not candidates:
        return Reject(refusals.nothing_open(weighed, routes, allowed, frozenset(by_route)))
    with_room = [option for option in candidates if option.has_room]
    if not with_room:
        return Reject(refusals.queue_full([option.view for option in candidates]))
    in_time = [option for option in with_room if not option.misses(weighed.deadline_s)]
    if not in_time:
        first_ms = {o.view.route: o.eta.first_token_ms for o in with_room if isinstance(o.eta, Eta)}
        return Reject(refusals.too_late(weighed, first_ms))
    # Under pressure new work leaves early; but to wait there is better than to be refused.
    calm = [option for option in in_time if not option.view.pressed]
    chosen = _quickest_worth_leaving_for(calm or in_time)
    standby = _standby(weighed, chosen, routes, known)
    if chosen.view.route != allowed[0].route:
        return _redirected(weighed, chosen, standby, allowed[0], by_route.get(allowed[0].route))
    return _placed(Admit if chosen.starts_now else Delay, weighed, chosen, standby)


def _quickest_worth_leaving_for(options: Sequence[_Option]) -> _Option:
    """The preferred one; but where it must wait, one that is expected to end earlier. Unknown estimates never win."""
    preferred = options[0]
    if preferred.starts_now or preferred.total_ms is None:
        return preferred
    # Where two end at the same time, the preferred one is first in the list and min keeps it.
    return min((o for o in options if o.total_ms is not None), key=lambda o: o.total_ms or 0.0)


def _cut_from(weighed: Weighed, option: _Option) -> tuple[int, ...] | None:
    named = weighed.may_be_cut and not weighed.output_is_default
    return weighed.outputs if named and option.outputs != weighed.outputs else None


def _placed(
    kind: type[Admit] | type[Delay], weighed: Weighed, option: _Option, standby: Standby | NoStandby
) -> Admit | Delay:
    view = option.view
    return kind(
        view.route,
        view.device,
        option.outputs,
        standby,
        option.position,
        option.starts_in_ms,
        option.eta,
        _cut_from(weighed, option),
    )


def _redirected(
    weighed: Weighed, option: _Option, standby: Standby | NoStandby, home: RouteView, at_home: _Option | None
) -> Redirect:
    return Redirect(
        route=option.view.route,
        device=option.view.device,
        outputs=option.outputs,
        standby=standby,
        position=option.position,
        starts_in_ms=option.starts_in_ms,
        eta=option.eta,
        cut_from=_cut_from(weighed, option),
        reason=_why_not_home(weighed, home, option, at_home),
    )


def _why_not_home(weighed: Weighed, home: RouteView, chosen: _Option, at_home: _Option | None) -> str:
    if at_home is None:
        return f"The request does not fit the {home.route} route: {limit_of(home)}."
    if not home.open:
        return home.why_not_open()
    if not at_home.has_room:
        return _no_place(home)
    if at_home.misses(weighed.deadline_s):
        return _after_deadline(weighed, home)
    if home.pressed:
        return home.why_pressed()
    there, here = at_home.total_ms or 0.0, chosen.total_ms or 0.0
    return (
        f"The {home.route} route is busy: about {seconds_text(there)} until the whole answer there, "
        f"about {seconds_text(here)} on the {chosen.view.route} route."
    )


def _no_place(view: RouteView) -> str:
    return f"All {view.queue_limit} places in the line of the {view.route} route are taken."


def _after_deadline(weighed: Weighed, view: RouteView) -> str:
    return f"The {view.route} route would answer after the deadline of {weighed.deadline_s:g} s."


# -- the way out


def _standby(weighed: Weighed, chosen: _Option, routes: Sequence[RouteView], known: _Known) -> Standby | NoStandby:
    """The first route after the chosen one that could take the whole request over, were its device lost."""
    if weighed.policy is not Policy.AUTO:
        return NoStandby(f"The policy {weighed.policy} allows no other route.")
    reasons: list[str] = []
    after = False
    for view in routes:
        if not after:
            after = view.route == chosen.view.route
            continue
        if view.device == chosen.view.device and not view.on_cpu:
            reasons.append(f"The {view.route} route would be lost with {view.device}, too.")
            continue
        option = known[view.route] if view.route in known else _option(weighed, view)
        if option is None:
            reasons.append(f"The request does not fit the {view.route} route: {limit_of(view)}.")
        elif not (view.open or (view.state is RouteState.STARTING and not view.breaker_open)):
            reasons.append(view.why_not_open())
        elif not option.has_room:
            reasons.append(_no_place(view))
        elif option.misses(weighed.deadline_s):
            reasons.append(_after_deadline(weighed, view))
        else:
            return Standby(view.route, view.device, option.outputs, option.total_ms, view.limits())
    return NoStandby(" ".join(reasons) or f"The {chosen.view.route} route is the last one this model has.")
