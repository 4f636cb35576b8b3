"""What loads on this machine teach."""

from __future__ import annotations

from collections.abc import Callable

from relevo.core.events import Ready, StartModel
from relevo.replicas.death import Death
from relevo.service.berths import Berth
from relevo.service.scales import Lessons, first_lessons


class Learning:
    def lessons(self, kind: str) -> Callable[[StartModel], Lessons]:
        return lambda _start: first_lessons(kind)

    def loaded(self, berth: Berth, ready: Ready) -> None:
        pass

    def lost(self, berth: Berth, death: Death) -> None:
        pass

    def peaked(self, berth: Berth) -> None:
        pass
