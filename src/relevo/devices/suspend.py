"""Whether the machine slept. After it, drivers may be gone, readings are of before, and no lease is proven any more.

Two clocks tell: one that stands still while the machine sleeps, and one that does not. Linux and macOS have both;
elsewhere the wall clock is compared, which somebody may also have set.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Final

THRESHOLD_S: Final = 1.0
"""Growth below this is no sleep: the two clocks are read one after the other, and a busy machine pauses in between."""
WALL_THRESHOLD_S: Final = 10.0
"""The same where the wall clock is compared: time servers move it by less."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Two clocks, read at one moment, in seconds."""

    awake_s: float
    """Stands still while the machine sleeps."""
    elapsed_s: float
    """Does not."""
    certain: bool = True
    """False: `elapsed_s` is the wall clock, which can be set."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """The machine slept, or its clock was set forward."""

    slept_s: float
    certain: bool

    @property
    def sentence(self) -> str:
        """For people, and the reason for doubting what was known before."""
        what = "The machine slept" if self.certain else "The machine slept, or its clock was set forward,"
        return f"{what} for {self.slept_s:.0f} s: what was known of its devices must be proven again."


class SleepDetector:
    """Compares each look with the one before; look every few seconds. Several sleeps between two count as one."""

    def __init__(self, first: Clocks, *, threshold_s: float | None = None) -> None:
        self._ahead_s = first.elapsed_s - first.awake_s
        self._threshold_s = threshold_s

    def look(self, clocks: Clocks) -> Sleep | None:
        """The sleep since the last look, or None. A clock that was set back is only taken note of."""
        ahead_s = clocks.elapsed_s - clocks.awake_s
        grown_s = ahead_s - self._ahead_s
        # A pause between reading the two makes the lead look smaller once; that it is back is no sleep.
        self._ahead_s = max(self._ahead_s, ahead_s) if clocks.certain else ahead_s
        threshold_s = self._threshold_s
        if threshold_s is None:
            threshold_s = THRESHOLD_S if clocks.certain else WALL_THRESHOLD_S
        return Sleep(grown_s, clocks.certain) if grown_s >= threshold_s else None


def read_clocks() -> Clocks:
    """This machine's two clocks. The one that goes on is read first, so that a pause between never looks like sleep."""
    if sys.platform == "linux":
        elapsed = time.clock_gettime(time.CLOCK_BOOTTIME)
        return Clocks(time.clock_gettime(time.CLOCK_MONOTONIC), elapsed)
    if sys.platform == "darwin":
        elapsed = time.clock_gettime(time.CLOCK_MONOTONIC)  # goes on in sleep there, unlike on Linux
        return Clocks(time.clock_gettime(time.CLOCK_UPTIME_RAW), elapsed)
    elapsed = time.time()
    return Clocks(time.monotonic(), elapsed, certain=False)
