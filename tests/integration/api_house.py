"""A running HTTP layer for tests: real uvicorn on a loopback port, in a thread with its own loop."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from relevo.api.app import create_app
from relevo.api.keys import KeyRing
from relevo.api.server import HttpServer, bind
from relevo.api.sse import Pace
from relevo.config import Config
from tests.integration.fakes.fake_service import FakeService

QUICK = Pace(header_wait_s=0.3, waiting_comment_s=0.2, silence_s=0.3, send_timeout_s=0.6, tick_s=0.02, leave_s=1.0)


class House:
    """The server's address, its service, and a way into its loop."""

    def __init__(self, service: FakeService, port: int, loop: asyncio.AbstractEventLoop, keys: KeyRing) -> None:
        self.service = service
        self.port = port
        self.loop = loop
        self.keys = keys
        self.base = f"http://127.0.0.1:{port}"

    def run(self, work: Any, timeout_s: float = 10.0) -> Any:
        """Run a coroutine in the server's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def wait(self, event: asyncio.Event, timeout_s: float = 5.0) -> None:
        """Wait for an event of the server's loop."""
        self.run(asyncio.wait_for(event.wait(), timeout_s))

    def set(self, event: asyncio.Event) -> None:
        """Set an event of the server's loop."""
        self.loop.call_soon_threadsafe(event.set)

    def left(self, index: int = -1, timeout_s: float = 5.0) -> bool:
        """Whether the ticket was left, in time."""
        try:
            self.wait(self.service.tickets[index].left, timeout_s)
        except TimeoutError:
            return False
        return True

    def raw(self, data: bytes, *, timeout_s: float = 5.0) -> bytes:
        """Send bytes, return everything until the server closes (or the time is up)."""
        with self.connect(data) as sock:
            return read_all(sock, timeout_s)

    def connect(self, data: bytes = b"") -> socket.socket:
        """A raw connection that sent these bytes."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        if data:
            sock.sendall(data)
        return sock

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """One request on a fresh connection: status, headers, body."""
        sent = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        lines = {"host": f"127.0.0.1:{self.port}", "connection": "close"}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        if method == "POST":
            lines.setdefault("content-length", str(len(sent)))
        head = (
            f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
        )
        return split_answer(self.raw(head.encode() + sent))


def read_all(sock: socket.socket, timeout_s: float = 5.0) -> bytes:
    """Everything until the other end closes."""
    sock.settimeout(timeout_s)
    got = b""
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        while piece := sock.recv(65536):
            got += piece
    return got


def read_answer(sock: socket.socket, timeout_s: float = 5.0) -> bytes:
    """One whole answer, also where the server keeps the connection."""
    sock.settimeout(timeout_s)
    got = b""
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        while piece := sock.recv(65536):
            got += piece
            head, found, body = got.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if found and length is not None and len(body) >= int(length[1]):
                break
    return got


def read_until(sock: socket.socket, mark: bytes, timeout_s: float = 5.0) -> bytes:
    """Everything up to the first read in which the mark has appeared."""
    sock.settimeout(timeout_s)
    got = b""
    while mark not in got:
        piece = sock.recv(65536)
        if not piece:
            raise AssertionError(f"closed before {mark!r}: {got[-300:]!r}")
        got += piece
    return got


def split_answer(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and body of a raw answer, chunks put together."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        joined = b""
        while body:
            size, _, rest = body.partition(b"\r\n")
            length = int(size or b"0", 16)
            joined, body = joined + rest[:length], rest[length + 2 :]
            if length == 0:
                break
        body = joined
    return int(first.split()[1]) if first else 0, headers, body


def post(path: str, body: bytes, port: int, *more: str) -> bytes:
    """The bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(body)}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


@contextlib.contextmanager
def open_house(
    service: FakeService | None = None,
    config: Config | None = None,
    keys: Path | None = None,
    pace: Pace = QUICK,
    **parser: float,
) -> Iterator[House]:
    """Run the server in a thread until the block ends."""
    ready = threading.Event()
    box: dict[str, Any] = {}
    fake = service or FakeService()
    settings = config or Config()
    ring = KeyRing(keys)

    async def serve() -> None:
        sock = bind("127.0.0.1", 0, ring)
        server = HttpServer(create_app(fake, settings, ring, pace=pace), sock, settings.limits, graceful_s=2)
        for name, value in parser.items():
            setattr(server.config.http, name, value)
        box.update(port=sock.getsockname()[1], loop=asyncio.get_running_loop(), server=server)
        ready.set()
        await server.run_until_stopped()

    thread = threading.Thread(target=uvloop.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    house = House(fake, box["port"], box["loop"], ring)
    try:
        yield house
    finally:
        box["loop"].call_soon_threadsafe(box["server"].stop)
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"
