"""Whether a worker is alive, judged by its heartbeats alone. Pure: time comes in as an argument.

Silence is counted in our own ticks, and a tick counts for at most twice its period: when the
gateway's own loop was starved or the machine slept, nobody could have heard a heartbeat, so the
worker is not blamed for that time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

TICK_S = 0.05
"""How often a worker is looked at (20 Hz)."""


class Sign(enum.Enum):
    """What the heartbeats say."""

    ALIVE = "Heartbeats arrive."
    SUSPECT = "A heartbeat is overdue: no new work is sent, but a starved worker is not a dead one."
    SILENT = "No heartbeat for so long that the worker is fenced."
    STUCK = "Heartbeats arrive, but one engine step has lasted beyond its deadline."


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """The patience with a worker. All in seconds."""

    suspect_s: float = 1.0
    fence_s: float = 3.0
    step_deadline_s: float = 60.0


class Liveness:
    """The heartbeat record of one process."""

    def __init__(self, limits: LivenessLimits, now_s: float) -> None:
        self._limits = limits
        self._tick_s = now_s
        self.silent_s = 0.0
        self.in_step_s = 0.0
        self.excused_s = 0.0
        """Time that was not counted because our own loop was late."""

    def heard(self, in_step_ms: float) -> None:
        """A heartbeat arrived. `in_step_ms` is how long the engine's present step has lasted; 0 when idle."""
        self.silent_s = 0.0
        self.in_step_s = in_step_ms / 1000

    def tick(self, now_s: float) -> Sign:
        """Look at the worker. `now_s` is monotonic; called every TICK_S, as well as our own loop manages."""
        passed_s = max(0.0, now_s - self._tick_s)
        self._tick_s = now_s
        counted_s = min(passed_s, 2 * TICK_S)
        self.excused_s += passed_s - counted_s
        self.silent_s += counted_s
        if self.silent_s >= self._limits.fence_s:
            return Sign.SILENT
        if self.silent_s >= self._limits.suspect_s:
            return Sign.SUSPECT
        if self.in_step_s >= self._limits.step_deadline_s:
            return Sign.STUCK
        return Sign.ALIVE
