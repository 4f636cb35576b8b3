"""What one caller is given of a request: in order, once, and never what may still be taken back."""

from __future__ import annotations

import asyncio
from typing import Any

from relevo.core.events import Ask, Delta, Ended, Piece, Sampling
from relevo.core.request import RequestState
from relevo.service.ticket import WorkTicket
from relevo.service.work import Work


def work_of(*, stream: bool) -> Work:
    ask = Ask(owner="local", model="m", kind="chat", stream=stream)
    return Work("req_1", ask, created=0.0, prompt_tokens=[1], sampling=Sampling(seed=1), outputs=[8])


def ticket_of(work: Work) -> WorkTicket:
    return WorkTicket(work, replayed=False, start=0, describe=lambda _: {}, waiting=lambda _: None, left=lambda _: None)


def piece(work: Work, text: str) -> None:
    work.add_piece(Piece("req_1", 1, 0, 0, [7], text))


def end(work: Work) -> None:
    work.publish(Ended(state="completed", usage=work.usage, relevo={}))


async def reading(work: Work, given: list[Any]) -> None:
    async for event in ticket_of(work).events():
        given.append(event)  # noqa: PERF401 - what came so far is looked at in between


async def a_little() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def texts(given: list[Any]) -> list[str]:
    return [e.text for e in given if isinstance(e, Delta)]


def test_output_that_a_restart_takes_back_is_not_in_a_collected_answer() -> None:
    async def run() -> list[str]:
        work, given = work_of(stream=False), []
        async with asyncio.TaskGroup() as group:
            group.create_task(reading(work, given))
            piece(work, "lost")
            await a_little()
            assert not work.delivered
            work.forget_output()  # its route is gone, and nobody has seen anything
            piece(work, "whole")
            await a_little()
            end(work)
        return texts(given)

    assert asyncio.run(run()) == ["whole"]


def test_a_stream_is_given_each_piece_at_once_and_is_delivered_from_then_on() -> None:
    async def run() -> list[str]:
        work, given = work_of(stream=True), []
        async with asyncio.TaskGroup() as group:
            group.create_task(reading(work, given))
            piece(work, "a")
            await a_little()
            assert texts(given) == ["a"]
            assert work.delivered
            piece(work, "b")
            end(work)
        return texts(given)

    assert asyncio.run(run()) == ["a", "b"]


def test_an_end_that_is_not_durable_yet_is_waited_for() -> None:
    async def run() -> list[Any]:
        work, given = work_of(stream=True), []
        async with asyncio.TaskGroup() as group:
            group.create_task(reading(work, given))
            piece(work, "all")
            await a_little()
            for state in (RequestState.QUEUED, RequestState.RUNNING, RequestState.COMPLETED):
                work.move(state)
            work.wake()
            await a_little()
            end(work)
        return given

    assert isinstance(asyncio.run(run())[-1], Ended)


def test_a_watcher_that_has_everything_is_let_go() -> None:
    async def run() -> None:
        work = work_of(stream=True)
        for state in (RequestState.QUEUED, RequestState.RUNNING, RequestState.COMPLETED):
            work.move(state)
        end(work)
        ticket = WorkTicket(
            work, replayed=True, start=1, describe=lambda _: {}, waiting=lambda _: None, left=lambda _: None
        )
        async with asyncio.timeout(1):
            assert [e async for e in ticket.events()] == []

    asyncio.run(run())
