"""What a refusal says: the need, what there is, and the smallest change that would fit, in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
from relevo.core.forecast import UNKNOWN_RETRY_S, retry_after_s
from relevo.core.route_view import Policy, RouteState, RouteView, Weighed


def never_fits(weighed: Weighed, routes: Sequence[RouteView]) -> RelevoError:
    """No route could take it, even when it is empty."""
    if not routes:
        return NothingCanServe("This model has no route.")
    most = max(view.slots for view in routes)
    if len(weighed.outputs) > most:
        return BadRequest(
            f"{len(weighed.outputs)} answers were asked for, and this model runs at most {most} side by side. "
            f"Ask for at most {most}.",
            param="n",
        )
    return ContextLengthExceeded(
        f"{need_of(weighed)}, which no route of this model can take: {limits_of(routes)}. "
        + smallest_change(weighed, routes),
        detail=_detail(weighed, routes),
    )


def smallest_change(weighed: Weighed, routes: Sequence[RouteView]) -> str:
    """What would make it fit one of these routes, as a sentence with numbers: less output, else a shorter prompt.

    Of several routes the one where the least has to go.
    """
    able = [view for view in routes if view.slots >= len(weighed.outputs)]
    if not able:
        return f"Ask for at most {max(view.slots for view in routes)} answers."
    best = max(able, key=lambda view: _most_output(weighed, view))
    left = _most_output(weighed, best)
    if left >= 1:
        return f"With at most {left} output tokens it fits the {best.route} route."
    output = 1 if weighed.output_is_default else max(weighed.outputs)
    best = max(able, key=lambda view: _most_prompt(weighed, view, min(output, view.output_tokens)))
    kept = min(output, best.output_tokens)
    if _most_prompt(weighed, best, kept) < 1:
        kept = 1
    most = _most_prompt(weighed, best, kept)
    if most < 1:
        return f"The {best.route} route is too small for {len(weighed.outputs)} answers; ask for fewer."
    fewer = "" if kept == output else f", and ask for at most {kept} output tokens"
    over = weighed.prompt_tokens - most
    return f"Shorten the prompt by {over} tokens, to at most {most}{fewer}: then it fits the {best.route} route."


def _most_output(weighed: Weighed, view: RouteView) -> int:
    """Output that each choice could have beside this prompt."""
    left = view.context_tokens - weighed.prompt_tokens
    if view.shared:
        left = min(left, (view.cells - weighed.prompt_tokens) // max(1, len(weighed.outputs)))
    return min(left, view.output_tokens)


def _most_prompt(weighed: Weighed, view: RouteView, output_tokens: int) -> int:
    """The longest prompt that leaves each choice so much output."""
    of_all = output_tokens * len(weighed.outputs) if view.shared else output_tokens
    return min(view.context_tokens - output_tokens, view.cells - of_all)


def nothing_open(
    weighed: Weighed, routes: Sequence[RouteView], allowed: Sequence[RouteView], fitting: frozenset[str]
) -> RelevoError:
    """No route that may and can take it is up: say which of the reasons it is. `fitting`: routes it fits when empty."""
    able = [view for view in allowed if view.route in fitting]
    again_s = min((v.reopens_in_s for v in able if v.reopens_in_s is not None), default=None)
    others = [view for view in routes if view not in allowed and view.route in fitting and view.open]
    if not able or (others and weighed.policy is not Policy.AUTO):
        return PolicyRefuses(_policy_sentence(weighed, allowed, able, others), retry_after_s=again_s)
    too_small = [view for view in allowed if view.route not in fitting and view.open]
    if too_small:
        return DoesNotFit(
            f"{need_of(weighed)}, which no open route of this model can take: {limits_of(too_small)}. "
            f"{smallest_change(weighed, too_small)} {able[0].why_not_open()}",
            retry_after_s=again_s,
            detail=_detail(weighed, routes),
        )
    meant = [view for view in able if view.state is not RouteState.STOPPED] or able
    sentences = list(dict.fromkeys(view.why_not_open() for view in meant))  # one breaker speaks for several routes
    if again_s is not None:
        sentences.append(f"The next try is in about {seconds_text(again_s * 1000)}.")
    return NothingCanServe(" ".join(sentences), retry_after_s=UNKNOWN_RETRY_S if again_s is None else again_s)


def _policy_sentence(
    weighed: Weighed, allowed: Sequence[RouteView], able: Sequence[RouteView], others: Sequence[RouteView]
) -> str:
    open_names = " and ".join(view.route for view in others)
    could = f" Without it the request could run on: {open_names}." if open_names else ""
    if not allowed:
        why = "This model has no such route."
    elif not able:
        why = f"{need_of(weighed)}, and there is: {limits_of(allowed)}. {smallest_change(weighed, allowed)}"
    else:
        why = able[0].why_not_open()
    return f"The policy of this request is {weighed.policy}. {why}{could}"


def queue_full(views: Sequence[RouteView]) -> RelevoError:
    """All lines are full."""
    full = ", ".join(f"{view.queue_limit} on the {view.route} route" for view in views)
    again_s = min(retry_after_s(view.rates, view.concurrency) for view in views)
    return QueueFull(
        f"Every place in line is taken: {full}. One should be free in about {seconds_text(again_s * 1000)}.",
        retry_after_s=again_s,
        detail={"queued": {view.route: view.queued for view in views}},
    )


def too_late(weighed: Weighed, first_ms: dict[str, float]) -> RelevoError:
    """No route would answer in time. `first_ms`: until the first token, by route."""
    route, best_ms = min(first_ms.items(), key=lambda item: item[1])
    least_s = math.ceil(best_ms / 100) / 10
    return DeadlineUnreachable(
        f"The first token would come in about {seconds_text(best_ms)} at best (on the {route} route), "
        f"and the deadline is {weighed.deadline_s:g} s. A deadline of at least {least_s:g} s could be met.",
        detail={"first_token_ms": first_ms},
    )


def _detail(weighed: Weighed, routes: Sequence[RouteView]) -> dict[str, Any]:
    return {
        "prompt_tokens": weighed.prompt_tokens,
        "output_tokens": list(weighed.outputs),
        "limits": {view.route: view.limits() for view in routes},
    }


def need_of(weighed: Weighed) -> str:
    """The request in words."""
    least = "at least 1" if weighed.output_is_default else f"up to {max(weighed.outputs, default=0)}"
    answers = "an answer" if len(weighed.outputs) == 1 else f"{len(weighed.outputs)} answers"
    return f"The request has {weighed.prompt_tokens} prompt tokens and wants {answers} of {least} tokens"


def limit_of(view: RouteView) -> str:
    """A route's limits in words."""
    shape = "all answers together" if view.shared else "each answer"
    return (
        f"{view.route} has {view.context_tokens} tokens of context ({shape}), at most {view.output_tokens} of output "
        f"and {view.slots} answers side by side"
    )


def limits_of(views: Sequence[RouteView]) -> str:
    """Several routes' limits in words."""
    return "; ".join(limit_of(view) for view in views)


def seconds_text(ms: float) -> str:
    """A time for people."""
    return f"{ms / 1000:.1f} s" if ms < 10_000 else f"{ms / 1000:.0f} s"
