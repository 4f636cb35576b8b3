"""How a chat answer is written: chunks of `chat.completion.chunk`, or one `chat.completion`."""

from __future__ import annotations

from typing import Any

from relevo.api.openai_stream import Collected, TextStream, encode, finite, readable, usage_object
from relevo.core.events import Ended, TokenLogprob


def answer_id(request_id: str) -> str:
    """`chatcmpl-` and the request id's digits, so that each gives the other."""
    return "chatcmpl-" + request_id.removeprefix("req_")


def logprob_list(logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content`."""
    return [
        {
            "token": readable(one.bytes_),
            "logprob": finite(one.logprob),
            "bytes": list(one.bytes_),
            "top_logprobs": [
                {"token": readable(text), "logprob": finite(value), "bytes": list(text)} for _, text, value in one.top
            ],
        }
        for one in logprobs
    ]


class ChatStream(TextStream):
    """A streamed chat."""

    kind_chunk = b"chat.completion.chunk"
    text_before = b',"delta":{"content":'
    text_after = b"}"

    def opening(self, relevo: dict[str, Any]) -> bytes:
        """Each choice's role; the first with `relevo`."""
        role = b',"delta":{"role":"assistant","content":""},"finish_reason":null}]'
        chunks = []
        for index in range(len(self._before)):
            end = self._with(relevo) if index == 0 else b"}\n\n"
            chunks += [self._head, b',"choices":[{"index":%d' % index, role, self._nulls, end]
        return b"".join(chunks)

    def logprobs(self, _choice: int, logprobs: list[TokenLogprob]) -> bytes:
        """The step's tokens."""
        return b'{"content":' + encode(logprob_list(logprobs)) + b',"refusal":null}'

    def empty(self) -> bytes:
        """An empty delta."""
        return b',"delta":{}'


def chat_answer(request_id: str, created: float, model: str, collected: Collected, ended: Ended) -> bytes:
    """The body of a whole chat answer."""
    choices = []
    for index in range(len(collected.texts)):
        logprobs = collected.logprobs[index]
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": collected.text(index), "refusal": None},
                "logprobs": None if logprobs is None else {"content": logprob_list(logprobs), "refusal": None},
                "finish_reason": collected.finishes[index],
            }
        )
    return encode(
        {
            "id": answer_id(request_id),
            "object": "chat.completion",
            "created": int(created),
            "model": model,
            "choices": choices,
            "usage": usage_object(ended.usage),
            "relevo": ended.relevo,
        }
    )
