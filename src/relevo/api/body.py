"""The body of a call, read under limits of bytes, time and progress."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from relevo.api.call import Call
from relevo.api.connection import ClientGone
from relevo.api.strict_json import parse_json
from relevo.config import LimitsConfig
from relevo.core.errors import BadRequest, BodyTooLarge, RequestTimeout

IDLE_S = 10.0  # longest pause between two pieces of a body
SLOWEST_BYTES_S = 1024  # average, once the first seconds are over
_GRACE_S = 5.0


async def read_body(call: Call, limits: LimitsConfig) -> bytes:
    """All bytes of the body.

    Raises BodyTooLarge, RequestTimeout (too long in all, a pause, or a trickle), BadRequest for an encoded body, and
    ClientGone when the client left.
    """
    encoding = call.headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b""):
        raise BadRequest(
            "A compressed body is not accepted. Send it without Content-Encoding.", param="content-encoding"
        )
    declared = call.headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise _too_large(limits)
    pieces: list[bytes] = []
    size = 0
    started = time.monotonic()
    ends = started + limits.body_timeout_s
    while True:
        left = ends - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, min(left, IDLE_S))):
                message = await call.receive()
        except TimeoutError:
            raise RequestTimeout(
                f"The body did not arrive in time: {size} bytes came within {limits.body_timeout_s:g} s."
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size > limits.body_bytes:
            raise _too_large(limits)
        pieces.append(piece)
        if not message.get("more_body", False):
            call.body_done = True
            return b"".join(pieces)
        spent = time.monotonic() - started
        if spent > _GRACE_S and size < SLOWEST_BYTES_S * (spent - _GRACE_S):
            raise RequestTimeout(f"The body arrives too slowly: less than {SLOWEST_BYTES_S} bytes a second.")


async def read_object(call: Call, limits: LimitsConfig, *, empty: bool = False) -> dict[str, Any]:
    """The body as one JSON object; `empty` allows no body at all. Raises what read_body and parse_json raise."""
    data = await read_body(call, limits)
    if not data.strip():
        if empty:
            return {}
        raise BadRequest("The body is empty. Send a JSON object.")
    value = parse_json(data, depth=limits.json_depth, nodes=limits.json_nodes)
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.")
    return value


def _too_large(limits: LimitsConfig) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than the {limits.body_bytes} bytes allowed (`limits.body_bytes`).")
