"""The outermost layer: every call passes here, and every refusal, our own faults too, leaves in one shape."""

from __future__ import annotations

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from relevo.api.call import Call
from relevo.api.connection import ClientGone, ReaderStalled
from relevo.api.hosts import HostWall
from relevo.api.route import CALL
from relevo.config import LimitsConfig
from relevo.core.errors import BadRequest, HeadersTooLarge, RelevoError

log = structlog.get_logger(__name__)


class Door:
    """Limits and walls before the router, one renderer for whatever it raises. Nothing is wrapped per message."""

    def __init__(self, inside: ASGIApp, limits: LimitsConfig, wall: HostWall) -> None:
        self._inside = inside
        self._limits = limits
        self._wall = wall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = Call(scope, receive, send)
        scope[CALL] = call
        try:
            call.read_headers()
            self._check_headers(call)
            self._wall.check(call)
            preflight = self._wall.preflight(call)
            if preflight is not None:
                await call.reply(204, b"", b"text/plain", preflight)
                return
            await self._inside(scope, receive, send)
        except RelevoError as error:
            await self._refuse(call, error)
        except ClientGone:
            log.debug("call.client_gone", request_id=call.request_id)
        except ReaderStalled:
            log.info("call.reader_stalled", request_id=call.request_id)
            call.abort()
        except Exception:
            log.exception("call.failed", request_id=call.request_id)
            await self._refuse(call, RelevoError())

    async def _refuse(self, call: Call, error: RelevoError) -> None:
        if call.started:  # the answer is under way and cannot be taken back: cut it, so that nobody takes it for whole
            call.abort()
            return
        await call.reply_error(error)

    def _check_headers(self, call: Call) -> None:
        fields = call.scope["headers"]
        limits = self._limits
        size = sum(len(name) + len(value) + 4 for name, value in fields)
        if len(fields) > limits.header_fields or size > limits.header_bytes:
            raise HeadersTooLarge(
                f"Too many headers: at most {limits.header_fields} fields and {limits.header_bytes} bytes."
            )
        if len(call.scope.get("raw_path", b"")) + len(call.scope["query_string"]) > 8192:
            raise HeadersTooLarge("The address is too long: at most 8192 bytes.")
        if b"content-length" in call.headers and b"transfer-encoding" in call.headers:
            raise BadRequest("Content-Length and Transfer-Encoding were both sent. Send one of them.")
