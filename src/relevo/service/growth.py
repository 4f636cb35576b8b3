"""Leases of cells while they run: taken at the start, extended ahead of need, parked, given back.

What is decided is in `core/cells.py` and `core/parking.py`; here it is done: the worker is told how far each answer may
go, the record says who is parked and why, and whoever has to give way is taken out of its worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from relevo.core import parking
from relevo.core.cells import Answer, CellLease
from relevo.core.events import Ask, Extend, Piece, Prefilled
from relevo.core.forecast import OutputLengths
from relevo.core.handover import Wish
from relevo.service.metrics import Metrics
from relevo.service.routes import Route
from relevo.service.work import Choice, Parked, Work

_log = logging.getLogger("relevo.growth")


def expected_output(lengths: OutputLengths, ask: Ask, limit: int, drawn: int = 0) -> int:
    """Output tokens that are set aside for an answer when it starts.

    A limit that the client named is set aside whole: what it asked for is never parked and never gives way. So is that
    of an answer which cannot end before its limit. Else what answers of this model were likely to need.
    """
    if ask.max_output_tokens is not None or ask.ignore_eos:
        return limit
    return lengths.expected(limit, drawn)


class Growth:
    """Changes the cells of running requests, and nothing else of them."""

    def __init__(self, metrics: Metrics, wall: Callable[[], float]) -> None:
        self._metrics = metrics
        self._wall = wall

    # ------------------------------------------------------- start and end

    def lease(self, route: Route, work: Work) -> bool:
        """Take the cells with which an attempt starts here; False where they are not free now.

        Nothing new starts while somebody is parked: cells that come free are his.
        """
        if route.parked:
            return False
        prompt_tokens = len(work.prompt_tokens)
        answers = [self._answer(route, work, choice) for choice in work.open_choices]
        lease = route.cells.lease_growing(work.request_id, prompt_tokens, answers)
        work.cells = lease if isinstance(lease, CellLease) else None
        return work.cells is not None

    @staticmethod
    def _answer(route: Route, work: Work, choice: Choice) -> Answer:
        """How an answer starts. For one that gave way everything is set aside: once is enough."""
        drawn, limit = len(choice.tokens), choice.max_output_tokens
        set_aside = limit if work.gave_way else expected_output(route.forecast.outputs, work.ask, limit, drawn)
        held = min(set_aside, parking.reach(len(work.prompt_tokens), drawn, limit))
        return Answer(choice.index, limit, set_aside, held)

    def let_go(self, route: Route, work: Work) -> None:
        """Its attempt has ended: everything is free. Safe to call twice."""
        if work.cells is not None:
            route.cells.release(work.cells)
        work.cells = work.parked = work.gives_way = None

    # ------------------------------------------------------------ progress

    def read(self, route: Route, work: Work, frame: Prefilled) -> None:
        """The worker has read more of its prompt."""
        if work.cells is not None:
            route.cells.read(work.cells, frame.done_tokens)

    def follow(self, route: Route, work: Work, piece: Piece) -> None:
        """An answer went on, or ended."""
        lease = work.cells
        if lease is None:
            return
        prompt_tokens = lease.prompt_tokens
        if lease.prompt_read < prompt_tokens:
            route.cells.read(lease, prompt_tokens)
        if piece.finish is not None:
            route.cells.end_answer(lease, piece.choice)
            if route.parked:
                self.share_out(route)
            return
        answer = lease.answer(piece.choice)
        if answer is not None and parking.is_due(prompt_tokens, piece.position, answer.held, answer.limit):
            self.share_out(route)

    def share_out(self, route: Route) -> None:
        """Extend whoever needs it, oldest first; park whom nothing is left for; let one give way where all are."""
        standings, somebody_leaves = self._standings(route)
        outcome = parking.share_out(standings, route.cells.free_cells, somebody_leaves=somebody_leaves)
        for extension in outcome.extend:
            work = route.running[extension.holder]
            assert work.cells is not None  # it has a standing
            held = route.cells.extend(work.cells, extension.choice, extension.tokens)
            route.replica.extend(Extend(work.request_id, work.attempt, extension.choice, held))
        self._metrics.cell_extensions.labels(route.model, route.name).inc(len(outcome.extend))
        self._mark(route, outcome.parked)
        if outcome.gives_way is not None:
            self._make_way(route, route.running[outcome.gives_way])

    @staticmethod
    def _standings(route: Route) -> tuple[list[parking.Standing], bool]:
        """Every unfinished answer here, and whether a request is about to end, so that its cells come free."""
        standings: list[parking.Standing] = []
        somebody_leaves = False
        for work in route.running.values():
            lease = work.cells
            if lease is None or work.cancel_requested or work.gives_way is not None or not lease.slots:
                somebody_leaves = True
                continue
            unseen = not work.delivered or work.wish == Wish.CONTINUOUS
            standings += [
                parking.Standing(
                    holder=work.request_id,
                    choice=answer.choice,
                    accepted=work.created,
                    prompt_tokens=lease.prompt_tokens,
                    drawn=len(work.choices[answer.choice].tokens),
                    held=answer.held,
                    set_aside=answer.set_aside,
                    limit=answer.limit,
                    priority=work.ask.priority,
                    unseen=unseen,
                )
                for answer in lease.answers
            ]
        return standings, somebody_leaves

    # ------------------------------------------------------------- parking

    def _mark(self, route: Route, parked: frozenset[tuple[str, int]]) -> None:
        for work in route.running.values():
            choices = tuple(sorted(choice for holder, choice in parked if holder == work.request_id))
            before = work.parked.choices if work.parked is not None else ()
            if choices == before:
                continue
            if not choices:
                work.parked = None
                _log.info("%s goes on: cells came free on %s/%s", work.request_id, route.model, route.name)
                continue
            self._metrics.cell_parks.labels(route.model, route.name).inc(len(set(choices) - set(before)))
            since = work.parked.since if work.parked is not None else self._wall()
            work.parked = Parked(since, choices, self._why_parked(route))
            _log.info("%s is parked: %s", work.request_id, work.parked.reason)

    @staticmethod
    def _why_parked(route: Route) -> str:
        return (
            f"All {route.cells.total_cells} cells of the {route.name} route are taken. Its answer is kept, "
            "and goes on as soon as another request there ends."
        )

    def _make_way(self, route: Route, work: Work) -> None:
        """Take it out of its worker; AttemptEnded follows, and the dispatcher decides how it goes on."""
        work.gives_way = (
            f"All {route.cells.total_cells} cells of the {route.name} route were taken and every answer there waited "
            "for more, so this one gave way to older ones."
        )
        self._metrics.cell_give_ways.labels(route.model, route.name).inc()
        _log.warning("%s gives way: %s", work.request_id, work.gives_way)
        route.replica.cancel(work.request_id, work.attempt)
