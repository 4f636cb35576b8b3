"""An NVIDIA card seen through a driver that answers, refuses, loses the card, or hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pynvml
import pytest

from relevo.core.errors import DeviceError
from relevo.core.ledger import Reading
from relevo.devices.device import Device
from relevo.devices.nvidia import NvidiaDevice, list_cards

from .fakes.nvml import FakeNvml

GIB = 1 << 30


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml(24 * GIB, 20 * GIB, GIB // 2)


@pytest.fixture
def device(nvml: FakeNvml) -> Iterator[NvidiaDevice]:
    watched = NvidiaDevice("gpu0", nvml=nvml, interval_s=0.01)
    watched.start()
    yield watched
    watched.stop()


def _until(device: NvidiaDevice, is_so: Callable[[Reading], bool]) -> Reading:
    deadline = time.monotonic() + 10
    while not is_so(device.read()):
        assert time.monotonic() < deadline, device.read()
        time.sleep(0.005)
    return device.read()


def test_its_figures_keep_what_the_driver_reserves_apart(device: NvidiaDevice) -> None:
    reading = device.read()
    assert isinstance(device, Device)
    assert (reading.total_bytes, reading.free_bytes, reading.driver_reserved_bytes) == (24 * GIB, 20 * GIB, GIB // 2)
    assert reading.used_bytes == 24 * GIB - 20 * GIB - GIB // 2
    assert device.description == "A Card 3000, driver 590.44.01" and device.engine_device == "CUDA0"


def test_changes_are_seen_by_themselves(device: NvidiaDevice, nvml: FakeNvml) -> None:
    nvml.memory.free = 3 * GIB
    assert _until(device, lambda r: r.free_bytes == 3 * GIB).reason is None


def test_an_older_driver_is_asked_in_the_older_way(device: NvidiaDevice, nvml: FakeNvml) -> None:
    nvml.old_driver = True
    assert _until(device, lambda r: r.driver_reserved_bytes == 0).free_bytes == 20 * GIB


def test_a_card_without_memory_of_its_own_is_unknown_and_says_what_to_do(device: NvidiaDevice, nvml: FakeNvml) -> None:
    nvml.fault = pynvml.NVML_ERROR_NOT_SUPPORTED
    reading = _until(device, lambda r: r.free_bytes is None)
    assert reading.reason is not None and "Declare total_bytes" in reading.reason
    assert device.fault is None


@pytest.mark.parametrize("number", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
def test_a_lost_card_is_unknown_and_the_breaker_can_see_why(device: NvidiaDevice, nvml: FakeNvml, number: int) -> None:
    nvml.fault = number
    reading = _until(device, lambda r: r.free_bytes is None)
    assert device.fault == "device_lost"
    assert reading.reason is not None and "gone or needs a reset" in reading.reason
    nvml.fault = None
    assert _until(device, lambda r: r.free_bytes == 20 * GIB) and device.fault is None
    assert nvml.opened >= 2  # the old handle was worth nothing


def test_a_driver_that_hangs_makes_the_card_unknown_and_blocks_nobody(nvml: FakeNvml) -> None:
    now = [100.0]
    device = NvidiaDevice("gpu0", nvml=nvml, interval_s=0.01, clock=lambda: now[0])
    device.start()
    nvml.hang = threading.Event()
    try:
        now[0] = 110.0
        deadline = time.monotonic() + 5
        reading = device.read()
        while reading.free_bytes is not None and time.monotonic() < deadline:
            now[0] += 10  # one answer may still have been under way
            time.sleep(0.01)
            reading = device.read()
        assert reading.free_bytes is None and reading.reason is not None and "has not answered" in reading.reason
        assert reading.total_bytes == 24 * GIB
        start = time.monotonic()
        device.read()
        assert time.monotonic() - start < 0.5
    finally:
        nvml.hang.set()
        device.stop()


def test_a_start_that_cannot_work_says_why(nvml: FakeNvml) -> None:
    with pytest.raises(DeviceError, match="no card with this number"):
        _start_and_stop(NvidiaDevice("gpu1", 1, nvml=nvml, interval_s=0.01))
    nvml.fault = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(DeviceError, match="driver is not usable"):
        _start_and_stop(NvidiaDevice("gpu0", nvml=nvml, interval_s=0.01))
    nvml.fault, nvml.hang = None, threading.Event()
    device = NvidiaDevice("gpu0", nvml=nvml, interval_s=0.01)
    with pytest.raises(DeviceError, match="did not answer"):
        device.start(wait_s=0.1)
    nvml.hang.set()
    device.stop()


def test_every_card_is_listed(nvml: FakeNvml) -> None:
    assert [(c.index, c.card, c.driver) for c in list_cards(nvml)] == [(0, "A Card 3000", "590.44.01")]
    assert nvml.closed == 1
    nvml.fault = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    with pytest.raises(DeviceError, match="restart the machine"):
        list_cards(nvml)


def _start_and_stop(device: NvidiaDevice) -> None:
    try:
        device.start()
    finally:
        device.stop()
