"""The sampler is llama.cpp's chain, computed plainly here beside it, and resumes from tokens alone."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from relevo.core.draw import uniform
from relevo.core.events import Sampling
from relevo.workers.llama.sampler import Leaders, NotFinite, Sampler, log_probabilities, wrong_with

VOCABULARY = 3001  # no multiple of a block; see also the last test


def row(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCABULARY) * 3).astype(np.float32)


def plain(logits: np.ndarray, s: Sampling, choice: int, position: int) -> int:
    """The chain as its description reads, over whole sorted lists."""
    pairs = sorted(((float(v), i) for i, v in enumerate(logits)), key=lambda p: (-p[0], p[1]))
    if s.top_k > 0:
        pairs = pairs[: s.top_k]
    if s.top_p < 1:
        weights = [math.exp(v - pairs[0][0]) for v, _ in pairs]
        total, running = math.fsum(weights), 0.0
        for kept, weight in enumerate(weights, 1):  # noqa: B007
            running += weight
            if running / total >= s.top_p:
                break
        pairs = pairs[:kept]
    if s.min_p > 0:
        pairs = [p for p in pairs if p[0] >= pairs[0][0] + math.log(s.min_p)]
    weights = [math.exp((v - pairs[0][0]) / s.temperature) for v, _ in pairs]
    goal, running = uniform(s.seed, choice, position) * math.fsum(weights), 0.0
    for (_, token), weight in zip(pairs, weights, strict=True):
        running += weight
        if goal < running:
            return token
    return pairs[-1][1]


@pytest.mark.parametrize("top_k", [0, 1, 40, 2000, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_draws_equal_the_chain_computed_plainly(top_k, top_p, min_p):
    sampler_leaders = Leaders(VOCABULARY)
    for seed in range(6):
        s = Sampling(seed=seed, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
        logits = row(seed)
        assert Sampler(s, 1, sampler_leaders).draw(logits, seed) == plain(logits, s, 1, seed)


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.zeros(VOCABULARY, np.float32)
    logits[[2999, 77, 500]] = 5
    assert Sampler(Sampling(temperature=0), 0, Leaders(VOCABULARY)).draw(logits, 0) == 77


def test_top_k_keeps_the_lowest_ids_among_equals():
    logits = np.zeros(VOCABULARY, np.float32)
    s = Sampling(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0)
    drawn = {Sampler(s, 0, Leaders(VOCABULARY)).draw(logits, position) for position in range(60)}
    assert drawn == {0, 1, 2}


def test_a_flat_row_can_give_any_token():
    s = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    logits = np.zeros(VOCABULARY, np.float32)
    leaders = Leaders(VOCABULARY)
    drawn = [Sampler(s, 0, leaders).draw(logits, position) for position in range(40)]
    assert drawn == [int(uniform(0, 0, position) * VOCABULARY) for position in range(40)]


def test_bias_comes_before_the_choice():
    logits = row(1)
    best = int(logits.argmax())
    s = Sampling(temperature=0, logit_bias={best: -100.0, 9: 50.0})
    assert Sampler(s, 0, Leaders(VOCABULARY)).draw(logits, 0) == 9


def test_penalties_follow_llama_cpp():
    logits = np.full(VOCABULARY, -50, np.float32)
    logits[[3, 4, 5]] = [8.0, 7.0, -2.0]
    s = Sampling(temperature=0, repeat_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    leaders = Leaders(VOCABULARY)
    sampler = Sampler(s, 0, leaders)
    sampler.fold([3, 3, 5])
    assert sampler.draw(logits, 0) == 4
    assert leaders.row[3] == 8.0 / 2 - (2 * 0.5 + 0.25)
    assert leaders.row[5] == -2.0 * 2 - (0.5 + 0.25)


def test_only_the_last_tokens_of_prompt_and_output_are_penalized():
    logits = np.zeros(VOCABULARY, np.float32)
    logits[[3, 4]] = [8.0, 7.0]
    sampler = Sampler(Sampling(temperature=0, repeat_penalty=9.0, penalty_last_tokens=2), 0, Leaders(VOCABULARY))
    sampler.fold([3, 1, 1])
    assert sampler.draw(logits, 0) == 3
    sampler.fold([3])
    assert sampler.draw(logits, 1) == 4
    sampler.fold([4])
    sampler.fold([1])
    assert sampler.draw(logits, 2) == 3


@pytest.mark.parametrize("window", [-1, 1, 7, 64])
def test_a_choice_resumed_from_its_tokens_goes_on_as_if_never_stopped(window):
    s = Sampling(seed=11, temperature=1.2, repeat_penalty=1.3, frequency_penalty=0.2, penalty_last_tokens=window)
    prompt = [5, 6, 7, 5] * 4

    def run(before: list[int], until: int) -> list[int]:
        sampler = Sampler(s, 2, Leaders(VOCABULARY))
        sampler.fold(prompt)
        sampler.fold(before)
        output = list(before)
        while len(output) < until:
            output.append(sampler.draw(row(len(output) % 3), len(output)))
            sampler.fold(output[-1:])
        return output

    whole = run([], 40)
    assert all(run(whole[:cut], 40) == whole for cut in (1, 8, 39))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_noticed(bad):
    logits = row(1)
    logits[2000] = bad
    with pytest.raises(NotFinite):
        Sampler(Sampling(), 0, Leaders(VOCABULARY)).draw(logits, 0)


def test_tokens_a_model_forbids_are_no_fault():
    logits = row(1)
    logits[:2900] = -math.inf
    assert Sampler(Sampling(top_k=0, top_p=1.0, min_p=0.0), 0, Leaders(VOCABULARY)).draw(logits, 0) >= 2900
    with pytest.raises(NotFinite):
        Sampler(Sampling(), 0, Leaders(VOCABULARY)).draw(np.full(VOCABULARY, -math.inf, np.float32), 0)


def test_log_probabilities_are_those_of_the_raw_row():
    logits = row(4)
    leaders = Leaders(VOCABULARY)
    _, everything = log_probabilities(logits, 0, VOCABULARY, leaders)
    assert math.fsum(math.exp(p) for _, p in everything) == pytest.approx(1.0, abs=1e-9)
    own, best = log_probabilities(logits, everything[7][0], 5, leaders)
    assert best == everything[:5]
    assert own == pytest.approx(everything[7][1])


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repeat_penalty": 0.0},
        {"penalty_last_tokens": -2},
        {"seed": 1 << 64},
        {"logit_bias": {VOCABULARY: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: math.inf}},
    ],
)
def test_values_out_of_range_are_named(change):
    assert wrong_with(Sampling(), VOCABULARY) is None
    sentence = wrong_with(msgspec.structs.replace(Sampling(), **change), VOCABULARY)
    assert sentence is not None
    assert sentence.endswith(".")


@pytest.mark.parametrize("size", [64, 640, 641, 6400])
def test_the_leaders_are_the_largest_in_order_whatever_the_size(size):
    logits = np.round(np.random.default_rng(size).standard_normal(size) * 4).astype(np.float32)  # many ties
    before = logits.copy()
    leaders = Leaders(size)
    leaders.fill(logits)
    right = sorted(range(size), key=lambda i: (-logits[i], i))
    for count in (1, 2, 5, 40, size - 1, size, size + 9):
        ids, values = leaders.best(count)
        assert ids.tolist() == right[:count]
        assert values.tolist() == [float(logits[i]) for i in right[:count]]
    sampler = Sampler(Sampling(logit_bias={3: 2.0}, repeat_penalty=1.5), 0, leaders)
    sampler.fold([1, 2, 3])
    sampler.draw(logits, 0)
    assert (logits == before).all(), "the engine's own row is never changed"
