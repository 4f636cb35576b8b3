"""Leases of KV cells inside a loaded llama.cpp replica.

The bytes were paid when the model was loaded; a request takes cells and sequence slots of that pool. A request
holds what its prompt and all the output it may still draw can need, so an accepted request never runs dry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from relevo.core.errors import OurBug

PROBE_CELLS: Final = 32
"""Cells that a worker keeps beside those it offers (fast profile): a probe must never wait for somebody's context."""


class CellShortfall(msgspec.Struct, frozen=True):
    """Cells or slots that could not be leased, with the numbers. Nothing was changed."""

    need_cells: int
    free_cells: int
    need_slots: int
    free_slots: int
    ever: bool
    """Whether an empty pool could take it."""
    reason: str
    """A plain sentence."""


class CellLease:
    """Cells and slots of one request. Only its pool changes it."""

    __slots__ = ("cells", "holder", "number", "released", "slots")

    def __init__(self, number: int, holder: str, cells: int, slots: int) -> None:
        self.number = number
        self.holder = holder
        self.cells = cells
        self.slots = slots
        self.released = False

    def __repr__(self) -> str:
        state = "released" if self.released else f"{self.cells} cells, {self.slots} slots"
        return f"<CellLease {self.number}: {self.holder} {state}>"


class CellPool:
    """The cells of one replica, as its Ready frame states them.

    `cells`: of the whole pool when `shared` (the fast profile), else of each slot (the strict profile).
    Shared: the engine keeps one copy of the prompt for all choices of a request (its unified cache marks the
    prompt's cells as belonging to several sequences), so the prompt is counted once. Not shared: each choice
    takes one slot whole and holds its own copy of the prompt.
    """

    def __init__(self, cells: int, slots: int, shared: bool) -> None:
        if cells < 1 or slots < 1:
            raise OurBug(f"A pool needs at least one cell and one slot, not {cells} and {slots}.")
        self._cells = cells
        self._slots = slots
        self.shared = shared
        self._leases: dict[int, CellLease] = {}
        self._next_number = 1
        self._used_cells = 0
        self._used_slots = 0

    def __repr__(self) -> str:
        kind = "shared" if self.shared else "strict"
        return (
            f"<CellPool {kind}: {self._used_cells} of {self.total_cells} cells, {self._used_slots} of {self._slots} "
            f"slots leased by {len(self._leases)}>"
        )

    @property
    def total_cells(self) -> int:
        """All cells of the replica."""
        return self._cells if self.shared else self._cells * self._slots

    @property
    def slots(self) -> int:
        """Sequences that can run side by side."""
        return self._slots

    @property
    def free_cells(self) -> int:
        """Cells not leased."""
        return self.total_cells - self._used_cells

    @property
    def free_slots(self) -> int:
        """Slots not leased."""
        return self._slots - self._used_slots

    @property
    def largest_context_tokens(self) -> int:
        """Prompt and output of the largest request with one choice that an empty pool could take."""
        return self._cells

    @property
    def leases(self) -> tuple[CellLease, ...]:
        """All leases that are not released, oldest first."""
        return tuple(self._leases.values())

    def need_cells(self, prompt_tokens: int, outputs: Sequence[int]) -> int:
        """Cells that a request takes here: shared, exactly its own; not shared, whole slots."""
        return need_cells(prompt_tokens, outputs, self._cells, self.shared)

    def fits_ever(self, prompt_tokens: int, outputs: Sequence[int]) -> bool:
        """Whether an empty pool could take the request."""
        return fits_ever(prompt_tokens, outputs, self._cells, self._slots, self.shared)

    def fits_now(self, prompt_tokens: int, outputs: Sequence[int]) -> bool:
        """Whether `lease` would succeed."""
        return (
            self.fits_ever(prompt_tokens, outputs)
            and self.need_cells(prompt_tokens, outputs) <= self.free_cells
            and len(outputs) <= self.free_slots
        )

    def lease(self, holder: str, prompt_tokens: int, outputs: Sequence[int]) -> CellLease | CellShortfall:
        """Take the cells of prompt and allowed outputs, and a slot for each choice; or say what is missing."""
        if prompt_tokens < 0 or not outputs or min(outputs) < 0:
            raise OurBug(f"{holder} asked for cells for {prompt_tokens} prompt tokens and outputs of {list(outputs)}.")
        need, ever = self.need_cells(prompt_tokens, outputs), self.fits_ever(prompt_tokens, outputs)
        if not ever or need > self.free_cells or len(outputs) > self.free_slots:
            return CellShortfall(
                need_cells=need,
                free_cells=self.free_cells,
                need_slots=len(outputs),
                free_slots=self.free_slots,
                ever=ever,
                reason=self._why_not(prompt_tokens, outputs, ever),
            )
        taken = CellLease(self._next_number, holder, need, len(outputs))
        self._next_number += 1
        self._leases[taken.number] = taken
        self._used_cells += taken.cells
        self._used_slots += taken.slots
        return taken

    def release(self, lease: CellLease) -> None:
        """Give everything back. Raises OurBug the second time, and for another pool's lease."""
        if self._leases.get(lease.number) is not lease:
            raise OurBug(f"{lease!r} is not (or no longer) a lease of {self!r}.")
        del self._leases[lease.number]
        lease.released = True
        self._used_cells -= lease.cells
        self._used_slots -= lease.slots

    def _why_not(self, prompt_tokens: int, outputs: Sequence[int], ever: bool) -> str:
        asked = f"{prompt_tokens} prompt tokens with {_count(len(outputs), 'answer')} of up to {max(outputs)} tokens"
        if not ever:
            limit = f"{self._cells} cells" + ("" if self.shared else " an answer")
            return f"{asked} can never fit here: there are {limit} and {_count(self._slots, 'slot')}."
        return (
            f"{asked} need {self.need_cells(prompt_tokens, outputs)} cells and {_count(len(outputs), 'slot')}; "
            f"{self.free_cells} cells and {_count(self.free_slots, 'slot')} are free."
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def need_cells(prompt_tokens: int, outputs: Sequence[int], cells: int, shared: bool) -> int:
    """Cells a request takes: the prompt once and each output (shared), or a slot's `cells` for each choice."""
    return prompt_tokens + sum(outputs) if shared else len(outputs) * cells


def fits_ever(prompt_tokens: int, outputs: Sequence[int], cells: int, slots: int, shared: bool) -> bool:
    """Whether a pool of this shape could take the request when it is empty."""
    if len(outputs) > slots:
        return False
    return prompt_tokens + (sum(outputs) if shared else max(outputs, default=0)) <= cells
