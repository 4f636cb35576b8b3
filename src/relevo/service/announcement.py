"""What a service says of itself once it is ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Announcement:
    """Given once to whoever started the service, after the socket listens and a route serves."""

    url: str
    """Where it really listens, with the port the system chose if it was asked to."""
    status: dict[str, Any]
    """The status object of the outer contract."""
    models: list[dict[str, Any]]
    """The models as `/v1/models` lists them: `{id, routes, ...}`."""
    keys_required: bool
    """Whether clients must send a key."""
