"""From an OpenAI body to the internal request."""

from __future__ import annotations

from typing import Any

import pytest

from relevo.api.call import Call
from relevo.api.openai_ask import chat_ask, completion_ask
from relevo.config import LimitsConfig
from relevo.core.errors import BadRequest, ModelNotFound, RelevoError, UnsupportedParameter
from relevo.core.events import Ask

MODELS = [{"id": "demo", "aliases": ["other-name"]}, {"id": "second"}]
USER = {"role": "user", "content": "Hi"}


async def _nothing(*_: Any) -> Any:
    raise AssertionError("no bytes move here")


def call(**headers: str) -> Call:
    fields = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    made = Call({"type": "http", "headers": fields, "query_string": b""}, _nothing, _nothing)
    made.owner = "key_1"
    made.read_headers()
    return made


def chat(body: dict[str, Any] | None = None, headers: dict[str, str] | None = None, **fields: Any) -> Ask:
    whole = body if body is not None else {"model": "demo", "messages": [USER], **fields}
    return chat_ask(call(**(headers or {})), whole, LimitsConfig(), MODELS)[0]


def completion(**fields: Any) -> Ask:
    return completion_ask(call(), {"model": "demo", "prompt": "Once", **fields}, LimitsConfig(), MODELS)[0]


def test_what_is_left_out_is_left_to_the_model():
    ask = chat()
    assert (ask.temperature, ask.top_k, ask.seed, ask.max_output_tokens, ask.logprobs) == (None,) * 5
    assert (ask.n, ask.stop, ask.stream, ask.kept, ask.policy, ask.handover) == (1, [], False, False, None, "auto")
    assert ask.messages == [USER] and ask.owner == "key_1"


def test_null_is_the_same_as_leaving_out():
    names = ["temperature", "stop", "seed", "n", "max_tokens", "logit_bias", "stream", "stream_options", "logprobs"]
    names += ["tools", "tool_choice", "response_format", "functions", "mirostat", "user", "top_k", "best_of"]
    assert chat(**dict.fromkeys(names)).n == 1


GOOD = [
    ({"seed": -1}, "seed", 2**64 - 1),
    ({"seed": -(2**63)}, "seed", 2**63),
    ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
    ({"stop": "x"}, "stop", ["x"]),
    ({"stop": ["x"] * 16}, "stop", ["x"] * 16),
    ({"temperature": 0}, "temperature", 0.0),
    ({"temperature": 2}, "temperature", 2.0),
    ({"top_k": -1}, "top_k", 0),
    ({"max_tokens": 5}, "max_output_tokens", 5),
    ({"max_completion_tokens": 5}, "max_output_tokens", 5),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_output_tokens", 5),
    ({"repeat_penalty": 1.2}, "repeat_penalty", 1.2),
    ({"repetition_penalty": 1.2}, "repeat_penalty", 1.2),
    ({"logit_bias": {"7": -100, "8": 100}}, "logit_bias", {7: -100.0, 8: 100.0}),
    ({"logprobs": True}, "logprobs", 0),
    ({"logprobs": True, "top_logprobs": 20}, "logprobs", 20),
    ({"logprobs": False, "top_logprobs": 0}, "logprobs", None),
    ({"n": 8}, "n", 8),
    ({"n": 2, "best_of": 2}, "n", 2),
    ({"model": "other-name"}, "model", "other-name"),
    ({"response_format": {"type": "text"}}, "n", 1),
    ({"mirostat": 0, "xtc_probability": 0.0}, "n", 1),
    ({"modalities": ["text"]}, "n", 1),
    ({"tools": [], "tool_choice": "auto"}, "tools", None),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "variables", {"enable_thinking": False}),
    ({"unheard_of": {"deep": [1]}, "reasoning_effort": "low"}, "n", 1),
]


@pytest.mark.parametrize(("fields", "name", "value"), GOOD)
def test_good_fields_arrive(fields: dict[str, Any], name: str, value: Any):
    assert getattr(chat(**fields), name) == value


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_tools_go_to_the_template_as_they_came(choice: str | None):
    assert chat(tools=[TOOL], tool_choice=choice).tools == [TOOL]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"seed": True}, "seed"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 10**20}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "é" * 129}, "stop"),
    ({"stop": ["ok", ""]}, "stop[1]"),
    ({"stop": ["ok", 1]}, "stop[1]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"4294967296": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"model": "m" * 257}, "model"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [USER] * 2049}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"user": 5}, "user"),
    ({"store": "yes"}, "store"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_a_bad_field_is_refused_with_its_path_and_a_sentence(fields: dict[str, Any], param: str):
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.status == 400 and caught.value.message.endswith(".")
    assert "$" not in caught.value.message and "null" not in caught.value.message.split(",")[0]


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": []}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"mirostat": 2}, "mirostat"),
    ({"mirostat": True}, "mirostat"),
    ({"xtc_probability": 0.5}, "xtc_probability"),
    ({"grammar": "root ::= x"}, "grammar"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED)
def test_what_would_change_the_answer_and_is_not_there_yet_is_refused(fields: dict[str, Any], param: str):
    with pytest.raises(UnsupportedParameter) as caught:
        chat(**fields)
    assert caught.value.param == param and caught.value.code == "unsupported_parameter"


def test_missing_fields_are_named():
    for body, param in (({"messages": [USER]}, "model"), ({"model": "demo"}, "messages")):
        with pytest.raises(BadRequest, match=f"`{param}` is missing") as caught:
            chat(body)
        assert caught.value.param == param


def test_an_unknown_model_is_answered_with_the_list():
    with pytest.raises(ModelNotFound, match="The models are: demo, second") as caught:
        chat(model="gpt-9")
    assert caught.value.status == 404 and caught.value.detail == {"models": ["demo", "second"]}


def test_a_prompt_is_text_or_tokens_and_one_in_a_list_counts():
    assert completion().prompt == "Once"
    assert completion(prompt=["Once"]).prompt == "Once"
    assert completion(prompt=[1, 2]).prompt == [1, 2]
    assert completion(prompt=[[1, 2]]).prompt == [1, 2]
    assert completion(logprobs=5).logprobs == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True, "prompt": [1]}, "echo"),
        ({"echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_a_bad_completion_is_refused(fields: dict[str, Any], param: str):
    with pytest.raises(BadRequest) as caught:
        completion(**fields)
    assert caught.value.param == param


def test_headers_carry_wishes():
    headers = {"idempotency_key": '"a b"', "x_relevo_policy": "GPU-only", "x_relevo_handover": "continuous"}
    headers["x_relevo_priority"] = "-3"
    ask = chat(headers={**headers, "x_relevo_deadline_s": "2.5", "x_stainless_retry_count": "2"})
    assert (ask.idempotency_key, ask.policy, ask.handover) == ("a b", "gpu-only", "continuous")
    assert ask.priority == -3
    assert (ask.deadline_s, ask.client_retry, ask.kept) == (2.5, 2, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("idempotency_key", ""),
        ("idempotency_key", '""'),
        ("idempotency_key", "x" * 256),
        ("idempotency_key", "é"),
        ("idempotency_key", "a\tb"),
        ("x_relevo_policy", "fast"),
        ("x_relevo_handover", "exact"),
        *[("x_relevo_deadline_s", bad) for bad in ("0", "-1", "nan", "inf", "1e400", "soon", "", "9" * 40, "604801")],
    ],
)
def test_a_bad_header_is_refused_by_name(name: str, value: str):
    with pytest.raises(RelevoError) as caught:
        chat(headers={name: value})
    assert caught.value.param == name.replace("_", "-") and caught.value.status == 400


@pytest.mark.parametrize("count", ["-1", "x", "", "99999999999", "1.5"])
def test_a_strange_retry_count_counts_as_none(count: str):
    assert chat(headers={"x_stainless_retry_count": count}).client_retry == 0


def test_a_header_sent_twice_is_refused():
    twice = Call(
        {"type": "http", "headers": [(b"idempotency-key", b"a"), (b"idempotency-key", b"b")]}, _nothing, _nothing
    )
    twice.read_headers()
    with pytest.raises(BadRequest, match="more than once"):
        chat_ask(twice, {"model": "demo", "messages": [USER]}, LimitsConfig(), MODELS)


def test_the_digest_covers_every_field():
    assert chat(seed=1).body_digest != chat(seed=2).body_digest
    assert chat().body_digest == chat().body_digest != completion().body_digest
