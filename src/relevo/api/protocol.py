"""The HTTP/1.1 parser with walls: headers are bounded in bytes and time before any of our code sees the request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from relevo.api.call import new_request_id
from relevo.api.errors import error_body
from relevo.config import LimitsConfig
from relevo.core.errors import BadRequest, HeadersTooLarge, RelevoError

HEADERS_TIMEOUT_S = 10.0
_REQUEST_LINE_BYTES = 8192


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's parser, which by itself takes headers of any size, as slowly as the client likes."""

    header_bytes = 16 * 2**10
    headers_timeout_s = HEADERS_TIMEOUT_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_headers = True
        self._head_bytes = 0
        self._headers_timer: asyncio.TimerHandle | None = None
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._head_bytes += len(data)
        super().data_received(data)
        if (
            self._in_headers
            and self._head_bytes > self.header_bytes + _REQUEST_LINE_BYTES
            and not self.transport.is_closing()
        ):
            self._refuse(HeadersTooLarge(f"Too many headers: at most {self.header_bytes} bytes."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._head_bytes = 0
        # The way to drop a reader that stalled: an orderly close would wait for it for ever.
        self.scope["extensions"] = {"relevo.abort": self.transport.abort}  # type: ignore[dict-item]
        if self._headers_timer is None:
            self._await_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # a trailer after a chunked body is no header: it comes after every check
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._head_bytes = 0
        self._forget_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # the name is uvicorn's
        """A request that is no HTTP, answered in the shape of every other refusal."""
        self._refuse(BadRequest("This is not a valid HTTP/1.1 request."))

    def _await_headers(self) -> None:
        self._headers_timer = self.loop.call_later(self.headers_timeout_s, self._headers_late)

    def _forget_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _headers_late(self) -> None:
        self._headers_timer = None
        if self._in_headers and not self.transport.is_closing():
            self.transport.abort()

    def _refuse(self, error: RelevoError) -> None:
        """Answer without a parsed request, unless an answer is under way on this connection; then only close."""
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete:
            body = error_body(error)
            head = [
                STATUS_LINE[error.status],
                b"content-type: application/json\r\nconnection: close\r\nx-should-retry: false\r\n",
                b"x-request-id: " + new_request_id().encode() + b"\r\n",
                b"content-length: %d\r\n\r\n" % len(body),
            ]
            self.transport.write(b"".join([*head, body]))
        self.transport.close()


def bounded_http(limits: LimitsConfig) -> type[BoundedHttp]:
    """The parser for a configuration."""
    return type("ConfiguredHttp", (BoundedHttp,), {"header_bytes": limits.header_bytes})
