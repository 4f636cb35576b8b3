"""What earlier loads on this machine taught, for a plan: read from the journal while no service holds it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from relevo.core.errors import RelevoError
from relevo.core.memory.learned import Circumstances, Key, Learned, Lessons, decode
from relevo.core.memory.tier import Tier
from relevo.service.scales import Place, first_charge

if TYPE_CHECKING:
    from relevo.cli.planning.targets import Target
    from relevo.core.events import StartModel
    from relevo.devices.ggml import EngineFacts

_ABOUT_NOTHING = Key("", "", ""), Circumstances("", "", "")


class Recalled:
    """The lessons of one state folder, for the engine that is here now. Nothing is read before it is asked for."""

    def __init__(self, state: Path, facts: Callable[[], EngineFacts]) -> None:
        self._state = state
        self._facts = facts
        self.reason: str | None = None
        """Why what was learned is not used, where there may be something."""

    def of(self, target: Target, place: Place) -> Callable[[StartModel, Tier], Learned]:
        """What a load on this device is to be charged beside its predicted parts."""
        first, floors = first_charge(place, target.kind)

        known: dict[tuple[StartModel | None, Tier], Learned] = {}

        def learned(start: StartModel, tier: Tier) -> Learned:
            taught = target.here and len(self.lessons) > 0
            asked = start if taught else None
            if (asked, tier) not in known:
                key, under = self._about(target, start) if taught else _ABOUT_NOTHING
                known[asked, tier] = self.lessons.learned(key, under, predicted_by=tier, start=first, floors=floors)
            return known[asked, tier]

        return learned

    def _about(self, target: Target, start: StartModel) -> tuple[Key, Circumstances]:
        from relevo.service.learning import key_of

        return key_of(start, target.name), Circumstances(
            f"llama.cpp {target.device_kind}", self._engine, target.description
        )

    @cached_property
    def lessons(self) -> Lessons:
        """All that is kept; nothing where a service holds the journal, or where there is none."""
        from relevo.core.errors import StateFolderBusy, StateFolderError

        found = Lessons()
        if not self._state.is_dir():
            return found
        from relevo.journal.reader import JournalReader

        try:
            with JournalReader(self._state) as journal:
                rows = journal.measurements()
        except StateFolderBusy:
            self.reason = "A service holds the journal, so what its loads taught is not in these figures."
            return found
        except StateFolderError:
            return found
        for row in rows:
            with contextlib.suppress(ValueError):  # one that another version wrote is passed over
                found.add(decode(row.value))
        return found

    @cached_property
    def _engine(self) -> str:
        """The build that is here now: of another nothing counts."""
        try:
            return self._facts().engine
        except RelevoError as error:
            self.reason = f"What loads taught is not used: {error.message}"
            return ""
