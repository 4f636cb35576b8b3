"""The least a gateway can do, as a yardstick: uvicorn, a raw ASGI app, and frames from a worker over a socket pair.

    python -m bench.bare_forward PORT ARGUMENTS-OF-THE-FAST-WORKER

It decodes each frame, wraps each piece's text into an OpenAI chunk and sends it. No record, no admission, no limits,
no tokenizer, no disconnect watch, no keys: what Relevo's gateway does beyond this is what its events cost more.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections import deque
from typing import Any, cast

import msgspec
import uvicorn

from bench.fast_house import worker_command
from relevo.core.events import AttemptEnded, ChoiceStart, FromWorker, Piece, Sampling, StartModel, Step, Submit

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
encode_json = msgspec.json.Encoder().encode
encode_frame = msgspec.msgpack.Encoder().encode
decode_frame = msgspec.msgpack.Decoder(FromWorker).decode


class Stream:
    """What came for one request and was not sent yet."""

    __slots__ = ("pieces", "woken")

    def __init__(self) -> None:
        self.pieces: deque[Piece | None] = deque()
        self.woken: asyncio.Future[None] | None = None

    def put(self, piece: Piece | None) -> None:
        self.pieces.append(piece)
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)


class Worker(asyncio.Protocol):
    """The gateway's end of the socket pair."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self._rest = b""
        self._transport: asyncio.Transport
        self._numbers = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        start = StartModel("m", "cpu", "none", "none", context_tokens=4_000_000, slots=255)
        self.send(start)

    def send(self, record: msgspec.Struct) -> None:
        payload = encode_frame(record)
        self._transport.write(len(payload).to_bytes(4, "big") + payload)

    def ask(self, tokens: int) -> Stream:
        self._numbers += 1
        name, stream = f"req_{self._numbers}", Stream()
        self.streams[name] = stream
        self.send(Submit(name, 1, [1], [ChoiceStart(0, tokens)], Sampling()))
        return stream

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at, size = 0, len(data)
        while at + 4 <= size:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end > size:
                break
            record = decode_frame(data[at + 4 : end])
            at = end
            if type(record) is Step:
                for piece in record.pieces:
                    self.streams[piece.request_id].put(piece)
            elif type(record) is AttemptEnded:
                self.streams.pop(record.request_id).put(None)
        self._rest = data[at:]


class App:
    """One route: a streamed completion."""

    def __init__(self, worker_arguments: list[str]) -> None:
        self._arguments = worker_arguments
        self._worker: Worker | None = None

    async def _connect(self) -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(worker_command(self._arguments, theirs.fileno()), pass_fds=(theirs.fileno(),))
        _, worker = await asyncio.get_running_loop().create_unix_connection(Worker, sock=ours)
        return worker

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self._worker is None:
            self._worker = await self._connect()
        body = b""
        while True:
            part = await receive()
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        if not body:
            await send({"type": "http.response.body", "body": b"ready"})
            return
        asked = msgspec.json.decode(body)
        stream = self._worker.ask(asked["max_tokens"])
        head = b'data: {"id":"x","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":'
        loop = asyncio.get_running_loop()
        while True:
            while stream.pieces:
                piece = stream.pieces.popleft()
                if piece is None:
                    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
                    return
                chunk = head + encode_json(piece.text) + b',"logprobs":null,"finish_reason":null}]}\n\n'
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            stream.woken = loop.create_future()
            await stream.woken


if __name__ == "__main__":
    uvicorn.run(
        App(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False, lifespan="off"
    )
