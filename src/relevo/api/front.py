"""What every handler works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from relevo.api.delivery import Farewells
from relevo.api.keys import KeyRing
from relevo.api.sse import Pace
from relevo.config import Config
from relevo.service.facade import Service


@dataclass(frozen=True, slots=True)
class Front:
    """The service behind the HTTP layer, and the rules in front of it."""

    service: Service
    config: Config
    keys: KeyRing
    pace: Pace
    farewells: Farewells = field(default_factory=Farewells)
