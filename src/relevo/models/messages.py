"""Chat messages as clients send them, made into what a template can take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from relevo.models.chat_template import RenderRefused

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


def prepare_messages(
    messages: Sequence[Any], *, null_content: bool, argument_objects: bool, developer_role: bool
) -> list[dict[str, Any]]:
    """Copy the messages in the form this template takes; fields that are not known here stay as they came.

    Text parts are joined, in order, with nothing between. The three switches are the template's habits.
    Raises RenderRefused("invalid") with the place of the first mistake.
    """
    if not messages:
        raise RenderRefused("invalid", "`messages` is empty; at least one message is needed.")
    return [
        _message(message, f"messages[{index}]", null_content, argument_objects, developer_role)
        for index, message in enumerate(messages)
    ]


def _message(
    message: Any, place: str, null_content: bool, argument_objects: bool, developer_role: bool
) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RenderRefused("invalid", f"{place} must be an object with `role` and `content`.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RenderRefused("invalid", f'{place}.role must be a text such as "user".')
    ready = dict(message)
    if role == "developer" and not developer_role:
        ready["role"] = "system"  # the newer name of the same thing
    calls = message.get("tool_calls")
    if calls is not None:
        ready["tool_calls"] = _calls(calls, f"{place}.tool_calls", argument_objects)
        if not ready["tool_calls"]:
            del ready["tool_calls"]  # templates ask whether the field is there
    ready["content"] = _content(message.get("content"), f"{place}.content")
    if ready["content"] is None:
        if role != "assistant":
            raise RenderRefused("invalid", f"{place}.content is missing.")
        if "tool_calls" not in ready or not null_content:
            ready["content"] = ""
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
