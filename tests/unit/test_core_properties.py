"""Whatever the order of events, the promises hold: each state machine against a naive model.

The quick profile runs with every commit; `-m proof` runs the same machines far longer.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from relevo.core.admission import Admit, Delay, Policy, Redirect, RouteState, RouteView, Weighed, decide
from relevo.core.breaker import DEVICE_THRESHOLDS, Breaker, BreakerState, FaultKind, Permit
from relevo.core.cells import CellLease, CellPool, CellShortfall
from relevo.core.errors import OurBug
from relevo.core.forecast import Rates
from relevo.core.handover import (
    BecomeResumable,
    Continue,
    Fail,
    Grade,
    LostAttempt,
    Requeue,
    Restart,
    Way,
    Wish,
    on_gateway_restart,
    on_route_lost,
)
from relevo.core.lane import Full, Lane
from relevo.core.leases.lease import Lease, LeaseState, Shortfall
from relevo.core.leases.ledger import Ledger
from relevo.core.leases.reading import Reading
from relevo.core.leases.tally import Tally
from relevo.core.request import TERMINAL, TRANSITIONS, IllegalTransition, RequestState, advance

# How many examples of each machine a commit can afford.
QUICK = {"LedgerMachine": 20, "LaneMachine": 60, "BreakerMachine": 120, "RequestMachine": 60, "AdmissionMachine": 8}


def quick(machine: type[RuleBasedStateMachine]) -> settings:
    return settings(
        max_examples=QUICK.get(machine.__name__, 25),
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


THOROUGH = settings(
    max_examples=400, stateful_step_count=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)

MIB = 1 << 20
TOTAL = 1000 * MIB
RESERVED = 30 * MIB
HEADROOM = 70 * MIB


def mebibytes(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most).map(lambda n: n * MIB)


class LedgerMachine(RuleBasedStateMachine):
    """A card with a real use per lease, memory of dead processes and a neighbour, against the ledger that sees sums.

    The card is exact, and its readings are of up to LAG seconds ago, but never older than the one before. A neighbour
    may take only what is free on the card, as a real one does. Memory of a dead process comes back when it likes.
    """

    LAG = 1.5
    SIZES = tuple(n * MIB for n in (0, 100, 200, 300, 450, 600))
    SHARES = (0.0, 0.2, 0.5, 1.0, 1.0)
    PASSED = (0.05, 0.3, 1.0, 1.6, 4.0, 6.0, 20.0)
    LAGS = (0.0, 0.5, LAG)
    sizes, shares, picks = st.sampled_from(SIZES), st.sampled_from(SHARES), st.integers(0, 5)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = Ledger("gpu0", headroom_bytes=HEADROOM)
        self.use: dict[int, int] = {}  # lease number -> bytes its process uses now
        self.dead: dict[int, int] = {}  # of released leases: bytes that are not back
        self.neighbour = 0
        self.released: list[Lease] = []
        self.past: list[tuple[float, int, int]] = []  # when, used, neighbour
        self.shown = (0.0, 0)  # of the newest reading: what moment it shows, and the neighbour then
        self.moved_at = 0.0  # when our own use last changed

    @property
    def used(self) -> int:
        return sum(self.use.values()) + sum(self.dead.values()) + self.neighbour

    def note(self, *, ours: bool) -> None:
        """Something changed on the card, a moment after what happened before."""
        self.now += 0.001
        self.past.append((self.now, self.used, self.neighbour))
        if ours:
            self.moved_at = self.now

    def read(self, lag: float = 0.0) -> None:
        moment = max(self.shown[0], self.now - lag)
        _, used, neighbour = next(entry for entry in reversed(self.past) if entry[0] <= moment)
        self.shown = (moment, neighbour)
        self.ledger.observe(Reading(TOTAL, TOTAL - RESERVED - used, RESERVED, read_at=self.now))

    def pick(self, number: int, *states: LeaseState) -> Lease | None:
        """One of the leases in these states."""
        found = [lease for lease in self.ledger.leases if lease.state in states]
        return found[number % len(found)] if found else None

    @initialize(neighbour=sizes)
    def start(self, neighbour: int) -> None:
        self.neighbour = neighbour
        self.note(ours=False)
        self.read()

    @rule(passed=st.sampled_from(PASSED), lag=st.sampled_from(LAGS))
    def read_the_device(self, passed: float, lag: float) -> None:
        self.now += passed
        self.read(lag)

    @rule(bytes_=sizes, all_there_is=st.booleans())
    def request(self, bytes_: int, all_there_is: bool) -> None:
        before, available = self.ledger.leased_bytes, self.ledger.available_bytes
        bytes_ = available if all_there_is and available is not None else bytes_
        answer = self.ledger.request("holder", bytes_, self.now)
        if isinstance(answer, Shortfall):
            stale = answer.available_bytes is None
            assert stale or (available is not None and bytes_ > available)
            assert answer.missing_bytes == (None if stale else bytes_ - (available or 0))
            assert self.ledger.leased_bytes == before
            return
        assert available is not None
        assert bytes_ <= available
        self.use[answer.number] = 0
        assert self.ledger.leased_bytes == before + bytes_
        if bytes_ == 0:
            return  # holds nothing, so it may be had even where a neighbour took what was promised
        # The promise itself: what is leased (of a holder that is being ended, and cannot grow, what it still has), what
        # dead processes hold, what the driver keeps and the headroom fit on the card, however late the readings are.
        taken = sum(self.dead.values()) + sum(
            self.use[lease.number] if lease.state is LeaseState.DRAINING else lease.bytes_
            for lease in self.ledger.leases
        )
        assert taken <= TOTAL - RESERVED - HEADROOM
        # Where no load is under way and the reading shows all that is ours, it shows the neighbour, too.
        others = [lease for lease in self.ledger.leases if lease is not answer and not lease.resting]
        settled = all(lease.state is LeaseState.SETTLED for lease in others)
        if settled and self.moved_at <= self.shown[0]:
            assert taken + self.shown[1] <= TOTAL - RESERVED - HEADROOM

    @rule(number=picks, share=shares)
    def load(self, number: int, share: float) -> None:
        """A process allocates: never more than it leased, and never more than is left on the card."""
        lease = self.pick(number, LeaseState.GRANTED)
        if lease is not None and not lease.resting:
            more = max(0, int(lease.bytes_ * share) - self.use[lease.number])
            self.use[lease.number] += min(more, TOTAL - RESERVED - self.used)
            self.note(ours=True)

    @rule(number=picks)
    def rest_or_begin(self, number: int) -> None:
        lease = self.pick(number, LeaseState.GRANTED)
        if lease is not None and lease.resting:
            self.ledger.begin(lease)
        elif lease is not None and self.use[lease.number] == 0:
            self.ledger.rest(lease)

    @rule(number=picks, share=shares)
    def end_and_keep_the_claim(self, number: int, share: float) -> None:
        """Its process is gone, and its memory stays leased for the next one."""
        lease = self.pick(number, LeaseState.SETTLED, LeaseState.DRAINING)
        if lease is not None:
            self.dead[lease.number] = int(self.use.pop(lease.number) * share)
            self.note(ours=True)
            kept = self.ledger.renew(lease, self.now)
            self.use[kept.number] = 0
            self.ledger.rest(kept)

    @rule(number=picks)
    def settle(self, number: int) -> None:
        lease = self.pick(number, LeaseState.GRANTED, LeaseState.UNVERIFIED)
        if lease is not None and not lease.resting:
            self.ledger.settle(lease, self.use[lease.number])

    @rule(number=picks, share=shares)
    def use_more_or_less(self, number: int, share: float) -> None:
        lease = self.pick(number, LeaseState.SETTLED)
        if lease is not None:
            more = int(lease.bytes_ * share) - self.use[lease.number]
            self.use[lease.number] += min(more, TOTAL - RESERVED - self.used)
            self.note(ours=True)
            self.ledger.recount(lease, self.use[lease.number])

    @rule(number=picks, share=shares)
    def drain(self, number: int, share: float) -> None:
        """It is being ended, and part of its memory may be back before its process is seen to be gone."""
        lease = self.pick(number, LeaseState.GRANTED, LeaseState.SETTLED, LeaseState.UNVERIFIED)
        if lease is not None:
            self.ledger.drain(lease)
            self.use[lease.number] = int(self.use[lease.number] * share)
            self.note(ours=True)

    @rule(number=picks, share=shares)
    def release(self, number: int, share: float) -> None:
        """Its process is gone; a share of its memory is not back."""
        lease = self.pick(number, *LeaseState)
        if lease is not None:
            self.dead[lease.number] = int(self.use.pop(lease.number) * share)
            self.note(ours=True)
            self.ledger.release(lease, self.now)
            self.released.append(lease)

    @precondition(lambda self: self.dead)
    @rule(number=picks, share=shares)
    def memory_comes_back(self, number: int, share: float) -> None:
        lease = sorted(self.dead)[number % len(self.dead)]
        self.dead[lease] = int(self.dead[lease] * share)
        self.note(ours=True)

    @precondition(lambda self: self.released)
    @rule(number=picks)
    def release_again(self, number: int) -> None:
        lease, before = self.released[number % len(self.released)], self.ledger.leased_bytes
        with pytest.raises(OurBug):
            self.ledger.release(lease)
        assert self.ledger.leased_bytes == before

    @precondition(lambda self: self.use)
    @rule()
    def doubt(self) -> None:
        self.ledger.doubt("The machine was suspended.", self.now)
        assert self.ledger.available_bytes is None
        self.now += 1.6
        self.read()

    @rule(wanted=sizes)
    def neighbour_moves(self, wanted: int) -> None:
        self.neighbour = min(wanted, TOTAL - RESERVED - self.used + self.neighbour)
        self.note(ours=False)

    @invariant()
    def every_sum_equals_a_recount(self) -> None:
        leases, view = self.ledger.leases, self.ledger.snapshot()
        assert {lease.number for lease in leases} == set(self.use)
        assert view.leased_bytes == sum(lease.bytes_ for lease in leases)
        assert [(h.holder, h.bytes_, h.state) for h in view.leases] == [
            (lease.holder, lease.counted_bytes, lease.state) for lease in leases
        ]
        sums = Tally()
        for lease in leases:
            sums.count(lease, 1)
        assert all(getattr(sums, name) == getattr(self.ledger._sums, name) for name in Tally.__slots__)
        in_doubt = [lease.bytes_ for lease in leases if lease.state is LeaseState.UNVERIFIED]
        assert view.unverified_bytes == sum(in_doubt)

    @invariant()
    def figures_add_up(self) -> None:
        view = self.ledger.snapshot()
        if view.available_bytes is not None and view.slack_bytes is not None:
            assert view.available_bytes == max(0, view.slack_bytes - HEADROOM) <= TOTAL - RESERVED - HEADROOM
            assert view.pressure is not None
            assert 0 <= view.pressure <= 1
        if view.slack_bytes is not None and view.external_bytes is not None:
            promised = view.leased_bytes + view.returning_bytes + view.external_bytes
            assert view.slack_bytes <= TOTAL - RESERVED - promised
            assert 0 <= view.granted_not_visible_bytes <= view.leased_bytes

    def walk(self, dice: random.Random, steps: int) -> None:
        """Long walks find what needs many events in a row; the search above finds short ones, and shrinks them."""
        self.start(neighbour=dice.choice(self.SIZES))
        for _ in range(steps):
            number, size, share = dice.randrange(6), dice.choice(self.SIZES), dice.choice(self.SHARES)
            step = dice.randrange(30)
            if step < 10:
                self.read_the_device(passed=dice.choice(self.PASSED), lag=dice.choice(self.LAGS))
            elif step < 15:
                self.request(bytes_=size, all_there_is=dice.random() < 0.3)
            elif step < 22:
                (self.load if step < 19 else self.settle)(number=number, **({"share": share} if step < 19 else {}))
            elif step < 28:
                acts = (self.use_more_or_less, self.drain, self.release, self.release, self.memory_comes_back)
                act = dice.choice(acts if self.dead else acts[:-1])
                act(number=number, share=share)
            elif step == 28:
                self.neighbour_moves(wanted=size)
            else:
                turn = dice.randrange(6)
                if turn < 3:
                    self.rest_or_begin(number=number)
                elif turn < 5:
                    self.end_and_keep_the_claim(number=number, share=share)
                else:
                    self.doubt()
            self.every_sum_equals_a_recount()
            self.figures_add_up()
        self.teardown()

    def teardown(self) -> None:
        for lease in self.ledger.leases:
            self.ledger.release(lease)
        assert self.ledger.leased_bytes == 0
        self.use.clear()
        self.dead.clear()
        self.neighbour = 0
        self.note(ours=True)
        # Nobody is there any more: within a few readings everything is available again.
        for _ in range(40):
            self.now += 10.0
            self.read()
        assert self.ledger.available_bytes == TOTAL - RESERVED - HEADROOM


class CellMachine(RuleBasedStateMachine):
    """Both kinds of pool, against a list of what was leased."""

    held = Bundle("held")

    @initialize(cells=st.integers(1, 300), slots=st.integers(1, 6), shared=st.booleans())
    def start(self, cells: int, slots: int, shared: bool) -> None:
        self.cells, self.slots, self.shared = cells, slots, shared
        self.pool = CellPool(cells, slots, shared)
        self.model: dict[int, tuple[int, list[int]]] = {}

    def cost(self, prompt: int, outputs: list[int]) -> int:
        return prompt + sum(outputs) if self.shared else self.cells * len(outputs)

    @rule(target=held, prompt=st.integers(0, 200), outputs=st.lists(st.integers(0, 120), min_size=1, max_size=7))
    def lease(self, prompt: int, outputs: list[int]) -> Any:
        total = self.cells if self.shared else self.cells * self.slots
        used = sum(self.cost(*each) for each in self.model.values())
        slots_used = sum(len(each[1]) for each in self.model.values())
        in_one = prompt + sum(outputs) if self.shared else prompt + max(outputs)
        possible = (
            in_one <= self.cells
            and used + self.cost(prompt, outputs) <= total
            and slots_used + len(outputs) <= self.slots
        )
        assert self.pool.fits_now(prompt, outputs) == possible
        answer = self.pool.lease("req", prompt, outputs)
        assert isinstance(answer, CellLease) == possible
        if isinstance(answer, CellShortfall):
            assert answer.ever == (in_one <= self.cells and len(outputs) <= self.slots)
            return None
        self.model[answer.number] = (prompt, outputs)
        return answer

    @rule(lease=consumes(held), again=st.booleans())
    def release(self, lease: CellLease | None, again: bool) -> None:
        if lease is not None:
            self.pool.release(lease)
            del self.model[lease.number]
            if again:
                with pytest.raises(OurBug):
                    self.pool.release(lease)

    @invariant()
    def never_over_capacity(self) -> None:
        if hasattr(self, "pool"):
            assert 0 <= self.pool.free_cells == self.pool.total_cells - sum(self.cost(*e) for e in self.model.values())
            assert 0 <= self.pool.free_slots == self.slots - sum(len(e[1]) for e in self.model.values())

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for lease in self.pool.leases:
                self.pool.release(lease)
            assert (self.pool.free_cells, self.pool.free_slots) == (self.pool.total_cells, self.slots)


class LaneMachine(RuleBasedStateMachine):
    """A lane against two lists and a set."""

    names = st.integers(0, 12).map(lambda n: f"req_{n}")

    @initialize(queue_limit=st.integers(0, 5), concurrency=st.integers(1, 3), handover=st.none() | st.integers(0, 3))
    def start(self, queue_limit: int, concurrency: int, handover: int | None) -> None:
        self.lane = Lane("cpu", queue_limit, concurrency, handover)
        self.now = 0.0
        self.moved: list[tuple[str, float, float]] = []  # name, deadline, and when it would have come with priority 0
        self.line: list[tuple[str, float, float]] = []
        self.runs: set[str] = set()

    def known(self) -> set[str]:
        return {name for name, *_ in self.moved + self.line} | self.runs

    @rule(name=names, wait=st.integers(0, 6), handed_over=st.booleans(), priority=st.just(0) | st.integers(-3, 3))
    def enter(self, name: str, wait: int, handed_over: bool, priority: int) -> None:
        if name in self.known():
            with pytest.raises(OurBug):
                self.lane.enter(name, self.now, None, handed_over=handed_over)
            return
        where = self.moved if handed_over else self.line
        limit = self.lane.handover_limit if handed_over else self.lane.queue_limit
        ahead = self.lane.ahead_of(priority, self.now)
        answer = self.lane.enter(name, self.now, self.now + wait, handed_over=handed_over, priority=priority)
        if limit is not None and len(where) >= limit:
            assert isinstance(answer, Full)
        else:
            where.append((name, self.now + wait, self.now - 2 * priority))
            where.sort(key=lambda each: each[2])  # stable: equals stay as they came
            assert not isinstance(answer, Full)
            assert answer.position == self.lane.position(name)
            assert handed_over or answer.position == ahead + 1

    @rule(name=names)
    def leave(self, name: str) -> None:
        assert self.lane.leave(name) == (name in self.known())
        self.moved = [each for each in self.moved if each[0] != name]
        self.line = [each for each in self.line if each[0] != name]
        self.runs.discard(name)

    @rule(passed=st.integers(0, 3), fitting=st.sets(names) | st.just({f"req_{n}" for n in range(13)}))
    def start_next(self, passed: int, fitting: set[str]) -> None:
        self.now += passed
        expired = {name for name, deadline, _ in self.moved + self.line if deadline <= self.now}
        self.moved = [each for each in self.moved if each[0] not in expired]
        self.line = [each for each in self.line if each[0] not in expired]
        expected = []
        waiting = self.moved + self.line
        while waiting and len(self.runs) < self.lane.concurrency and waiting[0][0] in fitting:
            name = waiting.pop(0)[0]
            expected.append(name)
            self.runs.add(name)
            self.moved = [each for each in self.moved if each[0] != name]
            self.line = [each for each in self.line if each[0] != name]
        starts = self.lane.start_next(self.now, fitting.__contains__)
        assert list(starts.start) == expected
        assert set(starts.expired) == expired

    @invariant()
    def bounds_hold_and_nobody_is_twice_in_it(self) -> None:
        if hasattr(self, "lane"):
            lane = self.lane
            assert lane.running <= lane.concurrency
            assert set(lane.running_holders) == self.runs
            assert list(lane.waiting_holders) == [name for name, *_ in self.moved + self.line]
            assert not set(lane.waiting_holders) & set(lane.running_holders)
            assert len(self.line) <= lane.queue_limit
            assert [lane.position(name) for name in lane.waiting_holders] == list(range(1, lane.queued + 1))


class BreakerMachine(RuleBasedStateMachine):
    """A breaker in the hands of a shell that sends whatever it may, with answers that come late or never."""

    permits = Bundle("permits")

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker("gpu0")
        self.now = 0.0
        self.latest: Permit | None = None  # outstanding and not overtaken
        self.good = 0

    def after_transitions(self, transitions: tuple[Any, ...]) -> None:
        for change in transitions:
            assert change.from_ is not change.to
            self.good = 0
            if change.to is BreakerState.OPEN or change.to is BreakerState.CLOSED:
                self.latest = None

    @rule(passed=st.sampled_from([0, 1, 5, 10, 29, 30, 300]))
    def time_passes(self, passed: int) -> None:
        self.now += passed

    @rule(kind=st.sampled_from(FaultKind), source=st.sampled_from(["chat/gpu", "speech/gpu"]))
    def fault(self, kind: FaultKind, source: str) -> None:
        was = self.breaker.state
        self.after_transitions(self.breaker.fault(kind, self.now, source))
        if DEVICE_THRESHOLDS[kind].count == 1 or was is not BreakerState.CLOSED:
            assert self.breaker.state is BreakerState.OPEN

    @rule(target=permits)
    def ask_for_a_probe(self) -> Any:
        due = self.breaker.next_probe_s(self.now)
        was = self.breaker.state
        permit, transitions = self.breaker.permit_probe(self.now)
        self.after_transitions(transitions)
        if self.breaker.hold is not None or (was is BreakerState.OPEN and due != 0.0):
            assert permit is None
        if permit is not None:
            assert self.latest is None or permit.number > self.latest.number
            self.latest = permit
        return permit

    @rule(permit=permits, ok=st.booleans())
    def answer(self, permit: Permit | None, ok: bool) -> None:
        if permit is None:
            return
        was, overtaken = self.breaker.state, self.breaker.overtaken_probes
        counts = permit == self.latest
        transitions = self.breaker.report_probe(permit, ok, self.now)
        if not counts:
            assert transitions == ()
            assert self.breaker.overtaken_probes == overtaken + 1
            assert self.breaker.state is was
            return
        self.latest = None
        if was is BreakerState.HALF_OPEN:
            good = self.good + 1 if ok else 0
            assert (self.breaker.state is BreakerState.CLOSED) == (good == 2)
            assert (self.breaker.state is BreakerState.OPEN) == (not ok)
            self.after_transitions(transitions)
            self.good = 0 if transitions else good
        else:
            self.after_transitions(transitions)

    @rule(what=st.sampled_from(["force_open", "drain", "force_close"]))
    def operator(self, what: str) -> None:
        was = self.breaker.state
        transitions = getattr(self.breaker, what)(self.now)
        self.after_transitions(transitions)
        if was is BreakerState.OPEN and what != "force_close":
            self.latest = None
        assert self.breaker.allow_work(self.now) == (what == "force_close")

    @rule()
    def restart(self) -> None:
        again = Breaker("gpu0")
        again.restore(self.breaker.export())
        again.overtaken_probes = self.breaker.overtaken_probes
        assert again.allow_work(self.now) == self.breaker.allow_work(self.now)
        assert again.hold is self.breaker.hold
        self.breaker, self.latest, self.good = again, None, 0

    @invariant()
    def work_goes_only_while_closed_and_nothing_is_open_for_ever(self) -> None:
        closed = self.breaker.state is BreakerState.CLOSED
        assert self.breaker.allow_work(self.now) == closed
        due = self.breaker.next_probe_s(self.now)
        if closed or self.breaker.hold is not None:
            assert due is None
        else:
            assert due is not None
            assert due <= 300.0


class RequestMachine(RuleBasedStateMachine):
    """One request, two routes that come and go, a gateway that is killed: one end, and nothing seen is done twice."""

    def __init__(self) -> None:
        super().__init__()
        self.state = RequestState.ACCEPTED
        self.ends: list[RequestState] = []
        self.route: str | None = None
        self.delivered = False
        self.attempts = 0
        self.open = {"gpu": True, "cpu": True}

    def go(self, state: RequestState) -> None:
        self.state = advance(self.state, state)
        if state in TERMINAL:
            self.ends.append(state)

    @rule(route=st.sampled_from(["gpu", "cpu"]), is_open=st.booleans())
    def a_route_comes_or_goes(self, route: str, is_open: bool) -> None:
        self.open[route] = is_open

    @precondition(lambda self: self.state is RequestState.ACCEPTED)
    @rule()
    def enter_a_lane(self) -> None:
        self.go(RequestState.QUEUED)

    @precondition(lambda self: self.state is RequestState.QUEUED)
    @rule(route=st.sampled_from(["gpu", "cpu"]))
    def start(self, route: str) -> None:
        if self.open[route]:
            self.go(RequestState.RUNNING)
            self.route = route
            self.attempts += 1

    @precondition(lambda self: self.state is RequestState.RUNNING)
    @rule()
    def deliver(self) -> None:
        self.delivered = True

    @precondition(lambda self: self.state is RequestState.RUNNING)
    @rule(
        wish=st.sampled_from(Wish),
        certified=st.sampled_from(Grade),
        policy=st.sampled_from(Policy),
        returns=st.booleans(),
        alone_kills=st.integers(0, 2),
        inside=st.booleans(),
    )
    def the_route_is_lost(
        self, wish: Wish, certified: Grade, policy: Policy, returns: bool, alone_kills: int, inside: bool
    ) -> None:
        assert self.route is not None
        lost, other = self.route, "cpu" if self.route == "gpu" else "gpu"
        self.open[lost] = False
        decision = on_route_lost(
            LostAttempt(
                route=lost, delivered=self.delivered, wish=wish, policy=policy, attempts=self.attempts,
                alone_kills=alone_kills, inside_tool_call=inside,
            ),
            Way(other, open=self.open[other]), Way(lost, open=False, returns=returns), certified=certified,
        )  # fmt: skip
        self.route = None
        if isinstance(decision, Restart):
            assert not self.delivered
            assert decision.waits_for_route == (not self.open[decision.route])
            self.go(RequestState.QUEUED)
        elif isinstance(decision, Continue):
            assert self.delivered
            assert wish is not Wish.BOUNDARY
            assert decision.grade is Grade.EXACT or not inside
            self.go(RequestState.QUEUED)
        elif isinstance(decision, BecomeResumable):
            self.go(RequestState.RESUMABLE)
        else:
            assert isinstance(decision, Fail)
            assert alone_kills >= 2 or self.attempts >= 8
            self.go(RequestState.FAILED)
        if policy is Policy.AUTO and self.open[other] and not self.delivered and alone_kills < 2 and self.attempts < 8:
            # A failure by our own fault while a fitting route was open would count as lost.
            assert isinstance(decision, Restart)
            assert decision.route == other

    @rule()
    def the_gateway_is_killed(self) -> None:
        before = self.state
        decision = on_gateway_restart(self.state, self.delivered)
        self.route = None
        if isinstance(decision, Requeue):
            assert not self.delivered
            if before is not RequestState.QUEUED:
                self.go(RequestState.QUEUED)
        elif isinstance(decision, BecomeResumable):
            assert self.delivered
            self.go(RequestState.RESUMABLE)
        else:
            assert before in TERMINAL or before is RequestState.RESUMABLE

    @precondition(lambda self: self.state is RequestState.RUNNING)
    @rule()
    def complete(self) -> None:
        self.go(RequestState.COMPLETED)

    @precondition(lambda self: self.state is RequestState.RESUMABLE)
    @rule()
    def resume(self) -> None:
        self.go(RequestState.QUEUED)

    @rule(state=st.sampled_from(RequestState))
    def any_move_not_in_the_table_is_refused(self, state: RequestState) -> None:
        if state not in TRANSITIONS[self.state]:
            with pytest.raises(IllegalTransition):
                advance(self.state, state)

    @rule()
    def cancel(self) -> None:
        if self.state not in TERMINAL:
            self.go(RequestState.CANCELLED)

    @invariant()
    def it_ends_once(self) -> None:
        assert len(self.ends) == (self.state in TERMINAL)

    def teardown(self) -> None:
        # With the faults off it always comes to an end.
        self.open = {"gpu": True, "cpu": True}
        for following in (RequestState.QUEUED, RequestState.RUNNING, RequestState.COMPLETED):
            if following in TRANSITIONS[self.state]:
                self.go(following)
        assert self.state in TERMINAL
        assert len(self.ends) == 1


class AdmissionMachine(RuleBasedStateMachine):
    """Any request before any house: what is admitted really fits, and what is refused had nowhere to go."""

    views = st.builds(
        RouteView,
        route=st.just("gpu"),
        device=st.just("d"),
        state=st.sampled_from([*RouteState, RouteState.SERVING, RouteState.SERVING]),
        cells=st.integers(1, 60),
        slots=st.integers(1, 4),
        shared=st.booleans(),
        cells_free=st.integers(0, 60),
        slots_free=st.integers(0, 4),
        queued=st.integers(0, 3),
        running=st.integers(0, 2),
        queue_limit=st.integers(0, 3),
        concurrency=st.integers(1, 2),
        breaker_open=st.booleans(),
        reopens_in_s=st.none() | st.floats(0, 100),
        max_context_tokens=st.none() | st.integers(1, 60),
        max_output_tokens=st.none() | st.integers(1, 60),
        rates=st.none()
        | st.builds(
            Rates, st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.none() | st.floats(1, 1e6), st.none() | st.floats(1, 50)
        ),
        load_eta_ms=st.none() | st.floats(0, 1e5),
    )
    asks = st.builds(
        Weighed,
        prompt_tokens=st.integers(0, 50),
        outputs=st.lists(st.integers(1, 30), min_size=1, max_size=5).map(tuple),
        output_is_default=st.booleans(),
        policy=st.sampled_from(Policy),
        deadline_s=st.none() | st.floats(0.01, 100),
    )

    @rule(gpu=views, cpu=views, weighed=asks, both=st.booleans())
    def decide(self, gpu: RouteView, cpu: RouteView, weighed: Weighed, both: bool) -> None:
        cpu = msgspec.structs.replace(cpu, route="cpu")
        routes = [gpu, cpu] if both else [cpu]
        verdict = decide(weighed, routes)
        assert decide(weighed, routes) == verdict or not isinstance(verdict, Admit | Delay | Redirect)
        if isinstance(verdict, Admit | Delay | Redirect):
            self.check_placed(weighed, {view.route: view for view in routes}, verdict)
        else:
            assert verdict.error.message.endswith(".")

    def check_placed(self, weighed: Weighed, routes: dict[str, RouteView], verdict: Admit | Delay | Redirect) -> None:
        view = routes[verdict.route]
        assert weighed.policy is Policy.AUTO or (view.route == "cpu") == (weighed.policy is Policy.CPU_ONLY)
        assert not view.breaker_open
        assert view.state in (RouteState.SERVING, RouteState.STARTING)
        pool = CellPool(view.cells, view.slots, view.shared)
        assert isinstance(pool.lease("req", weighed.prompt_tokens, verdict.outputs), CellLease)
        assert all(1 <= given <= asked for given, asked in zip(verdict.outputs, weighed.outputs, strict=True))
        assert weighed.output_is_default or verdict.outputs == weighed.outputs
        if verdict.position == 0:
            assert view.queued == 0
            assert view.running < view.concurrency
            assert pool.need_cells(weighed.prompt_tokens, verdict.outputs) <= view.cells_free
        else:
            assert verdict.position == view.queued + 1 <= view.queue_limit


MACHINES = [LedgerMachine, CellMachine, LaneMachine, BreakerMachine, RequestMachine, AdmissionMachine]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_promises_hold_in_any_order_of_events(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=quick(machine))


@pytest.mark.parametrize("seed", range(8))
def test_the_ledger_keeps_its_promises_on_long_walks(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(10):
        LedgerMachine().walk(dice, 100)


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_the_ledger_keeps_its_promises_on_very_many_long_walks() -> None:
    first = random.randrange(1 << 40)
    for seed in range(first, first + 4000):
        try:
            LedgerMachine().walk(random.Random(seed), 120)
        except AssertionError as e:
            raise AssertionError(f"the walk with the seed {seed}") from e


@pytest.mark.proof
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_promises_hold_in_very_many_orders_of_events(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=THOROUGH)
