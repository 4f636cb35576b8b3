"""Which host names and web origins may reach this server: the wall against pages that rebind a name to loopback."""

from __future__ import annotations

import ipaddress
import re

from relevo.api.call import Call
from relevo.api.errors import Headers
from relevo.config import ServerConfig, is_loopback
from relevo.core.errors import BadRequest, HostNotAllowed, OriginNotAllowed

_HOST = re.compile(rb"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})))(?::([0-9]{1,5}))?")
_UNSPECIFIED = frozenset({"0.0.0.0", "::"})  # noqa: S104  # to refuse them
_CHANGES_NOTHING = frozenset({"GET", "HEAD"})
_CORS_METHODS = b"GET, POST, OPTIONS"
_CORS_HEADERS = (
    b"authorization, content-type, idempotency-key, last-event-id, "
    b"x-relevo-policy, x-relevo-handover, x-relevo-priority, x-relevo-deadline-s"
)
_CORS_SHOWN = (
    b"x-request-id, x-relevo-route, x-relevo-device, x-relevo-model, x-relevo-degraded, x-relevo-standby, "
    b"x-relevo-eta-ms, retry-after, retry-after-ms, x-should-retry, idempotent-replayed"
)


def split_host(value: bytes) -> tuple[str, int | None] | None:
    """Host and port of a Host header, lower case and without a final dot; None where it is malformed."""
    match = _HOST.fullmatch(value)
    if match is None:
        return None
    inside, name, port = match.groups()
    number = int(port) if port is not None else None
    if number is not None and number > 65535:
        return None
    if inside is not None:
        try:
            return str(ipaddress.IPv6Address(inside.decode("ascii"))), number
        except ValueError:
            return None
    return name.decode("ascii").lower().rstrip("."), number


class HostWall:
    """Checks Host on every call, and Origin on every call that changes something."""

    def __init__(self, config: ServerConfig, address: str) -> None:
        """`address` is the one the server is bound to."""
        # 0.0.0.0 and :: are bound to, never called: browsers let any page reach loopback by them.
        self._names = set() if address in _UNSPECIFIED else {address.lower()}
        for entry in config.allowed_hosts:
            parts = split_host(entry.strip().encode("latin-1", "replace"))
            self._names.add(parts[0] if parts is not None else entry.strip().lower())
        self._origins = {origin.rstrip("/").lower() for origin in config.allowed_origins}

    def check(self, call: Call) -> None:
        """Raises BadRequest (no or bad Host), HostNotAllowed, OriginNotAllowed. Adds CORS headers if configured."""
        value = call.headers.get(b"host")
        parts = None if value is None or b"host" in call.repeated else split_host(value)
        if parts is None:
            raise BadRequest(
                "The Host header is missing or malformed. Send exactly one, such as `Host: localhost:8377`."
            )
        if not self._may_reach(parts[0], call):
            raise HostNotAllowed(
                f"The host name {parts[0][:80]!r} is not on the allow-list. "
                "Add it under `server.allowed_hosts` in the configuration."
            )
        self._check_origin(call, value or b"")

    def _may_reach(self, host: str, call: Call) -> bool:
        if is_loopback(host) or host in self._names:
            return True
        # The address this connection arrived at, written as a number: no name was involved, so none was rebound.
        server = call.scope.get("server")
        return server is not None and server[0] == host and _is_address(host)

    def _check_origin(self, call: Call, host: bytes) -> None:
        sent = call.headers.get(b"origin")
        if sent is None:
            return
        origin = sent.decode("latin-1").rstrip("/").lower()
        if b"origin" not in call.repeated and origin in self._origins:
            call.extra_headers += [
                (b"access-control-allow-origin", sent),
                (b"access-control-expose-headers", _CORS_SHOWN),
                (b"vary", b"origin"),
            ]
            return
        if call.scope["method"] in _CHANGES_NOTHING:
            return
        own = host.decode("latin-1").lower()
        if b"origin" in call.repeated or origin not in (f"http://{own}", f"https://{own}"):
            raise OriginNotAllowed(
                "Requests from web pages of another origin are not allowed. "
                "Add the page's origin under `server.allowed_origins`."
            )

    def preflight(self, call: Call) -> Headers | None:
        """The headers that answer a browser's preflight from an allowed origin; None where this is not one."""
        if call.scope["method"] != "OPTIONS" or b"access-control-request-method" not in call.headers:
            return None
        if not any(name == b"access-control-allow-origin" for name, _ in call.extra_headers):
            return None
        return [
            (b"access-control-allow-methods", _CORS_METHODS),
            (b"access-control-allow-headers", _CORS_HEADERS),
            (b"access-control-max-age", b"600"),
        ]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
