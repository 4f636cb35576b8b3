"""Leases of KV cells inside a loaded llama.cpp replica.

The bytes were paid when the model was loaded; a request takes cells and sequence slots of that pool. Of each answer its
lease knows three figures: what it *holds* (the worker may fill it now), what is *set aside* for it (held or not, nobody
else is given it), and its limit (the most that can ever come). An answer starts by holding few cells and grows by
steps, so that what is held is what is used. Up to what was set aside for it, it never waits; beyond that it takes what
is free, and where nothing is free it is parked (`core/parking.py`). A prompt is set aside whole and held as it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class Answer(msgspec.Struct, frozen=True):
    """Output tokens of one choice: 0 <= held <= set_aside <= limit."""

    choice: int
    limit: int
    """The most that can ever come."""
    set_aside: int
    """Nobody else is given these cells."""
    held: int
    """The worker may fill these cells now."""


class CellLease:
    """Cells and slots of one request. Only its pool changes it."""

    __slots__ = ("_answers", "_slot_cells", "holder", "number", "prompt_read", "prompt_tokens", "released")

    def __init__(
        self, number: int, holder: str, prompt_tokens: int, answers: Iterable[Answer], slot_cells: int | None
    ) -> None:
        self.number = number
        self.holder = holder
        self.prompt_tokens = prompt_tokens
        self.prompt_read = 0
        """Tokens of the prompt that the worker has read."""
        self.released = False
        self._answers = {answer.choice: answer for answer in answers}
        self._slot_cells = slot_cells  # None: shared; else what each answer takes, whatever its figures are

    def __repr__(self) -> str:
        state = "released" if self.released else f"{self.cells} cells, {self.slots} slots"
        return f"<CellLease {self.number}: {self.holder} {state}>"

    @property
    def slots(self) -> int:
        """Sequences: one for each answer that has not ended."""
        return len(self._answers)

    @property
    def cells(self) -> int:
        """Cells that nobody else can have: what is held, and what is set aside beyond that."""
        if self._slot_cells is not None:
            return self._slot_cells * len(self._answers)
        return self.prompt_tokens + sum(answer.set_aside for answer in self._answers.values())

    @property
    def held_cells(self) -> int:
        """Cells in use, or that may be at any moment: what was read of the prompt, then those of its answers too."""
        if self._slot_cells is not None:
            return self._slot_cells * len(self._answers)
        if self.prompt_read < self.prompt_tokens:
            return self.prompt_read
        return self.prompt_tokens + sum(answer.held for answer in self._answers.values())

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Those that have not ended."""
        return tuple(self._answers.values())

    def answer(self, choice: int) -> Answer | None:
        """What is leased for one choice; None once it has ended."""
        return self._answers.get(choice)

    def put(self, answer: Answer) -> None:
        """For its pool alone."""
        self._answers[answer.choice] = answer

    def drop(self, choice: int) -> None:
        """For its pool alone."""
        del self._answers[choice]


class CellPool:
    """The cells of one replica, as its Ready frame states them.

    `cells`: of the whole pool when `shared` (the fast profile), else of each slot (the strict profile).
    Shared: the engine keeps one copy of the prompt for all choices of a request (its unified cache marks the
    prompt's cells as belonging to several sequences), so the prompt is counted once, and leases grow. Not shared: each
    choice takes one slot whole and holds its own copy of the prompt; there is nothing to grow into.
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
        """Cells that are neither held nor set aside."""
        return self.total_cells - self._used_cells

    @property
    def held_cells(self) -> int:
        """Cells that are in use, or may be at any moment; the rest of what is leased is set aside."""
        return sum(lease.held_cells for lease in self._leases.values())

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
        """Whether an empty pool could take the request with these limits."""
        return fits_ever(prompt_tokens, outputs, self._cells, self._slots, self.shared)

    def fits_now(self, prompt_tokens: int, outputs: Sequence[int]) -> bool:
        """Whether `lease` would succeed with these outputs set aside whole."""
        return (
            self.fits_ever(prompt_tokens, outputs)
            and self.need_cells(prompt_tokens, outputs) <= self.free_cells
            and len(outputs) <= self.free_slots
        )

    # -- taking, growing, giving back

    def lease(self, holder: str, prompt_tokens: int, outputs: Sequence[int]) -> CellLease | CellShortfall:
        """Take the cells of the prompt and of all these outputs, and a slot for each; or say what is missing."""
        return self.lease_growing(
            holder, prompt_tokens, [Answer(i, limit, limit, limit) for i, limit in enumerate(outputs)]
        )

    def lease_growing(self, holder: str, prompt_tokens: int, answers: Sequence[Answer]) -> CellLease | CellShortfall:
        """Take the cells of the prompt and those to be set aside, and a slot for each answer; or say what is missing.

        The limits must fit an empty pool, so that the request can end when everybody else has.
        """
        if prompt_tokens < 0 or not answers or not all(0 <= a.held <= a.set_aside <= a.limit for a in answers):
            raise OurBug(f"{holder} asked for cells for {prompt_tokens} prompt tokens and {list(answers)}.")
        if not self.shared:
            answers = [Answer(a.choice, a.limit, a.limit, a.limit) for a in answers]
        limits, wanted = [a.limit for a in answers], [a.set_aside for a in answers]
        need, ever = self.need_cells(prompt_tokens, wanted), self.fits_ever(prompt_tokens, limits)
        if not ever or need > self.free_cells or len(answers) > self.free_slots:
            return CellShortfall(
                need_cells=need,
                free_cells=self.free_cells,
                need_slots=len(answers),
                free_slots=self.free_slots,
                ever=ever,
                reason=self._why_not(prompt_tokens, wanted if ever else limits, ever),
            )
        slot_cells = None if self.shared else self._cells
        taken = CellLease(self._next_number, holder, prompt_tokens, answers, slot_cells)
        if taken.slots != len(answers):
            raise OurBug(f"{holder} asked for cells for the same choice twice.")
        self._next_number += 1
        self._leases[taken.number] = taken
        self._used_cells += taken.cells
        self._used_slots += taken.slots
        return taken

    def read(self, lease: CellLease, prompt_tokens: int) -> None:
        """The worker has read so many tokens of its prompt."""
        self._check(lease)
        lease.prompt_read = max(lease.prompt_read, min(prompt_tokens, lease.prompt_tokens))

    def extend(self, lease: CellLease, choice: int, tokens: int) -> int:
        """Let an answer hold up to so many output tokens; returns how many it holds now.

        It never holds more than its limit, and gets what is free where that is less. One that has ended holds 0.
        """
        self._check(lease)
        answer = lease.answer(choice)
        if answer is None:
            return 0
        tokens = min(tokens, answer.limit)
        beyond = min(max(0, tokens - answer.set_aside), self.free_cells)
        held = max(answer.held, min(tokens, answer.set_aside + beyond))
        if held > answer.held:
            lease.put(msgspec.structs.replace(answer, held=held, set_aside=max(answer.set_aside, held)))
            self._used_cells += max(0, held - answer.set_aside)
        return held

    def end_answer(self, lease: CellLease, choice: int) -> None:
        """An answer has its finish: its output cells and its slot are free. The prompt stays for its neighbours."""
        self._check(lease)
        if lease.answer(choice) is None:
            return
        self._used_cells -= lease.cells
        lease.drop(choice)
        self._used_cells += lease.cells
        self._used_slots -= 1

    def release(self, lease: CellLease) -> None:
        """Give everything back. Raises OurBug the second time, and for another pool's lease."""
        self._check(lease)
        del self._leases[lease.number]
        lease.released = True
        self._used_cells -= lease.cells
        self._used_slots -= lease.slots

    def _check(self, lease: CellLease) -> None:
        if self._leases.get(lease.number) is not lease:
            raise OurBug(f"{lease!r} is not (or no longer) a lease of {self!r}.")

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


def live_cells(prompt_tokens: int, drawn: Sequence[int], shared: bool) -> int:
    """Cells that hold a token: of the prompt as far as it was read, and of each answer's tokens but the newest.

    The newest token was drawn and is decoded in the next step. `drawn`: of the answers that have not ended.
    """
    copies = 1 if shared else len(drawn)
    return prompt_tokens * copies + sum(max(0, tokens - 1) for tokens in drawn)
