"""From a configuration to a running service and back to nothing: the order of starting and of stopping."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec

from relevo.config import Config
from relevo.core.errors import StartupError
from relevo.core.handover import BecomeResumable, Requeue, on_gateway_restart
from relevo.core.request import RequestState
from relevo.journal import Journal, WorkerGone
from relevo.processes.identity import Identity
from relevo.replicas.process import kill_leftover
from relevo.service.house import House, build_house
from relevo.service.intake import handover_wish
from relevo.service.paths import Paths
from relevo.service.recovery import cut_off_attempts, restore

_log = logging.getLogger("relevo.run")

SWEEP_S = 0.25
GOVERN_S = 0.05
WAITING_NEWS_S = 2.0
STOP_GRACE_S = 5.0
"""How long running requests may go on when the service is asked to stop."""


class Announcement(msgspec.Struct, frozen=True):
    """What the person who started it should see first."""

    url: str
    state: str
    models: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    keys: bool
    recovered: int
    warnings: list[str]


Announce = Callable[[Announcement], None]


def run_service(config: Config, paths: Paths, *, announce: Announce, listen: Callable[[], Front]) -> int:
    """Run until SIGINT or SIGTERM. Returns the exit code; raises StartupError when it cannot start."""
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:  # Windows
        runner = asyncio.Runner()
    with runner:
        try:
            return runner.run(_serve(config, paths, announce, listen))
        except* StartupError as group:
            raise group.exceptions[0] from None


class Front(msgspec.Struct):
    """What the HTTP side gives: it serves a service until told to stop. Injected: dialects live above this room."""

    url: str
    keys: bool
    serve: Callable[[Any], Any]
    """`await serve(service)` runs until `stop`."""
    stop: Callable[[], None]


async def _serve(config: Config, paths: Paths, announce: Announce, open_front: Callable[[], Front]) -> int:
    journal = Journal.open(
        paths.state,
        reserve_bytes=config.journal.reserve_bytes,
        retention_s=config.journal.retention_s,
        payload_bytes=config.journal.payload_bytes,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, journal)
        front = open_front()
        journal.announce(front.url)
        await _kill_leftovers(journal)
        stop = _stop_signals()
        async with asyncio.TaskGroup() as tasks:
            house = await build_house(config, paths, journal, tasks)
            recovered = await _recover(house, journal)
            serving = tasks.create_task(front.serve(house.service), name="http")
            life = [tasks.create_task(part, name=name) for name, part in house.parts()]
            chores = [
                tasks.create_task(_sweep(house), name="sweep"),
                tasks.create_task(house.watch.run(), name="watch"),
                tasks.create_task(_govern(house), name="govern"),
                tasks.create_task(_announce_ready(house, front, paths, recovered, announce), name="announce"),
            ]
            await stop.wait()
            await _shut_down(house, front, serving, life, chores)
    return 0


async def _close(journal: Journal) -> None:
    with suppress(Exception):  # the journal said already why it cannot be written
        await journal.close()


def _stop_signals() -> asyncio.Event:
    """Set by SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop.set)
        except NotImplementedError:  # Windows' loop has none; the interpreter's own handler does
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    return stop


# ------------------------------------------------------------------ starting


async def _kill_leftovers(journal: Journal) -> None:
    """Workers that an earlier gateway left behind hold memory; they are gone before anything is admitted."""
    for left in await journal.workers():
        if not await kill_leftover(Identity(left.pid, left.start_time)):
            raise StartupError(
                f"A worker of an earlier start (process {left.pid}) hangs in the kernel and keeps its memory. "
                "Restart the machine, or wait until the process is gone."
            )
        await journal.commit(WorkerGone(pid=left.pid, start_time=left.start_time))


async def _recover(house: House, journal: Journal) -> int:
    """Everything the journal holds open is in memory again: queued to be done, or resting as resumable."""
    recovered = 0
    for record in await journal.open_requests():
        cut_off = cut_off_attempts(record, time.time())
        if cut_off:
            await journal.commit(*cut_off)
        work = await restore(journal, record)
        if work is None or work.ask.model not in house.models:
            _log.error("%s cannot go on: its payload or its model %r is gone", record.summary.id, record.summary.model)
            await house.dispatcher.end_unservable(record)
            continue
        work.wish = handover_wish(work.ask, house.models[work.ask.model].config)
        house.dispatcher.adopt(work)
        house.service.index(work)
        recovered += 1
        action = on_gateway_restart(work.state, delivered=_may_have_delivered(work))
        if isinstance(action, BecomeResumable):
            house.dispatcher.endings.rest(work, action.reason)
        elif isinstance(action, Requeue):
            work.forget_output()
            house.dispatcher.requeue(work, house.board.better_route(work) or house.board.home(work))
    return recovered


def _may_have_delivered(work: Any) -> bool:
    """A stream that ran may have delivered what no checkpoint holds yet. Unknown is treated as yes.

    Of a kept stream nothing leaves before a checkpoint holds it.
    """
    may_be_ahead = work.state is RequestState.RUNNING and not work.ask.kept
    return bool(work.ask.stream and (may_be_ahead or work.output_tokens))


async def _announce_ready(house: House, front: Front, paths: Paths, recovered: int, announce: Announce) -> None:
    """Once every route has started or failed to, say what there is."""
    for berth in house.fleet.berths.values():
        await berth.first.wait()
    warnings = [
        f"{b.route.replica.name}: {b.route.waiting_reason or b.route.replica.state.sentence}"
        for b in house.fleet.berths.values()
        if not b.route.serving and b.shown
    ]
    gap = house.journal.missing_after_crash
    if gap is not None:
        warnings.append(gap.sentence())
    status = house.service.status()
    announce(
        Announcement(
            url=front.url,
            state=str(paths.state),
            models=house.service.models(),
            devices=status["devices"],
            keys=front.keys,
            recovered=recovered,
            warnings=warnings,
        )
    )


# ------------------------------------------------------------------ living


async def _sweep(house: House) -> None:
    """Deadlines, expiry, and news for those who wait. Also shows how late the loop is."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    news_at = due
    while True:
        due += SWEEP_S
        await asyncio.sleep(max(0.0, due - loop.time()))
        house.metrics.loop_lag.set(max(0.0, loop.time() - due))
        due = max(due, loop.time() - SWEEP_S)
        for route in house.dispatcher.routes.values():
            house.dispatcher.pump(route)
        if loop.time() >= news_at:
            news_at = loop.time() + WAITING_NEWS_S
            house.dispatcher.tell_waiting()
            house.lengths.keep()
            await house.dispatcher.expire_resting(time.time())


async def _govern(house: House) -> None:
    """Emulated accelerators have no driver: their memory is bounded from here, often."""
    governors = house.governors()
    while governors:
        for tick in governors:
            tick()
        await asyncio.sleep(GOVERN_S)


# ------------------------------------------------------------------ stopping


async def _shut_down(
    house: House,
    front: Front,
    serving: asyncio.Task[None],
    life: list[asyncio.Task[None]],
    chores: list[asyncio.Task[None]],
) -> None:
    """Take nothing new, let what runs end for a moment, put the rest to rest, then stop HTTP and the workers."""
    _log.info("stopping: nothing new is accepted, running requests have %.0f s", STOP_GRACE_S)
    house.service.draining = True
    end = time.monotonic() + STOP_GRACE_S
    while house.dispatcher.running_count and time.monotonic() < end:  # noqa: ASYNC110 - bounded, at the very end
        await asyncio.sleep(0.05)
    house.lengths.keep(worth=1)
    await house.dispatcher.put_to_rest()
    front.stop()
    await serving
    for chore in chores:
        chore.cancel()
    await house.stop_workers()
    for task in life:
        task.cancel()
    _log.info("stopped")


def configure_logging(level: str = "INFO") -> None:
    """Key-value lines on standard error: prompts, answers and keys are never among them."""
    import structlog

    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    tty = sys.stderr.isatty()
    render: Any = (
        structlog.dev.ConsoleRenderer(colors=tty)
        if tty
        else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "logger", "event"])
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
