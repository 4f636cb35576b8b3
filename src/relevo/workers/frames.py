"""The worker's end of the wire: length-prefixed MessagePack frames on a blocking Unix socket."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import msgspec

from relevo.core.events import MAX_FRAME_BYTES

_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """The other end sent something that is no frame of this protocol."""


class FrameSocket:
    """Records over one connected stream socket. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._sending = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

    def send(self, record: msgspec.Struct) -> None:
        """Send one record whole.

        Raises FrameError when it is larger than MAX_FRAME_BYTES (nothing was sent then), OSError when the
        other end is gone.
        """
        with self._sending:
            payload = self._encoder.encode(record)
            if len(payload) > MAX_FRAME_BYTES:
                raise FrameError(
                    f"A {type(record).__name__} frame of {len(payload)} bytes is larger than {MAX_FRAME_BYTES}."
                )
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)

    def receive(self, kind: Any) -> Any | None:
        """Wait for the next record of `kind` (a Struct type or a union of them); None at the end of the stream.

        Raises FrameError for a frame that is too long, cut short, or not of that kind.
        """
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > MAX_FRAME_BYTES:
            raise FrameError(f"A frame of {size} bytes was announced; at most {MAX_FRAME_BYTES} are allowed.")
        payload = self._read(size)
        if payload is None:
            raise FrameError("The stream ended inside a frame.")
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.msgpack.Decoder(kind)
        try:
            return decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as e:  # ValidationError is one of the first
            raise FrameError(f"A frame could not be read: {e}.") from None

    def close(self) -> None:
        """Close the socket. Harmless when it is closed already."""
        self._socket.close()

    def _read(self, size: int) -> bytearray | None:
        """Exactly `size` bytes, or None when the stream ended before the first of them."""
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            try:
                count = self._socket.recv_into(view[done:])
            except ConnectionResetError:
                count = 0
            if not count:
                if done:
                    raise FrameError("The stream ended inside a frame.")
                return None
            done += count
        return data
