"""What a device's readings may not show yet: they lag by up to a second and a half behind a load or an unload.

Two figures keep that from freeing bytes, or from booking them twice: the least and the most that our holders were
known to use while the newest reading may have been taken, and the bytes of ended holders that are still to come back.
"""

from __future__ import annotations

from collections import deque
from typing import Final

RETURNS_WITHIN_S: Final = 5.0
"""Memory of a released lease that is not back by then is booked as external like anybody's."""
BACK_PERCENT: Final = 75
"""So much of a lease must be seen to be back before any of it is free again."""


class _Span:
    """The time from one reading to the next, and between what figures our holders' use was in it."""

    __slots__ = ("high_bytes", "low_bytes", "number", "start")

    def __init__(self, number: int, start: float, held_bytes: int) -> None:
        self.number = number
        self.start = start
        self.low_bytes = held_bytes
        self.high_bytes = held_bytes


class HeldWindow:
    """The observed use of our holders over the last `lag_s` seconds, by readings."""

    def __init__(self, lag_s: float) -> None:
        self._lag_s = lag_s
        self._spans: deque[_Span] = deque([_Span(0, float("-inf"), 0)])
        self.low_bytes = 0
        """The least that the newest reading must show of us."""
        self.high_bytes = 0
        """The most that the newest reading may show of us."""

    @property
    def number(self) -> int:
        """How many readings there were."""
        return self._spans[-1].number

    def has_shown(self, number: int) -> bool:
        """Whether what happened after reading `number` is in the newest reading for sure."""
        return number < self._spans[0].number

    def read(self, at: float, held_bytes: int) -> None:
        """A reading was taken."""
        self._spans.append(_Span(self.number + 1, at, held_bytes))
        while len(self._spans) > 1 and self._spans[1].start <= at - self._lag_s:
            self._spans.popleft()
        self._count()

    def change(self, held_bytes: int) -> None:
        """Our holders' use is another now."""
        span = self._spans[-1]
        span.low_bytes = min(span.low_bytes, held_bytes)
        span.high_bytes = max(span.high_bytes, held_bytes)
        self.low_bytes = min(self.low_bytes, held_bytes)
        self.high_bytes = max(self.high_bytes, held_bytes)

    def forget(self, bytes_: int, held_bytes: int) -> None:
        """A holder is gone, or its use is not known any more; what of it may still be seen is counted elsewhere."""
        for span in self._spans:
            span.low_bytes = max(0, span.low_bytes - bytes_)
            span.high_bytes = max(span.high_bytes - bytes_, held_bytes)
        self.change(held_bytes)
        self._count()

    def _count(self) -> None:
        self.low_bytes = min(span.low_bytes for span in self._spans)
        self.high_bytes = max(span.high_bytes for span in self._spans)


class _Return:
    """The bytes of one released lease."""

    __slots__ = ("after_reading", "bytes_", "left_bytes", "since")

    def __init__(self, bytes_: int, left_bytes: int, after_reading: int | None, since: float | None) -> None:
        self.bytes_ = bytes_
        self.left_bytes = left_bytes
        self.after_reading = after_reading  # None: its use was seen before, so its absence means that it is back
        self.since = since  # None: no reading was taken since

    @property
    def counted_bytes(self) -> int:
        back = self.bytes_ - self.left_bytes
        return self.left_bytes if back * 100 >= self.bytes_ * BACK_PERCENT else self.bytes_


class Returns:
    """Bytes of released leases that the device may not have given back yet. They count until they are seen to be."""

    def __init__(self) -> None:
        self._waiting: list[_Return] = []
        self.bytes_ = 0
        """What counts against the device."""

    def expect(self, bytes_: int, left_bytes: int, after_reading: int | None, now: float | None) -> None:
        """A lease was released, of which `left_bytes` may still be there.

        `after_reading`: its use may never have been shown, so that only readings the window calls sure tell of it.
        """
        if left_bytes > 0:
            returning = _Return(bytes_, left_bytes, after_reading, now)
            self._waiting.append(returning)
            self.bytes_ += returning.counted_bytes

    def see(self, unexplained_bytes: int, window: HeldWindow) -> None:
        """A believable reading leaves at most so much for all of them. The oldest are back first."""
        for returning in self._waiting:
            if returning.after_reading is not None and window.has_shown(returning.after_reading):
                returning.after_reading = None
        excess = sum(r.left_bytes for r in self._waiting if r.after_reading is None) - unexplained_bytes
        for returning in self._waiting:
            if excess <= 0:
                break
            if returning.after_reading is None:
                back = min(returning.left_bytes, excess)
                returning.left_bytes -= back
                excess -= back
        self._count()

    def overdue(self, at: float) -> int:
        """Give up those that had their time by `at` (of a reading). Returns what of them is still used."""
        late_bytes = 0
        for returning in self._waiting:
            if returning.since is None:
                returning.since = at
            elif at - returning.since >= RETURNS_WITHIN_S:
                late_bytes += returning.left_bytes
                returning.left_bytes = 0
        self._count()
        return late_bytes

    def _count(self) -> None:
        if self._waiting:
            self._waiting = [returning for returning in self._waiting if returning.left_bytes > 0]
        self.bytes_ = sum(returning.counted_bytes for returning in self._waiting)
