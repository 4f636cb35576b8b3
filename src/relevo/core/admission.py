"""The decision at the door: where a request goes, what it may use there, and where it would go if that route were lost.

Pure: the same request and the same view of the routes give the same verdict. The ladder, cheapest harm first: admit,
delay, redirect, reject; a limit that the client did not name is reduced on the way. A refusal carries its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from relevo.core import cells as cell_rules
from relevo.core.described import Described
from relevo.core.errors import (
    BadRequest,
    ContextLengthExceeded,
    DeadlineUnreachable,
    DoesNotFit,
    NothingCanServe,
    PolicyRefuses,
    QueueFull,
    RelevoError,
)
from relevo.core.forecast import UNKNOWN_RETRY_S, Eta, Load, Rates, Unknown, estimate, retry_after_s, wait_ms

CPU_ROUTES: Final = frozenset({"cpu", "backup"})
"""Routes that need no accelerator."""


class Policy(Described):
    """What the client allows."""

    AUTO = "auto", "The accelerator if it can take it, else the CPU, by plan."
    GPU_ONLY = "gpu-only", "Only the accelerator; refuse or wait where it cannot."
    CPU_ONLY = "cpu-only", "Only the CPU."


class RouteState(Described):
    """Whether the replica behind a route serves."""

    SERVING = "serving", "Its replica is ready."
    STARTING = "starting", "Its replica is loading the model."
    BACKING_OFF = "backing_off", "Its replica failed and will be started again."
    GIVEN_UP = "given_up", "Its replica failed too often and waits for a person."
    STOPPED = "stopped", "It is not meant to run."


class Weighed(msgspec.Struct, frozen=True):
    """What a request needs, counted."""

    prompt_tokens: int
    outputs: tuple[int, ...]
    """The most tokens of each choice."""
    output_is_default: bool = False
    """The client named no limit, so it may be reduced to what the context leaves."""
    policy: Policy = Policy.AUTO
    deadline_s: float | None = None
    """The longest the client wants to wait for the first token; None: as long as the lane allows."""


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    """A route as the owner of all state sees it at this moment."""

    route: str
    device: str
    state: RouteState
    cells: int
    """As in CellPool: of the whole pool when shared, else of each slot."""
    slots: int
    shared: bool
    cells_free: int
    slots_free: int
    queued: int
    running: int
    queue_limit: int
    concurrency: int
    breaker_open: bool = False
    reopens_in_s: float | None = None
    """Until its next probe or its next start; None: not by itself."""
    cause: str | None = None
    """Why it does not serve, as a plain sentence."""
    max_context_tokens: int | None = None
    max_output_tokens: int | None = None
    rates: Rates | None = None
    load_eta_ms: float | None = None

    @property
    def open(self) -> bool:
        """Whether work may be sent there."""
        return self.state is RouteState.SERVING and not self.breaker_open

    @property
    def on_cpu(self) -> bool:
        """Whether it needs no accelerator."""
        return self.route in CPU_ROUTES

    @property
    def context_tokens(self) -> int:
        """Prompt and output that one choice may have."""
        return self.cells if self.max_context_tokens is None else min(self.cells, self.max_context_tokens)

    @property
    def output_tokens(self) -> int:
        """Output that one choice may have."""
        return (
            self.context_tokens if self.max_output_tokens is None else min(self.context_tokens, self.max_output_tokens)
        )

    @property
    def has_room(self) -> bool:
        """Whether its line takes one more."""
        return self.queued < self.queue_limit

    def limits(self) -> dict[str, int]:
        """The `limits` of the outer contract."""
        return {
            "context_tokens": self.context_tokens,
            "max_output_tokens": self.output_tokens,
            "concurrency": self.concurrency,
        }

    def why_not_open(self) -> str:
        """The cause, or what its state and breaker say."""
        if self.cause is not None:
            return self.cause
        if self.breaker_open:
            return f"The {self.route} route is closed to work until probes have succeeded on {self.device}."
        return f"The {self.route} route does not serve: {self.state.sentence}"


class Standby(msgspec.Struct, frozen=True):
    """Where the request would go if its route were lost, checked now and not when it is too late."""

    route: str
    device: str
    outputs: tuple[int, ...]
    estimate_ms: float | None
    """To the end of its answer, from the loss; None: nothing was learned yet."""
    limits: dict[str, int]


class NoStandby(msgspec.Struct, frozen=True):
    """There is no second route for this request, and why."""

    reason: str


class _Placed(msgspec.Struct, frozen=True):
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


class Admit(_Placed, frozen=True):
    """It can start now, on the route it prefers."""


class Delay(_Placed, frozen=True):
    """It waits in the line of the route it prefers."""


class Redirect(_Placed, frozen=True, kw_only=True):
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

    Only limits that the client did not name are reduced, and to one token at least.
    """
    outputs = weighed.outputs
    most = min(route.context_tokens - weighed.prompt_tokens, route.output_tokens)
    if weighed.output_is_default and outputs:
        share = (route.cells - weighed.prompt_tokens) // len(outputs) if route.shared else most
        outputs = tuple(min(output, most, share) for output in outputs)
    if not outputs or min(outputs) < 1 or max(outputs) > most:
        return None
    fits = cell_rules.fits_ever(weighed.prompt_tokens, outputs, route.cells, route.slots, route.shared)
    return outputs if fits else None


def allows(policy: Policy, route: RouteView) -> bool:
    """Whether the client's policy allows this route at all."""
    return policy is Policy.AUTO or (policy is Policy.CPU_ONLY) == route.on_cpu


class _Option(msgspec.Struct, frozen=True):
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
        return 0 if self.starts_now else self.view.queued + 1

    def misses(self, deadline_s: float | None) -> bool:
        """Whether its estimate says that it would answer too late. Without an estimate it may try."""
        return deadline_s is not None and isinstance(self.eta, Eta) and self.eta.first_token_ms > deadline_s * 1000


def _option(weighed: Weighed, view: RouteView, outputs: tuple[int, ...]) -> _Option:
    need = cell_rules.need_cells(weighed.prompt_tokens, outputs, view.cells, view.shared)
    fits_now = need <= view.cells_free and len(outputs) <= view.slots_free
    if not view.open:
        fits_now = True  # nothing runs on a route that is not up yet
    load = Load(
        queued_ahead=view.queued,
        running=view.running,
        concurrency=view.concurrency,
        must_wait=not fits_now,
        ready_in_ms=0.0 if view.open else (view.load_eta_ms or 0.0),
    )
    if not view.open and view.load_eta_ms is None:
        eta: Eta | Unknown = Unknown("The model is being loaded, and no load of it was timed here yet.")
        starts_in_ms = None
    else:
        eta = estimate(view.rates, weighed.prompt_tokens, outputs, load, output_is_default=weighed.output_is_default)
        starts_in_ms = wait_ms(view.rates, load)
    starts_now = view.open and fits_now and view.queued == 0 and view.running < view.concurrency
    return _Option(view, outputs, starts_now, starts_in_ms, eta)


# -- the ladder


def decide(weighed: Weighed, routes: Sequence[RouteView]) -> Verdict:
    """The verdict on a request. `routes`: all of its model, in order of preference.

    Never raises: a refusal is a Reject whose error is raised (or rendered) by the caller.
    """
    grants = {view.route: outputs for view in routes if (outputs := granted_outputs(weighed, view)) is not None}
    if not grants:
        return Reject(_never_fits(weighed, routes))
    allowed = [view for view in routes if allows(weighed.policy, view)]
    options = [_option(weighed, view, grants[view.route]) for view in allowed if view.route in grants]
    candidates = [option for option in options if option.view.open]
    if not candidates:
        candidates = [o for o in options if o.view.state is RouteState.STARTING and not o.view.breaker_open]
    if not candidates:
        return Reject(_nothing_open(weighed, routes, allowed, grants))
    with_room = [option for option in candidates if option.starts_now or option.view.has_room]
    if not with_room:
        return Reject(_queue_full([option.view for option in candidates]))
    in_time = [option for option in with_room if not option.misses(weighed.deadline_s)]
    if not in_time:
        return Reject(_too_late(weighed, with_room))
    chosen = _quickest_worth_leaving_for(in_time)
    standby = _standby(weighed, chosen, options, routes)
    return _placed(weighed, chosen, standby, allowed, options)


def _quickest_worth_leaving_for(options: Sequence[_Option]) -> _Option:
    """The preferred one; but where it must wait, one that is expected to end earlier. Unknown estimates never win."""
    preferred = options[0]
    if preferred.starts_now or preferred.total_ms is None:
        return preferred
    # Where two end at the same time, the preferred one is first in the list and min keeps it.
    return min((o for o in options if o.total_ms is not None), key=lambda o: o.total_ms or 0.0)


def _placed(
    weighed: Weighed,
    chosen: _Option,
    standby: Standby | NoStandby,
    allowed: Sequence[RouteView],
    options: Sequence[_Option],
) -> Verdict:
    placed: dict[str, Any] = {
        "route": chosen.view.route,
        "device": chosen.view.device,
        "outputs": chosen.outputs,
        "standby": standby,
        "position": chosen.position,
        "starts_in_ms": 0.0 if chosen.starts_now else chosen.starts_in_ms,
        "eta": chosen.eta,
    }
    home = allowed[0]
    if chosen.view.route != home.route:
        return Redirect(**placed, reason=_why_not_home(weighed, home, chosen, options))
    return Admit(**placed) if chosen.starts_now else Delay(**placed)


def _why_not_home(weighed: Weighed, home: RouteView, chosen: _Option, options: Sequence[_Option]) -> str:
    at_home = next((option for option in options if option.view.route == home.route), None)
    if at_home is None:
        return f"The request does not fit the {home.route} route: {_limit_of(home)}."
    if not home.open:
        return home.why_not_open()
    if not at_home.starts_now and not home.has_room:
        return f"All {home.queue_limit} places in the line of the {home.route} route are taken."
    if at_home.misses(weighed.deadline_s):
        return f"The {home.route} route would answer after the deadline of {weighed.deadline_s:g} s."
    there, here = at_home.total_ms or 0.0, chosen.total_ms or 0.0
    return (
        f"The {home.route} route is busy: about {_seconds(there)} until the whole answer there, "
        f"about {_seconds(here)} on the {chosen.view.route} route."
    )


# -- the way out


def _standby(
    weighed: Weighed, chosen: _Option, options: Sequence[_Option], routes: Sequence[RouteView]
) -> Standby | NoStandby:
    """The first route after the chosen one that could take the whole request over."""
    if weighed.policy is not Policy.AUTO:
        return NoStandby(f"The policy {weighed.policy} allows no other route.")
    later = [view.route for view in routes]
    later = later[later.index(chosen.view.route) + 1 :]
    if not later:
        return NoStandby(f"The {chosen.view.route} route is the last one this model has.")
    reasons: list[str] = []
    for view in routes:
        if view.route not in later:
            continue
        option = next((o for o in options if o.view.route == view.route), None)
        if option is None:
            reasons.append(f"The request does not fit the {view.route} route: {_limit_of(view)}.")
        elif not (view.open or (view.state is RouteState.STARTING and not view.breaker_open)):
            reasons.append(view.why_not_open())
        elif not (option.starts_now or view.has_room):
            reasons.append(f"All {view.queue_limit} places in the line of the {view.route} route are taken.")
        elif option.misses(weighed.deadline_s):
            reasons.append(f"The {view.route} route would answer after the deadline of {weighed.deadline_s:g} s.")
        else:
            return Standby(view.route, view.device, option.outputs, option.total_ms, view.limits())
    return NoStandby(" ".join(reasons))


# -- refusals, with their numbers


def _never_fits(weighed: Weighed, routes: Sequence[RouteView]) -> RelevoError:
    if not routes:
        return NothingCanServe("This model has no route.")
    most = max(view.slots for view in routes)
    if len(weighed.outputs) > most:
        return BadRequest(
            f"{len(weighed.outputs)} answers were asked for, and this model runs at most {most} side by side.",
            param="n",
        )
    return ContextLengthExceeded(
        f"{_need_of(weighed)}, which no route of this model can take: {_limits_of(routes)}. "
        + _smallest_change(weighed, routes),
        detail=_detail(weighed, routes),
    )


def _smallest_change(weighed: Weighed, routes: Sequence[RouteView]) -> str:
    """What would make it fit somewhere."""
    best = max(routes, key=lambda view: view.context_tokens)
    left = best.context_tokens - weighed.prompt_tokens
    if best.shared:
        left = min(left, (best.cells - weighed.prompt_tokens) // max(1, len(weighed.outputs)))
    left = min(left, best.output_tokens)
    if left < 1:
        return f"Shorten the prompt to fewer than {best.context_tokens} tokens."
    return f"With at most {left} output tokens it fits the {best.route} route."


def _nothing_open(
    weighed: Weighed,
    routes: Sequence[RouteView],
    allowed: Sequence[RouteView],
    grants: dict[str, tuple[int, ...]],
) -> RelevoError:
    """No route that may and can take it is up: say which of the reasons it is."""
    able = [view for view in allowed if view.route in grants]
    again_s = min((v.reopens_in_s for v in able if v.reopens_in_s is not None), default=None)
    others = [view for view in routes if view not in allowed and view.route in grants and view.open]
    if not able or (others and weighed.policy is not Policy.AUTO):
        return PolicyRefuses(_policy_sentence(weighed, allowed, able, others), retry_after_s=again_s)
    too_small = [view for view in allowed if view.route not in grants and view.open]
    if too_small:
        return DoesNotFit(
            f"{_need_of(weighed)}, which no open route of this model can take: {_limits_of(too_small)}. "
            + able[0].why_not_open(),
            retry_after_s=again_s,
            detail=_detail(weighed, routes),
        )
    return NothingCanServe(
        " ".join(view.why_not_open() for view in able), retry_after_s=UNKNOWN_RETRY_S if again_s is None else again_s
    )


def _policy_sentence(
    weighed: Weighed, allowed: Sequence[RouteView], able: Sequence[RouteView], others: Sequence[RouteView]
) -> str:
    if not allowed:
        why = "This model has no such route."
    elif not able:
        why = f"{_need_of(weighed)}, and there is: {_limits_of(allowed)}."
    else:
        why = able[0].why_not_open()
    open_names = " and ".join(view.route for view in others)
    could = f" Without it the request could run on: {open_names}." if open_names else ""
    return f"The policy {weighed.policy} was asked for. {why}{could}"


def _queue_full(views: Sequence[RouteView]) -> RelevoError:
    full = ", ".join(f"{view.queue_limit} on the {view.route} route" for view in views)
    return QueueFull(
        f"Every place in line is taken: {full}.",
        retry_after_s=min(retry_after_s(view.rates, view.concurrency) for view in views),
        detail={"queued": {view.route: view.queued for view in views}},
    )


def _too_late(weighed: Weighed, options: Sequence[_Option]) -> RelevoError:
    # Only options with an estimate can miss a deadline, so each has one here.
    first_ms = {o.view.route: o.eta.first_token_ms for o in options if isinstance(o.eta, Eta)}
    route, best_ms = min(first_ms.items(), key=lambda item: item[1])
    return DeadlineUnreachable(
        f"The first token would come in about {_seconds(best_ms)} at best (on the {route} route), "
        f"and the deadline is {weighed.deadline_s:g} s.",
        detail={"first_token_ms": first_ms},
    )


def _detail(weighed: Weighed, routes: Sequence[RouteView]) -> dict[str, Any]:
    return {
        "prompt_tokens": weighed.prompt_tokens,
        "output_tokens": list(weighed.outputs),
        "limits": {view.route: view.limits() for view in routes},
    }


def _need_of(weighed: Weighed) -> str:
    least = "at least 1" if weighed.output_is_default else f"up to {max(weighed.outputs, default=0)}"
    answers = "an answer" if len(weighed.outputs) == 1 else f"{len(weighed.outputs)} answers"
    return f"The request has {weighed.prompt_tokens} prompt tokens and wants {answers} of {least} tokens"


def _limit_of(view: RouteView) -> str:
    shape = "all answers together" if view.shared else "each answer"
    return (
        f"{view.route} has {view.context_tokens} tokens of context ({shape}), at most {view.output_tokens} of output "
        f"and {view.slots} answers side by side"
    )


def _limits_of(views: Sequence[RouteView]) -> str:
    return "; ".join(_limit_of(view) for view in views)


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms < 10_000 else f"{ms / 1000:.0f} s"
