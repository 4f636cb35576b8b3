"""A bounded queue in front of a route, with its own concurrency.

The higher priority first, and first come, first served within one; nobody overtakes because he is small: a small
request never starts before a large one that stands before it. Who waits rises by one point of priority every
SECONDS_A_POINT, so that whoever came enough earlier goes first whatever the priorities are, and nobody starves.
Work that was accepted elsewhere and handed over goes before the line, by the same rule among itself: it has waited
already.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

import msgspec

from relevo.core.errors import OurBug

SECONDS_A_POINT: Final = 2.0
"""Of waiting, for which a request rises by one point of priority. All the range, -100 to 100, is made up for in 400 s,
less than the longest wait of a lane that nobody configured (600 s)."""


def risen(priority: int, waited_s: float) -> float:
    """The priority that a request has after so long a wait."""
    return priority + waited_s / SECONDS_A_POINT


def rank(priority: int, since: float) -> float:
    """Where it stands: the lower before the higher. The same order as by `risen`, at whatever time that is asked.

    All rise at the same pace, so an order once right stays right: it is the time at which it would have had to come
    (monotonic seconds) to stand there with a priority of 0.
    """
    return since - priority * SECONDS_A_POINT


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


_Place = tuple[float, int, str]
"""Rank, a number that grows with each that enters (so that equals stand as they came), holder."""


class _Waiting(msgspec.Struct, frozen=True):
    since: float
    deadline: float | None
    owner: str
    place: _Place


class _Line:
    """Who waits, in order."""

    __slots__ = ("_order", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[str, _Waiting] = {}
        self._order: list[_Place] = []

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, holder: str) -> bool:
        return holder in self.waiting

    def __iter__(self) -> Iterator[str]:
        return (holder for _, _, holder in self._order)

    @property
    def head(self) -> str:
        return self._order[0][2]

    def position(self, holder: str) -> int:
        """1 at its head. The holder must be in it."""
        return bisect_left(self._order, self.waiting[holder].place) + 1

    def ahead_of(self, rank_: float) -> int:
        """How many stand before one who comes now with this rank: the last of its equals."""
        return bisect_right(self._order, rank_, key=lambda place: place[0])

    def add(self, holder: str, waiting: _Waiting) -> int:
        """Put it in; the position it has."""
        self.waiting[holder] = waiting
        insort(self._order, waiting.place)
        return self.position(holder)

    def remove(self, holder: str) -> _Waiting | None:
        """Take it out; None where it was not there."""
        waiting = self.waiting.pop(holder, None)
        if waiting is not None:
            del self._order[bisect_left(self._order, waiting.place)]
        return waiting


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
        self._handed_over = _Line()  # before the line
        self._line = _Line()
        self._entered = 0
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
        if holder in self._handed_over:
            return self._handed_over.position(holder)
        return len(self._handed_over) + self._line.position(holder) if holder in self._line else None

    def ahead_of(self, priority: int, now: float) -> int:
        """How many of those who wait would start before one that came now with this priority."""
        return len(self._handed_over) + self._line.ahead_of(rank(priority, now))

    def held_by(self, owner: str) -> int:
        """How many requests of one owner wait or run here."""
        waiting = sum(w.owner == owner for w in self._all_waiting())
        return waiting + sum(running == owner for running in self._running.values())

    def oldest_age_ms(self, now: float) -> float:
        """How long the one that has waited longest has waited; 0 when nobody waits."""
        since = min((w.since for w in self._all_waiting()), default=now)
        return max(0.0, (now - since) * 1000)

    def next_deadline(self) -> float | None:
        """When the next one in the line expires, so that the shell can look then; None when none ever does."""
        return min((w.deadline for w in self._all_waiting() if w.deadline is not None), default=None)

    def _all_waiting(self) -> Iterator[_Waiting]:
        return chain(self._handed_over.waiting.values(), self._line.waiting.values())

    def snapshot(self, now: float) -> LaneView:
        """The figures of now, for status."""
        return LaneView(
            self.name, self.queued, self.running, self.oldest_age_ms(now), self.queue_limit, self.concurrency
        )

    # -- events

    def enter(
        self,
        holder: str,
        now: float,
        deadline: float | None,
        owner: str = "",
        *,
        handed_over: bool = False,
        priority: int = 0,
    ) -> Place | Full:
        """Take the place in the line that its priority gives it, where there is one: a full line refuses whoever comes.

        It never starts at or after `deadline` (monotonic seconds; None: it has none).

        `handed_over`: the request was accepted before (its route was lost, or the gateway restarted), so it goes
        before those who just came. Raises OurBug when the holder is in the lane already.
        """
        if holder in self._handed_over or holder in self._line or holder in self._running:
            raise OurBug(f"{holder} is in lane {self.name} already.")
        line, limit = (self._handed_over, self.handover_limit) if handed_over else (self._line, self.queue_limit)
        if limit is not None and len(line) >= limit:
            return Full(self.name, len(line), limit)
        self._entered += 1
        place = (rank(priority, now), self._entered, holder)
        position = line.add(holder, _Waiting(now, deadline, owner, place))
        return Place(self.name, position if handed_over else len(self._handed_over) + position)

    def leave(self, holder: str) -> bool:
        """Give up its place, or its run. False when it was not here; then nothing changes."""
        if self._running.pop(holder, None) is not None:
            return True
        return any(line.remove(holder) is not None for line in (self._handed_over, self._line))

    def expire(self, now: float) -> tuple[str, ...]:
        """Take those out of the line whose deadline has come, wherever they stand."""
        expired: list[str] = []
        for line in (self._handed_over, self._line):
            gone = [h for h, w in line.waiting.items() if w.deadline is not None and now >= w.deadline]
            for holder in gone:
                line.remove(holder)
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
                holder = line.head
                if not fits(holder):
                    return Starts(tuple(start), expired)
                self._running[holder] = line.waiting[holder].owner
                line.remove(holder)
                start.append(holder)
        return Starts(tuple(start), expired)
