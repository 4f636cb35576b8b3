"""The worker's end of the wire: whole records or a clear error."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest

from relevo.core.events import MAX_FRAME_BYTES, Cancel, Heartbeat, Shutdown, Tokenize, ToText, ToWorker
from relevo.workers.frames import FrameError, FrameSocket


@pytest.fixture
def pair() -> Iterator[tuple[FrameSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FrameSocket(ours), theirs


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def test_a_record_arrives_as_it_was_sent_however_it_is_cut(pair: tuple[FrameSocket, socket.socket]) -> None:
    frames, other = pair
    record = Cancel("request", 3)
    for byte in framed(msgspec.msgpack.encode(record)):
        other.sendall(bytes([byte]))
    assert frames.receive(ToWorker) == record
    FrameSocket(other).send(Shutdown())
    assert frames.receive(ToText) == Shutdown()


def test_the_end_of_the_stream_between_frames_is_none(pair: tuple[FrameSocket, socket.socket]) -> None:
    frames, other = pair
    other.close()
    assert frames.receive(ToWorker) is None


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\x00\x00", "inside a frame"),
        (framed(b"\x80")[:4], "inside a frame"),
        (struct.pack(">I", MAX_FRAME_BYTES + 1), "at most"),
        (framed(b""), "could not be read"),
        (framed(b"\xc1"), "could not be read"),
        (framed(msgspec.msgpack.encode(Heartbeat(1, 0.0, 0, 0))), "could not be read"),
        (framed(msgspec.msgpack.encode({"type": "Cancel", "request_id": 7})), "could not be read"),
        (framed(b"\x82\xa4type\xa6Render\xa8messages" + b"\x91" * 100_000), "could not be read"),
    ],
)
def test_what_is_no_frame_is_refused(pair: tuple[FrameSocket, socket.socket], sent: bytes, said: str) -> None:
    frames, other = pair
    other.sendall(sent)
    other.close()
    with pytest.raises(FrameError, match=said):
        frames.receive(ToText)


def test_a_record_that_is_too_large_is_not_sent_at_all(pair: tuple[FrameSocket, socket.socket]) -> None:
    frames, other = pair
    with pytest.raises(FrameError, match="larger"):
        frames.send(Tokenize(1, "x" * MAX_FRAME_BYTES))
    frames.send(Shutdown())
    assert FrameSocket(other).receive(ToText) == Shutdown()


def test_frames_of_several_threads_never_mix(pair: tuple[FrameSocket, socket.socket]) -> None:
    frames, other = pair
    threads = [
        threading.Thread(target=lambda n=n: [frames.send(Tokenize(n, str(n) * 5000)) for _ in range(20)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    received = [FrameSocket(other).receive(ToText) for _ in range(80)]
    for thread in threads:
        thread.join()
    assert all(record.text == str(record.call) * 5000 for record in received)
