"""Any request before any house: short cuts change nothing, and what a refusal advises really helps."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from relevo.core.admission import (
    PREFERENCE,
    Admit,
    Delay,
    Policy,
    Redirect,
    Reject,
    RouteView,
    Standby,
    Verdict,
    Weighed,
    _decide_among_all,
    decide,
    granted_outputs,
    in_preference,
)
from relevo.core.cells import CellLease, CellPool
from relevo.core.errors import DeadlineUnreachable

from .test_core_properties import AdmissionMachine

QUICK = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

views = AdmissionMachine.views
stages = st.sampled_from(["calm", "calm", "tight", "critical", "unknown"])


@st.composite
def houses(draw: st.DrawFn) -> list[RouteView]:
    """One to four routes; those that need an accelerator share it, and the stage of its memory."""
    names = draw(st.lists(st.sampled_from(PREFERENCE), min_size=1, max_size=4, unique=True))
    pressure = {"gpu0": draw(stages), "host": draw(stages)}
    found = []
    for name in names:
        device = "host" if name in ("cpu", "backup") else "gpu0"
        found.append(replace(draw(views), route=name, device=device, pressure=pressure[device]))
    return in_preference(found)


asks = st.builds(
    Weighed,
    prompt_tokens=st.integers(0, 70),
    outputs=st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
    output_is_default=st.booleans(),
    may_be_cut=st.booleans(),
    expected_outputs=st.none() | st.lists(st.integers(0, 20), min_size=1, max_size=5).map(tuple),
    policy=st.sampled_from(Policy),
    deadline_s=st.none() | st.floats(0.01, 100),
)


def told(verdict: Verdict) -> object:
    """What can be compared: errors are not equal even where they say the same."""
    return (type(verdict.error), verdict.error.message) if isinstance(verdict, Reject) else verdict


@QUICK
@given(asks, houses())
def test_the_short_way_decides_as_the_long_one_does(weighed: Weighed, routes: list[RouteView]) -> None:
    assert told(decide(weighed, routes)) == told(_decide_among_all(weighed, routes, {}))


@QUICK
@given(asks, houses())
def test_what_is_placed_can_be_leased_there(weighed: Weighed, routes: list[RouteView]) -> None:
    verdict = decide(weighed, routes)
    if isinstance(verdict, Reject):
        assert verdict.error.message.endswith(".")
        return
    view = next(view for view in routes if view.route == verdict.route)
    lease = CellPool(view.cells, view.slots, view.shared).lease("req", weighed.prompt_tokens, verdict.outputs)
    assert isinstance(lease, CellLease)
    assert all(1 <= given <= asked for given, asked in zip(verdict.outputs, weighed.outputs, strict=True))
    named = not weighed.output_is_default
    if named and not weighed.may_be_cut:
        assert verdict.outputs == weighed.outputs
    assert verdict.cut_from == (weighed.outputs if named and verdict.outputs != weighed.outputs else None)
    if verdict.position == 0:
        assert not view.shut
        assert (view.queued, view.running < view.concurrency) == (0, True)
    else:
        assert verdict.position == view.queued + 1 <= view.queue_limit
    assert isinstance(verdict, Delay) == (verdict.position > 0) or isinstance(verdict, Redirect)


@QUICK
@given(asks, houses())
def test_nothing_new_goes_to_a_pressed_device_while_another_route_would_take_it(
    weighed: Weighed, routes: list[RouteView]
) -> None:
    verdict = decide(weighed, routes)
    if isinstance(verdict, Reject):
        return
    chosen = next(view for view in routes if view.route == verdict.route)
    others = [view for view in routes if not view.pressed and view is not chosen]
    if chosen.pressed and chosen.open and others:
        without = decide(weighed, others)
        assert isinstance(without, Reject) or not any(view.open for view in others)


@QUICK
@given(asks, houses())
def test_the_standby_outlives_the_device(weighed: Weighed, routes: list[RouteView]) -> None:
    verdict = decide(weighed, routes)
    if isinstance(verdict, Admit | Delay | Redirect) and isinstance(verdict.standby, Standby):
        names = [view.route for view in routes]
        assert names.index(verdict.standby.route) > names.index(verdict.route)
        assert verdict.standby.device != verdict.device or verdict.standby.route == "backup"


ADVICE = re.compile(
    r"With at most (?P<left>-?\d+) output tokens it fits the (?P<less>\w+) route\."
    r"|Shorten the prompt by (?P<over>-?\d+) tokens, to at most (?P<prompt>-?\d+)"
    r"(?:, and ask for at most (?P<kept>-?\d+) output tokens)?: then it fits the (?P<shorter>\w+) route\."
    r"|A deadline of at least (?P<deadline>[\d.e+]+) s"
)


@QUICK
@given(asks, houses())
def test_what_a_refusal_advises_would_fit(weighed: Weighed, routes: list[RouteView]) -> None:
    verdict = decide(weighed, routes)
    advice = ADVICE.search(verdict.error.message) if isinstance(verdict, Reject) else None
    if advice is None:
        return
    if advice["deadline"] is not None:
        again = decide(replace(weighed, deadline_s=float(advice["deadline"])), routes)
        assert not (isinstance(again, Reject) and isinstance(again.error, DeadlineUnreachable))
        return
    route = next(view for view in routes if view.route == (advice["less"] or advice["shorter"]))
    if advice["less"] is not None:
        left = int(advice["left"])
        assert 1 <= left < max(weighed.outputs)
        cut = tuple(min(output, left) for output in weighed.outputs)
        assert granted_outputs(replace(weighed, outputs=cut), route) is not None
        return
    prompt, over = int(advice["prompt"]), int(advice["over"])
    assert over == weighed.prompt_tokens - prompt > 0
    kept = weighed.outputs if advice["kept"] is None else (int(advice["kept"]),) * len(weighed.outputs)
    shortened = replace(weighed, prompt_tokens=prompt, outputs=kept)
    assert granted_outputs(shortened, route) is not None
