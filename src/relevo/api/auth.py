"""Who calls: the key in the Authorization header, if keys are configured."""

from __future__ import annotations

from relevo.api.call import Call
from relevo.api.keys import KeyRing
from relevo.core.errors import Unauthorized

LOCAL_OWNER = "local"
_LONGEST_KEY = 512


def identify(call: Call, keys: KeyRing, *, needs_key: bool) -> None:
    """Set the call's owner and what its key grants. Raises Unauthorized where a valid key is needed and none was sent.

    Without keys any string is accepted (clients insist on sending one) and everybody is `local`.
    """
    if not keys.required:
        call.owner = LOCAL_OWNER
        call.sees = None
        return
    if not needs_key:
        return
    plain = _bearer(call)
    if plain is not None and keys.operator is not None and keys.operator.is_this(plain):
        call.owner = LOCAL_OWNER
        call.sees = None
        return
    key = keys.find(plain) if plain is not None else None
    if key is None:
        if plain is not None:
            raise Unauthorized(
                "This key is not valid here: it is unknown or was revoked. `relevo keys create NAME` makes one."
            )
        raise Unauthorized
    call.owner = key.id
    call.grant = key.grant
    call.sees = key.id


def _bearer(call: Call) -> str | None:
    value = call.headers.get(b"authorization")
    if value is None or b"authorization" in call.repeated:
        return None
    scheme, _, token = value.partition(b" ")
    token = token.strip()
    if scheme.lower() != b"bearer" or not token or len(token) > _LONGEST_KEY:
        return None
    return token.decode("latin-1")
