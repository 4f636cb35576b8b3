"""Server-sent events to one reader: timed writes, comments in silence, and giving up a reader that stalls."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from relevo.api.call import Call
from relevo.api.connection import ReaderStalled
from relevo.api.errors import Headers

SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Pace:
    """The times of a stream, in seconds."""

    header_wait_s: float = 10.0
    """Longest wait for a route before the headers leave without one."""
    waiting_comment_s: float = 10.0
    """Longest silence while the request waits in a lane."""
    silence_s: float = 15.0
    """Longest silence while it runs."""
    send_timeout_s: float = 30.0
    """A reader that takes nothing for so long is given up."""
    tick_s: float = 1.0
    """How often the above are looked at."""
    leave_s: float = 5.0
    """Longest time given to saying that the caller left."""


class EventWriter:
    """One stream. A write is one whole event or comment, so two tasks may write."""

    def __init__(self, call: Call, pace: Pace) -> None:
        self._call = call
        self._send = call.send
        self._pace = pace
        self.last_write = time.monotonic()
        self._sending = 0
        self._sending_since = 0.0

    async def start(self, headers: Headers) -> None:
        """Status 200 and the stream's headers."""
        await self._call.start(200, [*SSE_HEADERS, *headers])

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Whole events. Waits while the reader is slow; `watch` ends that."""
        now = time.monotonic()
        if not self._sending:
            self._sending_since = now
        self._sending += 1
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending -= 1
        self.last_write = now

    async def comment(self, text: str) -> None:
        """A line that readers ignore. Skipped while a write is waiting for the reader."""
        if not self._sending:
            await self.write(b": " + text.encode("ascii", "replace") + b"\n\n")

    async def end(self) -> None:
        """The stream is complete as far as it goes."""
        await self.write(b"", more=False)

    def silent_s(self) -> float:
        """How long nothing was written."""
        return time.monotonic() - self.last_write

    def check_reader(self) -> None:
        """Raises ReaderStalled when one write has waited longer than allowed."""
        if self._sending and time.monotonic() - self._sending_since > self._pace.send_timeout_s:
            raise ReaderStalled

    async def keep_alive(self) -> None:
        """For feeds: a comment in each silence, until the reader stalls. A side task of a group."""
        while True:
            await asyncio.sleep(self._pace.tick_s)
            self.check_reader()
            if self.silent_s() >= self._pace.silence_s:
                await self.comment("running")
