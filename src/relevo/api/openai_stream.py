"""What the streams of OpenAI's two text routes share: the order of chunks, built by hand around encoded text."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from relevo.core.events import Delta, Ended, TokenLogprob, Usage

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode
_IMPOSSIBLE = -9999.0  # what OpenAI writes for a log probability that JSON has no number for


def finite(logprob: float) -> float:
    """A log probability that JSON can carry."""
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def readable(token: bytes) -> str:
    """A token's bytes as text; half a character shows as its replacement."""
    return token.decode("utf-8", "replace")


def usage_object(usage: Usage) -> dict[str, int]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class TextStream(ABC):
    """Renders one request's events. Each method returns whole events, or nothing.

    Order: an opening with `relevo`; a chunk for each Delta; a finish for each choice, the last of them held until
    the end is known, because it carries `relevo` too; usage if asked; [DONE].
    """

    kind_chunk: bytes

    def __init__(
        self, answer_id: str, created: float, model: str, *, choices: int = 1, include_usage: bool = False
    ) -> None:
        self._head = b"".join(
            [
                b'data: {"id":',
                encode(answer_id),
                b',"object":"',
                self.kind_chunk,
                b'","created":%d,"model":' % created,
                encode(model),
            ]
        )
        self._nulls = b',"usage":null' if include_usage else b""
        self._include_usage = include_usage
        self._unfinished = set(range(choices))
        self._held: tuple[int, str] | None = None
        self._before = [self._head + b',"choices":[{"index":%d' % index + self.text_before for index in range(choices)]
        self._after = self.text_after + b',"finish_reason":null}]' + self._nulls + b"}\n\n"

    text_before: bytes
    """What stands between a choice's index and its text."""
    text_after: bytes
    """What closes the text; log probabilities follow."""

    @abstractmethod
    def opening(self, relevo: dict[str, Any]) -> bytes:
        """The first chunk of each choice; the first of all carries `relevo`."""

    @abstractmethod
    def logprobs(self, _choice: int, logprobs: list[TokenLogprob]) -> bytes:
        """The value of a chunk's `logprobs`."""

    @abstractmethod
    def empty(self) -> bytes:
        """A choice's members in a chunk without text."""

    def delta(self, delta: Delta) -> bytes:
        """The chunk of what one step added; a finish that is not the last follows at once."""
        if delta.finish is None and delta.logprobs is None:  # almost every one
            return self._before[delta.choice] + encode(delta.text) + self._after if delta.text else b""
        out = b""
        if delta.logprobs:
            logprobs = self.logprobs(delta.choice, delta.logprobs)
            after = b"".join(
                [self.text_after, b',"logprobs":', logprobs, b',"finish_reason":null}]', self._nulls, b"}\n\n"]
            )
            out = b"".join([self._before[delta.choice], encode(delta.text), after])
        elif delta.text:
            out = self._before[delta.choice] + encode(delta.text) + self._after
        if delta.finish is not None:
            self._unfinished.discard(delta.choice)
            if self._unfinished:
                out += self._finish(delta.choice, delta.finish, None)
            else:
                self._held = (delta.choice, delta.finish)
        return out

    def routed(self, relevo: dict[str, Any]) -> bytes:
        """After a handover: a chunk without text that carries the new `relevo`."""
        return b"".join(
            [
                self._head,
                b',"choices":[{"index":0',
                self.empty(),
                b',"finish_reason":null}]',
                self._nulls,
                self._with(relevo),
            ]
        )

    def closing(self, ended: Ended) -> bytes:
        """The end of a completed request."""
        out = b""
        if self._held is None:  # choices whose finish nobody reported: the request did complete, so they stopped
            *others, last = sorted(self._unfinished) or [0]
            out = b"".join(self._finish(choice, "stop", None) for choice in others)
            self._held = (last, "stop")
        out += self._finish(*self._held, ended.relevo)
        if self._include_usage:
            usage = encode(usage_object(ended.usage))
            out += b"".join([self._head, b',"choices":[],"usage":', usage, b"}\n\n"])
        return out + DONE

    def failure(self, error: dict[str, Any]) -> bytes:
        """The one error event of a stream that ends early. No [DONE] follows."""
        return b'data: {"error":' + encode(error) + b"}\n\n"

    def _finish(self, choice: int, finish: str, relevo: dict[str, Any] | None) -> bytes:
        body = [
            self._head,
            b',"choices":[{"index":%d' % choice,
            self.empty(),
            b',"finish_reason":',
            encode(finish),
            b"}]",
            self._nulls,
        ]
        body.append(b"}\n\n" if relevo is None else self._with(relevo))
        return b"".join(body)

    @staticmethod
    def _with(relevo: dict[str, Any]) -> bytes:
        return b',"relevo":' + encode(relevo) + b"}\n\n"


class Collected:
    """All of an answer, put together from its events for a client that did not ask for a stream."""

    def __init__(self, choices: int) -> None:
        self.texts: list[list[str]] = [[] for _ in range(choices)]
        self.finishes: list[str] = ["stop"] * choices
        self.logprobs: list[list[TokenLogprob] | None] = [None] * choices

    def add(self, delta: Delta) -> None:
        """Take in what one step added."""
        self.texts[delta.choice].append(delta.text)
        if delta.finish is not None:
            self.finishes[delta.choice] = delta.finish
        if delta.logprobs is not None:
            self.logprobs[delta.choice] = [*(self.logprobs[delta.choice] or []), *delta.logprobs]

    def text(self, choice: int) -> str:
        """The whole text of a choice."""
        return "".join(self.texts[choice])
