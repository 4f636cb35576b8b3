"""Leases of running requests: what the worker is told, who is marked as parked, who is asked to give way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relevo.config import LaneConfig
from relevo.core.events import Ask, Extend, Piece, Prefilled, Sampling
from relevo.core.forecast import START_OUTPUT_TOKENS, Forecast
from relevo.core.request import RequestState
from relevo.service.growth import Growth, expected_output
from relevo.service.metrics import Metrics
from relevo.service.routes import Placement, Route
from relevo.service.status import cells_view
from relevo.service.work import Work


@dataclass
class Worker:
    """Remembers what it was told."""

    extended: list[Extend] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def extend(self, frame: Extend) -> None:
        self.extended.append(frame)

    def cancel(self, request_id: str, attempt: int) -> None:
        self.cancelled.append(request_id)


class Street:
    """A route whose answers are expected to be short, and requests that run on it."""

    def __init__(self, cells: int = 300, expected: int = 20, shared: bool = True) -> None:
        forecast = Forecast()
        for _ in range(40):
            forecast.outputs.add(expected)
        held = Placement("gpu0", emulated=True)
        self.route = Route("gpu", "m", held=held, lane=LaneConfig(), pool=(cells, 4, shared), forecast=forecast)
        self.worker = Worker()
        self.route.replica = self.worker  # type: ignore[assignment]
        self.metrics = Metrics()
        self.growth = Growth(self.metrics, wall=lambda: 1000.0)
        self.count = 0

    def work(self, prompt: int = 40, limit: int = 200, n: int = 1, **asked: Any) -> Work:
        self.count += 1
        ask = Ask(owner="local", model="m", kind="chat", n=n, **asked)
        work = Work(
            f"req_{self.count}",
            ask,
            created=float(self.count),
            prompt_tokens=[1] * prompt,
            sampling=Sampling(),
            outputs=[limit] * n,
        )
        work.state = RequestState.RUNNING
        work.attempt = 1
        return work

    def run(self, **asked: Any) -> Work:
        work = self.work(**asked)
        assert self.growth.lease(self.route, work)
        self.route.running[work.request_id] = work
        self.growth.read(self.route, work, Prefilled(work.request_id, 1, 40, 40))
        return work

    def draw(self, work: Work, tokens: int, choice: int = 0, finish: str | None = None) -> None:
        """So many tokens, one after the other, as far as it holds cells."""
        for _ in range(tokens):
            position = len(work.choices[choice].tokens) + 1
            answer = work.cells.answer(choice) if work.cells is not None else None
            assert answer is not None and position <= answer.held
            piece = Piece(work.request_id, 1, choice, position, [7], "x", finish)
            work.add_piece(piece)
            work.first_output_at = 1.0
            self.growth.follow(self.route, work, piece)

    def draw_all(self, work: Work, choice: int = 0) -> None:
        """Until it holds no more."""
        while work.cells is not None and (answer := work.cells.answer(choice)):
            if len(work.choices[choice].tokens) >= answer.held:
                return
            self.draw(work, 1, choice)

    def end(self, work: Work) -> None:
        del self.route.running[work.request_id]
        self.growth.let_go(self.route, work)
        if self.route.parked:
            self.growth.share_out(self.route)

    def counted(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"{name}_total", {"model": "m", "route": "gpu"}) or 0.0


def set_aside(work: Work) -> int:
    assert work.cells is not None
    return work.cells.answers[0].set_aside


def test_without_a_named_limit_what_was_learned_is_set_aside() -> None:
    street = Street()
    assert set_aside(street.run()) == 20
    assert set_aside(street.run(limit=8)) == 8


def test_a_named_limit_is_set_aside_whole_and_so_is_that_of_an_answer_without_an_end() -> None:
    street = Street(cells=2000)
    assert set_aside(street.run(max_output_tokens=200)) == 200
    assert set_aside(street.run(ignore_eos=True)) == 200
    lengths = Forecast().outputs
    assert expected_output(lengths, Ask("local", "m", "chat"), 5000) == START_OUTPUT_TOKENS


def test_the_worker_is_told_how_far_it_may_go_and_is_extended_before_it_comes_there() -> None:
    street = Street()
    work = street.run()
    [start] = work.starts()
    assert (start.held_tokens, start.max_output_tokens) == (16, 200)
    street.draw(work, 7)
    assert not street.worker.extended
    street.draw(work, 1)
    assert street.worker.extended == [Extend("req_1", 1, 0, 24)]
    street.draw(work, 192)
    assert street.worker.extended[-1].held_tokens == 200
    assert street.counted("relevo_cell_extensions") == len(street.worker.extended)


def test_a_strict_slot_may_be_filled_from_the_start() -> None:
    street = Street(shared=False)
    [start] = street.run().starts()
    assert start.held_tokens is None


def test_whoever_finds_no_cell_is_parked_with_a_reason_and_goes_on_when_another_ends() -> None:
    street = Street(cells=300)
    named = street.run(max_output_tokens=100, limit=100)
    grows = street.run()
    street.draw_all(grows)
    assert len(grows.choices[0].tokens) == 300 - 140 - 40
    assert grows.parked is not None and grows.parked.choices == (0,)
    assert "All 300 cells of the gpu route are taken" in grows.parked.reason
    seen = cells_view(street.route)
    assert (seen["parked"], seen["parked_reason"], seen["cells_free"]) == (1, grows.parked.reason, 0)
    street.draw(named, 100)
    assert named.parked is None, "what it named was set aside for it"
    street.end(named)
    assert grows.parked is None
    street.draw_all(grows)
    assert len(grows.choices[0].tokens) == 200
    assert (street.counted("relevo_cell_parks"), street.counted("relevo_cell_give_ways")) == (1, 0)


def test_nothing_starts_while_somebody_is_parked() -> None:
    street = Street(cells=300)
    street.run(max_output_tokens=100, limit=100)
    grows = street.run()
    street.draw_all(grows)
    assert not street.growth.lease(street.route, street.work(prompt=1, limit=1))


def test_an_answer_that_ends_makes_room_for_a_parked_one_of_another_request() -> None:
    street = Street(cells=230)
    pair = street.run(n=2, limit=60, max_output_tokens=60)
    grows = street.run(limit=150)
    street.draw_all(grows)
    assert grows.parked is not None
    street.draw(pair, 1, choice=1, finish="stop")
    assert grows.parked is None


def test_where_all_are_parked_the_newest_is_asked_to_give_way_once() -> None:
    street = Street(cells=200)
    works = [street.run(limit=150), street.run(limit=150)]
    for _ in range(200):
        for work in works:
            answer = work.cells.answer(0) if work.cells is not None else None
            if answer is not None and len(work.choices[0].tokens) < answer.held:
                street.draw(work, 1)
    assert street.worker.cancelled == ["req_2"]
    assert works[1].gives_way is not None and "gave way to older ones" in works[1].gives_way
    street.growth.share_out(street.route)
    assert street.worker.cancelled == ["req_2"], "its cells are on their way"
    street.end(works[1])
    assert works[1].gives_way is None and works[0].parked is None
    assert street.counted("relevo_cell_give_ways") == 1


def test_where_all_are_parked_the_lowest_priority_gives_way_before_the_newest() -> None:
    street = Street(cells=240)
    works = [street.run(limit=150, priority=priority) for priority in (0, -1, 5)]
    for _ in range(200):
        for work in works:
            answer = work.cells.answer(0) if work.cells is not None else None
            if answer is not None and len(work.choices[0].tokens) < answer.held:
                street.draw(work, 1)
    assert street.worker.cancelled == ["req_2"]


def test_nobody_gives_way_while_a_cancelled_request_is_ending() -> None:
    street = Street(cells=200)
    first, second = street.run(limit=150), street.run(limit=150)
    second.cancel_requested = True
    street.draw_all(first)
    assert first.parked is not None and not street.worker.cancelled


def test_one_that_gave_way_starts_again_with_everything_set_aside() -> None:
    street = Street(cells=300)
    work = street.work()
    work.gave_way = 1
    assert street.growth.lease(street.route, work)
    assert set_aside(work) == 200


def test_an_answer_that_goes_on_holds_more_than_it_has() -> None:
    street = Street()
    work = street.work()
    work.choices[0].tokens = [7] * 30
    assert street.growth.lease(street.route, work)
    [start] = work.starts()
    assert (len(start.output_tokens), start.held_tokens) == (30, 46)


def test_live_cells_are_those_that_hold_a_token() -> None:
    street = Street()
    work = street.work()
    assert street.growth.lease(street.route, work)
    street.route.running[work.request_id] = work
    street.growth.read(street.route, work, Prefilled(work.request_id, 1, 16, 40))
    seen = cells_view(street.route)
    assert (seen["cells_live"], seen["cells_leased"], seen["cells_set_aside"]) == (16, 16, 44)
    street.growth.read(street.route, work, Prefilled(work.request_id, 1, 40, 40))
    street.draw(work, 5)
    seen = cells_view(street.route)
    assert (seen["cells_live"], seen["cells_leased"], seen["cells_free"]) == (44, 56, 240)
    assert seen["cells_reserved_unused"] == 16
