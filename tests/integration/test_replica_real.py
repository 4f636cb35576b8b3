"""The handles on the real workers: a small model answers, is killed in the middle of it, and answers again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

from relevo.core.errors import BadRequest
from relevo.core.events import AttemptEnded, ChoiceStart, Sampling, StartModel, StartText, Step, Submit
from relevo.replicas.process import ProcessLimits
from relevo.replicas.replica import Replica, ReplicaSettings
from relevo.replicas.text import TextProcess

from .fakes.replica_house import House, process_exists, running, short_backoff


def pieces_of(house: House, request_id: str) -> list[Any]:
    steps = [w[1] for w in house.told if w[0] == "frame" and isinstance(w[1], Step)]
    return [p for step in steps for p in step.pieces if p.request_id == request_id]


async def until_ended(house: House, request_id: str) -> AttemptEnded:
    async with asyncio.timeout(30):
        while True:
            for told in house.told:
                if told[0] == "frame" and isinstance(told[1], AttemptEnded) and told[1].request_id == request_id:
                    return told[1]
            await asyncio.sleep(0.01)


def make_real(house: House, libraries: Path, model: Path, **changes: Any) -> Replica:
    plan = StartModel(
        model="demo", route="cpu", path=str(model), libraries=str(libraries), context_tokens=512, slots=2, **changes
    )
    return Replica(
        "demo on cpu",
        model="demo",
        route="cpu",
        device="host",
        kind="llama",
        plan=lambda: plan,
        events=house,
        settings=ReplicaSettings(new_backoff=short_backoff(2)),
    )


def test_a_real_model_survives_the_death_of_its_worker(libraries: Path, demo_model: Path, capsys: Any) -> None:
    async def scenario() -> None:
        house = House()
        replica = make_real(house, libraries, demo_model)
        text = TextProcess("demo", plan=lambda: StartText("demo", str(demo_model), str(libraries)))
        async with asyncio.TaskGroup() as group:
            group.create_task(text.run())
            try:
                await converse(house, replica, text)
            finally:
                await text.stop()

    async def converse(house: House, replica: Replica, text: TextProcess) -> None:
        prompt = (await text.render([{"role": "user", "content": "Count to five."}])).tokens
        with pytest.raises(BadRequest):
            await text.render([{"role": "nobody's", "content": 3}])
        async with running(replica, others=1):
            await house.until("ready", timeout_s=30)
            first = Submit("req_first", 1, prompt, [ChoiceStart(0, 400)], Sampling(seed=7), ignore_eos=True)
            replica.submit(first)
            while len(pieces_of(house, "req_first")) < 5:
                await asyncio.sleep(0.005)
            pid = replica.pid
            assert pid is not None
            killed = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            await house.until("lost")
            with capsys.disabled():
                print(f"\nreal worker: lost {(time.perf_counter() - killed) * 1000:.0f} ms after SIGKILL")
            before = pieces_of(house, "req_first")
            await house.until("ready", 2, timeout_s=30)
            assert pieces_of(house, "req_first") == before and not process_exists(pid)
            tokens = [t for p in before for t in p.tokens]
            replica.submit(
                Submit("req_again", 2, prompt, [ChoiceStart(0, len(tokens))], Sampling(seed=7), ignore_eos=True)
            )
            assert (await until_ended(house, "req_again")).outcome == "completed"
            assert [t for p in pieces_of(house, "req_again") for t in p.tokens] == tokens
            answer = await replica.probe(5)
            assert answer.ok and replica.ready is not None and answer.tokens == replica.ready.probe_tokens[:4]
        assert house.count("lost") == house.count("gone") == 2 and replica.last_death is not None
        assert replica.last_death.code == 0

    uvloop.run(scenario())


def test_a_real_worker_that_may_not_have_the_memory_says_so(libraries: Path, demo_model: Path) -> None:
    async def scenario() -> None:
        house = House()
        house.limits = ProcessLimits(data_bytes=96 << 20)
        async with running(make_real(house, libraries, demo_model, use_mmap=False)):
            _, sentence = await house.until("given_up", timeout_s=30)
            _, _, death = await house.until("lost")
            assert death.kind == "allocation", death
            assert "relevo devices probe host" in sentence

    uvloop.run(scenario())


def test_a_model_file_that_is_missing_is_named(libraries: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        house = House()
        async with running(make_real(house, libraries, tmp_path / "absent.gguf")):
            await house.until("given_up", timeout_s=30)
            _, _, death = await house.until("lost")
            assert death.kind == "unclassified_death" and "absent.gguf" in death.cause, death

    uvloop.run(scenario())
