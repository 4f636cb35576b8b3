"""Renders a chat with the model's own Jinja template, which is a stranger's program and is treated as one.

It runs in Jinja's immutable sandbox, with arithmetic that cannot explode and a bound on what it may write. Time
and memory are bounded from outside, by the process it runs in. The surroundings a template expects (`tojson`,
`raise_exception`, `strftime_now`, loop controls, `generation` blocks, trimmed blocks) are those of the
transformers library, for which these templates are written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relevo.core.errors import ModelFileError

MAX_TEMPLATE_BYTES = 2**20
MAX_OUTPUT_CHARACTERS = 16 * 2**20
MAX_INTEGER_BITS = 256
RESERVED_VARIABLES = frozenset({"messages", "tools", "bos_token", "eos_token", "raise_exception", "strftime_now"})

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


class RenderRefused(Exception):
    """The chat could not be rendered. `code` is invalid, template or too_large; `message` is one plain sentence."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(message)


class Habits(msgspec.Struct, frozen=True):
    """What a template can take. It cannot be read off, only tried; `Habits()` is what most can."""

    null_content: bool = True  # None as the content of a message that holds tool calls
    argument_objects: bool = True  # a call's arguments as an object; else as JSON text
    null_tools: bool = True  # None for no tools; else an empty list
    system_role: bool = True  # else it is put before the next user message
    developer_role: bool = True  # else it is called system


class _Raised(TemplateError):
    """The template called raise_exception: it does not take this conversation."""


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training. Here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it on the instance

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*(\d{5,}|\{)")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on what one operation can produce: such a step could not be interrupted."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            if isinstance(left, str) and _WIDE_PERCENT.search(left):
                raise SecurityError("a format that is too wide")
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INTEGER_BITS:
                raise SecurityError("a number that is too large")
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if (
                isinstance(times, int)
                and hasattr(sequence, "__len__")
                and len(sequence) * times > MAX_OUTPUT_CHARACTERS
            ):
                raise SecurityError("a repetition that is too long")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_BRACES.search(value.__self__):
            raise SecurityError("a format that is too wide")
        return wrapped


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    """Jinja's `format` filter is the percent operator by another name, and takes the same bound."""
    form = str(value)
    if _WIDE_PERCENT.search(form):
        raise SecurityError("a format that is too wide")
    return form % (kwargs or args)


def _raise_exception(message: Any) -> None:
    raise _Raised(str(message)[:1000])


def _to_json(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False, **_: Any) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML and sorts keys, which changes the prompt."""
    return json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )


def _listed(value: Any) -> list[Any]:
    """What filters such as `map` leave behind is a generator."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


class ChatTemplate:
    """One compiled template, with its habits.

    Raises ModelFileError when the template is too large or is not valid Jinja.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", origin: str = "The model's") -> None:
        raw = source.encode(errors="replace")
        if len(raw) > MAX_TEMPLATE_BYTES:
            raise ModelFileError(f"{origin} chat template is larger than {MAX_TEMPLATE_BYTES} bytes.")
        self.digest = hashlib.sha256(raw).hexdigest()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _to_json
        environment.filters["format"] = _format
        environment.globals["raise_exception"] = _raise_exception
        for needless in ("lipsum", "cycler", "joiner"):
            environment.globals.pop(needless, None)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as e:
            raise ModelFileError(
                f"{origin} chat template is not valid Jinja: {e.message} (line {e.lineno}). "
                "Name another one with `chat_template` in the configuration."
            ) from None
        except (RecursionError, SyntaxError, ValueError, TemplateError) as e:
            raise ModelFileError(f"{origin} chat template cannot be compiled: {type(e).__name__}: {e}.") from None
        self.habits = Habits()
        self.habits = self._tried("developer" in source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime,
    ) -> str:
        """The prompt, ready for the model's answer. `messages` as `prepare_messages` leaves them.

        Raises RenderRefused: invalid (a reserved variable), template (it complained or broke), too_large.
        """
        variables = variables or {}
        reserved = RESERVED_VARIABLES & variables.keys()
        if reserved:
            raise RenderRefused(
                "invalid", f"The template variable {min(reserved)!r} is set by Relevo and cannot be given."
            )
        values: dict[str, Any] = {
            "add_generation_prompt": True,
            "documents": None,
            **self._tokens,
            **variables,
            "messages": list(messages),
            "tools": list(tools) if tools else None if self.habits.null_tools else [],
            "strftime_now": now.strftime,
        }
        try:
            return self._bounded(values)
        except _Raised as e:
            raise RenderRefused(
                "template", f"The model's chat template does not take this conversation: {e}."
            ) from None
        except SecurityError as e:
            raise RenderRefused("template", f"The model's chat template tried something forbidden: {e}.") from None
        except (MemoryError, OverflowError):
            raise RenderRefused("too_large", "Rendering this conversation took more memory than allowed.") from None
        except RenderRefused:
            raise
        except Exception as e:  # a template may fail in any way Python can
            raise RenderRefused(
                "template",
                f"The model's chat template failed on this conversation: {type(e).__name__}: {str(e)[:500]}.",
            ) from None

    def _bounded(self, values: dict[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(values):
            size += len(part)
            if size > MAX_OUTPUT_CHARACTERS:
                raise RenderRefused(
                    "too_large", f"The rendered prompt is longer than {MAX_OUTPUT_CHARACTERS} characters."
                )
            parts.append(part)
        return "".join(parts)

    def _tried(self, developer_role: bool) -> Habits:
        """Find the habits with small conversations.

        A wrong guess prints "None", encodes JSON twice or fails. Where both forms fail the template does not know
        the thing at all, and the form most templates take is kept.
        """
        user = {"role": "user", "content": "hello"}
        null_tools = self._attempt([user]) is not None
        if not null_tools:
            self.habits = Habits(null_tools=False)
            null_tools = self._attempt([user]) is None
            self.habits = Habits(null_tools=null_tools)
        system = [{"role": "system", "content": "needle"}, user]
        system_role = "needle" in (self._attempt(system) or "") or self._attempt([user]) is None

        with_object = self._attempt(_tool_chat("", {"needle": 7}))
        objects = with_object is not None and "'needle'" not in with_object  # Python's own way to print a dict
        arguments: Any = {"needle": 7} if objects else '{"needle": 7}'
        if self._attempt(_tool_chat("", arguments)) is None and self._attempt(_tool_chat(None, arguments)) is None:
            objects, arguments = True, {"needle": 7}
        with_null = self._attempt(_tool_chat(None, arguments))
        return Habits(
            null_content=with_null is not None and "None" not in with_null,
            argument_objects=objects,
            null_tools=null_tools,
            system_role=system_role,
            developer_role=developer_role,
        )

    def _attempt(self, chat: list[dict[str, Any]]) -> str | None:
        try:
            return self.render(chat, now=datetime(2026, 1, 1))  # noqa: DTZ001 - an example, no moment
        except RenderRefused:
            return None


def _tool_chat(content: Any, arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": "probe", "content": "1"},
    ]


def choose_template(
    own: str | None,
    override: str | None,
    *,
    has_token: Callable[[str], bool],
    bos_token: str = "",
    eos_token: str = "",
) -> ChatTemplate | None:
    """The template to use: the configured one, else the file's own, else ChatML where the vocabulary has its tokens.

    ChatML is the one generic form that cannot be mistaken for text, and only for models that know its two tokens.
    None when nothing fits: the model can complete text but not chat. Raises ModelFileError for a broken template.
    """
    if override is not None:
        return ChatTemplate(override, bos_token=bos_token, eos_token=eos_token, origin="The configured")
    if own is not None:
        return ChatTemplate(own, bos_token=bos_token, eos_token=eos_token)
    if all(has_token(token) for token in CHATML_TOKENS):
        return ChatTemplate(CHATML, bos_token=bos_token, eos_token=eos_token, origin="The generic")
    return None


NO_TEMPLATE = (
    "This model's file has no chat template, so it can complete text but not chat. Name one with `chat_template` "
    "in the configuration."
)
