"""The decision at the door: admit, delay, redirect or reject, with a way out planned."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import pytest

from relevo.core.admission import (
    Admit,
    Delay,
    NoStandby,
    Policy,
    Redirect,
    Reject,
    RouteState,
    RouteView,
    Standby,
    Verdict,
    Weighed,
    decide,
    granted_outputs,
    in_preference,
)
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
from relevo.core.forecast import Eta, Rates, Unknown

S = RouteState
FAST = Rates(prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0, request_ms=2000.0)
SLOW = Rates(prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0, request_ms=20_000.0)


def gpu(**more: Any) -> RouteView:
    fields: dict[str, Any] = {
        "route": "gpu",
        "device": "gpu0",
        "state": S.SERVING,
        "cells": 8192,
        "slots": 8,
        "shared": True,
        "cells_free": 8192,
        "slots_free": 8,
        "queued": 0,
        "running": 0,
        "queue_limit": 64,
        "concurrency": 8,
        "rates": FAST,
    }
    return RouteView(**{**fields, **more})


def cpu(**more: Any) -> RouteView:
    fields: dict[str, Any] = {"route": "cpu", "device": "host", "queue_limit": 16, "rates": SLOW}
    return gpu(**{**fields, **more})


def busy(view: RouteView, **more: Any) -> RouteView:
    return msgspec.structs.replace(view, running=view.concurrency, slots_free=0, cells_free=0, **more)


def ask(prompt: int = 100, *outputs: int, **more: Any) -> Weighed:
    return Weighed(prompt_tokens=prompt, outputs=outputs or (100,), **more)


V = TypeVar("V")


def expect(kind: type[V], verdict: Verdict) -> V:
    assert isinstance(verdict, kind), verdict
    return verdict


def refused(error: type[RelevoError], weighed: Weighed, *routes: RouteView) -> RelevoError:
    verdict = expect(Reject, decide(weighed, routes))
    assert type(verdict.error) is error, verdict.error
    return verdict.error


# -- priorities


def test_only_those_who_would_start_before_it_are_waited_for() -> None:
    line = busy(gpu(), queued=6)
    for ahead, position in ((None, 7), (6, 7), (2, 3), (0, 1)):
        verdict = expect(Delay, decide(ask(), [msgspec.structs.replace(line, ahead=ahead)]))
        assert verdict.position == position
    first, last = (decide(ask(), [msgspec.structs.replace(line, ahead=ahead)]) for ahead in (0, 6))
    assert expect(Delay, first).starts_in_ms < expect(Delay, last).starts_in_ms  # type: ignore[operator]


def test_it_starts_at_once_where_all_who_wait_come_after_it() -> None:
    waiting_for_cells = gpu(queued=1, running=1, cells_free=1000)
    assert expect(Admit, decide(ask(), [msgspec.structs.replace(waiting_for_cells, ahead=0)])).position == 0
    assert expect(Delay, decide(ask(), [waiting_for_cells])).position == 2


def test_a_full_line_refuses_whatever_the_priority() -> None:
    full = busy(gpu(queue_limit=6), queued=6, ahead=0)
    refused(QueueFull, ask(priority=100), full)


# -- admit


def test_a_free_gpu_takes_it_and_the_cpu_stands_by() -> None:
    verdict = expect(Admit, decide(ask(), [gpu(), cpu()]))
    assert (verdict.route, verdict.device, verdict.outputs, verdict.position) == ("gpu", "gpu0", (100,), 0)
    assert verdict.eta == Eta(first_token_ms=100.0, total_ms=1100.0)
    assert verdict.standby == Standby(
        "cpu", "host", (100,), 11_000.0, {"context_tokens": 8192, "max_output_tokens": 8192, "concurrency": 8}
    )


def test_who_asks_for_the_cpu_gets_it_and_that_is_no_redirect() -> None:
    verdict = expect(Admit, decide(ask(policy=Policy.CPU_ONLY), [gpu(), cpu()]))
    assert verdict.route == "cpu"
    assert verdict.standby == NoStandby("The policy cpu-only allows no other route.")


def test_a_model_on_the_cpu_alone_is_admitted_without_standby() -> None:
    verdict = expect(Admit, decide(ask(), [cpu()]))
    assert verdict.standby == NoStandby("The cpu route is the last one this model has.")


def test_a_request_may_fill_the_context_exactly() -> None:
    expect(Admit, decide(ask(8092), [gpu()]))
    refused(ContextLengthExceeded, ask(8093), gpu())


def test_nothing_learned_is_admitted_without_an_estimate() -> None:
    verdict = expect(Admit, decide(ask(), [gpu(rates=None), cpu(rates=None)]))
    assert isinstance(verdict.eta, Unknown)
    assert isinstance(verdict.standby, Standby)
    assert verdict.standby.estimate_ms is None


# -- reduce


def test_a_limit_nobody_named_is_reduced_to_what_the_context_leaves() -> None:
    verdict = expect(Admit, decide(ask(8000, 1024, output_is_default=True), [gpu()]))
    assert verdict.outputs == (192,)


def test_choices_share_what_the_pool_leaves() -> None:
    assert granted_outputs(ask(8000, 1024, 1024, output_is_default=True), gpu()) == (96, 96)


def test_in_strict_slots_each_choice_has_the_whole_rest() -> None:
    assert granted_outputs(ask(8000, 1024, 1024, output_is_default=True), gpu(shared=False)) == (192, 192)


def test_a_limit_the_client_named_is_never_reduced() -> None:
    assert granted_outputs(ask(8000, 1024), gpu()) is None
    assert granted_outputs(ask(10, 512), gpu(max_output_tokens=256)) is None
    assert granted_outputs(ask(10, 512, output_is_default=True), gpu(max_output_tokens=256)) == (256,)


def test_one_token_is_the_least_a_reduced_limit_leaves() -> None:
    assert granted_outputs(ask(8191, 1024, output_is_default=True), gpu()) == (1,)
    assert granted_outputs(ask(8192, 1024, output_is_default=True), gpu()) is None


def test_the_standby_has_its_own_reduced_limit() -> None:
    verdict = expect(Admit, decide(ask(1000, 1024, output_is_default=True), [gpu(), cpu(cells=1500)]))
    assert isinstance(verdict.standby, Standby)
    assert (verdict.outputs, verdict.standby.outputs) == ((1024,), (500,))


# -- delay


def test_a_busy_gpu_that_is_still_sooner_makes_it_wait() -> None:
    verdict = expect(Delay, decide(ask(), [busy(gpu(), queued=3), cpu()]))
    assert (verdict.route, verdict.position, verdict.starts_in_ms) == ("gpu", 4, 1000.0)
    assert isinstance(verdict.standby, Standby)


def test_missing_cells_make_it_wait_although_a_slot_is_free() -> None:
    verdict = expect(Delay, decide(ask(), [gpu(running=1, cells_free=199)]))
    assert verdict.position == 1
    expect(Admit, decide(ask(), [gpu(running=1, cells_free=200)]))


def test_nobody_overtakes_the_line() -> None:
    assert expect(Delay, decide(ask(), [gpu(queued=1)])).position == 2


def test_a_wait_without_an_estimate_is_waited_on_the_preferred_route() -> None:
    verdict = expect(Delay, decide(ask(), [busy(gpu(rates=None)), cpu()]))
    assert verdict.starts_in_ms is None


def test_who_insists_on_the_gpu_waits_for_it_however_long() -> None:
    verdict = expect(Delay, decide(ask(policy=Policy.GPU_ONLY), [busy(gpu(), queued=60), cpu()]))
    assert verdict.standby == NoStandby("The policy gpu-only allows no other route.")


def test_a_route_that_starts_is_waited_for_when_nothing_else_serves() -> None:
    routes = [gpu(state=S.STARTING, load_eta_ms=5000.0), cpu(state=S.STOPPED)]
    verdict = expect(Delay, decide(ask(), routes))
    assert (verdict.route, verdict.position, verdict.starts_in_ms) == ("gpu", 1, 5000.0)
    assert verdict.eta == Eta(first_token_ms=5100.0, total_ms=6100.0)
    unknown = expect(Delay, decide(ask(), [gpu(state=S.STARTING)]))
    assert unknown.starts_in_ms is None
    assert isinstance(unknown.eta, Unknown)


# -- redirect


def test_a_busy_gpu_sends_it_to_a_cpu_that_will_be_done_sooner() -> None:
    verdict = expect(Redirect, decide(ask(10, 10), [busy(gpu(), queued=40), cpu()]))
    assert (verdict.route, verdict.position) == ("cpu", 0)
    assert verdict.reason == (
        "The gpu route is busy: about 10 s until the whole answer there, about 1.1 s on the cpu route."
    )


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ({"breaker_open": True}, "The gpu route is closed to work until probes have succeeded on gpu0."),
        ({"state": S.BACKING_OFF, "cause": "The worker died."}, "The worker died."),
        ({"state": S.GIVEN_UP}, "The gpu route does not serve: Its replica failed too often and waits for a person."),
        ({"state": S.STARTING, "load_eta_ms": 1.0}, "The gpu route does not serve: Its replica is loading the model."),
    ],
)
def test_a_gpu_that_does_not_serve_sends_it_to_the_cpu_with_the_reason(lost: dict[str, Any], reason: str) -> None:
    verdict = expect(Redirect, decide(ask(), [gpu(**lost), cpu()]))
    assert (verdict.route, verdict.device, verdict.reason) == ("cpu", "host", reason)
    assert isinstance(verdict.standby, NoStandby)


def test_a_redirect_may_wait_in_the_cpus_line() -> None:
    verdict = expect(Redirect, decide(ask(), [gpu(breaker_open=True), busy(cpu(), queued=2)]))
    assert verdict.position == 3


def test_what_does_not_fit_the_gpu_goes_to_a_larger_cpu_route() -> None:
    verdict = expect(Redirect, decide(ask(9000), [gpu(), cpu(cells=16384, cells_free=16384)]))
    assert verdict.reason.startswith("The request does not fit the gpu route: gpu has 8192 tokens of context")


def test_a_full_line_at_the_gpu_sends_it_to_the_cpu() -> None:
    verdict = expect(Redirect, decide(ask(), [busy(gpu(), queued=64), cpu()]))
    assert verdict.reason == "All 64 places in the line of the gpu route are taken."


def test_a_deadline_the_gpu_would_miss_sends_it_to_the_cpu() -> None:
    weighed = ask(100, 1000, deadline_s=2.0)
    verdict = expect(Redirect, decide(weighed, [busy(gpu(), queued=39), cpu()]))
    assert verdict.reason == "The gpu route would answer after the deadline of 2 s."


# -- standby


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"cells": 150}, "The request does not fit the cpu route: cpu has 150 tokens of context"),
        ({"state": S.GIVEN_UP}, "The cpu route does not serve"),
        ({"running": 8, "queued": 16}, "All 16 places in the line of the cpu route are taken."),
    ],
)
def test_a_standby_that_could_not_take_it_is_not_promised(second: dict[str, Any], why: str) -> None:
    verdict = expect(Admit, decide(ask(), [gpu(), cpu(**second)]))
    assert isinstance(verdict.standby, NoStandby)
    assert verdict.standby.reason.startswith(why)


def test_a_standby_that_would_miss_the_deadline_is_not_promised() -> None:
    verdict = expect(Admit, decide(ask(1000, 10, deadline_s=5.0), [gpu(), cpu()]))
    assert verdict.standby == NoStandby("The cpu route would answer after the deadline of 5 s.")


def test_a_standby_that_is_still_loading_counts() -> None:
    verdict = expect(Admit, decide(ask(), [gpu(), cpu(state=S.STARTING, load_eta_ms=1000.0)]))
    assert isinstance(verdict.standby, Standby)
    assert verdict.standby.estimate_ms == 12_000.0


# -- reject


def test_what_no_route_could_ever_take_is_told_with_all_numbers() -> None:
    error = refused(ContextLengthExceeded, ask(9000), gpu(), cpu(cells=4096))
    assert error.message == (
        "The request has 9000 prompt tokens and wants an answer of up to 100 tokens, which no route of this model can "
        "take: gpu has 8192 tokens of context (all answers together), at most 8192 of output and 8 answers side by "
        "side; cpu has 4096 tokens of context (all answers together), at most 4096 of output and 8 answers side by "
        "side. Shorten the prompt by 908 tokens, to at most 8092: then it fits the gpu route."
    )
    assert error.detail["limits"]["cpu"]["context_tokens"] == 4096


def test_the_smallest_change_that_would_fit_is_named() -> None:
    error = refused(ContextLengthExceeded, ask(8000, 1000, 1000), gpu())
    assert error.message.endswith("With at most 96 output tokens it fits the gpu route.")
    expect(Admit, decide(ask(8000, 96, 96), [gpu()]))


def test_too_large_is_told_even_when_nothing_serves() -> None:
    refused(ContextLengthExceeded, ask(9000), gpu(state=S.GIVEN_UP))


def test_more_answers_than_slots_is_the_callers_mistake() -> None:
    error = refused(BadRequest, ask(1, *([1] * 9)), gpu())
    assert error.param == "n"
    assert error.message == "9 answers were asked for, and this model runs at most 8 side by side. Ask for at most 8."


def test_what_only_the_lost_gpu_could_take_does_not_fit_now() -> None:
    error = refused(DoesNotFit, ask(2000), gpu(breaker_open=True, reopens_in_s=7.0), cpu(cells=1024))
    assert "no open route of this model can take: cpu has 1024 tokens" in error.message
    assert error.message.endswith("The gpu route is closed to work until probes have succeeded on gpu0.")
    assert error.retry_after_s == 7.0


def test_when_nothing_serves_the_retry_time_is_the_next_probe() -> None:
    error = refused(
        NothingCanServe, ask(), gpu(breaker_open=True, reopens_in_s=30.0), cpu(state=S.BACKING_OFF, reopens_in_s=4.0)
    )
    assert error.retry_after_s == 4.0
    assert "The cpu route does not serve: Its replica failed and will be started again." in error.message


def test_a_model_without_routes_cannot_be_served() -> None:
    refused(NothingCanServe, ask())


def test_who_insists_on_a_lost_gpu_is_refused_and_told_of_the_cpu() -> None:
    error = refused(PolicyRefuses, ask(policy=Policy.GPU_ONLY), gpu(breaker_open=True, reopens_in_s=9.0), cpu())
    assert error.message == (
        "The policy of this request is gpu-only. "
        "The gpu route is closed to work until probes have succeeded on gpu0. "
        "Without it the request could run on: cpu."
    )
    assert error.retry_after_s == 9.0


def test_who_insists_on_a_route_that_is_too_small_or_missing_is_refused() -> None:
    error = refused(PolicyRefuses, ask(2000, policy=Policy.CPU_ONLY), gpu(), cpu(cells=1024))
    assert "there is: cpu has 1024 tokens" in error.message
    error = refused(PolicyRefuses, ask(policy=Policy.GPU_ONLY), cpu())
    assert "This model has no such route." in error.message


def test_full_lines_everywhere_refuse_with_the_time_a_place_comes_free() -> None:
    error = refused(QueueFull, ask(), busy(gpu(), queued=64), busy(cpu(), queued=16))
    assert error.message == (
        "Every place in line is taken: 64 on the gpu route, 16 on the cpu route. One should be free in about 1.0 s."
    )
    assert error.retry_after_s == 1.0
    error = refused(QueueFull, ask(policy=Policy.CPU_ONLY), gpu(), busy(cpu(), queued=16))
    assert error.retry_after_s == 3.0


def test_a_line_of_no_places_still_admits_what_can_start_now() -> None:
    expect(Admit, decide(ask(), [gpu(queue_limit=0)]))
    refused(QueueFull, ask(), busy(gpu(queue_limit=0)))


def test_a_deadline_that_no_route_can_meet_is_refused_with_the_estimate() -> None:
    error = refused(DeadlineUnreachable, ask(5000, 10, deadline_s=2.0), gpu(), cpu())
    assert error.message == (
        "The first token would come in about 5.0 s at best (on the gpu route), and the deadline is 2 s. "
        "A deadline of at least 5 s could be met."
    )
    expect(Admit, decide(ask(5000, 10, deadline_s=5.0), [gpu(), cpu()]))


def test_a_deadline_without_an_estimate_is_tried() -> None:
    expect(Admit, decide(ask(5000, 10, deadline_s=0.001), [gpu(rates=None)]))


# -- less than asked for, where that is allowed


def test_a_limit_the_client_lets_be_cut_is_reduced_and_the_verdict_says_from_what() -> None:
    verdict = expect(Admit, decide(ask(8000, 1024, may_be_cut=True), [gpu(), cpu(cells=8100)]))
    assert (verdict.outputs, verdict.cut_from) == ((192,), (1024,))
    assert isinstance(verdict.standby, Standby)
    assert verdict.standby.outputs == (100,)
    assert expect(Admit, decide(ask(100, 1024, may_be_cut=True), [gpu()])).cut_from is None
    assert expect(Admit, decide(ask(8000, 1024, output_is_default=True), [gpu()])).cut_from is None


def test_where_leases_grow_it_starts_with_the_cells_it_is_likely_to_need() -> None:
    weighed = ask(100, 1000, output_is_default=True, expected_outputs=(150,))
    verdict = expect(Admit, decide(weighed, [gpu(cells_free=250)]))
    assert verdict.outputs == (1000,)
    expect(Delay, decide(weighed, [gpu(cells_free=249)]))
    expect(Delay, decide(ask(100, 1000, expected_outputs=(150,)), [gpu(cells_free=250)]))  # it named the limit
    expect(Delay, decide(weighed, [gpu(cells_free=250, shared=False)]))  # a slot is taken whole


def test_whether_it_ever_fits_is_asked_of_the_least_and_not_of_what_is_expected() -> None:
    weighed = ask(8000, 1000, output_is_default=True, expected_outputs=(500,))
    assert expect(Admit, decide(weighed, [gpu()])).outputs == (192,)


def test_a_priority_changes_nothing_here() -> None:
    assert decide(ask(priority=9), [gpu(), cpu()]) == decide(ask(), [gpu(), cpu()])


# -- hybrid and backup


def hybrid(**more: Any) -> RouteView:
    return gpu(**{"route": "hybrid", "rates": SLOW, **more})


def backup(**more: Any) -> RouteView:
    return cpu(**{"route": "backup", **more})


def test_routes_are_preferred_by_speed_and_a_smaller_model_comes_last() -> None:
    assert [view.route for view in in_preference([backup(), cpu(), hybrid(), gpu()])] == [
        "gpu",
        "hybrid",
        "cpu",
        "backup",
    ]


def test_a_hybrid_takes_over_where_the_whole_model_is_not_on_the_gpu() -> None:
    stopped = gpu(state=S.STOPPED, cause="The model does not fit gpu0 whole.")
    verdict = expect(Redirect, decide(ask(), [stopped, hybrid(), cpu()]))
    assert (verdict.route, verdict.reason) == ("hybrid", "The model does not fit gpu0 whole.")
    assert isinstance(verdict.standby, Standby)
    assert verdict.standby.route == "cpu"


def test_a_route_on_the_same_device_is_no_standby() -> None:
    verdict = expect(Admit, decide(ask(), [gpu(), hybrid()]))
    assert verdict.standby == NoStandby("The hybrid route would be lost with gpu0, too.")
    verdict = expect(Admit, decide(ask(), [gpu(), hybrid(device="gpu1")]))
    assert isinstance(verdict.standby, Standby)


def test_a_hybrid_needs_the_accelerator_and_a_backup_does_not() -> None:
    assert expect(Redirect, decide(ask(policy=Policy.GPU_ONLY), [gpu(breaker_open=True), hybrid()])).route == "hybrid"
    assert expect(Admit, decide(ask(policy=Policy.CPU_ONLY), [gpu(), hybrid(), cpu()])).route == "cpu"
    lost = cpu(state=S.GIVEN_UP)
    assert expect(Redirect, decide(ask(policy=Policy.CPU_ONLY), [gpu(), lost, backup()])).route == "backup"


def test_a_backup_stands_by_for_the_cpu_route() -> None:
    verdict = expect(Admit, decide(ask(policy=Policy.AUTO), [cpu(), backup()]))
    assert isinstance(verdict.standby, Standby)
    assert verdict.standby.route == "backup"


# -- pressure


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        ("tight", "Other programs want the memory of gpu0: new work does not go to the gpu route."),
        ("critical", "Other programs have taken the memory of gpu0: nothing new starts on the gpu route."),
    ],
)
def test_under_pressure_new_work_leaves_early_and_is_told_why(stage: str, reason: str) -> None:
    verdict = expect(Redirect, decide(ask(), [gpu(pressure=stage), hybrid(pressure=stage), cpu()]))
    assert (verdict.route, verdict.reason) == ("cpu", reason)
    verdict = expect(Redirect, decide(ask(), [gpu(pressure=stage), busy(cpu(), queued=3)]))
    assert (verdict.route, verdict.position) == ("cpu", 4)


def test_who_insists_on_a_pressed_gpu_waits_in_its_line() -> None:
    insists = ask(policy=Policy.GPU_ONLY)
    verdict = expect(Delay, decide(insists, [gpu(pressure="critical"), cpu()]))
    assert (verdict.route, verdict.position, verdict.starts_in_ms) == ("gpu", 1, None)
    assert verdict.eta == Unknown("Other programs have taken the memory of gpu0: nothing new starts on the gpu route.")
    expect(Admit, decide(insists, [gpu(pressure="tight"), cpu()]))


def test_to_wait_on_a_pressed_gpu_is_better_than_to_be_refused() -> None:
    expect(Delay, decide(ask(), [gpu(pressure="critical"), cpu(state=S.GIVEN_UP)]))
    expect(Admit, decide(ask(2000), [gpu(pressure="tight"), cpu(cells=1024)]))


def test_an_unknown_stage_is_no_pressure() -> None:
    expect(Admit, decide(ask(), [gpu(pressure="unknown"), cpu()]))


# -- every refusal says what would fit


def test_a_request_only_the_lost_gpu_could_take_is_told_what_the_cpu_could() -> None:
    error = refused(DoesNotFit, ask(1000, 100), gpu(breaker_open=True), cpu(cells=1024))
    assert "With at most 24 output tokens it fits the cpu route." in error.message
    expect(Redirect, decide(ask(1000, 24), [gpu(breaker_open=True), cpu(cells=1024)]))


def test_a_prompt_that_is_too_long_is_told_by_how_much() -> None:
    error = refused(PolicyRefuses, ask(2000, 100, policy=Policy.CPU_ONLY), gpu(), cpu(cells=1024))
    assert error.message.endswith(
        "Shorten the prompt by 1076 tokens, to at most 924: then it fits the cpu route. "
        "Without it the request could run on: gpu."
    )
    expect(Admit, decide(ask(924, 100, policy=Policy.CPU_ONLY), [cpu(cells=1024)]))


def test_a_prompt_and_an_output_that_are_both_too_long_are_told_so() -> None:
    error = refused(ContextLengthExceeded, ask(2000, 2000), gpu(cells=1024))
    assert error.message.endswith(
        "Shorten the prompt by 977 tokens, to at most 1023, and ask for at most 1 output tokens: "
        "then it fits the gpu route."
    )


def test_more_answers_than_the_open_routes_have_slots_is_told_their_number() -> None:
    error = refused(DoesNotFit, ask(10, 5, 5, 5), gpu(breaker_open=True), cpu(slots=2))
    assert "Ask for at most 2 answers." in error.message


def test_when_nothing_serves_the_time_of_the_next_try_is_told() -> None:
    error = refused(NothingCanServe, ask(), gpu(state=S.BACKING_OFF, reopens_in_s=4.0))
    assert error.message.endswith("The next try is in about 4.0 s.")
