"""Chat messages as clients send them, made into what a template can take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from relevo.models.chat_template import Habits, RenderRefused

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA_PARTS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
    "file": "file",
    "input_file": "file",
}


def prepare_messages(messages: Sequence[Any], habits: Habits) -> list[dict[str, Any]]:
    """Copy the messages in the form this template takes; fields that are not known here stay as they came.

    Text parts are joined, in order, with nothing between.
    Raises RenderRefused("invalid") with the place of the first mistake.
    """
    if not messages:
        raise RenderRefused("invalid", "`messages` is empty; at least one message is needed.")
    ready = [_message(message, f"messages[{index}]", habits) for index, message in enumerate(messages)]
    return ready if habits.system_role else _without_system(ready)


def _message(message: Any, place: str, habits: Habits) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RenderRefused("invalid", f"{place} must be an object with `role` and `content`.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RenderRefused("invalid", f'{place}.role must be a text such as "user".')
    ready = dict(message)
    if role == "developer" and not habits.developer_role:
        ready["role"] = "system"  # the newer name of the same thing
    if ready.get("tool_calls") is None:
        ready.pop("tool_calls", None)  # templates ask whether the field is there
    else:
        ready["tool_calls"] = _calls(ready["tool_calls"], f"{place}.tool_calls", habits.argument_objects)
        if not ready["tool_calls"]:
            del ready["tool_calls"]
    ready["content"] = _content(message.get("content"), f"{place}.content")
    if ready["content"] is None:
        if role != "assistant":
            raise RenderRefused("invalid", f"{place}.content is missing.")
        if "tool_calls" not in ready or not habits.null_content:
            ready["content"] = ""
    return ready


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put each system text before the user message that follows it; a last one becomes a user message itself."""
    ready: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
            continue
        if waiting and message["role"] == "user":
            message["content"] = "\n\n".join([*waiting, message["content"]])
            waiting = []
        ready.append(message)
    if waiting:
        ready.append({"role": "user", "content": "\n\n".join(waiting)})
    return ready


def _content(content: Any, place: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RenderRefused("invalid", f"{place} must be a text or a list of parts.")
    texts = []
    for index, part in enumerate(content):
        where = f"{place}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _MEDIA_PARTS:
            raise RenderRefused(
                "invalid",
                f"{where} is of kind {_MEDIA_PARTS[kind]}, which needs a projector; this model takes text only.",
            )
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None or not isinstance(part.get(field), str):
            raise RenderRefused("invalid", f'{where} must be a part such as {{"type": "text", "text": "..."}}.')
        texts.append(part[field])
    return "".join(texts)


def _calls(calls: Any, place: str, argument_objects: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RenderRefused("invalid", f"{place} must be a list.")
    ready = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RenderRefused("invalid", f"{place}[{index}] must hold `function` with a `name`.")
        arguments = function.get("arguments", "{}")
        ready.append({**call, "function": {**function, "arguments": _arguments(arguments, argument_objects)}})
    return ready


def _arguments(arguments: Any, as_object: bool) -> Any:
    """OpenAI sends arguments as a JSON text, Ollama as an object; a text that is no JSON object stays a text."""
    if as_object and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    if not as_object and not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    return arguments
