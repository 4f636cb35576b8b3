"""One HTTP call: what came in, who sent it, and the ways to answer."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from relevo.api.errors import Headers, error_body, error_headers
from relevo.core.errors import BadRequest, RelevoError
from relevo.core.grant import Grant

NO_KEY = Grant()
_LINGER_S = 1.0  # how long the rest of a refused body is read and thrown away, so that the client sees the answer


def new_request_id() -> str:
    """An id for an answer that belongs to no accepted request."""
    return "req_" + uuid.uuid4().hex


def header_value(text: object) -> bytes:
    """Text as a header's value: printable ASCII, anything else replaced by `?`."""
    return "".join(c if " " <= c <= "~" else "?" for c in str(text)).encode("ascii")


@dataclass(slots=True)
class Call:
    """A call under way. `owner` is set by the route's own check, before any handler runs."""

    scope: Scope
    receive: Receive
    send: Send
    request_id: str = field(default_factory=new_request_id)
    owner: str = ""
    sees: str | None = None
    """Whose requests this caller may see; None: everybody's (no keys are configured)."""
    grant: Grant = NO_KEY
    """What the caller's key gives its requests."""
    started: bool = False
    body_done: bool = False
    extra_headers: Headers = field(default_factory=list)
    headers: dict[bytes, bytes] = field(default_factory=dict)
    repeated: set[bytes] = field(default_factory=set)

    def read_headers(self) -> None:
        """Take a copy of the headers now: trailers after the body must not be able to add any."""
        for name, value in self.scope["headers"]:
            if name in self.headers:
                self.repeated.add(name)
            self.headers[name] = value
        length = self.headers.get(b"content-length", b"0").strip()
        self.body_done = b"transfer-encoding" not in self.headers and length == b"0"

    def header(self, name: str) -> str | None:
        """A header's value, or None. Raises BadRequest where it was sent more than once."""
        key = name.encode()
        if key in self.repeated:
            raise BadRequest(f"The header {name} was sent more than once. Send it once.", param=name)
        value = self.headers.get(key)
        return None if value is None else value.decode("latin-1").strip()

    def query(self) -> dict[str, str]:
        """The query's parameters. Raises BadRequest for a repeated one."""
        found: dict[str, str] = {}
        try:
            pairs = parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=32)
        except ValueError:
            raise BadRequest("The address has too many parameters: at most 32.") from None
        for name, value in pairs:
            if name in found:
                raise BadRequest("A parameter of the address was given twice. Give it once.", param=name[:64])
            found[name] = value
        return found

    @property
    def path_params(self) -> dict[str, Any]:
        """The named parts of the address."""
        params: dict[str, Any] = self.scope.get("path_params", {})
        return params

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line and headers; x-request-id is always among them."""
        self.started = True
        every = [(b"x-request-id", self.request_id.encode("ascii")), *headers, *self.extra_headers]
        await self.send({"type": "http.response.start", "status": status, "headers": every})

    async def reply(self, status: int, body: bytes, content_type: bytes, headers: Headers | None = None) -> None:
        """A whole answer at once."""
        await self.start(status, self._whole(body, content_type, headers or []))
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def reply_json(self, value: Any, *, status: int = 200, headers: Headers | None = None) -> None:
        """A JSON answer."""
        await self.reply(status, msgspec.json.encode(value), b"application/json", headers)

    async def reply_error(self, error: RelevoError) -> None:
        """A refusal in OpenAI's shape. The rest of a refused body is read for a moment, then the connection ends."""
        body = error_body(error)
        headers = error_headers(error)
        if self.body_done:
            await self.reply(error.status, body, b"application/json", headers)
            return
        if (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        await self.start(error.status, self._whole(body, b"application/json", headers))
        await self.send({"type": "http.response.body", "body": body, "more_body": True})
        await self._throw_away_body()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    def abort(self) -> None:
        """Drop the connection without waiting for the client to read (where the server lets us)."""
        abort = self.scope.get("extensions", {}).get("relevo.abort")
        if abort is not None:
            abort()

    @staticmethod
    def _whole(body: bytes, content_type: bytes, headers: Headers) -> Headers:
        return [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            (b"cache-control", b"no-store"),
            *headers,
        ]

    async def _throw_away_body(self) -> None:
        # Closing with unread bytes resets the connection, and the client may then never see why.
        try:
            async with asyncio.timeout(_LINGER_S):
                while True:
                    message = await self.receive()
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return
