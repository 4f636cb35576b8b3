"""What foreign processes hold of a device: believed at once when it grows, slowly when it falls."""

from __future__ import annotations

from typing import Final

SMALL_BYTES: Final = 1 << 20
"""Less than this above its target is no longer smoothed."""


class External:
    """A smoothed figure; `half_life_s` is how long half of a fall takes."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._at: float | None = None  # of the reading it was taken from
        self.bytes_ = 0

    def follow(self, least_bytes: int, most_bytes: int, at: float, *, at_rest: bool) -> None:
        """A reading, taken `at`, lets foreign use be anything from `least_bytes` to `most_bytes`.

        `at_rest`: a load or an unload is under way, which hides what neighbours do; then it does not fall.
        """
        if self._at is None or least_bytes > self.bytes_:
            self.bytes_ = least_bytes
        elif most_bytes < self.bytes_ and not at_rest:
            passed_s = max(0.0, at - self._at)
            above = (self.bytes_ - most_bytes) * 0.5 ** (passed_s / self._half_life_s)
            self.bytes_ = most_bytes + (round(above) if above >= SMALL_BYTES else 0)
        self._at = at
