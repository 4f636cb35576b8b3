"""The fields of OpenAI's two text routes, typed; what is known and refused, and how a mistake is told."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from relevo.core.errors import BadRequest, UnsupportedParameter

Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repeat = Annotated[float, Meta(gt=0, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream should carry besides text."""

    include_usage: bool | None = None


class Part(msgspec.Struct, frozen=True):
    """A piece of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """A message, as far as it is checked here; the template gets it as it was sent."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool on offer."""

    type: str
    function: dict[str, Any] | None = None


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both routes. A null is the same as leaving the field out."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repeat_penalty: Repeat | None = None
    repetition_penalty: Repeat | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    max_tokens: Tokens | None = None
    n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    user: str | None = None
    store: bool | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    # Known to clients, of no effect here: they ask for nothing that would change the answer.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatFields(SharedFields, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionFields(SharedFields, frozen=True, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None


_INSTEAD = "could not be handed over to another route. Use temperature, top_p, top_k or min_p."
_HIDDEN_STATE = "Its hidden state " + _INSTEAD
_OWN_RANDOMNESS = "Its own random numbers " + _INSTEAD
_NO_STRUCTURE = "Structured output is not supported yet. Leave it out."

REFUSED = {
    "audio": "Spoken answers are not supported here. Leave it out.",
    "functions": "It was replaced by `tools`. Use `tools`.",
    "function_call": "It was replaced by `tool_choice`. Use `tool_choice`.",
    "prediction": "Predicted outputs are not supported here. Leave it out.",
    "web_search_options": "Web search is not supported here. Leave it out.",
    "grammar": "Grammars are not supported yet. Leave it out.",
    "json_schema": _NO_STRUCTURE,
    "guided_json": _NO_STRUCTURE,
    "guided_regex": _NO_STRUCTURE,
    "guided_choice": _NO_STRUCTURE,
    "guided_grammar": _NO_STRUCTURE,
    "structured_outputs": _NO_STRUCTURE,
    "suffix": "Text after the gap is not supported here. Leave it out.",
    "mirostat": _HIDDEN_STATE,
    "mirostat_tau": _HIDDEN_STATE,
    "mirostat_eta": _HIDDEN_STATE,
    "xtc_probability": _OWN_RANDOMNESS,
    "xtc_threshold": _OWN_RANDOMNESS,
}
"""Fields that change the answer in a way this server cannot give: ignoring them would be a lie."""

HARMLESS = {"mirostat": (0,), "xtc_probability": (0, 0.0)}
"""Values of refused fields that mean `off`."""

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_TYPES = re.compile(r"`([a-z| ]+)`")

Fields = TypeVar("Fields", bound=SharedFields)


def read_fields(body: dict[str, Any], kind: type[Fields]) -> tuple[Fields, list[str]]:
    """The typed fields of a body, and the names of those nobody here knows.

    Raises BadRequest or UnsupportedParameter, with the path of the mistake as `param`.
    """
    for name, why in REFUSED.items():
        value = body.get(name)
        if value is not None and not (not isinstance(value, bool) and value in HARMLESS.get(name, ())):
            raise UnsupportedParameter(f"`{name}` is not supported. {why}", param=name)
    try:
        fields = msgspec.convert(body, kind)
    except msgspec.ValidationError as e:
        raise plain_mistake(str(e)) from None
    known = kind.__struct_fields__
    return fields, sorted(name for name in body if name not in known and name not in REFUSED)


def plain_mistake(message: str) -> BadRequest:
    """A validation message as one plain sentence with `param`."""
    match = _AT.match(message)
    assert match is not None
    path = (match["path"] or "").removeprefix("$").removeprefix(".")
    what = match["what"]
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing is not None:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return BadRequest(f"`{param}` is missing.", param=param)
    what = _TYPES.sub(_type_words, what)
    for sign, words in (("<= ", "of at most "), (">= ", "of at least "), ("< ", "below "), ("> ", "above ")):
        what = what.replace(sign, words)
    what = what.replace(".0", "") if what.endswith(".0") else what
    what = what[:1].lower() + what[1:]
    return BadRequest(
        f"`{path}` is not valid: {what}." if path else f"The body is not valid: {what}.", param=path or None
    )


def _type_words(match: re.Match[str]) -> str:
    """`int | null` as `a whole number`: null is what one leaves out, not what is expected."""
    kinds = [kind.strip() for kind in match[1].split("|")]
    shown = [kind for kind in kinds if kind != "null"] or kinds
    return " or ".join(_WORDS.get(kind, kind) for kind in shown)
