"""Who gives way when memory is short, with the least harm: idle holders, never a busy one for a load.

For a load, idle replicas of no higher priority may be ended. When memory must go back to other programs, idle ones go
first, then running ones shrink, the lowest priority first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from relevo.core.described import Described
from relevo.core.loads.wish import DeviceView, Holder
from relevo.core.units import size_text

UNKNOWN_RELOAD_S: Final = 60.0
"""What a reload counts where none was measured: nobody should be ended cheaply for not being known."""

FORGOTTEN_S: Final = 300.0
"""After this time without use a replica counts half as likely to be wanted soon."""

RETURNS_WITHIN_S: Final = 10.0
"""Memory that its holder gives back by then need not be taken from anybody else."""

_MOST_STEPS: Final = 4000
"""A search stops after so many steps with the best it has: 2 ms, and enough to be exact for a dozen holders."""


def harm_of(holder: Holder) -> float:
    """Expected seconds lost by ending it: its reload, weighted by how likely it is wanted soon."""
    reload_s = UNKNOWN_RELOAD_S if holder.reload_s is None else holder.reload_s
    return (1.0 + reload_s) / (1.0 + max(0.0, holder.idle_s) / FORGOTTEN_S)


def may_be_evicted(holder: Holder, priority: int | None) -> bool:
    """Whether it may be ended for a load of this priority; None: for the device's sake, whatever its priority."""
    able = holder.idle and holder.evictable and holder.frees_in_s is None and holder.bytes_ > 0
    return able and (priority is None or holder.priority <= priority)


def candidates(device: DeviceView, priority: int | None) -> tuple[Holder, ...]:
    """All that may be ended, in an order that does not depend on the one they came in."""
    able = [holder for holder in device.holders if may_be_evicted(holder, priority)]
    return tuple(sorted(able, key=lambda holder: (holder.priority, harm_of(holder), holder.bytes_, holder.holder)))


def least_harm(able: Sequence[Holder], gap_bytes: int, block_bytes: int = 0) -> tuple[Holder, ...] | None:
    """The set that frees `gap_bytes`, one of them at least `block_bytes`, with the least harm; None: not even all do.

    A lower priority gives way before a higher one. Then the sum of `harm_of` counts, then the fewest bytes.
    """
    if gap_bytes <= 0 and block_bytes <= 0:
        return ()
    for priority in sorted({holder.priority for holder in able}):
        low = [holder for holder in able if holder.priority <= priority]
        if _covers(low, gap_bytes, block_bytes):
            return _Search(low, gap_bytes, block_bytes).best()
    return None


def _covers(holders: Sequence[Holder], gap_bytes: int, block_bytes: int) -> bool:
    largest = max((holder.bytes_ for holder in holders), default=0)
    return largest >= block_bytes and sum(holder.bytes_ for holder in holders) >= gap_bytes


class _Search:
    """Branch and bound over sets of holders, the least harmful first."""

    def __init__(self, holders: Sequence[Holder], gap_bytes: int, block_bytes: int) -> None:
        self._holders = sorted(holders, key=lambda holder: (harm_of(holder), holder.bytes_, holder.holder))
        self._harms = [harm_of(holder) for holder in self._holders]
        self._gap, self._block = gap_bytes, block_bytes
        self._rest_bytes = [0]
        self._rest_block = [0]
        for holder in reversed(self._holders):
            self._rest_bytes.append(self._rest_bytes[-1] + holder.bytes_)
            self._rest_block.append(max(self._rest_block[-1], holder.bytes_))
        self._rest_bytes.reverse()
        self._rest_block.reverse()
        self._steps = 0
        self._chosen: list[Holder] = []
        self._best = self._greedy()
        self._best_cost = (sum(map(harm_of, self._best)), sum(holder.bytes_ for holder in self._best))

    def best(self) -> tuple[Holder, ...]:
        """The best set, the least harmful member first."""
        self._visit(0, 0.0, 0, 0)
        return self._best

    def _greedy(self) -> tuple[Holder, ...]:
        """A set that covers, with none in it that it could do without."""
        chosen = list(self._holders)
        for holder in reversed(self._holders):
            less = [other for other in chosen if other is not holder]
            if _covers(less, self._gap, self._block):
                chosen = less
        return tuple(chosen)

    def _visit(self, index: int, harm: float, freed: int, block: int) -> None:
        self._steps += 1
        if freed >= self._gap and block >= self._block:
            if (harm, freed) < self._best_cost:
                self._best, self._best_cost = tuple(self._chosen), (harm, freed)
            return
        if index == len(self._holders) or self._steps > _MOST_STEPS:
            return
        if freed + self._rest_bytes[index] < self._gap or max(block, self._rest_block[index]) < self._block:
            return
        holder = self._holders[index]
        with_it = harm + self._harms[index]
        if with_it <= self._best_cost[0]:  # later ones harm more still, so without this one it is no better either
            self._chosen.append(holder)
            self._visit(index + 1, with_it, freed + holder.bytes_, max(block, holder.bytes_))
            self._chosen.pop()
            self._visit(index + 1, harm, freed, block)


class Way(Described):
    """How a holder gives memory back."""

    EVICT = "evict", "It is idle: its worker is ended, and started again when it is wanted."
    SHRINK = "shrink", "It runs: its work is parked, it is loaded smaller, and the work goes on."


class Yield(msgspec.Struct, frozen=True):
    """A holder that gives way, and what that gives back."""

    holder: Holder
    way: Way
    frees_bytes: int
    sentence: str


def who_yields(device: DeviceView, need_bytes: int) -> tuple[Yield, ...]:
    """Who gives way, in order, so that other programs have `need_bytes` back; all that can, where it is not enough.

    What is coming back within RETURNS_WITHIN_S anyway is not taken twice. Idle holders are ended first, whatever
    their priority; only then the running ones shrink, the lowest priority first.
    """
    coming = (h.bytes_ for h in device.holders if h.frees_in_s is not None and h.frees_in_s <= RETURNS_WITHIN_S)
    gap_bytes = need_bytes - sum(coming)
    if gap_bytes <= 0:
        return ()
    idle = candidates(device, None)
    gone = least_harm(idle, gap_bytes)
    if gone is None:
        gone = idle
    given = [_evicted(holder) for holder in gone]
    gap_bytes -= sum(each.frees_bytes for each in given)
    for holder in _able_to_shrink(device, gone):
        if gap_bytes <= 0:
            break
        given.append(_shrunk(holder))
        gap_bytes -= given[-1].frees_bytes
    return tuple(given)


def _able_to_shrink(device: DeviceView, gone: Sequence[Holder]) -> list[Holder]:
    able = [h for h in device.holders if h not in gone and h.frees_in_s is None and _shrink_bytes(h) > 0]
    return sorted(able, key=lambda h: (h.priority, -_shrink_bytes(h), h.holder))


def _shrink_bytes(holder: Holder) -> int:
    return 0 if holder.shrinks_to_bytes is None else holder.bytes_ - holder.shrinks_to_bytes


def _evicted(holder: Holder) -> Yield:
    again = (
        "its reload was not timed yet" if holder.reload_s is None else f"loading again takes {holder.reload_s:.1f} s"
    )
    sentence = f"{holder.holder} is idle and gives back {size_text(holder.bytes_)}; {again}."
    return Yield(holder, Way.EVICT, holder.bytes_, sentence)


def _shrunk(holder: Holder) -> Yield:
    frees = _shrink_bytes(holder)
    smaller = size_text(holder.shrinks_to_bytes)
    sentence = f"{holder.holder} parks its work and shrinks to {smaller}, which gives back {size_text(frees)}."
    return Yield(holder, Way.SHRINK, frees, sentence)
