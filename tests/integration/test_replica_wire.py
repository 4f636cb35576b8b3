"""The wire to a worker, over a real socket pair."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from relevo.core.events import MAX_FRAME_BYTES, AttemptEnded, FromWorker, Heartbeat, Piece, Step, TokenLogprob
from relevo.replicas.wire import Wire, WireError

from .fakes.replica_house import House, make_replica, open_descriptors, running, submit, under_both_loops

BEAT = Heartbeat(1, 2.0, 3, 4)


def framed(record: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(record)
    return len(payload).to_bytes(4, "big") + payload


class Ear:
    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.ends: list[Exception | None] = []

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition(self):
                await asyncio.sleep(0.001)


@asynccontextmanager
async def connected(incoming: Any = FromWorker) -> AsyncIterator[tuple[Wire, socket.socket, Ear]]:
    ours, theirs = socket.socketpair()
    ear = Ear()
    wire = await Wire.connect(ours, incoming, ear.frames.append, ear.ends.append)
    try:
        with theirs:
            theirs.setblocking(False)
            yield wire, theirs, ear
    finally:
        wire.close()
        await asyncio.sleep(0.01)


def test_frames_arrive_whole_however_they_are_cut() -> None:
    async def scenario() -> None:
        piece = Piece("req_1", 1, 0, 3, [5], "é", None, [TokenLogprob(5, b"\xc3", -0.5, [(5, b"\xc3", -0.5)])])
        records = [BEAT, Step([piece]), AttemptEnded("req_1", 1, "completed")]
        data = b"".join(map(framed, records))
        for size in (1, 2, 3, 5, 7, 64, len(data)):
            async with connected() as (_, theirs, ear):
                for at in range(0, len(data), size):
                    theirs.send(data[at : at + size])
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                await ear.until(lambda e: len(e.frames) == len(records))
                assert ear.frames == records and ear.ends == []

    under_both_loops(scenario)


def test_the_largest_frame_passes_and_a_larger_one_is_refused_on_both_sides() -> None:
    async def scenario() -> None:
        empty = len(msgspec.msgpack.encode(AttemptEnded("", 1, "failed", message="x" * 70_000))) - 70_000
        largest = AttemptEnded("", 1, "failed", message="x" * (MAX_FRAME_BYTES - empty))
        assert len(framed(largest)) == MAX_FRAME_BYTES + 4
        async with connected() as (wire, theirs, ear):
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(theirs, framed(largest))
            await ear.until(lambda e: e.frames)
            assert ear.frames == [largest]
            wire.send(largest)
            too_large = msgspec.structs.replace(largest, request_id="y")
            with pytest.raises(WireError, match="larger than a frame"):
                wire.send(too_large)
            assert not wire.closed
            theirs.send((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
            await ear.until(lambda e: e.ends)
            assert "rubbish" in str(ear.ends[0]) and wire.closed
            with pytest.raises(WireError, match="closed"):
                wire.send(BEAT)

    under_both_loops(scenario)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x81\xa4type\xa4Nope",
        b"\x81\xa4type\xa4Step",
        msgspec.msgpack.encode({"type": "Heartbeat", "steps": "x"}),
    ],
)
def test_rubbish_closes_the_wire_with_a_reason_and_nothing_after_it_is_heard(payload: bytes) -> None:
    async def scenario() -> None:
        async with connected() as (_, theirs, ear):
            theirs.send(framed(BEAT) + len(payload).to_bytes(4, "big") + payload + framed(BEAT))
            await ear.until(lambda e: e.ends)
            assert ear.frames == [BEAT] and len(ear.ends) == 1
            assert isinstance(ear.ends[0], WireError) and "rubbish" in str(ear.ends[0])

    under_both_loops(scenario)


def test_the_other_ends_close_is_told_once() -> None:
    async def scenario() -> None:
        async with connected():
            pass  # what the loop itself opens at its first connection is not ours
        before = open_descriptors()
        async with connected() as (_, theirs, ear):
            theirs.send(framed(BEAT) + b"\0\0")  # and half a frame
            theirs.close()
            await ear.until(lambda e: e.ends)
            assert ear.frames == [BEAT] and ear.ends == [None]
        assert open_descriptors() == before

    under_both_loops(scenario)


def test_after_close_nothing_is_heard_even_in_the_middle_of_a_batch() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        heard: list[Any] = []
        ends: list[Any] = []

        def close_at_second(frame: Any) -> None:
            heard.append(frame)
            if len(heard) == 2:
                wire.close()

        wire = await Wire.connect(ours, FromWorker, close_at_second, ends.append)
        theirs.send(framed(BEAT) * 5)
        await asyncio.sleep(0.05)
        assert len(heard) == 2 and ends == [] and wire.closed
        with pytest.raises(WireError):
            wire.send(BEAT)
        theirs.close()
        await asyncio.sleep(0.01)

    under_both_loops(scenario)


def test_a_worker_that_does_not_read_is_cut_off_and_never_waited_for() -> None:
    async def scenario() -> None:
        async with connected() as (wire, _, ear):
            wire._max_unsent_bytes = 4 << 20
            half = AttemptEnded("req", 1, "failed", message="x" * 500_000)
            began = time.perf_counter()
            with pytest.raises(WireError, match="does not read"):
                for _ in range(50):
                    wire.send(half)
                    await asyncio.sleep(0)
            assert time.perf_counter() - began < 2.0
            await ear.until(lambda e: e.ends)
            assert "does not read" in str(ear.ends[0]) and len(ear.ends) == 1

    under_both_loops(scenario)


@pytest.mark.parametrize("pieces", [1, 8])
def test_the_wire_carries_more_frames_than_any_model_makes(pieces: int, capsys: Any) -> None:
    count = 20_000

    async def scenario() -> None:
        house = House()
        frames = 0

        def on_frame(replica: Any, frame: Any) -> None:
            nonlocal frames
            if type(frame) is Step:
                frames += 1
            else:
                house.tell("end")

        house.on_frame = on_frame  # type: ignore[method-assign]
        async with running(
            make_replica(house, {"flood": count, "pieces": pieces, "tokens": 0}, fence_s=20.0)
        ) as replica:
            await house.until("ready")
            wall, cpu = time.perf_counter(), time.process_time()
            replica.submit(submit())
            await house.until("end", timeout_s=30)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            assert frames == count
            with capsys.disabled():
                print(
                    f"\n{pieces} piece(s) a frame: {count / wall:,.0f} frames/s, "
                    f"{cpu / count * 1e6:.2f} us of gateway CPU a frame ({cpu / count / pieces * 1e6:.2f} a token)"
                )
            assert cpu / count < 200e-6

    under_both_loops(scenario)


def test_a_process_that_inherits_the_socket_does_not_keep_it_open() -> None:
    async def scenario() -> None:
        async with connected() as (_, theirs, ear):
            child = os.posix_spawn("/bin/sleep", ["sleep", "5"], {})
            try:
                theirs.close()
                await ear.until(lambda e: e.ends)
            finally:
                os.kill(child, 9)
                os.waitpid(child, 0)

    asyncio.run(scenario())
