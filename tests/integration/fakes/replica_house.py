"""An owner for replicas in tests: it records what it is told, in order, and can wait for it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from relevo.core.backoff import Backoff
from relevo.core.events import ChoiceStart, Sampling, StartModel, Submit
from relevo.replicas.liveness import LivenessLimits
from relevo.replicas.process import ProcessLimits
from relevo.replicas.replica import Replica, ReplicaSettings

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")


def short_backoff(give_up_after: int = 3, first_s: float = 0.02) -> Callable[[str], Backoff]:
    """Short delays, so that tests are short."""
    return lambda resume: Backoff(resume, first_s=first_s, give_up_after=give_up_after)


class House:
    """Records every event as (name, rest...)."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.at_s: list[float] = []
        self.limits = ProcessLimits()
        self.gate: asyncio.Event | None = None
        self.leases: set[int] = set()
        self._news = asyncio.Event()

    def tell(self, *what: Any) -> None:
        self.told.append(what)
        self.at_s.append(time.perf_counter())
        self._news.set()

    def names(self) -> list[str]:
        return [w[0] for w in self.told if w[0] != "frame"]

    def count(self, name: str) -> int:
        return sum(1 for w in self.told if w[0] == name)

    async def until(self, name: str, count: int = 1, timeout_s: float = 15.0) -> tuple[Any, ...]:
        """The `count`th event of this name."""
        async with asyncio.timeout(timeout_s):
            while self.count(name) < count:
                self._news.clear()
                await self._news.wait()
        return [w for w in self.told if w[0] == name][count - 1]

    async def may_start(self, replica: Replica, incarnation: int) -> ProcessLimits:
        self.tell("may_start", incarnation)
        if self.gate is not None:
            await self.gate.wait()
        self.leases.add(incarnation)
        return self.limits

    async def on_starting(self, replica: Replica, incarnation: int, identity: Any) -> None:
        self.tell("starting", incarnation, identity)

    def on_ready(self, replica: Replica, ready: Any) -> None:
        self.tell("ready", ready)

    def on_frame(self, replica: Replica, frame: Any) -> None:
        self.tell("frame", frame)

    def on_suspect(self, replica: Replica) -> None:
        self.tell("suspect")

    def on_recovered(self, replica: Replica) -> None:
        self.tell("recovered")

    def on_lost(self, replica: Replica, incarnation: int, death: Any) -> None:
        self.tell("lost", incarnation, death)

    def on_gone(self, replica: Replica, incarnation: int) -> None:
        self.tell("gone", incarnation)
        self.leases.remove(incarnation)

    def on_given_up(self, replica: Replica, sentence: str) -> None:
        self.tell("given_up", sentence)


def fake_command(fd: int) -> list[str]:
    return [sys.executable, "-I", str(FAKE_WORKER), "--fd", str(fd)]


def start_model() -> StartModel:
    return StartModel(model="fake", route="gpu", path="/nowhere/model.gguf", libraries="/nowhere")


def submit(request: int = 1, attempt: int = 1) -> Submit:
    return Submit(f"req_{request:032x}", attempt, [1, 2], [ChoiceStart(0, 16)], Sampling())


def make_replica(
    house: House,
    habits: dict[str, Any],
    *,
    backoff: Callable[[str], Backoff] | None = None,
    suspect_s: float = 2.0,
    fence_s: float = 8.0,
    step_deadline_s: float = 60.0,
    **settings: Any,
) -> Replica:
    liveness = LivenessLimits(suspect_s, fence_s, step_deadline_s)
    return Replica(
        "fake on gpu",
        model="fake",
        route="gpu",
        device="gpu0",
        kind="fake",
        plan=start_model,
        events=house,
        settings=ReplicaSettings(
            liveness=liveness,
            extra_environment={"FAKE_HABITS": json.dumps(habits)},
            command=settings.pop("command", fake_command),
            new_backoff=backoff or short_backoff(),
            **settings,
        ),
    )


@asynccontextmanager
async def running(replica: Replica, grace_s: float = 2.0, others: int = 0) -> AsyncIterator[Replica]:
    """Run it for the length of the block, then stop it, and leave nothing behind."""
    async with asyncio.TaskGroup() as group:
        group.create_task(replica.run(), name="replica")
        try:
            yield replica
        finally:
            await replica.stop(grace_s)
    assert len(asyncio.all_tasks()) == 1 + others, asyncio.all_tasks()


def under_both_loops(test: Callable[[], Any]) -> None:
    """Run on uvloop, as the gateway does, and on asyncio's own loop."""
    import uvloop

    for factory in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test())


def process_exists(pid: int) -> bool:
    """Whether a process runs under this pid. Zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
