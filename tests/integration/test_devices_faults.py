"""Faults played on an emulated device with real processes: each shows, each really fails, and each ends."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from relevo.core.events import Ready, StartFailed
from relevo.core.leases.lease import Shortfall
from relevo.core.leases.ledger import Ledger
from relevo.devices import faults
from relevo.devices.events import DeviceEventKind
from relevo.devices.faults import Faults
from relevo.devices.soft import SoftDevice
from relevo.replicas.process import worker_environment

from .fakes.growing import Grower
from .llama_process import LlamaProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulated accelerator needs Linux")

MIB = 1 << 20


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device(tmp_path: Path, clock: Clock) -> SoftDevice:
    return SoftDevice("gpu0", 512 * MIB, folder=tmp_path, spare_bytes=0, clock=clock)


@pytest.fixture
def grower(device: SoftDevice) -> Iterator[Grower]:
    made = Grower()
    device.register(made.pid)
    yield made
    made.close()


def test_a_device_that_has_the_bytes_and_not_the_block_refuses_the_large_allocation(
    device: SoftDevice, grower: Grower, tmp_path: Path
) -> None:
    assert device.read().largest_block_bytes is None
    faults.write(tmp_path, Faults(largest_block_bytes=32 * MIB))
    reading = device.tick()
    assert reading.largest_block_bytes == 32 * MIB
    assert reading.free_bytes is not None and reading.free_bytes > 200 * MIB
    assert grower.grow(64 * MIB) == "MemoryError"
    for _ in range(3):  # the same bytes in pieces
        assert grower.grow(24 * MIB) == "ok"
        device.tick()
    faults.clear(tmp_path)
    device.tick()
    assert grower.grow(64 * MIB) == "ok"
    assert device.read().largest_block_bytes is None


def test_readings_lag_behind_a_load_and_behind_an_unload_and_claim_to_be_new(
    device: SoftDevice, grower: Grower, tmp_path: Path, clock: Clock
) -> None:
    faults.write(tmp_path, Faults(lag_s=1.0))
    before = device.tick().free_bytes
    assert before is not None and grower.grow(100 * MIB) == "ok"
    seen = []
    for step in range(60):
        clock.now += 0.05
        reading = device.tick()
        assert reading.read_at == clock.now
        seen.append(reading.free_bytes)
        if step == 29:
            assert grower.grow(-1) == "ok"
    shown = [before - free if free is not None else None for free in seen]
    assert shown[:19] == [0] * 19 and shown[22:45] == [100 * MIB] * 23 and shown[52:] == [0] * 8


def test_the_limit_holds_while_the_readings_lie(device: SoftDevice, grower: Grower, tmp_path: Path) -> None:
    faults.write(tmp_path, Faults(all_free=True))
    assert device.tick().free_bytes == 512 * MIB
    assert grower.grow(300 * MIB) == "ok"
    assert device.tick().free_bytes == 512 * MIB
    assert grower.grow(300 * MIB) == "MemoryError"
    assert device.used_bytes > 300 * MIB


def test_stale_readings_stand_still_and_their_time_with_them(
    device: SoftDevice, grower: Grower, tmp_path: Path, clock: Clock
) -> None:
    old = device.read()
    faults.write(tmp_path, Faults(stale=True))
    clock.now += 40
    assert grower.grow(100 * MIB) == "ok"
    assert device.tick() == device.read() == old and old.read_at == 100.0
    faults.clear(tmp_path)
    fresh = device.read()
    assert fresh.read_at == 140.0 and fresh.free_bytes is not None and old.free_bytes is not None
    assert old.free_bytes - fresh.free_bytes == 100 * MIB


def test_a_lost_device_kills_its_processes_and_later_ones_until_it_is_back(
    device: SoftDevice, grower: Grower, tmp_path: Path
) -> None:
    faults.write(tmp_path, Faults(lost=True))
    reading = device.tick()
    assert reading.free_bytes is None and reading.total_bytes is None and "is lost" in (reading.reason or "")
    ledger = Ledger("gpu0", declared_bytes=512 * MIB)
    ledger.observe(reading)
    refused = ledger.request("chat", MIB, reading.read_at)
    assert isinstance(refused, Shortfall) and refused.available_bytes == 0
    assert grower.popen.wait(5) == -signal.SIGKILL
    late = Grower()
    try:
        device.register(late.pid)
        assert late.popen.wait(5) == -signal.SIGKILL
    finally:
        late.close()
    assert [e.kind for e in device.events()] == [DeviceEventKind.OFF_THE_BUS]
    faults.clear(tmp_path)
    assert device.tick().free_bytes == 512 * MIB
    assert [e.code for e in device.events()] == ["back"]


def test_a_reset_is_played_once_for_each_number(device: SoftDevice, grower: Grower, tmp_path: Path) -> None:
    faults.write(tmp_path, Faults(reset=1))
    device.tick()
    assert grower.popen.wait(5) == -signal.SIGKILL
    faults.write(tmp_path, Faults(reset=1, lag_s=0.5))
    device.tick()
    assert device.resets == 1
    faults.write(tmp_path, Faults(reset=2))
    device.tick()
    assert device.resets == 2
    assert [e.kind for e in device.events()] == [DeviceEventKind.RESET_DONE] * 2


def test_a_played_neighbour_takes_its_part(device: SoftDevice, grower: Grower, tmp_path: Path) -> None:
    faults.write(tmp_path, Faults(external_bytes=400 * MIB))
    free = device.tick().free_bytes
    assert free is not None and free < 112 * MIB
    assert grower.grow(128 * MIB) == "MemoryError"
    assert device.overshoot_bytes == 0


def test_played_errors_are_told_like_a_drivers(device: SoftDevice, tmp_path: Path) -> None:
    faults.write(tmp_path, Faults(xids=(13, 79)))
    device.tick()
    device.tick()
    told = device.events()
    assert [(e.kind, e.code) for e in told] == [("restart_engine", "xid 13"), ("off_the_bus", "xid 79")]
    assert all("Emulated" in e.sentence for e in told)


def test_what_is_played_is_said_and_a_file_that_is_not_understood_changes_nothing(
    device: SoftDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "Faults" not in device.tells
    faults.write(tmp_path, Faults(all_free=True))
    device.tick()
    assert 'Faults are played on it: {"all_free":true}.' in device.tells
    for wrong in ('{"lag": 1}', '{"lag_s": -1}', "not json", '{"lag_s": 99}'):
        caplog.clear()
        (tmp_path / faults.FILE_NAME).write_text(wrong)
        device.tick()
        assert device.faults == Faults(all_free=True)
        assert "is not understood" in caplog.text
    faults.clear(tmp_path)
    device.tick()
    assert device.faults == Faults() and "Faults" not in device.tells


def test_a_device_without_a_folder_plays_nothing() -> None:
    device = SoftDevice("gpu0", MIB)
    assert device.tick().free_bytes == MIB and device.faults == Faults()


def test_only_a_process_on_it_holds_something(device: SoftDevice, grower: Grower) -> None:
    held = device.held_by(grower.pid)
    assert held is not None and grower.grow(10 * MIB) == "ok"
    assert device.held_by(grower.pid) == held + 10 * MIB
    device.forget(grower.pid)
    assert device.held_by(grower.pid) is None


@contextlib.contextmanager
def _governed(device: SoftDevice) -> Iterator[None]:
    """Tick as the service does."""
    done = threading.Event()

    def govern() -> None:
        while not done.wait(0.05):
            device.tick()

    thread = threading.Thread(target=govern)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_real_model_does_not_load_where_there_are_the_bytes_and_not_the_block(
    tmp_path: Path, libraries: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are one buffer of 92 MiB."""
    for name, value in worker_environment(threads=1).items():
        monkeypatch.setenv(name, value)
    device = SoftDevice("gpu0", 1024 * MIB, folder=tmp_path)
    for largest, loads in ((80 * MIB, False), (None, True)):
        faults.write(tmp_path, Faults(largest_block_bytes=largest))
        with _governed(device), LlamaProcess(libraries, demo_model) as worker:
            assert device.register(worker.process.pid)
            answer = worker.start(use_mmap=False)
            free = device.read().free_bytes
            assert free is not None and free > 400 * MIB
            assert isinstance(answer, Ready) is loads
            if isinstance(answer, StartFailed):
                assert answer.code == "allocation" and "not enough memory for the weights" in answer.message
