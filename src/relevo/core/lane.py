"""A bounded queue in front of a route, with its own concurrency.

First come, first served, without overtaking: a small request never starts before a large one that came earlier, so the
large one cannot starve. Work that was accepted elsewhere and handed over goes first: it has waited already.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import msgspec

from relevo.core.errors import OurBug


class Place(msgspec.Struct, frozen=True):
    """A place in the line. `position` counts from 1 at its head."""

    lane: str
    position: int


class Full(msgspec.Struct, frozen=True):
    """Every place is taken. Nothing was changed."""

    lane: str
    queued: int
    limit: int


class Starts(msgspec.Struct, frozen=True):
    """What leaves the line now: `start` runs from here on, `expired` has left the lane because its deadline passed."""

    start: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()


class LaneView(msgspec.Struct, frozen=True):
    """A lane, for the status page. Never decided on."""

    name: str
    queued: int
    running: int
    oldest_age_ms: float
    limit: int
    concurrency: int


class _Waiting(msgspec.Struct, frozen=True):
    since: float
    deadline: float | None
    owner: str


class Lane:
    """Who waits for a route and who runs on it. Holders are request ids; each is here at most once.

    `queue_limit` bounds what admission may queue; `handover_limit` bounds, beside it, what was accepted elsewhere
    and is moved here. None: everything handed over is taken, which the other lanes' own bounds keep finite.
    """

    def __init__(self, name: str, queue_limit: int, concurrency: int, handover_limit: int | None = None) -> None:
        if queue_limit < 0 or concurrency < 1:
            raise OurBug(f"Lane {name} cannot have {queue_limit} places and a concurrency of {concurrency}.")
        self.name = name
        self.queue_limit = queue_limit
        self.concurrency = concurrency
        self.handover_limit = handover_limit
        self._handed_over: dict[str, _Waiting] = {}  # before the line
        self._line: dict[str, _Waiting] = {}
        self._running: dict[str, str] = {}  # holder -> owner

    def __repr__(self) -> str:
        running, queued = f"{self.running} of {self.concurrency} running", f"{self.queued} of {self.queue_limit} queued"
        return f"<Lane {self.name}: {running}, {queued}>"

    # -- figures

    @property
    def queued(self) -> int:
        """How many wait."""
        return len(self._handed_over) + len(self._line)

    @property
    def running(self) -> int:
        """How many run."""
        return len(self._running)

    @property
    def waiting_holders(self) -> tuple[str, ...]:
        """Who waits, head of the line first."""
        return (*self._handed_over, *self._line)

    @property
    def running_holders(self) -> tuple[str, ...]:
        """Who runs, longest first."""
        return tuple(self._running)

    def position(self, holder: str) -> int | None:
        """1 at the head of the line; None when it does not wait here."""
        if holder not in self._handed_over and holder not in self._line:
            return None
        return next(i for i, waiting in enumerate(chain(self._handed_over, self._line), 1) if waiting == holder)

    def held_by(self, owner: str) -> int:
        """How many requests of one owner wait or run here."""
        waiting = sum(w.owner == owner for w in chain(self._handed_over.values(), self._line.values()))
        return waiting + sum(running == owner for running in self._running.values())

    def oldest_age_ms(self, now: float) -> float:
        """How long the one that has waited longest has waited; 0 when nobody waits."""
        since = min((w.since for w in chain(self._handed_over.values(), self._line.values())), default=now)
        return max(0.0, (now - since) * 1000)

    def next_deadline(self) -> float | None:
        """When the next one in the line expires, so that the shell can look then; None when none ever does."""
        waiting = chain(self._handed_over.values(), self._line.values())
        return min((w.deadline for w in waiting if w.deadline is not None), default=None)

    def snapshot(self, now: float) -> LaneView:
        """The figures of now, for status."""
        return LaneView(
            self.name, self.queued, self.running, self.oldest_age_ms(now), self.queue_limit, self.concurrency
        )

    # -- events

    def enter(
        self, holder: str, now: float, deadline: float | None, owner: str = "", *, handed_over: bool = False
    ) -> Place | Full:
        """Take a place in the line. It never starts at or after `deadline` (monotonic seconds; None: it has none).

        `handed_over`: the request was accepted before (its route was lost, or the gateway restarted), so it goes
        before those who just came. Raises OurBug when the holder is in the lane already.
        """
        if holder in self._handed_over or holder in self._line or holder in self._running:
            raise OurBug(f"{holder} is in lane {self.name} already.")
        line, limit = (self._handed_over, self.handover_limit) if handed_over else (self._line, self.queue_limit)
        if limit is not None and len(line) >= limit:
            return Full(self.name, len(line), limit)
        line[holder] = _Waiting(now, deadline, owner)
        return Place(self.name, len(self._handed_over) + (0 if handed_over else len(self._line)))

    def leave(self, holder: str) -> bool:
        """Give up its place, or its run. False when it was not here; then nothing changes."""
        return any(where.pop(holder, None) is not None for where in (self._handed_over, self._line, self._running))

    def expire(self, now: float) -> tuple[str, ...]:
        """Take those out of the line whose deadline has come, wherever they stand."""
        expired: list[str] = []
        for line in (self._handed_over, self._line):
            gone = [holder for holder, w in line.items() if w.deadline is not None and now >= w.deadline]
            for holder in gone:
                del line[holder]
            expired += gone
        return tuple(expired)

    def start_next(self, now: float, fits: Callable[[str], bool]) -> Starts:
        """Start from the head of the line while there is concurrency and the head fits.

        `fits` is asked once for each in order, and where it says True the holder starts: it may take the lease
        in the same breath. Its first False ends the round; nobody overtakes.
        """
        expired = self.expire(now)
        start: list[str] = []
        for line in (self._handed_over, self._line):
            while line and self.running < self.concurrency:
                holder = next(iter(line))
                if not fits(holder):
                    return Starts(tuple(start), expired)
                self._running[holder] = line.pop(holder).owner
                start.append(holder)
        return Starts(tuple(start), expired)
