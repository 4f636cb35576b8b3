"""A real llama worker process at the other end of a socket pair, driven frame by frame."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relevo.core.events import (
    AttemptEnded,
    ChoiceStart,
    FromWorker,
    Heartbeat,
    Prefilled,
    Ready,
    Sampling,
    StartFailed,
    StartModel,
    Step,
    Submit,
    TokenLogprob,
)
from relevo.workers.frames import FrameSocket

PATIENCE_S = 40
GREEDY = Sampling(temperature=0)


@dataclass
class Answer:
    """What one choice was given."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass
class Result:
    """What one attempt was given."""

    answers: dict[int, Answer] = field(default_factory=dict)
    ended: AttemptEnded | None = None
    prefilled: list[int] = field(default_factory=list)

    @property
    def only(self) -> Answer:
        [answer] = self.answers.values()
        return answer


class LlamaProcess:
    """Starts the process on entering, ends it on leaving."""

    def __init__(self, libraries: Path, model: Path, data_limit_bytes: int | None = None) -> None:
        self._libraries, self._model, self._data_limit_bytes = libraries, model, data_limit_bytes
        self.heartbeats: list[Heartbeat] = []

    def __enter__(self) -> LlamaProcess:
        self.socket, theirs = socket.socketpair()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PATIENCE_S, 0))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "relevo.workers.llama", "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
            )
        if self._data_limit_bytes is not None:
            resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (self._data_limit_bytes,) * 2)
        self.frames = FrameSocket(self.socket)
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def start(self, **changes: Any) -> Ready | StartFailed:
        settings = {
            "model": "demo",
            "route": "cpu",
            "path": str(self._model),
            "libraries": str(self._libraries),
            "context_tokens": 1024,
            "slots": 8,
            "batch_tokens": 256,
            "ubatch_tokens": 128,
        }
        self.frames.send(StartModel(**(settings | changes)))
        answer = self.receive()
        assert isinstance(answer, Ready | StartFailed)
        return answer

    def receive(self) -> Any:
        """The next frame that is no heartbeat; None at the end of the stream."""
        while isinstance(record := self.frames.receive(FromWorker), Heartbeat):
            self.heartbeats.append(record)
        return record

    def stderr(self) -> str:
        """Everything the process has written there. Waits for its end."""
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError):
            return self.process.stderr.read().decode()
        return ""

    def collect(self, keys: Iterable[tuple[str, int]], on_step: Callable[[Step], None] = lambda _: None) -> dict:
        """Receive until all of these attempts have ended."""
        waiting = set(keys)
        results: dict[tuple[str, int], Result] = {key: Result() for key in waiting}
        while waiting:
            record = self.receive()
            assert record is not None, self.stderr()
            if isinstance(record, Step):
                for piece in record.pieces:
                    answer = results[piece.request_id, piece.attempt].answers.setdefault(piece.choice, Answer())
                    assert answer.finish is None, "nothing follows a finish"
                    answer.tokens += piece.tokens
                    answer.text += piece.text
                    answer.finish = piece.finish
                    answer.logprobs += piece.logprobs or []
                on_step(record)
            elif isinstance(record, Prefilled):
                results[record.request_id, record.attempt].prefilled.append(record.done_tokens)
            elif isinstance(record, AttemptEnded):
                results[record.request_id, record.attempt].ended = record
                waiting.remove((record.request_id, record.attempt))
        return results

    def run(self, *submits: Submit) -> list[Result]:
        """Send all, then wait for all."""
        for submit in submits:
            self.frames.send(submit)
        results = self.collect((s.request_id, s.attempt) for s in submits)
        return [results[s.request_id, s.attempt] for s in submits]


_numbers = iter(range(1, 1 << 30))


def submit(prompt: list[int], limit: int = 24, sampling: Sampling = GREEDY, **more: Any) -> Submit:
    """A Submit under a new request id, with one choice unless `choices` are given."""
    choices = more.pop("choices", None) or [ChoiceStart(0, limit)]
    return Submit(f"request-{next(_numbers)}", 1, prompt, choices, sampling, **more)
