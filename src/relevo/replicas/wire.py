"""The gateway's end of the socket to one worker process: whole records in, whole records out, nothing blocks.

Four bytes of length (big endian), then MessagePack of one record of core/events.py.
Every token passes through here, so a frame costs one decode and one call: no task,
no queue, no copy of the payload.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import msgspec

from relevo.core.events import MAX_FRAME_BYTES

MAX_UNSENT_BYTES = 64 << 20
"""More than this waiting for the worker to read means that it does not read."""

_HEADER_BYTES = 4


class WireError(Exception):
    """The conversation with the worker is over, or this record cannot be part of it. The message says why."""


class Wire(asyncio.Protocol):
    """One connection. `on_frame` gets each record; `on_closed` is called once, unless we closed it ourselves.

    `on_closed` gets None when the worker closed its end, and otherwise the reason. After `close()`
    returned neither is ever called again: this is what makes a fence a fence.
    """

    def __init__(
        self,
        incoming: Any,
        on_frame: Callable[[Any], None],
        on_closed: Callable[[Exception | None], None],
        *,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._max_unsent_bytes = max_unsent_bytes
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._parts: list[bytes] = []  # of a frame that has not arrived whole
        self._have_bytes = 0
        self._want_bytes = 0

    @classmethod
    async def connect(
        cls,
        sock: socket.socket,
        incoming: Any,
        on_frame: Callable[[Any], None],
        on_closed: Callable[[Exception | None], None],
    ) -> Wire:
        """Take over our end of a socket pair. `incoming` is the union of records the other side may send."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_unix_connection(lambda: cls(incoming, on_frame, on_closed), sock=sock)
        return wire

    @property
    def closed(self) -> bool:
        """True when nothing can be sent or received any more."""
        return self._closed

    def send(self, record: msgspec.Struct) -> None:
        """Hand a record to the kernel, or to the outgoing buffer when the kernel is full. Never waits.

        Raises WireError when the connection is closed, the record is larger than a frame may be, or
        the worker has left too much unread (then the connection is closed as well).
        """
        if self._closed or self._transport is None:
            raise WireError("The connection to the worker is closed.")
        payload = self._encode(record)
        size_bytes = len(payload)
        if size_bytes > MAX_FRAME_BYTES:
            kind = type(record).__name__
            raise WireError(f"A {kind} of {size_bytes} bytes is larger than a frame may be ({MAX_FRAME_BYTES} bytes).")
        if self._transport.get_write_buffer_size() + size_bytes > self._max_unsent_bytes:
            error = WireError(f"The worker does not read: over {self._max_unsent_bytes} bytes would be waiting for it.")
            self._fail(error)
            raise error
        self._transport.write(size_bytes.to_bytes(_HEADER_BYTES, "big") + payload)

    def close(self) -> None:
        """End the conversation now. What was not sent is dropped; nothing that still arrives is delivered."""
        self._closed = True
        self._parts.clear()
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The transport is up."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Cut what arrived into frames and pass each on."""
        if self._closed:
            return
        if self._parts:
            self._parts.append(data)
            self._have_bytes += len(data)
            if self._have_bytes < self._want_bytes:
                return
            data = b"".join(self._parts)
            self._parts.clear()
        used_bytes = self._take(memoryview(data))
        if used_bytes < len(data) and not self._closed:
            self._parts.append(data[used_bytes:])
            self._have_bytes = len(data) - used_bytes

    def _take(self, view: memoryview) -> int:
        """Deliver every whole frame in `view`; return the bytes used, and leave what is missing in `_want_bytes`."""
        at, size_bytes = 0, len(view)
        while not self._closed:
            start = at + _HEADER_BYTES
            if start > size_bytes:
                self._want_bytes = _HEADER_BYTES
                break
            length = int.from_bytes(view[at:start], "big")
            if length > MAX_FRAME_BYTES:
                self._fail(WireError(f"The worker spoke rubbish: a frame of {length} bytes was announced."))
                break
            end = start + length
            if end > size_bytes:
                self._want_bytes = end - at
                break
            try:
                record = self._decode(view[start:end])
            except ValueError as e:  # msgspec's errors are ValueErrors
                self._fail(WireError(f"The worker spoke rubbish: {e}."))
                break
            at = end
            self._on_frame(record)
        return at

    def eof_received(self) -> bool:
        """The worker closed its end: close ours too."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is down. A reset is how a killed peer with unread input looks: not an error of its own."""
        self._transport = None
        if isinstance(exc, ConnectionResetError | BrokenPipeError):
            exc = None
        self._report(exc)

    def _fail(self, reason: WireError) -> None:
        transport = self._transport
        self._report(reason)
        if transport is not None:
            transport.abort()

    def _report(self, reason: Exception | None) -> None:
        if not self._closed:
            self._closed = True
            self._parts.clear()
            self._on_closed(reason)
