"""When a device is read next: every second, and four times as often while its figures are on the move."""

from __future__ import annotations

from typing import Final

from relevo.core.described import Described

CALM_S: Final = 1.0
QUICK_S: Final = 0.25
QUICK_FOR_S: Final = 5.0
"""How long after a change: readings lag up to 1.5 s, and a released lease's bytes are waited for up to 5 s."""


class Change(Described):
    """What sets a device's figures in motion."""

    LOAD = "load", "A worker was started on it, or became ready."
    UNLOAD = "unload", "A worker on it is being ended."
    DEATH = "death", "A worker on it died."
    EVENT = "event", "The driver or the kernel told something of it."
    WAKE = "wake", "The machine slept."


class Cadence:
    """One device's rhythm. All times are monotonic seconds, and passed in."""

    def __init__(self, *, calm_s: float = CALM_S, quick_s: float = QUICK_S, quick_for_s: float = QUICK_FOR_S) -> None:
        self._calm_s = calm_s
        self._quick_s = quick_s
        self._quick_for_s = quick_for_s
        self._quick_until: float | None = None
        self.last_change: Change | None = None

    def changed(self, change: Change, now: float) -> None:
        """Something happened: read often for a while from here on."""
        self.last_change = change
        until = now + self._quick_for_s
        self._quick_until = until if self._quick_until is None else max(self._quick_until, until)

    def interval_s(self, now: float, *, under_way: bool = False, calm: bool = True) -> float:
        """Seconds between readings now. `under_way`: a load or unload is; `calm`: memory is not pressed."""
        moving = self._quick_until is not None and now < self._quick_until
        return self._quick_s if under_way or not calm or moving else self._calm_s

    def wait_s(self, read_at: float | None, now: float, *, under_way: bool = False, calm: bool = True) -> float:
        """Seconds until the next reading is due, 0 when it is. `read_at`: when the last was taken, None: never."""
        if read_at is None:
            return 0.0
        return max(0.0, read_at + self.interval_s(now, under_way=under_way, calm=calm) - now)
