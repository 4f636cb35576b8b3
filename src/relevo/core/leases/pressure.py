"""How hard a device's memory is pressed, with two thresholds for each stage so that it does not flap."""

from __future__ import annotations

from typing import Final

import msgspec

from relevo.core.described import Described


class PressureStage(Described):
    """How far the memory kept free for kernels and neighbours is used up."""

    CALM = "calm", "The headroom is whole."
    TIGHT = "tight", "A good part of the headroom is used up; nothing large should be started."
    CRITICAL = "critical", "The headroom is nearly gone; memory should be given back."
    UNKNOWN = "unknown", "It cannot be told how much is free."


_P = PressureStage

SEVERITY: Final = (_P.CALM, _P.TIGHT, _P.CRITICAL)
ENTER_BELOW_PERCENT: Final = {_P.TIGHT: 75, _P.CRITICAL: 25}
"""A stage begins when the slack falls below this share of the headroom."""
LEAVE_AT_PERCENT: Final = {_P.TIGHT: 100, _P.CRITICAL: 50}
"""It ends when the slack has come back to this share."""


class Pressure(msgspec.Struct, frozen=True):
    """A device's stage at one moment, with its figures."""

    stage: PressureStage
    slack_bytes: int | None
    """Free by the smaller of report and promise, headroom included. Negative: there is less than is promised."""
    headroom_bytes: int | None
    since: float
    """When the stage began; monotonic seconds."""
    reason: str | None
    """Why the stage is unknown."""


def next_stage(stage: PressureStage, slack_bytes: int, headroom_bytes: int) -> PressureStage:
    """The stage that follows from these figures, coming from `stage` (not UNKNOWN)."""
    now = SEVERITY.index(stage)
    entered = _reached(slack_bytes, headroom_bytes, ENTER_BELOW_PERCENT)
    kept = _reached(slack_bytes, headroom_bytes, LEAVE_AT_PERCENT)
    return SEVERITY[min(max(now, entered), max(kept, entered))]


def _reached(slack_bytes: int, headroom_bytes: int, percent: dict[PressureStage, int]) -> int:
    return sum(100 * slack_bytes < headroom_bytes * share for share in percent.values())


class PressureGauge:
    """Remembers the stage. Worse is believed at once; better only when a stage lasted `stay_s` seconds."""

    def __init__(self, stay_s: float) -> None:
        self._stay_s = stay_s
        self._known = PressureStage.CALM
        self._known_since: float | None = None
        self._shown = Pressure(PressureStage.UNKNOWN, None, None, 0.0, "It was not read yet.")

    @property
    def pressure(self) -> Pressure:
        """What the last update gave."""
        return self._shown

    def update(
        self, slack_bytes: int | None, headroom_bytes: int | None, now: float, reason: str | None = None
    ) -> Pressure:
        """Take new figures. Without them the stage is unknown, for `reason`; what it was is remembered."""
        if slack_bytes is None or headroom_bytes is None:
            stage = PressureStage.UNKNOWN
        else:
            stage, reason = self._move(slack_bytes, headroom_bytes, now), None
        since = self._shown.since if stage is self._shown.stage else now
        self._shown = Pressure(stage, slack_bytes, headroom_bytes, since, reason)
        return self._shown

    def _move(self, slack_bytes: int, headroom_bytes: int, now: float) -> PressureStage:
        found = next_stage(self._known, slack_bytes, headroom_bytes)
        better = SEVERITY.index(found) < SEVERITY.index(self._known)
        if better and self._known_since is not None and now - self._known_since < self._stay_s:
            return self._known
        if found is not self._known or self._known_since is None:
            self._known, self._known_since = found, now
        return self._known
