"""The largest number that fits, found with few looks: what it takes grows almost evenly, so the next look is aimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_AIMED_LOOKS: Final = 6
"""After so many the rest is halved: then what it takes does not grow evenly."""


def largest_that_fits(low: int, high: int, excess: Callable[[int], int | None]) -> int | None:
    """The largest number from `low` to `high` whose excess is at most 0; None: not even `low`.

    `excess`: bytes missing, at most 0 where it fits, None where that is not known (it does not fit then). It must not
    fall as the number grows.
    """
    below = excess(low)
    if not _fits(below):
        return None
    above = excess(high)
    if _fits(above):
        return high
    looks = 0
    while high - low > 1:
        at = (low + high) // 2
        if below is not None and above is not None and looks < _AIMED_LOOKS:
            aimed = low + (high - low) * -below // max(1, above - below)
            at = min(high - 1, max(low + 1, aimed))
        looks += 1
        found = excess(at)
        if _fits(found):
            low, below = at, found
        else:
            high, above = at, found
    return low


def _fits(excess: int | None) -> bool:
    return excess is not None and excess <= 0
