"""The emulated accelerator with real processes: the kernel keeps its memory limit, and a reset really kills."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relevo.devices import ballast
from relevo.devices.device import Device
from relevo.devices.soft import SoftDevice
from relevo.processes.identity import alive_since
from relevo.processes.memory import data_bytes

from .fakes.growing import Grower

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulated accelerator needs Linux")

MIB = 1 << 20


@pytest.fixture
def growers() -> Iterator[list[Grower]]:
    made = [Grower(), Grower()]
    yield made
    for grower in made:
        grower.close()


def test_its_figures_are_the_kernels(growers: list[Grower]) -> None:
    device = SoftDevice("gpu0", 512 * MIB)
    assert isinstance(device, Device)
    for grower in growers:
        assert device.register(grower.pid, alive_since(grower.pid))
    before = device.read()
    assert before.used_bytes == sum(data_bytes(g.pid) or 0 for g in growers)
    assert growers[0].grow(64 * MIB) == "ok"
    after = device.read()
    assert before.free_bytes is not None and after.free_bytes is not None
    assert before.free_bytes - after.free_bytes == 64 * MIB
    assert [o.pid for o in device.occupants] == [g.pid for g in growers]


def test_when_one_process_has_taken_the_rest_the_allocation_of_another_fails(growers: list[Grower]) -> None:
    first, second = growers
    device = SoftDevice("gpu0", 256 * MIB)
    for grower in growers:
        device.register(grower.pid)
    free = device.tick().free_bytes
    assert free is not None
    assert first.grow(free - 16 * MIB) == "ok"
    device.tick()
    assert second.grow(64 * MIB) == "MemoryError"
    assert second.grow(8 * MIB) == "ok"  # what is left may still be taken
    device.tick()
    assert first.grow(-1) == "ok"
    device.tick()
    assert second.grow(64 * MIB) == "ok"
    assert device.overshoot_bytes == 0


def test_a_full_device_gives_a_process_its_spare_bytes_only_once(growers: list[Grower]) -> None:
    first, second = growers
    device = SoftDevice("gpu0", 128 * MIB, spare_bytes=4 * MIB)
    for grower in growers:
        device.register(grower.pid)
    free = device.tick().free_bytes
    assert free is not None and first.grow(free) == "ok"
    device.tick()
    answers = []
    for _ in range(8):
        answers.append(second.grow(1 * MIB))
        device.tick()
    assert answers[0] == "ok" and answers[-1] == "MemoryError"
    assert 0 < device.overshoot_bytes <= 8 * MIB


def test_a_limit_never_falls_below_what_a_process_holds(growers: list[Grower]) -> None:
    assert growers[0].grow(200 * MIB) == "ok"
    device = SoftDevice("gpu0", 100 * MIB)
    device.register(growers[0].pid)
    held = data_bytes(growers[0].pid)
    soft, _ = resource.prlimit(growers[0].pid, resource.RLIMIT_DATA)
    assert held is not None and soft >= held
    assert growers[0].grow(32 * MIB) == "MemoryError"
    assert device.read().free_bytes == 0


def test_a_process_that_leaves_the_device_is_limited_no_more(growers: list[Grower]) -> None:
    device = SoftDevice("gpu0", 64 * MIB)
    device.register(growers[0].pid)
    assert growers[0].grow(128 * MIB) == "MemoryError"
    device.forget(growers[0].pid)
    assert growers[0].grow(128 * MIB) == "ok"
    assert device.read().used_bytes == 0


def test_a_reset_kills_everything_on_the_device_and_nothing_else(growers: list[Grower]) -> None:
    on_it, beside = growers
    device = SoftDevice("gpu0", 256 * MIB)
    device.register(on_it.pid)
    assert device.reset() == 1
    assert on_it.popen.wait(5) == -signal.SIGKILL
    assert device.read().used_bytes == 0 and device.resets == 1
    assert beside.popen.poll() is None
    assert not device.register(on_it.pid)


def test_a_pid_that_was_given_away_again_is_not_taken(growers: list[Grower]) -> None:
    device = SoftDevice("gpu0", 256 * MIB)
    assert not device.register(growers[0].pid, (alive_since(growers[0].pid) or 0) - 1)
    assert device.reset() == 0
    assert growers[0].popen.poll() is None


def test_the_governor_keeps_up_with_a_process_that_grows_step_by_step(growers: list[Grower]) -> None:
    device = SoftDevice("gpu0", 256 * MIB)
    for grower in growers:
        device.register(grower.pid)

    async def scenario() -> list[str]:
        governing = asyncio.create_task(device.govern(0.01))
        answers = []
        for step in range(40):
            answers.append(await asyncio.to_thread(growers[step % 2].grow, 16 * MIB))
            await asyncio.sleep(0.03)
        governing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await governing
        return answers

    answers = asyncio.run(scenario())
    assert "MemoryError" in answers and 10 <= answers.count("ok") <= 16
    assert device.overshoot_bytes <= 2 * device._spare_bytes


def test_ballast_takes_its_part_of_the_device_until_it_is_told(tmp_path: Path) -> None:
    device = SoftDevice("gpu0", 512 * MIB, folder=tmp_path)
    with subprocess.Popen(ballast.command(tmp_path, 100 * MIB), stdout=subprocess.PIPE, text=True) as process:
        try:
            _tick_until(device, lambda: (device.read().used_bytes or 0) > 100 * MIB)
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"holding_bytes": 100 * MIB}
            process.terminate()
            assert process.wait(5) == 0
        finally:
            process.kill()
    assert device.read().used_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_ballast_that_does_not_fit_says_so(tmp_path: Path) -> None:
    device = SoftDevice("gpu0", 128 * MIB, folder=tmp_path)
    with subprocess.Popen(ballast.command(tmp_path, 256 * MIB), stdout=subprocess.PIPE, text=True) as process:
        try:
            _tick_until(device, lambda: process.poll() is not None)
            assert process.stdout is not None
            assert "does not have" in json.loads(process.stdout.read())["error"]
            assert process.wait(5) == 1
        finally:
            process.kill()


def test_a_reset_takes_ballast_too(tmp_path: Path) -> None:
    device = SoftDevice("gpu0", 512 * MIB, folder=tmp_path)
    with subprocess.Popen(ballast.command(tmp_path, 32 * MIB), stdout=subprocess.PIPE, text=True) as process:
        try:
            _tick_until(device, lambda: (device.read().used_bytes or 0) > 32 * MIB)
            assert device.reset() == 1
            assert process.wait(5) == -signal.SIGKILL
        finally:
            process.kill()


def _tick_until(device: SoftDevice, is_so: object) -> None:
    deadline = time.monotonic() + 20
    while not is_so():  # type: ignore[operator]
        device.tick()
        assert time.monotonic() < deadline
        time.sleep(0.02)
