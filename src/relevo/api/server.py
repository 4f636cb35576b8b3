"""Listening: the socket, who may bind where, and uvicorn with the settings this service needs."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from relevo.api.keys import KeyRing
from relevo.api.protocol import bounded_http
from relevo.config import LimitsConfig, is_loopback
from relevo.core.errors import StartupError

BACKLOG = 512
KEEP_ALIVE_S = 30
GRACEFUL_S = 10


def bind(host: str, port: int, keys: KeyRing) -> socket.socket:
    """A listening socket: who connects before the server runs waits for it. Port 0 takes any free one.

    Raises StartupError: not loopback without a key, port taken (by whom, where that can be seen), no such address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise StartupError(
            f"The address {host!r} cannot be used: {e.strerror}. Use 127.0.0.1, or an address of this machine."
        ) from None
    family, _, _, _, address = found[0]
    if not is_loopback(str(address[0])) and not keys.required:
        raise StartupError(
            f"Listening on {host} would let everybody on the network in: there is no key yet. "
            "Make one first with `relevo keys create NAME`, or listen on 127.0.0.1."
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)  # only now is a port that another process listens on refused
        sock.setblocking(False)
    except OSError as e:
        sock.close()
        raise StartupError(_why_not(e, host, port)) from None
    return sock


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is taken{_taken_by(port)}. Stop that, or choose another port with --port."
    if error.errno == errno.EACCES:
        return f"Port {port} needs more rights than this user has. Choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine. Use 127.0.0.1, or one that `ip address` shows."
    return f"{host}:{port} cannot be listened on: {error.strerror}."


def _taken_by(port: int) -> str:
    import psutil  # type: ignore[import-untyped]

    try:
        for connection in psutil.net_connections(kind="tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
                and connection.pid
            ):
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


class HttpServer(uvicorn.Server):
    """uvicorn inside a loop that is not its own: signals belong to whoever runs the loop."""

    def __init__(
        self, app: ASGIApp, sock: socket.socket, limits: LimitsConfig, *, graceful_s: int = GRACEFUL_S
    ) -> None:
        self._sock = sock
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_http(limits),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=True,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=graceful_s,
            )
        )

    async def run_until_stopped(self) -> None:
        """Serve until `stop`, then let calls under way end, for a bounded time."""
        await self.serve(sockets=[self._sock])

    def stop(self) -> None:
        """Take no more calls and finish."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield
