"""The official OpenAI client, unchanged, against the HTTP layer."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from relevo.core.errors import ContextLengthExceeded, NothingCanServe, PolicyRefuses, QueueFull
from relevo.core.events import Delta, Routed
from tests.integration.api_house import House, open_house
from tests.integration.fakes.fake_service import FakeService, completed, plain_answer, queued, relevo_object, resumable

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def house():
    with open_house() as opened:
        yield opened


@pytest.fixture(autouse=True)
def fresh(house: House):
    house.service.__init__()  # type: ignore[misc]  # the same server, a service without memory
    return house


def client(house: House, **named: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=house.base + "/v1", api_key="anything", timeout=10, **named)


def test_a_plain_chat_answers_with_text_usage_and_route(house: House):
    with client(house) as api:
        answer = api.chat.completions.create(model="demo", messages=HELLO)
    assert answer.choices[0].message.content == "Hello you"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.total_tokens == 10
    assert answer.id == "chatcmpl-" + house.service.tickets[0].request_id.removeprefix("req_")
    assert answer._request_id == house.service.tickets[0].request_id
    assert answer.model_extra["relevo"]["route"] == "gpu"


def test_the_headers_tell_the_route(house: House):
    with client(house) as api:
        raw = api.chat.completions.with_raw_response.create(model="demo", messages=HELLO)
    told = {name: raw.headers[f"x-relevo-{name}"] for name in ("route", "device", "model", "degraded", "standby")}
    assert told == {"route": "gpu", "device": "gpu0", "model": "demo", "degraded": "false", "standby": "cpu"}


def test_a_stream_has_a_role_the_text_a_finish_and_usage_if_asked(house: House):
    with client(house) as api:
        stream = api.chat.completions.create(
            model="demo", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].model_extra["relevo"]["route"] == "gpu"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello you"
    finishes = [c for c in chunks if c.choices and c.choices[0].finish_reason]
    assert [c.choices[0].finish_reason for c in finishes] == ["stop"]
    assert finishes[0].model_extra["relevo"]["device"] == "gpu0"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 10
    assert {c.id for c in chunks} == {chunks[0].id}
    assert house.service.tickets[0].times_left == 0


def test_a_stream_without_include_usage_has_none(house: House):
    with client(house) as api:
        chunks = list(api.chat.completions.create(model="demo", messages=HELLO, stream=True))
    assert all(chunk.usage is None for chunk in chunks)


def test_every_choice_arrives_whole_in_a_stream_and_in_an_answer(house: House):
    with client(house) as api:
        texts = {0: "", 1: "", 2: ""}
        finished = []
        for chunk in api.chat.completions.create(model="demo", messages=HELLO, n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            if chunk.choices[0].finish_reason:
                finished.append((chunk.choices[0].index, "relevo" in (chunk.model_extra or {})))
        answer = api.chat.completions.create(model="demo", messages=HELLO, n=3)
    assert set(texts.values()) == {"Hello you"}
    assert finished == [(0, False), (1, False), (2, True)]
    assert [choice.message.content for choice in answer.choices] == ["Hello you"] * 3


def test_log_probabilities_have_openais_shape(house: House):
    with client(house) as api:
        answer = api.chat.completions.create(model="demo", messages=HELLO, logprobs=True, top_logprobs=2)
        chunks = list(api.chat.completions.create(model="demo", messages=HELLO, logprobs=True, stream=True))
        columns = api.completions.create(model="demo", prompt="x", logprobs=2).choices[0].logprobs
    content = answer.choices[0].logprobs.content
    assert [one.token for one in content] == ["Hel", "lo ", "you"]
    assert content[0].bytes == [72, 101, 108]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("x", -1.5), ("�", -9999.0)]
    assert chunks[1].choices[0].logprobs.content[0].logprob == -0.25
    assert columns.tokens == ["Hel", "lo ", "you"] and columns.text_offset == [0, 3, 6]
    assert columns.top_logprobs[0] == {"x": -1.5, "�": -9999.0}


def test_completions_work_whole_streamed_and_with_echo(house: House):
    with client(house) as api:
        whole = api.completions.create(model="demo", prompt="Say: ", echo=True)
        chunks = list(api.completions.create(model="demo", prompt="Say: ", stream=True, echo=True))
    assert whole.choices[0].text == "Say: Hello you" and whole.id.startswith("cmpl-")
    assert "".join(c.choices[0].text for c in chunks) == "Say: Hello you"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_sampling_fields_reach_the_service(house: House):
    with client(house) as api:
        api.chat.completions.create(
            model="demo-alias",
            messages=HELLO,
            stop=["A", "B"],
            seed=-1,
            temperature=0.5,
            top_p=0.9,
            frequency_penalty=0.1,
            presence_penalty=-0.1,
            logit_bias={"12": -100},
            max_completion_tokens=17,
            store=True,
            extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "made_up": 1},
            extra_headers={"Idempotency-Key": '"abc"', "x-relevo-policy": "cpu-only", "x-relevo-deadline-s": "30"},
        )
    ask = house.service.asks[0]
    assert (ask.stop, ask.seed, ask.temperature, ask.top_p) == (["A", "B"], 2**64 - 1, 0.5, 0.9)
    assert (ask.top_k, ask.min_p, ask.repeat_penalty, ask.ignore_eos) == (3, 0.1, 1.1, True)
    assert (ask.frequency_penalty, ask.presence_penalty, ask.logit_bias) == (0.1, -0.1, {12: -100.0})
    assert (ask.max_output_tokens, ask.store, ask.idempotency_key) == (17, True, "abc")
    assert (ask.policy, ask.deadline_s, ask.owner, ask.kept) == ("cpu-only", 30.0, "local", True)
    assert len(ask.body_digest) == 64


def test_models_are_listed_and_found_by_name_and_alias(house: House):
    with client(house) as api:
        assert [model.id for model in api.models.list()] == ["demo", "org/other"]
        assert api.models.retrieve("org/other").owned_by == "relevo"
        assert api.models.retrieve("demo-alias").id == "demo"
        with pytest.raises(openai.NotFoundError) as caught:
            api.models.retrieve("nope")
    assert "demo, org/other" in caught.value.message
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("refusal", "kind", "tries"),
    [
        (QueueFull(retry_after_s=0.01), openai.RateLimitError, 3),
        (NothingCanServe(retry_after_s=0.01), openai.InternalServerError, 3),
        (PolicyRefuses(), openai.InternalServerError, 1),
        (ContextLengthExceeded("The prompt has 9000 tokens."), openai.BadRequestError, 1),
    ],
)
def test_the_client_retries_exactly_what_can_help(house: House, refusal: Any, kind: type[Exception], tries: int):
    house.service.refusal = refusal
    with client(house) as api, pytest.raises(kind) as caught:
        api.chat.completions.create(model="demo", messages=HELLO)
    assert len(house.service.asks) == tries
    assert [ask.client_retry for ask in house.service.asks] == list(range(tries))
    assert caught.value.code == refusal.code  # type: ignore[attr-defined]
    assert caught.value.request_id.startswith("req_")  # type: ignore[attr-defined]


def test_a_retry_after_a_refusal_gets_through(house: House):
    house.service.refusal, house.service.refusals = QueueFull(retry_after_s=0.01), 1
    with client(house) as api:
        assert api.chat.completions.create(model="demo", messages=HELLO).choices[0].message.content == "Hello you"


def test_a_resumable_end_is_not_retried_and_names_its_checkpoint(house: House):
    house.service.script = lambda ask: [Routed(relevo_object()), Delta(0, "Hel", [1]), resumable()]
    with client(house) as api, pytest.raises(openai.InternalServerError) as caught:
        api.chat.completions.create(model="demo", messages=HELLO)
    assert len(house.service.asks) == 1
    assert caught.value.status_code == 503 and caught.value.code == "resumable"
    assert caught.value.body["checkpoint"] == "cp_1"
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_stream_that_loses_its_route_raises_in_the_client(house: House):
    house.service.script = lambda ask: [Routed(relevo_object()), Delta(0, "Hel", [1]), resumable()]
    got = ""
    with client(house) as api, pytest.raises(openai.APIError) as caught:
        for chunk in api.chat.completions.create(model="demo", messages=HELLO, stream=True):
            got += chunk.choices[0].delta.content or ""
    assert got == "Hel"
    assert caught.value.code == "resumable" and "Resume the request" in caught.value.message


def test_a_long_wait_in_the_lane_is_bridged_by_comments(house: House):
    house.service.script = lambda ask: [*queued(2), 0.5, *queued(1), 0.2, *plain_answer(ask)]
    with client(house) as api:
        raw = api.chat.completions.with_raw_response.create(model="demo", messages=HELLO, stream=True)
        assert raw.headers["x-relevo-route"] == "pending" and raw.headers["x-relevo-eta-ms"] == "8000"
        chunks = list(raw.parse())
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello you"
    assert chunks[0].model_extra["relevo"]["route"] == "gpu"


def test_a_handover_shows_in_the_stream(house: House):
    moved = relevo_object("cpu", handovers=[{"from": "gpu", "to": "cpu", "at_token": 1, "grade": "exact"}])
    house.service.script = lambda ask: [
        Routed(relevo_object()),
        Delta(0, "a", [1]),
        Routed(moved),
        Delta(0, "b", [2], "length"),
        completed(route="cpu"),
    ]
    with client(house) as api:
        chunks = list(api.chat.completions.create(model="demo", messages=HELLO, stream=True))
    told = [c.model_extra["relevo"]["route"] for c in chunks if c.model_extra]
    assert told == ["gpu", "cpu", "cpu"]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_replayed_answer_is_marked(house: House):
    house.service.replayed = True
    with client(house) as api:
        raw = api.chat.completions.with_raw_response.create(model="demo", messages=HELLO)
    assert raw.headers["idempotent-replayed"] == "true"


def test_the_async_client_streams_many_at_once(house: House):
    async def one(api: openai.AsyncOpenAI) -> str:
        stream = await api.chat.completions.create(model="demo", messages=HELLO, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=house.base + "/v1", api_key="x", timeout=10) as api:
            return await asyncio.gather(*(one(api) for _ in range(20)))

    assert asyncio.run(many()) == ["Hello you"] * 20


def test_a_wrong_parameter_is_a_bad_request_with_its_path(house: House):
    with client(house) as api, pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="demo", messages=HELLO, temperature=3)
    assert caught.value.param == "temperature" and "at most 2" in caught.value.message


def test_service_fake_is_the_services_page():
    from relevo.service.facade import Service

    def takes(service: Service) -> Service:
        return service

    assert takes(FakeService())
