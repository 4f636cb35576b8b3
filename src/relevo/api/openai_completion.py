"""How a plain completion is written: chunks or one `text_completion`."""

from __future__ import annotations

from typing import Any

from relevo.api.openai_stream import Collected, TextStream, encode, finite, readable, usage_object
from relevo.core.events import Ended, TokenLogprob


def answer_id(request_id: str) -> str:
    """`cmpl-` and the request id's digits, so that each gives the other."""
    return "cmpl-" + request_id.removeprefix("req_")


def logprob_columns(logprobs: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """OpenAI's older shape: parallel lists. `offset` is where the first token's text begins, in characters."""
    tokens = [readable(one.bytes_) for one in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [finite(one.logprob) for one in logprobs],
        "top_logprobs": [{readable(text): finite(value) for _, text, value in one.top} for one in logprobs],
        "text_offset": offsets,
    }


class CompletionStream(TextStream):
    """A streamed completion. `echo` is the prompt's text, sent first, where it was asked for."""

    kind_chunk = b"text_completion"
    text_before = b',"text":'
    text_after = b""

    def __init__(self, *args: Any, echo: str = "", **named: Any) -> None:
        super().__init__(*args, **named)
        self._echo = echo
        self._offsets = [0] * len(self._before)

    def opening(self, relevo: dict[str, Any]) -> bytes:
        """A chunk with the echo, or no text, for each choice; the first with `relevo`."""
        chunks = []
        for index in range(len(self._before)):
            end = self._with(relevo) if index == 0 else b"}\n\n"
            chunks += [
                self._before[index],
                encode(self._echo),
                b',"logprobs":null,"finish_reason":null}]',
                self._nulls,
                end,
            ]
        return b"".join(chunks)

    def logprobs(self, _choice: int, logprobs: list[TokenLogprob]) -> bytes:
        """The step's tokens."""
        columns = logprob_columns(logprobs, self._offsets[_choice])
        self._offsets[_choice] += sum(len(token) for token in columns["tokens"])
        return encode(columns)

    def empty(self) -> bytes:
        """No text."""
        return b',"text":"","logprobs":null'


def completion_answer(
    request_id: str, created: float, model: str, collected: Collected, ended: Ended, *, echo: str = ""
) -> bytes:
    """The body of a whole completion."""
    choices = []
    for index in range(len(collected.texts)):
        logprobs = collected.logprobs[index]
        choices.append(
            {
                "index": index,
                "text": echo + collected.text(index),
                "logprobs": None if logprobs is None else logprob_columns(logprobs, 0),
                "finish_reason": collected.finishes[index],
            }
        )
    return encode(
        {
            "id": answer_id(request_id),
            "object": "text_completion",
            "created": int(created),
            "model": model,
            "choices": choices,
            "usage": usage_object(ended.usage),
            "relevo": ended.relevo,
        }
    )
