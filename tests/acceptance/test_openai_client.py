"""An unchanged OpenAI client against a real service with a real model."""

from __future__ import annotations

import concurrent.futures
import math

import openai
import pytest

from .house import House

MODEL = "smollm2-135m"
CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def test_a_chat_is_answered_with_the_route_in_headers_and_body(house: House) -> None:
    raw = house.client.chat.completions.with_raw_response.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=24
    )
    answer = raw.parse()
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert raw.headers["x-relevo-route"] == "gpu"
    assert raw.headers["x-relevo-degraded"] == "false"
    assert raw.headers["x-relevo-standby"] == "cpu"
    relevo = answer.model_extra["relevo"]
    assert relevo["request_id"] == raw.headers["x-request-id"]
    assert (
        answer.usage is not None
        and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_a_stream_gives_the_same_text_as_a_plain_answer(house: House) -> None:
    plain = house.client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=24)
    stream = house.client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage == plain.usage
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finishes == ["stop"]
    assert len({c.id for c in chunks}) == 1


def test_the_same_seed_draws_the_same_text_and_another_seed_another(house: House) -> None:
    def story(seed: int) -> str:
        answer = house.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a short story."}],
            temperature=1.0,
            top_p=0.95,
            seed=seed,
            max_tokens=24,
            extra_body={"top_k": 50, "min_p": 0.02},
        )
        return answer.choices[0].message.content or ""

    assert story(7) == story(7)
    assert story(7) != story(8)


def test_a_stop_string_ends_the_text_before_it(house: House) -> None:
    answer = house.client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=24, stop=["Paris"]
    )
    assert answer.choices[0].message.content is not None and "Paris" not in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_max_completion_tokens_ends_with_length(house: House) -> None:
    answer = house.client.chat.completions.create(model=MODEL, messages=CAPITAL, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_n_answers_differ_and_are_counted_together(house: House) -> None:
    answer = house.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name something."}],
        n=8,
        max_tokens=8,
        temperature=1.5,
        seed=1,
    )
    assert [c.index for c in answer.choices] == list(range(8))
    assert len({c.message.content for c in answer.choices}) > 1


def test_logprobs_are_probabilities_of_the_drawn_tokens(house: House) -> None:
    answer = house.client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 6
    for token in logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)  # temperature 0 takes the best
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1.0001


def test_a_logit_bias_of_minus_100_bans_a_token(house: House) -> None:
    ask = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 1, "logprobs": 1}
    first = house.client.completions.create(**ask)
    banned = house.http.get(f"/relevo/v1/requests/{first.model_extra['relevo']['request_id']}").json()
    assert banned["state"] == "completed"
    token = first.choices[0].text
    biased = house.client.completions.create(**ask, logit_bias={str(i): -100 for i in range(200, 1200)})
    assert biased.choices[0].text is not None and token is not None


def test_a_plain_completion_continues_the_text(house: House) -> None:
    answer = house.client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=6
    )
    assert "Paris" in answer.choices[0].text


def test_models_are_listed_and_an_unknown_one_is_answered_with_the_list(house: House) -> None:
    assert MODEL in [m.id for m in house.client.models.list()]
    with pytest.raises(openai.NotFoundError) as caught:
        house.client.chat.completions.create(model="gpt-9", messages=CAPITAL)
    assert caught.value.code == "model_not_found" and MODEL in str(caught.value)


def test_a_prompt_that_is_too_long_is_refused_with_numbers(house: House) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        house.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 20_000}])
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in str(caught.value)


def test_cpu_only_policy_runs_on_the_twin(house: House) -> None:
    raw = house.client.chat.completions.with_raw_response.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=24, extra_headers={"x-relevo-policy": "cpu-only"}
    )
    assert raw.headers["x-relevo-route"] == "cpu"
    assert "Paris" in (raw.parse().choices[0].message.content or "")


def test_twenty_requests_at_once_are_all_answered(house: House) -> None:
    def one(i: int) -> str:
        answer = house.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"Count from {i}."}], max_tokens=8, seed=i
        )
        return answer.choices[0].finish_reason

    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        assert all(f in ("stop", "length") for f in pool.map(one, range(20)))


def test_the_same_idempotency_key_finds_the_finished_work(house: House) -> None:
    headers = {"Idempotency-Key": "one-story"}
    ask = {"model": MODEL, "messages": CAPITAL, "max_tokens": 12, "temperature": 1.0}
    first = house.client.chat.completions.with_raw_response.create(**ask, extra_headers=headers)
    again = house.client.chat.completions.with_raw_response.create(**ask, extra_headers=headers)
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    assert again.parse().choices[0].message.content == first.parse().choices[0].message.content
    with pytest.raises(openai.UnprocessableEntityError):
        house.client.chat.completions.create(**{**ask, "max_tokens": 13}, extra_headers=headers)
    listed = house.records(idempotency_key="one-story")
    assert [r["id"] for r in listed] == [first.headers["x-request-id"]]
