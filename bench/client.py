"""A small HTTP/1.1 client, cheap enough not to be what is measured. One connection, kept alive."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any


class Cut(Exception):
    """The connection ended inside an answer."""


@dataclass(slots=True)
class Streamed:
    """What one stream gave."""

    asked_at: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    """Of each event that carried text."""
    stamps: list[float] = field(default_factory=list)
    """Another clock, read at the same moments, where one was given."""
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    done: bool = False
    cut: str | None = None
    ended_at: float = 0.0

    @property
    def first_ms(self) -> float:
        """From asking to the first text."""
        return (self.times[0] - self.asked_at) * 1e3

    def gaps_ms(self, since: float = 0.0, until: float = float("inf")) -> list[float]:
        """Times between neighbouring events that overlap this span."""
        return [(b - a) * 1e3 for a, b in zip(self.times, self.times[1:], strict=False) if b > since and a < until]


class Connection:
    """One keep-alive connection to a server on loopback."""

    def __init__(self, port: int, headers: dict[str, str] | None = None) -> None:
        self._port = port
        self._headers = "".join(f"{k}: {v}\r\n" for k, v in (headers or {}).items())
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def _send(self, path: str, body: bytes, method: str = "POST") -> asyncio.StreamReader:
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{self._headers}\r\n"
        )
        self._writer.write(head.encode() + body)
        return self._reader

    async def _head(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        try:
            raw = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            raise Cut("closed before any status line") from None
        first, *lines = raw.decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines if line)
        return int(first.split()[1]), {name.strip().lower(): value.strip() for name, _, value in fields}

    async def _pieces(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
        try:
            if "content-length" in headers:
                yield await reader.readexactly(int(headers["content-length"]))
                return
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            raise Cut("closed inside the body") from None

    async def call(self, path: str, body: Any = None, *, method: str = "POST") -> tuple[int, dict[str, str], bytes]:
        """One call, one whole answer. `body` may be encoded already. Raises Cut, OSError."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        reader = await self._send(path, data, method)
        status, headers = await self._head(reader)
        return status, headers, b"".join([piece async for piece in self._pieces(reader, headers)])

    async def count(self, path: str, body: bytes) -> tuple[int, float, float]:
        """A stream whose events are only counted: how many, when the first came, when the last."""
        reader = await self._send(path, body)
        status, headers = await self._head(reader)
        assert status == 200, status
        events, first, last = 0, 0.0, 0.0
        async for piece in self._pieces(reader, headers):
            last = time.perf_counter()
            first = first or last
            events += piece.count(b"\n\ndata:") + piece.startswith(b"data:")
        return events, first, last

    async def stream(
        self, path: str, body: Any, at: int = 0, then: Any = None, stamp: Callable[[], float] | None = None
    ) -> Streamed:
        """A stream read to its end, whatever that is. `then()` is called when `at` texts have come.

        `stamp()` is asked at every text, where given.
        """
        got = Streamed(time.perf_counter())
        try:
            reader = await self._send(path, json.dumps(body).encode())
            got.status, got.headers = await self._head(reader)
            rest = b""
            async for piece in self._pieces(reader, got.headers):
                now = time.perf_counter()
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:") or not self._event(got, line[5:].strip(), now):
                        continue
                    if stamp is not None:
                        got.stamps.append(stamp())
                    if len(got.times) == at:
                        then()
        except Cut as e:
            got.cut = str(e)
        except OSError as e:
            got.cut = f"{type(e).__name__}: {e}"
            self.close()
        got.ended_at = time.perf_counter()
        return got

    @staticmethod
    def _event(got: Streamed, data: bytes, now: float) -> bool:
        """Take in one event; True when it carried text."""
        if data == b"[DONE]":
            got.done = True
            return False
        said = json.loads(data)
        got.usage = said.get("usage") or got.usage
        got.timings = said.get("timings") or got.timings
        got.error = said.get("error") or got.error
        choices = said.get("choices") or [{}]
        text = choices[0].get("text") or (choices[0].get("delta") or {}).get("content")
        if text:
            got.times.append(now)
        return bool(text)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
