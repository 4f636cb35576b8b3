"""A replica through its life, with a fake worker in a real process."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import uvloop

from relevo.core.errors import ModelFileError
from relevo.core.events import AttemptEnded, Ready, Step
from relevo.replicas.process import ProcessLimits
from relevo.replicas.replica import ReplicaNotServing
from relevo.replicas.state import ReplicaState

from .fakes.replica_house import (
    House,
    make_replica,
    open_descriptors,
    process_exists,
    running,
    short_backoff,
    submit,
    under_both_loops,
)


def test_a_worker_becomes_ready_streams_and_stops() -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {})
        with pytest.raises(ReplicaNotServing, match="stopped"):
            replica.submit(submit())
        async with running(replica):
            _, ready = await house.until("ready")
            assert isinstance(ready, Ready) and replica.ready is ready
            assert replica.state is ReplicaState.SERVING
            assert replica.pid == ready.pid and replica.identity is not None and replica.identity.start_time > 0
            replica.submit(submit())
            await house.until("frame", 4)
            frames = [w[1] for w in house.told if w[0] == "frame"]
            assert [f.pieces[0].position for f in frames if isinstance(f, Step)] == [1, 2, 3]
            assert isinstance(frames[-1], AttemptEnded) and frames[-1].outcome == "completed"
            pid = ready.pid
        assert house.names() == ["may_start", "starting", "ready", "lost", "gone"]
        death = house.told[-2][2]
        assert death.kind is None and death.code == 0
        assert "loading /nowhere/model.gguf" in death.log_tail
        assert not process_exists(pid) and not house.leases
        assert replica.state is ReplicaState.STOPPED and replica.pid is None

    under_both_loops(scenario)


def test_a_killed_worker_is_noticed_at_once_and_replaced(capsys: Any) -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {"tokens": 1000, "token_s": 0.02})
        async with running(replica):
            await house.until("ready")
            replica.submit(submit())
            await house.until("frame", 3)
            pid = replica.pid
            assert pid is not None
            killed = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            _, incarnation, death = await house.until("lost")
            took_s = time.perf_counter() - killed
            with capsys.disabled():
                print(f"\nnoticed {took_s * 1000:.1f} ms after SIGKILL: {death.cause}")
            assert took_s < 1.0
            assert incarnation == 1 and death.signal == signal.SIGKILL and death.kind == "unclassified_death"
            frames_then = house.count("frame")
            await house.until("ready", 2)
            assert house.count("frame") == frames_then
            assert replica.incarnation == 2 and replica.pid != pid
        assert house.count("lost") == house.count("gone") == 2

    under_both_loops(scenario)


def test_a_large_killed_worker_is_lost_before_it_is_gone(capsys: Any) -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {"hold_bytes": 1 << 29})
        async with running(replica):
            await house.until("ready")
            assert replica.pid is not None
            killed = time.perf_counter()
            os.kill(replica.pid, signal.SIGKILL)
            _, _, death = await house.until("lost")
            await house.until("gone")
            lost_s, gone_s = (house.at_s[[w[0] for w in house.told].index(name)] - killed for name in ("lost", "gone"))
            with capsys.disabled():
                print(f"\n512 MiB worker: lost after {lost_s * 1000:.0f} ms, gone after {gone_s * 1000:.0f} ms")
            assert lost_s <= gone_s
            assert lost_s < 1.0 and death.signal == signal.SIGKILL

    asyncio.run(scenario())


def test_what_a_worker_sent_before_it_died_is_heard_before_it_is_lost() -> None:
    async def scenario() -> None:
        house = House()
        habits = {"tokens": 300, "die": {"when": "end", "code": 9}}
        async with running(make_replica(house, habits, backoff=short_backoff(50, 0.001))) as replica:
            for n in range(1, 6):
                await house.until("ready", n)
                replica.submit(submit(n))
                await house.until("gone", n)
                assert house.count("frame") == n * 301
                assert isinstance([w for w in house.told if w[0] == "frame"][-1][1], AttemptEnded)
                assert house.names()[-3:-1] == ["ready", "lost"]

    under_both_loops(scenario)


def test_without_process_descriptors_a_thread_sees_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")

    async def scenario() -> None:
        house = House()
        async with running(make_replica(house, {})) as replica:
            await house.until("ready")
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGKILL)
            _, _, death = await house.until("lost")
            assert death.signal == signal.SIGKILL
            await house.until("ready", 2)
        assert house.count("gone") == 2

    under_both_loops(scenario)
    assert threading.active_count() == 1


def test_a_stopped_worker_is_suspect_first_and_fenced_later(capsys: Any) -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {"stop_itself": True}, suspect_s=0.4, fence_s=1.0)
        async with running(replica):
            await house.until("ready")
            pid = replica.pid
            assert pid is not None
            replica.submit(submit())
            sent = time.perf_counter()
            await house.until("suspect")
            with pytest.raises(ReplicaNotServing, match="suspect"):
                replica.submit(submit(2))
            _, _, death = await house.until("lost")
            took_s = time.perf_counter() - sent
            with capsys.disabled():
                print(f"\nfenced {took_s:.2f} s after SIGSTOP (limit 1.0 s)")
            assert 0.8 <= took_s < 3.0
            assert death.kind == "stall" and "no heartbeat for 1 s" in death.cause
            await house.until("gone")
            assert not process_exists(pid)

    asyncio.run(scenario())


def test_a_short_stop_only_makes_it_suspect() -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {}, suspect_s=0.3, fence_s=5.0)
        async with running(replica):
            await house.until("ready")
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGSTOP)
            await house.until("suspect")
            os.kill(replica.pid, signal.SIGCONT)
            await house.until("recovered")
            replica.submit(submit())
            await house.until("frame", 4)
            assert house.count("lost") == 0

    asyncio.run(scenario())


def test_a_starved_gateway_does_not_blame_the_worker() -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {}, suspect_s=1.0, fence_s=1.2)
        async with running(replica):
            await house.until("ready")
            for _ in range(2):
                time.sleep(1.3)  # the loop stands still for longer than the worker is trusted
                await asyncio.sleep(0)
            await asyncio.sleep(0.3)
            assert replica.state is ReplicaState.SERVING
            assert house.count("suspect") == house.count("lost") == 0

    uvloop.run(scenario())


def test_a_step_without_end_is_a_stall_though_the_heart_beats() -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {"step_forever": True, "tokens": 0}, step_deadline_s=5.0)
        async with running(replica):
            await house.until("ready")
            replica.submit(submit())
            _, _, death = await house.until("lost")
            assert death.kind == "stall" and "in one engine step" in death.cause

    asyncio.run(scenario())


def test_a_start_that_fails_tells_its_last_words_backs_off_gives_up_and_resumes() -> None:
    async def scenario() -> None:
        house = House()
        says = ["ggml_backend: nothing special", "the moon is in the wrong house"]
        backoff = short_backoff(3)
        replica = make_replica(house, {"die": {"when": "load", "code": 7, "says": says}}, backoff=backoff)
        async with running(replica):
            _, sentence = await house.until("given_up")
            assert "relevo devices probe gpu0" in sentence and "the moon is in the wrong house" in sentence
            assert replica.state is ReplicaState.GIVEN_UP
            assert house.count("lost") == house.count("gone") == 3 and house.count("ready") == 0
            death = replica.last_death
            assert death is not None and death.code == 7 and "exit code 7" in death.cause
            await asyncio.sleep(0.1)
            assert house.count("may_start") == 3 and "failed 3 times" in sentence
            replica.resume()
            await house.until("given_up", 2)
            assert house.count("may_start") == 6

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("habits", "kind", "words"),
    [
        ({"refuse": ["allocation", "The model needs 4 GiB and 1 GiB is free."]}, "allocation", "4 GiB"),
        ({"refuse": ["device", "There is no device CUDA0."]}, "device_lost", "no device CUDA0"),
        ({"refuse": ["model_file", "The model file is damaged."]}, "unclassified_death", "damaged"),
        ({"die": {"when": "start", "code": 3, "says": ["cannot import"]}}, "unclassified_death", "cannot import"),
        ({"die": {"when": "load", "signal": "SIGSEGV"}}, "unclassified_death", "SIGSEGV"),
        (
            {
                "die": {
                    "when": "load",
                    "signal": "SIGABRT",
                    "says": ["CUDA error: an illegal memory access was encountered"],
                }
            },
            "sticky_device",
            "illegal memory access",
        ),
        ({"die": {"when": "load", "oom": True}}, "allocation", "MemoryError"),
    ],
)
def test_the_cause_of_a_failed_start_is_told(habits: dict[str, Any], kind: str, words: str) -> None:
    async def scenario() -> None:
        house = House()
        house.limits = ProcessLimits(data_bytes=256 << 20, oom_score_adj=800)
        async with running(make_replica(house, habits, backoff=short_backoff(1))):
            _, _, death = await house.until("lost")
            assert death.kind == kind and words in death.cause, death
            await house.until("given_up")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("habits", "words"),
    [
        ({"garbage": "00000004deadbeef"}, "rubbish"),
        ({"garbage": "ffffffff00"}, "4294967295 bytes"),
        ({"close_socket": True}, "closed its connection"),
    ],
)
def test_a_worker_that_talks_rubbish_is_cut_off(habits: dict[str, Any], words: str) -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, habits)
        async with running(replica):
            await house.until("ready")
            pid = replica.pid
            replica.submit(submit())
            _, _, death = await house.until("lost")
            assert death.kind == "cut_short" and words in death.cause, death
            await house.until("gone")
            assert pid is not None and not process_exists(pid)
            await house.until("ready", 2)

    under_both_loops(scenario)


def test_a_worker_that_never_speaks_or_never_is_ready_is_given_a_limited_time() -> None:
    async def scenario(habits: dict[str, Any], **settings: float) -> str:
        house = House()
        async with running(make_replica(house, habits, backoff=short_backoff(1), **settings)):
            _, _, death = await house.until("lost")
            assert death.kind == "stall"
            return str(death.cause)

    assert "no heartbeat" in asyncio.run(scenario({"mute": True, "ready_after_s": 50}, start_silence_s=0.6))
    assert "not ready within" in asyncio.run(scenario({"ready_after_s": 50}, load_timeout_s=0.6))


def test_grandchildren_die_with_their_group(tmp_path: Any) -> None:
    async def scenario() -> None:
        note = tmp_path / "pid"
        house = House()
        replica = make_replica(house, {"grandchild": str(note)})
        async with running(replica):
            await house.until("ready")
            grandchild = int(note.read_text())
            assert process_exists(grandchild) and replica.pid is not None
            os.kill(replica.pid, signal.SIGKILL)
            await house.until("gone")
            assert not process_exists(grandchild)
            await house.until("ready", 2)
            grandchild = int(note.read_text())
        assert not process_exists(grandchild)

    asyncio.run(scenario())


def test_a_stop_is_bounded_even_when_the_worker_is_deaf() -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {"deaf": True})
        async with asyncio.TaskGroup() as group:
            run = group.create_task(replica.run())
            await house.until("ready")
            began = time.perf_counter()
            stop = group.create_task(replica.stop(0.5))
            await asyncio.sleep(0.1)
            assert replica.state is ReplicaState.DRAINING
            stop.cancel()  # whoever asked does not wait any more; the stop goes on
            await run
            assert 0.4 < time.perf_counter() - began < 3.0
        _, _, death = await house.until("lost")
        assert death.signal == signal.SIGKILL and death.kind is None
        assert house.count("gone") == 1

    under_both_loops(scenario)


def test_a_cancelled_run_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        for when in ("starting", "ready"):
            house = House()
            replica = make_replica(house, {"ready_after_s": 0.1})
            run = asyncio.create_task(replica.run())
            await house.until(when)
            pid = replica.pid
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert house.count("lost") == house.count("gone") == 1
            assert pid is not None and not process_exists(pid)

    under_both_loops(scenario)


def test_a_replica_that_waits_for_memory_can_be_stopped() -> None:
    async def scenario() -> None:
        house = House()
        house.gate = asyncio.Event()
        async with running(make_replica(house, {})):
            await house.until("may_start")
        assert house.names() == ["may_start"] and not house.leases

    under_both_loops(scenario)


def test_a_probe_is_answered_or_ends_in_time() -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {"probe_s": 0.2})
        async with running(replica):
            await house.until("ready")
            with pytest.raises(TimeoutError):
                await replica.probe(1, timeout_s=0.05)
            answer = await replica.probe(2)
            assert answer.number == 2 and answer.tokens == [1, 2, 3, 4]
            asked = asyncio.ensure_future(replica.probe(3))
            await asyncio.sleep(0.05)
            replica.kill("The device was reset.", None)
            with pytest.raises(ReplicaNotServing, match="The device was reset"):
                await asked
            _, _, death = await house.until("lost")
            assert death.cause == "The device was reset." and death.kind is None
            await house.until("ready", 2)
            assert house.count("given_up") == 0

    asyncio.run(scenario())


def test_a_program_that_cannot_be_started_is_a_death_like_any_other() -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {}, command=lambda fd: ["/no/such/program"], backoff=short_backoff(1))
        async with running(replica):
            await house.until("given_up")
            assert house.names() == ["may_start", "lost", "gone", "given_up"]
            assert "could not be started" in house.told[1][2].cause

    asyncio.run(scenario())


def test_a_mistake_of_the_owner_comes_out_of_run_after_everything_is_cleaned_up() -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {})

        def broken(*_: Any) -> None:
            raise LookupError("no such request")

        house.on_frame = broken  # type: ignore[method-assign]
        run = asyncio.create_task(replica.run())
        await house.until("ready")
        replica.submit(submit())
        with pytest.raises(LookupError):
            await run
        assert house.count("lost") == house.count("gone") == 1

    asyncio.run(scenario())


def test_a_stop_before_the_first_step_counts_and_one_without_a_run_is_harmless() -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {})
        run = asyncio.create_task(replica.run())
        await replica.stop()
        await run
        assert house.told == []
        await replica.stop()
        async with running(replica):
            await house.until("ready")

    asyncio.run(scenario())


def test_a_plan_that_fails_is_a_death_and_a_mistake_in_it_comes_out_of_run() -> None:
    async def scenario(error: Exception) -> House:
        house = House()
        replica = make_replica(house, {}, backoff=short_backoff(1))

        def plan() -> Any:
            raise error

        replica._plan = plan
        async with asyncio.timeout(5), running(replica):
            await house.until("gone")
            await asyncio.sleep(0.05)
        assert not house.leases
        return house

    house = asyncio.run(scenario(ModelFileError("The file is gone.")))
    assert house.names() == ["may_start", "lost", "gone", "given_up"] and "The file is gone." in house.told[1][2].cause
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(scenario(KeyError("bug")))
    assert raised.group_contains(KeyError)


def test_many_restarts_leave_no_descriptors_threads_or_processes() -> None:
    async def scenario() -> None:
        house = House()
        replica = make_replica(house, {}, backoff=short_backoff(100, 0.001))
        pids = []
        async with running(replica):
            await house.until("ready")
            before = (open_descriptors(), threading.active_count())
            for n in range(1, 9):
                assert replica.pid is not None
                pids.append(replica.pid)
                os.kill(replica.pid, signal.SIGKILL)
                await house.until("ready", n + 1)
            assert (open_descriptors(), threading.active_count()) == before
        assert not any(map(process_exists, pids))

    under_both_loops(scenario)


def test_whenever_it_is_stopped_every_lease_comes_back_once() -> None:
    dice = random.Random(7)

    async def scenario() -> None:
        for round_ in range(14):
            house = House()
            habits: dict[str, Any] = {"tokens": 50, "token_s": 0.01, "deaf": round_ % 5 == 0}
            replica = make_replica(house, habits, backoff=short_backoff(50, 0.001))
            pids = set()
            run = asyncio.create_task(replica.run())
            for _ in range(3):
                await asyncio.sleep(dice.random() * 0.12)
                if replica.pid is not None:
                    pids.add(replica.pid)
                match dice.randrange(4):
                    case 0 if replica.state is ReplicaState.SERVING:
                        replica.submit(submit())
                    case 1 if replica.pid is not None and replica.state in (
                        ReplicaState.SERVING,
                        ReplicaState.STARTING,
                    ):
                        os.kill(replica.pid, signal.SIGKILL)
                    case 2:
                        replica.kill("The dice said so.", None)
                    case _:
                        pass
            if dice.random() < 0.5:
                await replica.stop(dice.random() * 0.2)
                await run
            else:
                run.cancel()
                await asyncio.gather(run, return_exceptions=True)
            assert not house.leases and replica.state is ReplicaState.STOPPED
            for name in ("lost", "gone"):
                numbers = [w[1] for w in house.told if w[0] == name]
                assert numbers == sorted(set(numbers)), (name, house.told)
            assert not any(map(process_exists, pids))

    under_both_loops(scenario)
