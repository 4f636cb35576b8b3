"""OpenAI's shape for the one error family: status, body and headers of a refusal."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from relevo.core import errors as family
from relevo.core.errors import RelevoError
from relevo.core.events import Ended

Headers = list[tuple[bytes, bytes]]

_SHORTEST_RETRY_S = 1.0  # where a retry can help and nobody can say when


def _by_code(root: type[RelevoError]) -> dict[str, type[RelevoError]]:
    found: dict[str, type[RelevoError]] = {}
    waiting = [root]
    while waiting:
        cls = waiting.pop()
        found.setdefault(cls.code, cls)
        waiting.extend(cls.__subclasses__())
    return found


BY_CODE = _by_code(family.RelevoError)


class EndedUnfinished(RelevoError):
    """The request ended without an answer."""

    def __init__(self, ended: Ended) -> None:
        """Take status, type and retry from the error's code; the record's own words win."""
        error = dict(ended.error or {})
        fallback = {"cancelled": family.Cancelled, "resumable": family.Resumable}.get(ended.state, family.RelevoError)
        kind = BY_CODE.get(str(error.get("code") or ""), fallback)
        super().__init__(str(error.pop("message", "") or ended.reason or (kind.__doc__ or "").strip()))
        self.status = kind.status  # type: ignore[misc]  # of this one error, not of the class
        self.type = str(error.pop("type", None) or kind.type)  # type: ignore[misc]
        self.code = str(error.pop("code", None) or kind.code)  # type: ignore[misc]
        self.retry = bool(kind.retry)  # type: ignore[misc]  # work that was accepted is not blindly begun anew
        self.param = error.pop("param", None)
        self.more = error
        self.relevo = ended.relevo


def error_object(error: RelevoError) -> dict[str, Any]:
    """The value of `error` in a body or a stream event."""
    body: dict[str, Any] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    if isinstance(error, EndedUnfinished):
        body.update({name: value for name, value in error.more.items() if name not in body})
        body["relevo"] = error.relevo
    if error.detail:
        body["detail"] = error.detail
    return body


def error_headers(error: RelevoError) -> Headers:
    """Retry-After, retry-after-ms, x-should-retry and, where the connection cannot go on, `connection: close`."""
    headers: Headers = []
    if error.retry is not None:
        headers.append((b"x-should-retry", b"true" if error.retry else b"false"))
    after_s = error.retry_after_s
    if after_s is None and error.retry and error.status in (429, 503):
        after_s = _SHORTEST_RETRY_S
    if after_s is not None and math.isfinite(after_s):
        after_s = max(0.0, after_s)
        headers.append((b"retry-after", b"%d" % math.ceil(after_s)))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(after_s * 1000)))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, family.Draining):
        headers.append((b"connection", b"close"))
    return headers


def error_body(error: RelevoError) -> bytes:
    """The JSON body of a refusal. Text that cannot be encoded is replaced, never a second failure."""
    try:
        return msgspec.json.encode({"error": error_object(error)})
    except (UnicodeEncodeError, TypeError):
        plain = error.message.encode("utf-8", "replace").decode()
        return msgspec.json.encode({"error": {"message": plain, "type": error.type, "param": None, "code": error.code}})
