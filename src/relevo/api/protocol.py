"""The HTTP/1.1 parser with walls: headers are bounded in bytes and time before any of our code sees the request."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from relevo.api.call import new_request_id
from relevo.api.errors import error_body
from relevo.config import LimitsConfig
from relevo.core.errors import BadRequest, HeadersTooLarge, RelevoError

HEADERS_TIMEOUT_S = 10.0
_REQUEST_LINE_BYTES = 8192
_OFFER = frozenset({b"upgrade", b"http2-settings"})


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's parser, which by itself takes headers of any size, as slowly as the client likes."""

    header_bytes = 16 * 2**10
    headers_timeout_s = HEADERS_TIMEOUT_S
    send_timeout_s = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_headers = True
        self._head_bytes = 0
        self._offered = False
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
        self._feed(data)
        if (
            self._in_headers
            and self._head_bytes > self.header_bytes + _REQUEST_LINE_BYTES
            and not self.transport.is_closing()
        ):
            self._refuse(HeadersTooLarge(f"Too many headers: at most {self.header_bytes} bytes."))

    def _feed(self, data: bytes) -> None:
        """Parse. An offer to upgrade is passed over: Java's client sends one beside every body and wants an answer."""
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                rest = data[offer.args[0] :]
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(BadRequest("This is no proxy: CONNECT is not served."))
                    return
                data = self._head_without_offer() + rest
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
                continue
            except httptools.HttpParserError:
                self._refuse(BadRequest("This is not a valid HTTP/1.1 request."))
            return

    def _head_without_offer(self) -> bytes:
        """The request line and headers just parsed, as they would have come without the offer."""
        lines = [b"%b %b HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [b"%b: %b" % field for field in self.headers if field[0] not in _OFFER]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._offered = False
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
        if self.parser.should_upgrade():  # the parser would skip the body: it is fed again without the offer
            self._offered = True
            return
        self._in_headers = False
        self._head_bytes = 0
        self._forget_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offered:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # an orderly close waits for the reader: not for ever
            self.loop.call_later(self.send_timeout_s, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """The connection was idle. An answer that nobody took in all that time is thrown away."""
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

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
        unanswered = cycle is not None and not cycle.response_started and not self.pipeline
        if cycle is None or cycle.response_complete or unanswered:
            body = error_body(error)
            head = [
                STATUS_LINE[error.status],
                b"content-type: application/json\r\nconnection: close\r\nx-should-retry: false\r\n",
                b"x-request-id: " + new_request_id().encode() + b"\r\n",
                b"content-length: %d\r\n\r\n" % len(body),
            ]
            self.transport.write(b"".join([*head, body]))
        if unanswered:  # its handler must not answer as well
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()


def bounded_http(limits: LimitsConfig) -> type[BoundedHttp]:
    """The parser for a configuration."""
    chosen = {"header_bytes": limits.header_bytes, "send_timeout_s": limits.send_timeout_s}
    return type("ConfiguredHttp", (BoundedHttp,), chosen)
