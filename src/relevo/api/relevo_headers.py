"""The response headers that say, before the first byte of an answer, where it comes from."""

from __future__ import annotations

import math
from typing import Any

from relevo.api.call import header_value
from relevo.api.errors import Headers


def relevo_headers(relevo: dict[str, Any], *, replayed: bool = False) -> Headers:
    """x-relevo-route, -device, -model, -degraded and -standby from the `relevo` object; `unknown` where it has none."""
    standby = relevo.get("standby")
    route = standby.get("route") if isinstance(standby, dict) else standby
    headers = [
        (b"x-relevo-route", header_value(relevo.get("route") or "unknown")),
        (b"x-relevo-device", header_value(relevo.get("device") or "unknown")),
        (b"x-relevo-model", header_value(relevo.get("model") or "unknown")),
        (b"x-relevo-degraded", b"true" if relevo.get("degraded") else b"false"),
        (b"x-relevo-standby", header_value(route or "none")),
    ]
    if replayed:
        headers.append((b"idempotent-replayed", b"true"))
    return headers


def pending_headers(relevo: dict[str, Any], eta_ms: float | None, *, replayed: bool = False) -> Headers:
    """The same while no route is known yet: `pending`, with the estimate."""
    known = (eta_ms is not None) and math.isfinite(eta_ms)
    eta = b"%d" % max(0, math.ceil(eta_ms or 0)) if known else b"unknown"
    headers = [(name, value) for name, value in relevo_headers(relevo, replayed=replayed) if name != b"x-relevo-route"]
    return [(b"x-relevo-route", b"pending"), (b"x-relevo-eta-ms", eta), *headers]
