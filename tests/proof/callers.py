"""Clients of the proof: they keep everything they were given, and can hang up at any moment."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tests.acceptance.house import House, wait_for

MODEL = "smollm2-135m"
STORY = "Tell me a long story about a lighthouse."
LONG_PROMPT = " ".join(f"light{n % 10}" for n in range(970))
"""About 3,000 tokens with the template: several seconds of prefill."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way of asking."""

    name: str
    stream: bool = False
    kept: bool = False
    choices: int = 1
    handover: str = "auto"
    logprobs: bool = False


PLAIN = Kind("plain")
STREAM = Kind("stream", stream=True)
KEPT = Kind("kept", stream=True, kept=True)
FOUR = Kind("four", choices=4)
# With log probabilities each token is its own entry with its bytes: what is doubled or missing can be counted.
CONTINUOUS = Kind("continuous", stream=True, handover="continuous", logprobs=True)
KINDS = (PLAIN, STREAM, KEPT, FOUR, CONTINUOUS)


@dataclass(slots=True)
class Call:
    """One call, in its own thread. `start`, then look at what came, then `end`."""

    house: House
    kind: Kind
    tokens: int
    prompt: str = STORY
    policy: str = "auto"
    key: str | None = None
    more: dict[str, Any] = field(default_factory=dict)
    more_headers: dict[str, str] = field(default_factory=dict)

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    token_bytes: dict[int, list[bytes]] = field(default_factory=dict)
    counted_at_route: list[int] = field(default_factory=list)
    """How many tokens had come when each chunk with `relevo` came."""
    relevo: list[dict[str, Any]] = field(default_factory=list)
    finishes: dict[int, str] = field(default_factory=dict)
    answer: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    broken: str | None = None
    came: list[float] = field(default_factory=list)
    _connection: http.client.HTTPConnection | None = None
    _thread: threading.Thread | None = None
    _left: bool = False

    def start(self) -> Call:
        """Send it."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def end(self, timeout_s: float = 120.0) -> Call:
        """Wait until the answer, or its failure, is here."""
        assert self._thread is not None
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"no end of {self} in {timeout_s} s"
        return self

    def leave(self) -> None:
        """Hang up."""
        self._left = True
        connection = wait_for("a connection", lambda: self._connection, 5)
        with contextlib.suppress(OSError, AttributeError):
            connection.sock.shutdown(socket.SHUT_RDWR)
        self.end(10)

    @property
    def seen(self) -> int:
        """Chunks with text, about one a token."""
        return len(self.came)

    @property
    def request_id(self) -> str | None:
        """As the client learned it."""
        if "x-request-id" in self.headers:
            return self.headers["x-request-id"]
        return self.relevo[0]["request_id"] if self.relevo else None

    @property
    def ok(self) -> bool:
        """A whole answer came."""
        return self.status == 200 and self.error is None and self.broken is None and (self.done or bool(self.answer))

    def body(self) -> dict[str, Any]:
        """As it is sent."""
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "n": self.kind.choices,
            "stream": self.kind.stream,
            **({"logprobs": True} if self.kind.logprobs else {}),
            **self.more,
        }

    def _run(self) -> None:
        headers = {"content-type": "application/json", "x-relevo-policy": self.policy, **self.more_headers}
        headers["x-relevo-handover"] = self.kind.handover
        if self.key is not None:
            headers["idempotency-key"] = self.key
        self._connection = http.client.HTTPConnection("127.0.0.1", self.house.port, timeout=180)
        try:
            self._connection.request("POST", "/v1/chat/completions", json.dumps(self.body()), headers)
            answer = self._connection.getresponse()
            self.status = answer.status
            self.headers = {k.lower(): v for k, v in answer.getheaders()}
            if answer.status != 200 or not self.kind.stream:
                self._take_whole(json.loads(answer.read()))
            else:
                self._take_stream(answer)
        except (OSError, http.client.HTTPException, ValueError) as e:
            self.broken = "left" if self._left else f"{type(e).__name__}: {e}"
        finally:
            self._connection.close()

    def _take_whole(self, body: dict[str, Any]) -> None:
        if "error" in body:
            self.error = body["error"]
            return
        self.answer = body
        self.relevo.append(body["relevo"])
        for choice in body["choices"]:
            self.texts[choice["index"]] = choice["message"]["content"]
            self.finishes[choice["index"]] = choice["finish_reason"]

    def _take_stream(self, answer: http.client.HTTPResponse) -> None:
        for raw in answer:
            line = raw.decode().strip()
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                self.done = True
                continue
            assert not self.done, f"something came behind [DONE]: {line}"
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self.error = chunk["error"]
                continue
            assert self.error is None, f"something came behind the error: {line}"
            self._take_chunk(chunk)
        if not self.done and self.error is None:
            self.broken = "the stream ended without an end"

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        self.chunks.append(chunk)
        if "relevo" in chunk:
            self.relevo.append(chunk["relevo"])
            self.counted_at_route.append(sum(map(len, self.token_bytes.values())))
        for choice in chunk["choices"]:
            index, text = choice["index"], choice["delta"].get("content") or ""
            self.texts[index] = self.texts.get(index, "") + text
            entries = ((choice.get("logprobs") or {}).get("content")) or []
            self.token_bytes.setdefault(index, []).extend(bytes(e["bytes"]) for e in entries)
            if text:
                self.came.append(time.monotonic())
            if choice["finish_reason"] is not None:
                assert index not in self.finishes, "a choice finished twice"
                self.finishes[index] = choice["finish_reason"]


def call(house: House, kind: Kind, tokens: int, prompt: str = STORY, **more: Any) -> Call:
    """Start a call; a kept one gets a key of its own."""
    if kind.kept and "key" not in more:
        more["key"] = f"key-{time.monotonic_ns()}"
    return Call(house, kind, tokens, prompt, **more).start()


def accepted_id(house: House, known: set[str], timeout_s: float = 20.0) -> str:
    """The id of the one request that is not known yet."""
    new = wait_for(
        "a request to be accepted", lambda: {r["id"] for r in house.records(limit="100")} - known, timeout_s, 0.005
    )
    assert len(new) == 1, new
    return str(new.pop())


def known_ids(house: House) -> set[str]:
    """Every id that the service lists."""
    return {r["id"] for r in house.records(limit="100")}
