"""Estimates are learned from what ran here; before that there are none."""

from __future__ import annotations

import math

import pytest

from relevo.core.forecast import (
    FEWEST_OUTPUTS,
    LONGEST_MS,
    START_OUTPUT_TOKENS,
    Eta,
    Forecast,
    Load,
    Observation,
    OutputLengths,
    Rates,
    Unknown,
    estimate,
    retry_after_s,
    wait_ms,
)

RATES = Rates(prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0, request_ms=4000.0)


def seen(prompt_s: float = 1.0, decode_s: float = 10.0, **more: object) -> Observation:
    return Observation(
        prompt_tokens=100, prompt_ms=prompt_s * 1000, output_tokens=100, decode_ms=decode_s * 1000, **more
    )  # type: ignore[arg-type]


def learned(*observations: Observation, concurrency: int = 1) -> Rates:
    forecast = Forecast()
    for each in observations:
        forecast.observe("cpu", concurrency, each)
    rates = forecast.rates("cpu", concurrency)
    assert rates is not None
    return rates


def test_nothing_is_known_before_something_ran() -> None:
    forecast = Forecast()
    assert forecast.rates("gpu", 1) is None
    assert repr(forecast) == "<Forecast of nothing yet>"
    assert estimate(None, 10, [10], Load()) == Unknown("No request has run on this route yet.")


def test_one_attempt_is_enough_for_rates() -> None:
    rates = learned(seen())
    assert (rates.prefill_tokens_per_s, rates.decode_tokens_per_s) == (pytest.approx(100.0), pytest.approx(10.0))
    assert rates.request_ms is None


def test_routes_are_learned_apart() -> None:
    forecast = Forecast()
    forecast.observe("cpu", 1, seen())
    assert forecast.rates("gpu", 1) is None


def test_later_attempts_move_the_mean_by_their_weight() -> None:
    rates = learned(seen(decode_s=10.0), seen(decode_s=20.0))
    assert 1000 / rates.decode_tokens_per_s == pytest.approx(100 + 0.2 * 100)


def test_an_answer_of_a_few_tokens_weighs_little() -> None:
    short = Observation(prompt_tokens=1, prompt_ms=500.0, output_tokens=2, decode_ms=2000.0)
    rates = learned(seen(), short)
    assert rates.decode_tokens_per_s == pytest.approx(10.0, rel=0.15)
    assert rates.prefill_tokens_per_s == pytest.approx(100.0, rel=0.35)


@pytest.mark.parametrize("bad", [0.0, -5.0, math.nan, math.inf])
def test_times_that_make_no_sense_are_passed_over(bad: float) -> None:
    odd = Observation(prompt_tokens=100, prompt_ms=bad, output_tokens=100, decode_ms=bad, held_ms=bad)
    assert learned(seen(held_ms=11_000.0), odd) == learned(seen(held_ms=11_000.0))
    forecast = Forecast()
    forecast.observe("cpu", 1, odd)
    assert forecast.rates("cpu", 1) is None


def test_one_output_token_says_nothing_of_the_pace() -> None:
    forecast = Forecast()
    forecast.observe("cpu", 1, Observation(prompt_tokens=100, prompt_ms=1000.0, output_tokens=1, decode_ms=0.01))
    assert forecast.rates("cpu", 1) is None


def test_the_nearest_concurrency_that_was_learned_answers() -> None:
    forecast = Forecast()
    forecast.observe("gpu", 1, seen(decode_s=1.0))
    forecast.observe("gpu", 8, seen(decode_s=4.0))
    found = [forecast.rates("gpu", side_by_side) for side_by_side in (1, 2, 4, 5, 8, 100)]
    assert [round(rates.decode_tokens_per_s) for rates in found if rates is not None] == [100, 100, 25, 25, 25, 25]


def test_a_free_route_is_prompt_then_output() -> None:
    assert estimate(RATES, 200, [50, 30], Load()) == Eta(first_token_ms=2000.0, total_ms=7000.0)


def test_in_a_line_places_come_free_at_the_pace_of_endings() -> None:
    load = Load(queued_ahead=3, running=2, concurrency=2)
    assert wait_ms(RATES, load) == 8000.0
    assert estimate(RATES, 100, [10], load) == Eta(first_token_ms=9000.0, total_ms=10_000.0)


def test_missing_cells_make_it_wait_although_concurrency_is_left() -> None:
    assert wait_ms(RATES, Load(running=1, concurrency=4, must_wait=True)) == 1000.0


def test_before_a_route_serves_the_first_in_the_line_start_together() -> None:
    assert wait_ms(RATES, Load(queued_ahead=1, concurrency=4, ready_in_ms=500.0)) == 500.0
    assert wait_ms(RATES, Load(queued_ahead=4, concurrency=4, ready_in_ms=500.0)) == 1500.0
    assert wait_ms(None, Load(ready_in_ms=500.0)) == 500.0


def test_a_wait_that_nothing_explains_is_unknown() -> None:
    fresh = Rates(prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0)
    answer = estimate(fresh, 10, [10], Load(queued_ahead=1, running=1))
    assert isinstance(answer, Unknown)
    assert "wait in its lane is not known" in answer.reason


def test_an_unnamed_limit_is_expected_to_end_where_answers_end_here() -> None:
    rates = learned(
        Observation(
            prompt_tokens=100, prompt_ms=1000, output_tokens=40, decode_ms=4000, held_ms=5000, limit_named=False
        )
    )
    assert rates.output_tokens == 40
    eta = estimate(rates, 100, [1000], Load(), output_is_default=True)
    assert isinstance(eta, Eta)
    assert eta.total_ms == pytest.approx(5000.0)
    named = estimate(rates, 100, [1000], Load())
    assert isinstance(named, Eta)
    assert named.total_ms == pytest.approx(101_000.0)


def test_answers_cut_by_the_client_do_not_teach_how_long_answers_are() -> None:
    assert learned(seen(held_ms=11_000.0)).output_tokens is None


def test_no_estimate_says_more_than_a_day() -> None:
    slow = Rates(prefill_tokens_per_s=1e-3, decode_tokens_per_s=1e-3, request_ms=LONGEST_MS)
    assert estimate(slow, 10**9, [10**9], Load(queued_ahead=10**6, running=1)) == Eta(LONGEST_MS, LONGEST_MS)


def test_retry_after_is_when_the_next_place_comes_free() -> None:
    assert retry_after_s(RATES, 1) == 4.0
    assert retry_after_s(RATES, 8) == 1.0
    assert retry_after_s(Rates(1.0, 1.0, request_ms=1e9), 1) == 600.0
    assert retry_after_s(None, 1) == 10.0


# ------------------------------------------------------------ how long answers are


def lengths(*tokens: int, kept: int = 512) -> OutputLengths:
    known = OutputLengths(kept)
    for each in tokens:
        known.add(each)
    return known


def test_before_enough_answers_were_seen_a_start_value_stands() -> None:
    known = lengths(*[5] * (FEWEST_OUTPUTS - 1))
    assert known.expected(1000) == START_OUTPUT_TOKENS
    assert known.expected(100) == 100, "never above the limit"
    known.add(5)
    assert known.expected(1000) == 5


def test_19_of_20_answers_are_no_longer_than_what_is_expected() -> None:
    known = lengths(*range(1, 101))
    assert known.expected(1000) == 95
    assert known.expected(50) == 50


def test_an_answer_that_came_far_is_compared_with_those_that_came_as_far() -> None:
    known = lengths(*[10] * 80, *range(101, 121))
    assert known.expected(1000, drawn=10) == 119
    assert known.expected(1000, drawn=100) == 119
    assert known.expected(1000, drawn=115) == 115 + START_OUTPUT_TOKENS, "five came further: too few to say"
    assert known.expected(1000, drawn=5) > 5


def test_old_answers_are_forgotten() -> None:
    known = lengths(*[500] * 40, *[20] * 40, kept=40)
    assert known.samples == 40
    assert known.expected(1000) == 20
    assert repr(known) == "<OutputLengths of 40 answers>"
