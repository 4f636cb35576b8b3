"""A day of requests through the classes that lease cells, without a model: a token a step for whoever holds a cell.

Lane, pool, learned lengths and parking are the service's own; only the worker is played. A step reads a chunk of the
prompts in turn and draws a token for every answer. An extension reaches the worker some steps after it was decided.
"""

from __future__ import annotations

import csv
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from relevo.core import parking
from relevo.core.cells import Answer, CellLease, CellPool, live_cells
from relevo.core.forecast import OutputLengths

CHUNK_ROWS = 64
"""Prompt rows of a step while somebody draws; twice as many while nobody does."""

QUANTILES = {
    "conversation": (
        (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0),
        (3, 181, 396, 1020, 1189, 4083, 14050),
        (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0),
        (1, 41, 85, 129, 395, 424, 451, 601, 1000),
    ),
    "code": (
        (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0),
        (3, 75, 578, 1469, 2744, 7302, 7437),
        (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0),
        (1, 6, 9, 13, 24, 55, 90, 249, 1899),
    ),
}
"""Lengths of prompts and answers of the Azure LLM inference trace 2023 (Patel et al., Splitwise, ISCA 2024; CC-BY 4.0):
shares and the values below which they lie."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request of the day. `at` in steps."""

    number: int
    at: float
    prompt: int
    output: int
    named: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """The replica, and what is asked of it."""

    cells: int = 8192
    slots: int = 8
    limit: int = 1024
    """Output of a request that names no limit."""
    load: float = 0.8
    """Of what the slots could do: arrival times are stretched to it."""
    named: float = 0.0
    """Share of requests that name that limit; the others name none."""
    late_steps: int = 1
    """Steps from an extension's decision to its effect."""


@dataclass(slots=True)
class Run:
    """A request that runs."""

    call: Call
    lease: CellLease
    may_reach: int
    """As the worker knows it."""
    read: int = 0
    drawn: int = 0


@dataclass(slots=True)
class Sums:
    """Summed over steps."""

    steps: int = 0
    live: int = 0
    held: int = 0
    reserved: int = 0
    """Held, or set aside."""
    running: int = 0
    parked: int = 0
    late: int = 0
    """Answers that waited for the frame while there were cells."""
    drawn: int = 0


class Replay:
    """See the module. `figures` after `run`."""

    def __init__(self, lengths: Sequence[tuple[float, int, int]], shape: Shape) -> None:
        self._shape = shape
        self._line = deque(_stretched(lengths, shape))
        self._waiting: deque[Call] = deque()
        self._pool = CellPool(shape.cells, shape.slots, shared=True)
        self._lengths = OutputLengths()
        self._running: dict[str, Run] = {}
        self._parked: frozenset[tuple[str, int]] = frozenset()
        self._under_way: deque[tuple[int, Run, int]] = deque()
        self._gave_way: set[int] = set()
        self._sums = Sums()
        self._parks = self._extensions = self._give_ways = self._ended = 0
        self._waits: list[float] = []
        self._step = 0

    def run(self) -> None:
        """Until everybody has had the whole answer."""
        calls = len(self._line)
        while self._line or self._waiting or self._running:
            if not self._running and not self._waiting:
                self._step = max(self._step, int(self._line[0].at))
            self._step += 1
            while self._line and self._line[0].at <= self._step:
                self._waiting.append(self._line.popleft())
            self._start()
            self._share_out()
            self._compute()
        assert self._ended == calls
        assert self._pool.free_cells == self._pool.total_cells

    def figures(self) -> dict[str, float]:
        """Shares of cells are over time: of all steps in which somebody ran."""
        sums, calls = self._sums, self._ended
        return {
            "live_of_held": sums.live / sums.held,
            "live_of_reserved": sums.live / sums.reserved,
            "reserved_unused_of_pool": (sums.reserved - sums.live) / (sums.steps * self._shape.cells),
            "live_of_pool": sums.live / (sums.steps * self._shape.cells),
            "running": sums.running / sums.steps,
            "wait_steps": sum(self._waits) / len(self._waits),
            "parks": self._parks,
            "parked_of_running": sums.parked / sums.running,
            "give_ways": self._give_ways,
            "extensions_a_call": self._extensions / calls,
            "late_of_drawn": sums.late / sums.drawn,
            "calls": calls,
        }

    def _start(self) -> None:
        while self._waiting and not self._parked and len(self._running) < self._shape.slots:
            call = self._waiting[0]
            limit = min(self._shape.limit, self._shape.cells - call.prompt)
            whole = call.named or call.number in self._gave_way
            aside = limit if whole else self._lengths.expected(limit)
            first = min(aside, parking.reach(call.prompt, 0, limit))
            lease = self._pool.lease_growing(str(call.number), call.prompt, [Answer(0, limit, aside, first)])
            if not isinstance(lease, CellLease):
                return
            self._waiting.popleft()
            self._waits.append(self._step - call.at)
            self._running[str(call.number)] = Run(call, lease, first)

    def _share_out(self) -> None:
        if not self._parked and not any(self._is_due(run) for run in self._running.values()):
            return
        outcome = parking.share_out([_standing(run) for run in self._running.values()], self._pool.free_cells)
        for extension in outcome.extend:
            run = self._running[extension.holder]
            held = self._pool.extend(run.lease, 0, extension.tokens)
            self._under_way.append((self._step + self._shape.late_steps, run, held))
        self._extensions += len(outcome.extend)
        self._parks += len(outcome.parked - self._parked)
        self._parked = outcome.parked
        if outcome.gives_way is not None:
            run = self._running[outcome.gives_way]
            self._leave(run)
            self._waiting.appendleft(run.call)
            self._gave_way.add(run.call.number)
            self._give_ways += 1

    @staticmethod
    def _is_due(run: Run) -> bool:
        answer = run.lease.answer(0)
        return answer is not None and parking.is_due(run.call.prompt, run.drawn, answer.held, answer.limit)

    def _compute(self) -> None:
        while self._under_way and self._under_way[0][0] <= self._step:
            _, run, held = self._under_way.popleft()
            run.may_reach = max(run.may_reach, held)
        drawing = [run for run in self._running.values() if run.read == run.call.prompt]
        self._read_prompts(CHUNK_ROWS if drawing else 2 * CHUNK_ROWS)
        for run in drawing:
            if run.drawn < run.may_reach:
                run.drawn += 1
                self._sums.drawn += 1
            elif (str(run.call.number), 0) not in self._parked:
                self._sums.late += 1
        self._count()
        for run in [run for run in self._running.values() if run.drawn >= min(run.call.output, _limit(run))]:
            self._leave(run)
            self._ended += 1
            if not run.call.named:
                self._lengths.add(run.drawn)

    def _read_prompts(self, rows: int) -> None:
        for run in self._running.values():
            part = min(rows, run.call.prompt - run.read)
            if part:
                run.read += part
                rows -= part
                self._pool.read(run.lease, run.read)
                run.drawn = int(run.read == run.call.prompt)

    def _leave(self, run: Run) -> None:
        self._pool.release(run.lease)
        name = str(run.call.number)
        del self._running[name]
        self._parked = frozenset(each for each in self._parked if each[0] != name)

    def _count(self) -> None:
        sums = self._sums
        sums.steps += 1
        sums.live += sum(live_cells(run.read, [run.drawn], shared=True) for run in self._running.values())
        sums.held += self._pool.held_cells
        sums.reserved += self._pool.total_cells - self._pool.free_cells
        sums.running += len(self._running)
        sums.parked += len(self._parked)


def _limit(run: Run) -> int:
    answer = run.lease.answer(0)
    assert answer is not None
    return answer.limit


def _standing(run: Run) -> parking.Standing:
    answer = run.lease.answer(0)
    assert answer is not None
    return parking.Standing(
        holder=str(run.call.number),
        choice=0,
        accepted=run.call.at,
        prompt_tokens=run.call.prompt,
        drawn=run.drawn,
        held=answer.held,
        set_aside=answer.set_aside,
        limit=answer.limit,
    )


def _stretched(lengths: Sequence[tuple[float, int, int]], shape: Shape) -> list[Call]:
    """Those that fit the replica, at times in steps such that its slots are loaded as the shape says."""
    draw = random.Random(7)
    fitting = [(at, p, o) for at, p, o in lengths if p + min(o, shape.limit) <= shape.cells and o > 0 and p > 0]
    steps = sum(prompt / CHUNK_ROWS + min(output, shape.limit) for _, prompt, output in fitting)
    first, last = fitting[0][0], fitting[-1][0]
    stretch = steps / shape.slots / shape.load / max(1e-9, last - first)
    return [
        Call(i, (at - first) * stretch, prompt, output, draw.random() < shape.named)
        for i, (at, prompt, output) in enumerate(fitting)
    ]


def read_trace(path: Path, most: int) -> list[tuple[float, int, int]]:
    """Time in seconds, prompt and output tokens of the first calls of a trace (TIMESTAMP, ContextTokens, ...)."""
    with path.open(newline="") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(most), strict=False)]
    return [
        (
            datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
            int(row["ContextTokens"]),
            int(row["GeneratedTokens"]),
        )
        for row in rows
    ]


def drawn_lengths(kind: str, most: int) -> list[tuple[float, int, int]]:
    """Calls at random times whose lengths follow the trace's quantiles, prompt and output apart."""
    draw = random.Random(11)
    prompt_shares, prompts, output_shares, outputs = QUANTILES[kind]
    at = 0.0
    calls = []
    for _ in range(most):
        at += draw.expovariate(1.0)
        calls.append((at, _value(prompt_shares, prompts, draw), _value(output_shares, outputs, draw)))
    return calls


def _value(shares: Sequence[float], values: Sequence[int], draw: random.Random) -> int:
    share = draw.random()
    place = next(i for i in range(1, len(shares)) if share <= shares[i])
    low, high = shares[place - 1], shares[place]
    return round(values[place - 1] + (values[place] - values[place - 1]) * (share - low) / (high - low))
