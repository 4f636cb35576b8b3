"""From OpenAI's body and headers to the one internal request. Every range is checked here, before all else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import structlog

from relevo.api.call import Call
from relevo.api.openai_fields import ChatFields, CompletionFields, Message, SharedFields, read_fields
from relevo.api.strict_json import body_digest
from relevo.config import LimitsConfig
from relevo.core.errors import BadRequest, ModelNotFound, UnsupportedParameter
from relevo.core.events import Ask
from relevo.core.grant import HIGHEST_PRIORITY, LOWEST_PRIORITY, PolicyName

log = structlog.get_logger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
POLICIES: dict[str, PolicyName] = {"auto": "auto", "gpu-only": "gpu-only", "cpu-only": "cpu-only"}
HANDOVERS = ("auto", "continuous", "boundary")
LONGEST_DEADLINE_S = 7 * 24 * 3600.0
_KEY_LETTERS = 255
_SMALL_NUMBER = re.compile(r"[+-]?[0-9]{1,3}")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def chat_ask(
    call: Call, body: dict[str, Any], limits: LimitsConfig, models: Iterable[dict[str, Any]]
) -> tuple[Ask, ChatFields]:
    """The request of a chat body. Raises BadRequest and its kinds, ModelNotFound."""
    fields, unknown = read_fields(body, ChatFields)
    _note_unknown(call, unknown)
    _check_messages(fields.messages, limits)
    tools = _tools(body, fields, limits)
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise UnsupportedParameter('`modalities` other than ["text"] are not supported.', param="modalities")
    shared = _shared(call, "/v1/chat/completions", body, fields, limits, models)
    wanted = _one_of(fields, "max_tokens", "max_completion_tokens")
    ask = Ask(
        kind="chat",
        messages=body["messages"],
        tools=tools,
        max_output_tokens=wanted,
        logprobs=_chat_logprobs(fields, limits),
        variables=fields.chat_template_kwargs or {},
        **shared,
    )
    return ask, fields


def completion_ask(
    call: Call, body: dict[str, Any], limits: LimitsConfig, models: Iterable[dict[str, Any]]
) -> tuple[Ask, CompletionFields]:
    """The request of a plain completion body. Raises BadRequest and its kinds, ModelNotFound."""
    fields, unknown = read_fields(body, CompletionFields)
    _note_unknown(call, unknown)
    prompt = _prompt(fields.prompt)
    if fields.logprobs is not None and fields.logprobs > limits.top_logprobs:
        raise BadRequest(f"`logprobs` is not valid: at most {limits.top_logprobs}.", param="logprobs")
    if fields.echo and not isinstance(prompt, str):
        raise UnsupportedParameter("`echo` needs the prompt as text.", param="echo")
    if fields.echo and fields.logprobs is not None:
        raise UnsupportedParameter(
            "`echo` with `logprobs` is not supported: the prompt's log probabilities are not computed.", param="echo"
        )
    shared = _shared(call, "/v1/completions", body, fields, limits, models)
    ask = Ask(kind="completion", prompt=prompt, max_output_tokens=fields.max_tokens, logprobs=fields.logprobs, **shared)
    return ask, fields


def known_model(name: str, models: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The model of this name or alias. Raises ModelNotFound with the list of names."""
    listed = list(models)
    for model in listed:
        if name == model["id"] or name in model.get("aliases", ()):
            return model
    names = [model["id"] for model in listed]
    shown = name[:80].encode("utf-8", "replace").decode()
    have = "The models are: " + ", ".join(names) + "." if names else "No model is configured."
    raise ModelNotFound(f"No model has the name {shown!r} here. {have}", param="model", detail={"models": names})


def _shared(
    call: Call,
    path: str,
    body: dict[str, Any],
    fields: SharedFields,
    limits: LimitsConfig,
    models: Iterable[dict[str, Any]],
) -> dict[str, Any]:
    """What both routes have in common, as keyword arguments of Ask."""
    n = fields.n or 1
    if n > limits.choices:
        raise BadRequest(f"`n` is not valid: at most {limits.choices} answers.", param="n")
    if fields.best_of is not None and fields.best_of != n:
        raise UnsupportedParameter("`best_of` is supported only where it equals `n`.", param="best_of")
    if fields.stream_options is not None and not fields.stream:
        raise BadRequest("`stream_options` needs `stream` to be true.", param="stream_options")
    shape = (fields.response_format or {}).get("type", "text")
    if shape != "text":
        raise UnsupportedParameter(
            "`response_format` other than text is not supported yet. Leave it out.", param="response_format"
        )
    known_model(fields.model, models)
    return {
        "owner": call.owner,
        "model": fields.model,
        "temperature": fields.temperature,
        "top_k": None if fields.top_k is None else max(0, fields.top_k),
        "top_p": fields.top_p,
        "min_p": fields.min_p,
        "repeat_penalty": _one_of(fields, "repeat_penalty", "repetition_penalty"),
        "frequency_penalty": fields.frequency_penalty,
        "presence_penalty": fields.presence_penalty,
        "seed": None if fields.seed is None else fields.seed % 2**64,
        "logit_bias": _logit_bias(fields, limits),
        "stop": _stop(fields, limits),
        "n": n,
        "ignore_eos": bool(fields.ignore_eos),
        "stream": bool(fields.stream),
        "store": bool(fields.store),
        "body_digest": body_digest(path, body),
        **read_wishes(call),
    }


def read_wishes(call: Call) -> dict[str, Any]:
    """The request headers of the contract, as arguments of Ask, within what the key grants.

    Raises BadRequest and NotGranted with the header as `param`.
    """
    handover = (call.header("x-relevo-handover") or "auto").lower()
    if handover not in HANDOVERS:
        raise BadRequest(f"x-relevo-handover is not valid: one of {', '.join(HANDOVERS)}.", param="x-relevo-handover")
    retries = call.headers.get(b"x-stainless-retry-count", b"0")
    return {
        "policy": call.grant.policy_for(_policy(call.header("x-relevo-policy"))),
        "priority": call.grant.priority_for(_priority(call.header("x-relevo-priority"))),
        "handover": handover,
        "deadline_s": _deadline(call.header("x-relevo-deadline-s")),
        "idempotency_key": _idempotency_key(call.header("idempotency-key")),
        "client_retry": int(retries) if retries.isdigit() and len(retries) <= 4 else 0,
    }


def _policy(value: str | None) -> PolicyName | None:
    policy = POLICIES.get(value.lower()) if value else None
    if policy is None and value:
        raise BadRequest(f"x-relevo-policy is not valid: one of {', '.join(POLICIES)}.", param="x-relevo-policy")
    return policy


def _priority(value: str | None) -> int | None:
    if value is None:
        return None
    priority = int(value) if _SMALL_NUMBER.fullmatch(value) else HIGHEST_PRIORITY + 1
    if not LOWEST_PRIORITY <= priority <= HIGHEST_PRIORITY:
        raise BadRequest(
            f"x-relevo-priority is not valid: a whole number from {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}.",
            param="x-relevo-priority",
        )
    return priority


def _deadline(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value) if len(value) <= 32 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_DEADLINE_S:
        raise BadRequest(
            f"x-relevo-deadline-s is not valid: a number of seconds above 0, at most {LONGEST_DEADLINE_S:.0f}.",
            param="x-relevo-deadline-s",
        )
    return seconds


def _idempotency_key(value: str | None) -> str | None:
    if value is None:
        return None
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = value[1:-1]
    if not 1 <= len(value) <= _KEY_LETTERS or not all(" " <= c <= "~" for c in value):
        raise BadRequest(
            f"Idempotency-Key is not valid: 1 to {_KEY_LETTERS} printable ASCII characters.", param="idempotency-key"
        )
    return value


def _one_of(fields: SharedFields, first: str, second: str) -> Any:
    """One value that goes by two names. Raises BadRequest where both are given and differ."""
    one, two = getattr(fields, first), getattr(fields, second, None)
    if one is not None and two is not None and one != two:
        raise BadRequest(
            f"`{first}` and `{second}` mean the same and were given different values. Send one of them.", param=second
        )
    return two if one is None else one


def _stop(fields: SharedFields, limits: LimitsConfig) -> list[str]:
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stop) > limits.stop_strings:
        raise BadRequest(f"`stop` is not valid: at most {limits.stop_strings} texts.", param="stop")
    for index, text in enumerate(stop):
        param = "stop" if isinstance(fields.stop, str) else f"stop[{index}]"
        if not text:
            raise BadRequest(f"`{param}` is not valid: an empty text would stop at once. Leave it out.", param=param)
        if len(text.encode("utf-8", "surrogatepass")) > limits.stop_bytes:
            raise BadRequest(f"`{param}` is not valid: at most {limits.stop_bytes} bytes.", param=param)
    return stop


def _logit_bias(fields: SharedFields, limits: LimitsConfig) -> dict[int, float]:
    bias = fields.logit_bias or {}
    if len(bias) > limits.logit_bias_entries:
        raise BadRequest(f"`logit_bias` is not valid: at most {limits.logit_bias_entries} tokens.", param="logit_bias")
    for token in bias:
        if not _TOKEN_ID.fullmatch(token) or int(token) >= 2**31:
            shown = token[:32].encode("utf-8", "replace").decode()
            raise BadRequest(
                f"`logit_bias` is not valid: {shown!r} is not a token id. Its keys are whole numbers.",
                param="logit_bias",
            )
    return {int(token): value for token, value in bias.items()}


def _chat_logprobs(fields: ChatFields, limits: LimitsConfig) -> int | None:
    if not fields.logprobs:
        if fields.top_logprobs:
            raise BadRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        return None
    wanted = fields.top_logprobs or 0
    if wanted > limits.top_logprobs:
        raise BadRequest(f"`top_logprobs` is not valid: at most {limits.top_logprobs}.", param="top_logprobs")
    return wanted


def _tools(body: dict[str, Any], fields: ChatFields, limits: LimitsConfig) -> list[Any] | None:
    choice = fields.tool_choice
    if choice is not None and choice not in ("none", "auto"):
        raise UnsupportedParameter(
            '`tool_choice` other than "none" and "auto" is not supported yet.', param="tool_choice"
        )
    tools = fields.tools or []
    if len(tools) > limits.tools:
        raise BadRequest(f"`tools` is not valid: at most {limits.tools}.", param="tools")
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise UnsupportedParameter(
                'Tools of a type other than "function" are not supported.', param=f"tools[{index}].type"
            )
        if not isinstance((tool.function or {}).get("name"), str):
            raise BadRequest(f"`tools[{index}].function.name` is missing.", param=f"tools[{index}].function.name")
    return body["tools"] if tools else None


def _check_messages(messages: list[Message], limits: LimitsConfig) -> None:
    if not messages:
        raise BadRequest("`messages` is empty. Send at least one message.", param="messages")
    if len(messages) > limits.messages:
        raise BadRequest(f"`messages` is not valid: at most {limits.messages} messages.", param="messages")
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if message.role not in ROLES:
            raise BadRequest(f"`{at}.role` is not valid: one of {', '.join(ROLES)}.", param=f"{at}.role")
        if message.content is None and message.role != "assistant":
            raise BadRequest(f"`{at}.content` is missing.", param=f"{at}.content")
        if isinstance(message.content, list):
            for number, part in enumerate(message.content):
                if part.type != "text":
                    raise UnsupportedParameter(
                        "Content other than text is not supported by this model here.",
                        param=f"{at}.content[{number}].type",
                    )
                if part.text is None:
                    raise BadRequest(f"`{at}.content[{number}].text` is missing.", param=f"{at}.content[{number}].text")


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    """A text or a list of token ids; a list of one such thing is that thing."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str | list):
        inner: str | list[Any] = prompt[0]
        return _prompt(inner)
    if not prompt:
        raise BadRequest("`prompt` is empty.", param="prompt")
    if all(isinstance(one, str | list) for one in prompt):
        raise UnsupportedParameter(
            "Several prompts in one request are not supported. Send one request for each.", param="prompt"
        )
    for index, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise BadRequest(
                f"`prompt[{index}]` is not a token id: a whole number of at least 0.", param=f"prompt[{index}]"
            )
    return prompt


def _note_unknown(call: Call, unknown: list[str]) -> None:
    if unknown:
        log.debug(
            "call.unknown_fields",
            request_id=call.request_id,
            fields=[name[:40] for name in unknown[:20]],
            count=len(unknown),
        )
