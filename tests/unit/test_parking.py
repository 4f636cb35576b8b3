"""Who gets the next cells, who waits, who gives way: one answer at a time, and whole days of them at random."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relevo.core.cells import Answer, CellLease, CellPool, live_cells
from relevo.core.parking import (
    LEAST_AHEAD_TOKENS,
    MOST_AHEAD_TOKENS,
    Extension,
    Outcome,
    Standing,
    ahead_tokens,
    is_due,
    reach,
    share_out,
)


def standing(holder: str, **more: object) -> Standing:
    figures: dict[str, object] = {
        "choice": 0,
        "accepted": float(ord(holder[0])),
        "prompt_tokens": 100,
        "drawn": 50,
        "held": 50,
        "set_aside": 50,
        "limit": 500,
    }
    return Standing(holder=holder, **(figures | more))  # type: ignore[arg-type]


# ------------------------------------------------------------ one decision


def test_an_extension_reaches_further_the_more_a_request_holds_within_bounds() -> None:
    assert ahead_tokens(10, 5) == LEAST_AHEAD_TOKENS
    assert ahead_tokens(1000, 280) == 40
    assert ahead_tokens(30_000, 5) == MOST_AHEAD_TOKENS
    assert reach(100, 50, 500) == 66
    assert reach(100, 50, 60) == 60, "never past the limit"


def test_an_answer_is_due_when_half_a_step_is_left() -> None:
    assert not is_due(100, 50, 59, 500)
    assert is_due(100, 50, 58, 500)
    assert is_due(100, 50, 50, 500)
    assert not is_due(100, 50, 50, 50), "at its limit it needs nothing"


def test_nobody_is_extended_before_it_is_due() -> None:
    assert share_out([standing("a", held=66, set_aside=66)], 1000) == Outcome()


def test_up_to_what_was_set_aside_an_extension_takes_no_free_cell() -> None:
    outcome = share_out([standing("a", set_aside=200)], 0)
    assert outcome == Outcome(extend=(Extension("a", 0, 66),))


def test_beyond_it_the_free_ones_go_to_the_oldest_first() -> None:
    outcome = share_out([standing("b"), standing("a")], 20)
    assert outcome.extend == (Extension("a", 0, 66), Extension("b", 0, 54))
    assert not outcome.parked


def test_whoever_gets_none_is_parked_and_whoever_still_has_some_is_not() -> None:
    outcome = share_out([standing("a"), standing("b"), standing("c", held=55, set_aside=55)], 16)
    assert outcome.extend == (Extension("a", 0, 66),)
    assert outcome.parked == {("b", 0)}
    assert outcome.gives_way is None


def test_an_answer_whose_prompt_is_being_read_is_not_parked() -> None:
    outcome = share_out([standing("a"), standing("b", drawn=0, held=16, set_aside=16)], 0)
    assert outcome.parked == {("a", 0)} and outcome.gives_way is None


def test_where_everybody_is_parked_the_newest_gives_way() -> None:
    assert share_out([standing("b"), standing("a"), standing("c")], 0).gives_way == "c"


def test_nobody_gives_way_while_a_request_is_ending() -> None:
    assert share_out([standing("b"), standing("a")], 0, somebody_leaves=True).gives_way is None


def test_a_lower_priority_gives_way_before_a_newer_request() -> None:
    standings = [standing("a"), standing("b", priority=-1), standing("c")]
    assert share_out(standings, 0).gives_way == "b"


def test_one_whose_client_will_not_notice_gives_way_before_a_newer_one() -> None:
    standings = [standing("a"), standing("b"), standing("c", unseen=False)]
    assert share_out(standings, 0).gives_way == "b"


def test_the_oldest_never_gives_way_whatever_its_priority() -> None:
    standings = [standing("a", priority=-9), standing("b", unseen=False, priority=9)]
    assert share_out(standings, 0).gives_way == "b"


def test_a_request_alone_never_gives_way_to_itself() -> None:
    assert share_out([standing("a"), standing("a", choice=1)], 0).gives_way is None


def test_nobody_runs_nobody_waits() -> None:
    assert share_out([], 10) == Outcome()


# ------------------------------------------------------------ whole days


@dataclass
class Asked:
    """A request of a day: how long its answers will be is known to the worker alone."""

    name: str
    accepted: float
    prompt: int
    outputs: list[int]
    limit: int
    expected: int
    priority: int
    unseen: bool
    attempts: int = 0
    rested: bool = False


@dataclass
class Running:
    asked: Asked
    lease: CellLease
    drawn: dict[int, int]
    read: bool = False


class Day:
    """A pool, a line before it and a worker that draws a token a step, as service and worker do it together."""

    def __init__(self, cells: int, slots: int, requests: list[Asked]) -> None:
        self.pool = CellPool(cells, slots, shared=True)
        self.line = deque(sorted(requests, key=lambda r: r.accepted))
        self.running: dict[str, Running] = {}
        self.parked: frozenset[tuple[str, int]] = frozenset()
        self.ended: list[Asked] = []
        self.held = self.live = 0

    def start(self) -> None:
        while self.line and not self.parked:
            asked = self.line[0]
            aside = asked.limit if asked.attempts else min(asked.limit, max(1, asked.expected))
            first = min(aside, reach(asked.prompt, 0, asked.limit))
            answers = [Answer(i, asked.limit, aside, first) for i in range(len(asked.outputs))]
            lease = self.pool.lease_growing(asked.name, asked.prompt, answers)
            if not isinstance(lease, CellLease):
                return
            self.line.popleft()
            self.running[asked.name] = Running(asked, lease, dict.fromkeys(range(len(answers)), 0))

    def standings(self) -> list[Standing]:
        return [
            Standing(
                holder=r.asked.name,
                choice=a.choice,
                accepted=r.asked.accepted,
                prompt_tokens=r.asked.prompt,
                drawn=r.drawn[a.choice],
                held=a.held,
                set_aside=a.set_aside,
                limit=a.limit,
                priority=r.asked.priority,
                unseen=r.asked.unseen,
            )
            for r in self.running.values()
            for a in r.lease.answers
        ]

    def share_out(self) -> None:
        standings = self.standings()
        free = self.pool.free_cells
        outcome = share_out(standings, free)
        for extension in outcome.extend:
            lease = self.running[extension.holder].lease
            assert self.pool.extend(lease, extension.choice, extension.tokens) == extension.tokens
        if outcome.parked:
            assert self.pool.free_cells == 0, "nobody is parked while cells are free"
        self.parked = outcome.parked
        if outcome.gives_way is not None:
            oldest = min(self.running.values(), key=lambda r: r.asked.accepted).asked.name
            assert outcome.gives_way != oldest
            self.give_way(self.running.pop(outcome.gives_way))

    def give_way(self, run: Running) -> None:
        assert run.asked.attempts == 0, "once is enough"
        self.pool.release(run.lease)
        self.parked = frozenset(p for p in self.parked if p[0] != run.asked.name)
        run.asked.attempts += 1
        if run.asked.unseen:
            self.line.appendleft(run.asked)
        else:
            run.asked.rested = True
            self.ended.append(run.asked)

    def step(self) -> bool:
        """A token for whoever holds a cell for it. False when nothing moved."""
        moved = False
        for run in list(self.running.values()):
            if not run.read:
                run.read = moved = True
                self.pool.read(run.lease, run.asked.prompt)
                continue
            for answer in run.lease.answers:
                if run.drawn[answer.choice] >= answer.held:
                    continue
                moved = True
                run.drawn[answer.choice] += 1
                if run.drawn[answer.choice] == min(run.asked.outputs[answer.choice], run.asked.limit):
                    self.pool.end_answer(run.lease, answer.choice)
            if not run.lease.slots:
                self.pool.release(run.lease)
                del self.running[run.asked.name]
                self.parked = frozenset(p for p in self.parked if p[0] != run.asked.name)
                self.ended.append(run.asked)
        return moved

    def look(self) -> None:
        leased = sum(lease.cells for lease in self.pool.leases)
        assert leased + self.pool.free_cells == self.pool.total_cells and self.pool.free_cells >= 0
        live = sum(
            live_cells(r.asked.prompt if r.read else 0, [r.drawn[a.choice] for a in r.lease.answers], shared=True)
            for r in self.running.values()
        )
        assert live <= self.pool.held_cells <= leased <= self.pool.total_cells
        self.held += self.pool.held_cells
        self.live += live

    def live_through(self) -> None:
        for _ in range(20_000):
            self.start()
            self.share_out()
            self.look()
            if not self.running and not self.line:
                return
            gave_way = sum(a.attempts for a in self.line) > 0
            assert self.step() or gave_way or self.parked, "somebody always goes on"
        raise AssertionError("the day never ended")


@st.composite
def days(draw: st.DrawFn) -> Day:
    cells, slots = draw(st.integers(20, 200)), draw(st.integers(1, 6))
    requests = []
    for number in range(draw(st.integers(1, 12))):
        choices = draw(st.integers(1, min(3, slots)))
        prompt = draw(st.integers(1, cells - choices))
        limit = draw(st.integers(1, (cells - prompt) // choices))
        outputs = draw(st.lists(st.integers(1, limit + 20), min_size=choices, max_size=choices))
        requests.append(
            Asked(
                name=f"r{number:02}",
                accepted=float(number),
                prompt=prompt,
                outputs=outputs,
                limit=limit,
                expected=draw(st.integers(1, limit + 5)),
                priority=draw(st.integers(-1, 1)),
                unseen=draw(st.booleans()),
            )
        )
    return Day(cells, slots, requests)


@settings(max_examples=60, deadline=None)
@given(days())
def test_every_request_of_any_day_ends_whole_or_rests_and_cells_are_never_promised_twice(day: Day) -> None:
    asked = list(day.line)
    day.live_through()
    assert {id(a) for a in day.ended} == {id(a) for a in asked} and len(day.ended) == len(asked)
    assert day.pool.free_cells == day.pool.total_cells and day.pool.free_slots == day.pool.slots
    assert not asked[0].attempts, "the very first one never gives way"
    assert all(a.attempts <= 1 for a in asked)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(200, 900), st.integers(20, 300)), min_size=3, max_size=12))
def test_what_is_held_is_used(sizes: list[tuple[int, int]]) -> None:
    """Whatever the lengths, a lease runs ahead of its tokens by no more than a step: 3 % and a few tokens."""
    requests = [
        Asked(f"r{i:02}", float(i), prompt, [output], 500, 256, 0, unseen=True)
        for i, (prompt, output) in enumerate(sizes)
    ]
    day = Day(4096, 8, requests)
    day.live_through()
    steps = sum(min(output, 500) for _, output in sizes) + 2 * len(sizes)
    assert day.held - day.live <= 0.0325 * day.held + steps * (LEAST_AHEAD_TOKENS + 1)


@pytest.mark.parametrize("named", [True, False])
def test_a_limit_that_was_set_aside_whole_is_never_parked(named: bool) -> None:
    greedy = [Asked(f"g{i}", float(i), 10, [80], 80, 1, 0, unseen=True) for i in range(3)]
    careful = Asked("z", 9.0, 10, [40], 40, 40 if named else 1, 0, unseen=True)
    day = Day(100, 4, [*greedy, careful])
    waited = False
    for _ in range(2000):
        day.start()
        day.share_out()
        waited |= ("z", 0) in day.parked
        if not day.running and not day.line:
            break
        day.step()
    assert waited != named
