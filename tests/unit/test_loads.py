"""Who may load when, and who gives way: the service's rules over real ledgers, with workers that are only played."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relevo.config import LaneConfig, ModelConfig
from relevo.core.breaker import Breaker, BreakerSettings, BreakerState, FaultKind
from relevo.core.events import ProbeAnswer, StartModel
from relevo.core.forecast import Forecast
from relevo.core.leases.lease import Lease
from relevo.core.leases.ledger import Ledger
from relevo.core.leases.reading import Reading
from relevo.core.loads.standby import Readiness
from relevo.core.loads.verdict import Step
from relevo.core.memory.demand import Demand
from relevo.models.header_cache import FileIdentity
from relevo.replicas.dry_run import DryRuns
from relevo.replicas.state import ReplicaState
from relevo.service.berths import Berth, HeldDevice, Life, Posture
from relevo.service.fleet import Fleet
from relevo.service.loads import Loads
from relevo.service.routes import Placement, Route
from relevo.service.watch import Watch

MIB = 2**20
TOTAL = 1000 * MIB


@dataclass
class PlayedWorker:
    """What Loads and Watch ask of a replica."""

    name: str
    model: str
    route: str
    state: ReplicaState = ReplicaState.WAITING
    ready: Any = None
    last_death: Any = None
    killed: list[str] = field(default_factory=list)
    resumed: int = 0

    def kill(self, reason: str, kind: FaultKind | None) -> None:
        assert kind is None, "nobody is to blame for giving way"
        self.killed.append(reason)

    def resume(self) -> None:
        self.resumed += 1


class FixedScales:
    """Weighs every start by its context: 1 MiB for 10 tokens."""

    def __init__(self) -> None:
        self.shape = SimpleNamespace(layer_count=10, layers=(), context_trained_tokens=None)
        self.unknown: list[StartModel] = []
        self.asked = 0

    def weigh(self, start: StartModel) -> tuple[Demand, Demand]:
        self.asked += 1
        on_device = start.route != "cpu"
        mine = Demand(kv_bytes=start.context_tokens * MIB // 10)
        return (mine, Demand()) if on_device else (Demand(), mine)

    def learned(self, start: StartModel) -> None:
        del start


class PlayedHouse:
    """One device of 1,000 MiB without headroom, and as many models as a test asks for."""

    def __init__(self) -> None:
        self.device = self.hold("gpu0")
        self.host = self.hold("host")
        self.loads = Loads(cast(DryRuns, None), lambda: None)
        self.led_on: list[str] = []
        dispatcher: Any = SimpleNamespace(
            reconsider_waiting=lambda route: self.led_on.append(route.replica.name), pump=lambda _: None
        )
        fleet: Any = SimpleNamespace(loads=self.loads, berths=self.loads.berths, devices={"gpu0": self.device})
        self.watch = Watch(fleet, dispatcher, cast(Any, None), lambda: None)

    @staticmethod
    def hold(name: str) -> HeldDevice:
        ledger = Ledger(name, headroom_bytes=0, lag_s=0.0, external_half_life_s=1e-6)
        ledger.observe(Reading(TOTAL, TOTAL, read_at=time.monotonic()))
        return HeldDevice(name, cast(Any, SimpleNamespace(emulated=True)), ledger, Breaker(name), yield_s=10.0)

    def add(self, name: str, mib: int, *, route: str = "gpu", held: HeldDevice | None = None, **config: Any) -> Berth:
        held = held or self.device
        served: Any = SimpleNamespace(name=name, config=ModelConfig(path="m.gguf", reduce=(), **config), routes={})
        start = StartModel(
            model=name, route=route, path="m.gguf", libraries="", context_tokens=mib * 10, slots=1, use_mmap=False
        )
        made = Route(
            route, name, held=Placement(held.name, True), lane=LaneConfig(), pool=(mib, 1, True), forecast=Forecast()
        )
        made.replica = cast(Any, PlayedWorker(f"{name}/{route}", name, route))
        served.routes[route] = made
        berth = Berth(made, served, held, self.host, start, cast(Any, FixedScales()))
        self.loads.berths[made.replica.name] = berth
        return berth

    def lease(self, berth: Berth, within_s: float = 0.2) -> Life | None:
        """Ask as its replica would, and be stopped if it takes too long."""

        async def ask() -> Life | None:
            try:
                return await asyncio.wait_for(self.loads.lease(berth, 1), within_s)
            except TimeoutError:
                return None

        berth.life = asyncio.run(ask())
        return berth.life

    def serve(self, berth: Berth, idle_s: float = 100.0) -> Life:
        """Load it, and let it serve since a while."""
        life = self.lease(berth)
        assert life is not None, berth.route.waiting_reason
        for held, lease in life.leases:
            held.ledger.settle(lease, lease.bytes_)
        self.read(sum(lease.bytes_ for lease in self.device.ledger.leases))
        berth.route.replica.ready = cast(Any, SimpleNamespace(pid=1))  # type: ignore[misc]
        worker(berth).state = ReplicaState.SERVING
        berth.first.set()
        berth.last_used = time.monotonic() - idle_s
        return life

    def end(self, berth: Berth) -> None:
        """Its process is gone, and the device does not show it yet."""
        life, berth.life = berth.life, None
        assert life is not None
        worker(berth).state, worker(berth).ready = ReplicaState.WAITING, None
        for held, lease in life.leases:
            held.ledger.drain(lease)
            held.ledger.release(lease, time.monotonic())

    def read(self, used_bytes: int) -> None:
        self.device.ledger.observe(Reading(TOTAL, TOTAL - used_bytes, read_at=time.monotonic()))


def worker(berth: Berth) -> PlayedWorker:
    return cast(PlayedWorker, berth.route.replica)


def want(berth: Berth) -> None:
    berth.wanted_at = time.monotonic()


def leases(house: PlayedHouse) -> list[Lease]:
    return list(house.device.ledger.leases)


# -- the ladder's answer, and what is done with it


def test_who_stops_waiting_holds_nothing() -> None:
    house = PlayedHouse()
    house.serve(house.add("first", 600))
    second = house.add("second", 600)
    assert house.lease(second) is None
    assert [lease.holder for lease in leases(house)] == ["first/gpu"]
    assert "600 MiB" in (second.route.waiting_reason or "")


def test_memory_that_is_coming_back_is_waited_for_rather_than_doing_with_less() -> None:
    house = PlayedHouse()
    first = house.add("first", 600)
    house.serve(first)
    house.end(first)  # it crashed, and starts again before its memory is seen to be back
    assert house.lease(first) is None
    assert first.verdict is not None and first.verdict.step is Step.DELAY
    assert not Loads._needs_part(first), "no part of it is loaded because the whole worker fell"
    house.read(0)
    assert house.lease(first) is not None


def test_a_refusal_is_not_asked_for_again_while_nothing_changes() -> None:
    house = PlayedHouse()
    house.serve(house.add("first", 600))
    second = house.add("second", 600)
    house.lease(second)
    asked = cast(FixedScales, second.scales).asked
    house.lease(second)
    house.read(600 * MIB + 2 * MIB)  # somebody's window moved
    house.lease(second)
    assert cast(FixedScales, second.scales).asked == asked
    house.read(640 * MIB)
    house.lease(second)
    assert cast(FixedScales, second.scales).asked > asked


def test_a_load_that_another_one_came_between_is_not_taken_for_refused() -> None:
    house = PlayedHouse()
    first, second = house.add("first", 300), house.add("second", 300)

    async def both() -> None:
        verdict = await house.loads.weigh_up(first)
        second.life = Life(1, verdict, [])  # it got there while the first was being weighed
        assert not isinstance(house.loads._take(first, verdict, 1), Life)
        second.life = None

    asyncio.run(both())
    assert first.refusal is None
    assert house.lease(first) is not None


def test_the_reason_that_is_shown_is_the_one_that_still_holds() -> None:
    house = PlayedHouse()
    house.serve(house.add("first", 600))
    second = house.add("second", 600)
    house.lease(second)
    refused = second.route.waiting_reason
    house.loads.hold_back(second, "The breaker of gpu0 is open: it was lost.")
    house.lease(second)
    assert second.route.waiting_reason == refused


def test_other_figures_in_the_same_reason_are_no_news_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    house = PlayedHouse()
    second = house.add("second", 600)
    with caplog.at_level("WARNING", "relevo.loads"):
        for mib in (600, 599.5, 580):
            house.loads.hold_back(second, f"second needs 700 MiB, and {mib} MiB is available.")
        house.loads.hold_back(second, "The breaker of gpu0 is open.")
    assert len(caplog.records) == 2
    assert second.route.waiting_reason == "The breaker of gpu0 is open."


# -- who gives way


def test_what_somebody_was_ended_for_is_not_taken_by_whoever_looks_first() -> None:
    house = PlayedHouse()
    first, second = house.add("first", 600), house.add("second", 600)
    house.serve(first)
    want(second)
    assert house.lease(second) is None
    assert worker(first).killed and first.posture is Posture.EVICTED
    house.end(first)
    house.read(0)
    assert house.lease(first) is None, "it gave its memory to another"
    assert "for second/gpu" in (first.route.waiting_reason or "")
    assert house.lease(second) is not None
    assert second.room_until is None


def test_what_was_promised_and_is_not_taken_is_free_again() -> None:
    house = PlayedHouse()
    first, second = house.add("first", 600), house.add("second", 600)
    second.room_until = time.monotonic() - 0.1
    assert house.lease(first) is not None


def test_a_replica_that_got_work_while_it_was_weighed_up_is_not_ended() -> None:
    house = PlayedHouse()
    first, second = house.add("first", 600), house.add("second", 600)
    house.serve(first)
    want(second)
    verdict = asyncio.run(house.loads.weigh_up(second))
    assert verdict.step is Step.EVICT
    first.route.running["r"] = cast(Any, None)
    assert not house.loads._make_room(second, verdict)
    assert not worker(first).killed and first.posture is Posture.WANTED


@pytest.mark.parametrize(("idle_s", "load_s", "gives_way"), [(6.0, 1.0, True), (6.0, 20.0, False), (21.0, 20.0, True)])
def test_a_replica_is_idle_when_it_was_idle_for_longer_than_it_takes_to_load(
    idle_s: float, load_s: float, gives_way: bool
) -> None:
    house = PlayedHouse()
    first, second = house.add("first", 600), house.add("second", 600)
    house.serve(first, idle_s)
    first.load_s = load_s
    want(second)
    house.lease(second)
    assert bool(worker(first).killed) is gives_way


def test_a_request_that_nobody_saw_running_counts_as_use() -> None:
    house = PlayedHouse()
    first, second = house.add("first", 600), house.add("second", 600)
    house.serve(first)
    want(second)
    first.route.used_at = time.monotonic()  # it began and ended between two looks
    house.lease(second)
    assert not worker(first).killed


# -- another program wants memory


def press(house: PlayedHouse, free_mib: int) -> None:
    """A neighbour leaves so much of the headroom of 100 MiB."""
    house.device.ledger._headroom_bytes = 100 * MIB
    house.read(TOTAL - free_mib * MIB)
    house.watch._relieve(house.device)


def test_one_who_is_leaving_is_enough_where_it_frees_enough() -> None:
    house = PlayedHouse()
    first, second = house.add("first", 300), house.add("second", 300)
    for berth in (first, second):
        berth.twin = berth
        house.serve(berth)
        berth.route.running["r"] = cast(Any, None)
    press(house, 10)
    press(house, 10)
    assert sorted(b.posture for b in (first, second)) == [Posture.LEAVING, Posture.WANTED]


def test_one_who_died_while_leaving_does_not_keep_the_others_from_leaving() -> None:
    house = PlayedHouse()
    first, second = house.add("first", 300), house.add("second", 300)
    for berth in (first, second):
        berth.twin = berth
        house.serve(berth)
    first.posture, first.life = Posture.LEAVING, None
    press(house, 10)
    assert worker(second).killed


def test_what_ended_workers_give_back_is_not_taken_from_others_too() -> None:
    house = PlayedHouse()
    first, second = house.add("first", 300), house.add("second", 300)
    for berth in (first, second):
        berth.twin = berth
        house.serve(berth)
    house.end(first)
    press(house, 10)
    assert not worker(second).killed


def test_a_load_under_way_is_ended_when_another_program_takes_its_memory() -> None:
    house = PlayedHouse()
    first = house.add("first", 300)
    first.twin = first
    house.lease(first)
    worker(first).state = ReplicaState.STARTING
    press(house, 10)
    assert first.posture is Posture.EVICTED
    assert "still being loaded" in worker(first).killed[0]


def test_one_who_is_leaving_stays_when_the_memory_is_back() -> None:
    house = PlayedHouse()
    first = house.add("first", 300)
    first.twin = first
    house.serve(first)
    first.route.running["r"] = cast(Any, None)
    house.device.ledger._gauge._stay_s = 0.0
    press(house, 10)
    closed = first.route.closed_reason
    assert closed is not None and not first.route.serving
    press(house, 700)
    assert first.posture is Posture.WANTED and first.route.serving
    assert not worker(first).killed


# -- rest, parts, persons


def test_a_part_of_a_model_beside_the_whole_of_it_is_superfluous_when_it_is_idle() -> None:
    house = PlayedHouse()
    whole, part = house.add("m", 300), house.add("m", 200, route="hybrid")
    house.serve(part)  # as if it had been needed
    part.whole = whole
    assert not house.loads.superfluous(part)
    house.serve(whole)
    assert house.loads.superfluous(part)
    part.route.running["r"] = cast(Any, None)
    assert not house.loads.superfluous(part)


def test_what_a_twin_holds_already_need_not_be_free_once_more_to_keep_it_warm() -> None:
    house = PlayedHouse()
    twin = house.add("m", 600, route="cpu", held=house.host)
    cast(Any, twin.scales).weigh = lambda _: (Demand(kv_bytes=600 * MIB), Demand())
    life = house.lease(twin)
    assert life is not None
    house.host.ledger.settle(life.leases[0][1], 600 * MIB)
    house.host.ledger.observe(Reading(TOTAL, 400 * MIB, read_at=time.monotonic()))
    twin.load_s = 5.0
    assert house.watch.readiness(twin) is Readiness.WARM


def test_a_probe_by_a_person_asks_the_ladder_again_and_keeps_the_reason() -> None:
    house = PlayedHouse()
    house.serve(house.add("first", 600))
    second = house.add("second", 600)
    house.lease(second)
    played_fleet(house).try_again("gpu0")
    assert second.refusal is None and worker(second).resumed == 1
    assert second.route.waiting_reason is not None


def test_one_whose_time_is_over_is_not_asked_to_leave_once_more() -> None:
    house = PlayedHouse()
    first = house.add("first", 300)
    first.twin = first
    house.serve(first)
    first.route.running["r"] = cast(Any, None)
    press(house, 10)
    first.leaves_by = time.monotonic()
    press(house, 10)
    press(house, 10)
    assert first.posture is Posture.EVICTED and len(worker(first).killed) == 1


# -- whose fault it is


def played_fleet(house: PlayedHouse, tasks: asyncio.TaskGroup | None = None) -> Fleet:
    fleet = Fleet.__new__(Fleet)
    fleet.devices, fleet.berths, fleet._changed = {"gpu0": house.device}, house.loads.berths, lambda: None
    fleet._dispatcher = cast(Any, SimpleNamespace(pump=lambda _: None))
    fleet._journal = cast(Any, SimpleNamespace(submit=lambda _: asyncio.get_running_loop().create_future()))
    fleet._tasks = cast(Any, tasks)
    return fleet


@pytest.mark.parametrize("kind", [FaultKind.ALLOCATION, FaultKind.PROBE_FAILED])
def test_a_model_that_cannot_load_does_not_close_the_device_on_which_others_compute(kind: FaultKind) -> None:
    house = PlayedHouse()
    good, broken = house.add("good", 300), house.add("broken", 300)
    fleet = played_fleet(house)
    assert not fleet._is_its_own(broken, kind), "nobody else is there to speak for the device"
    house.serve(good)
    assert fleet._is_its_own(broken, kind)
    assert not fleet._is_its_own(broken, FaultKind.DEVICE_LOST)
    assert not fleet._is_its_own(good, kind)


def test_workers_that_live_on_when_a_breaker_opens_earn_its_trust_again() -> None:
    house = PlayedHouse()
    house.device.breaker = Breaker("gpu0", settings=BreakerSettings(first_open_s=0.0))
    first = house.add("first", 300)
    house.serve(first)
    first.known_answer = [1, 2]
    asked: list[int] = []

    async def probe(number: int) -> ProbeAnswer:
        asked.append(number)
        return ProbeAnswer(number=number, ok=True, tokens=[1, 2], took_ms=1.0)

    cast(Any, worker(first)).probe = probe
    cast(Any, worker(first)).incarnation = 1

    async def two_others_die() -> None:
        async with asyncio.TaskGroup() as tasks:
            fleet = played_fleet(house, tasks)
            for name in ("b/gpu", "c/gpu"):
                fleet._note(house.device.breaker.fault(FaultKind.UNCLASSIFIED_DEATH, time.monotonic(), source=name))
            assert house.device.breaker.state is not BreakerState.CLOSED

    asyncio.run(two_others_die())
    assert house.device.breaker.state is BreakerState.CLOSED and len(asked) == 2


# -- the file


def test_a_file_that_was_replaced_is_not_loaded_beside_what_was_read_of_the_old_one(tmp_path: Path) -> None:
    house = PlayedHouse()
    first = house.add("first", 300)
    path = tmp_path / "m.gguf"
    path.write_text("old")
    first.file = FileIdentity.of(path, path)
    path.rename(tmp_path / "aside")
    assert house.lease(first) is None
    assert "cannot be read" in (first.route.waiting_reason or "")
    path.write_text("new")
    assert house.lease(first) is None
    assert "restart Relevo" in (first.route.waiting_reason or "")
    (tmp_path / "aside").rename(path)
    assert house.lease(first) is not None


def test_a_twin_at_rest_that_cannot_wake_does_not_count_as_a_way_out() -> None:
    house = PlayedHouse()
    twin = house.add("m", 300, route="cpu", held=house.host)
    twin.posture = Posture.RESTING
    house.lease(twin)
    assert twin.rests
    house.loads.hold_back(twin, "The file of m cannot be read.")
    assert not twin.rests
    house.lease(twin)
    assert twin.rests, "it is tried again with the next request"


def test_what_waits_for_a_route_that_never_comes_is_led_to_the_one_that_came() -> None:
    house = PlayedHouse()
    whole = house.add("m", 600)
    twin = house.add("m", 300, route="cpu", held=house.host)
    whole.model.routes["cpu"] = twin.route
    whole.route.lane.enter("r", 0.0, None, "", handed_over=True)
    house.watch._lead_on(whole)
    assert not house.led_on, "nobody serves it"
    house.serve(twin)
    house.watch._lead_on(whole)
    house.watch._lead_on(twin)
    assert house.led_on == ["m/gpu"]


def test_at_the_start_the_dearer_model_is_loaded_first_and_then_those_configured_earlier() -> None:
    house = PlayedHouse()
    cheap, dear, later = house.add("cheap", 600), house.add("dear", 600, priority=5), house.add("later", 600)
    for berth in (cheap, dear, later):
        berth.twin = house.add(f"twin of {berth.model.name}", 1, route="cpu", held=house.host)
    assert house.lease(cheap) is None and cheap.route.waiting_reason == "It starts after dear/gpu."
    assert house.lease(later) is None and later.route.waiting_reason == "It starts after cheap/gpu."
    house.serve(dear)
    assert house.lease(later) is None and later.route.waiting_reason == "It starts after cheap/gpu."
    assert house.lease(cheap) is None and "It starts after" not in (cheap.route.waiting_reason or "")
    assert house.lease(later) is None and "It starts after" not in (later.route.waiting_reason or "")
