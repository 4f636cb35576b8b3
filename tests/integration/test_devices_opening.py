"""Which reader watches a card that the engine sees, and which card that is."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pynvml
import pytest

from relevo.core.errors import DeviceError
from relevo.core.leases.lease import Lease, Shortfall
from relevo.core.leases.ledger import Ledger
from relevo.devices.device import DeviceKind
from relevo.devices.ggml import EngineDevice, EngineDeviceFacts, EngineFacts
from relevo.devices.nvidia import NvidiaDevice
from relevo.devices.opening import open_card

from .fakes.nvml import FakeNvml

GIB = 1 << 30
CUDA = EngineDeviceFacts("CUDA0", "A Card 3000", "gpu", "CUDA", 24 * GIB, 20 * GIB)


def ask() -> EngineFacts:
    raise AssertionError("the engine was asked")


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml(24 * GIB, 20 * GIB, GIB // 2)


def opened(
    nvml: FakeNvml,
    card: EngineDeviceFacts = CUDA,
    *,
    declared: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> NvidiaDevice | EngineDevice:
    device = open_card(
        "gpu0",
        card,
        ask,
        declared_bytes=declared,
        environment=environment or {},
        nvml=nvml,
        root=Path("/nowhere"),
        wait_s=2,
    )
    device.stop()
    return device


def test_an_nvidia_card_is_watched_through_its_makers_library(nvml: FakeNvml) -> None:
    device = opened(nvml)
    assert isinstance(device, NvidiaDevice) and device.read().free_bytes == 20 * GIB


def test_another_makers_card_is_watched_through_the_engine(nvml: FakeNvml) -> None:
    vulkan = EngineDeviceFacts("Vulkan0", "A card", "gpu", "Vulkan", 8 * GIB, 6 * GIB)
    device = opened(nvml, vulkan)
    assert isinstance(device, EngineDevice) and device.kind is DeviceKind.VULKAN
    assert nvml.opened == 0


def test_the_engines_first_card_is_the_one_that_is_visible_to_it(nvml: FakeNvml) -> None:
    nvml.divide(2)
    device = opened(nvml, environment={"CUDA_VISIBLE_DEVICES": "MIG-2"})
    assert isinstance(device, NvidiaDevice) and device.facts is not None and device.facts.uuid == "MIG-2"
    assert device.engine_device == "CUDA0"
    with pytest.raises(DeviceError, match="no such card"):  # a second card that this machine does not have
        opened(FakeNvml(24 * GIB, 20 * GIB, 0), environment={"CUDA_VISIBLE_DEVICES": "1"})


def test_an_address_is_surer_than_a_number(nvml: FakeNvml) -> None:
    card = EngineDeviceFacts("CUDA3", "A Card 3000", "gpu", "CUDA", 24 * GIB, 20 * GIB, "0000:01:00.0")
    device = opened(nvml, card)
    assert isinstance(device, NvidiaDevice) and device.facts is not None
    assert device.facts.pci_address == "0000:01:00.0" and device.engine_device == "CUDA3"


def test_without_the_library_only_a_declared_budget_lets_the_card_be_used(nvml: FakeNvml) -> None:
    nvml.fault = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    with pytest.raises(DeviceError, match="not usable"):
        opened(nvml)
    device = opened(nvml, declared=8 * GIB)
    assert isinstance(device, EngineDevice) and device.kind is DeviceKind.CUDA
    ledger = Ledger("gpu0", declared_bytes=8 * GIB)
    ledger.observe(device.read())
    assert isinstance(ledger.request("chat", 7 * GIB, 0.0), Lease)
    assert isinstance(ledger.request("chat", 2 * GIB, 0.0), Shortfall)


def test_a_driver_that_hangs_at_the_start_is_said_to(nvml: FakeNvml) -> None:
    nvml.hang = threading.Event()
    try:
        with pytest.raises(DeviceError, match=r"did not answer within 0\.1 s"):
            open_card("gpu0", CUDA, ask, environment={}, nvml=nvml, wait_s=0.1)
    finally:
        nvml.hang.set()


def test_a_declared_budget_is_no_way_round_a_card_that_is_lost_or_divided(nvml: FakeNvml) -> None:
    nvml.divide(1)
    with pytest.raises(DeviceError, match="divided into slices"):
        opened(nvml, declared=8 * GIB)
    lost = FakeNvml(24 * GIB, 20 * GIB, 0)
    lost.refused["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_GPU_IS_LOST
    device = opened(lost, declared=8 * GIB)
    assert isinstance(device, NvidiaDevice) and device.fault == "device_lost"
    ledger = Ledger("gpu0", declared_bytes=8 * GIB)
    ledger.observe(device.read())
    assert isinstance(ledger.request("chat", 1 * GIB, device.read().read_at), Shortfall)


def test_a_card_that_shares_the_machines_memory_is_bounded_by_what_the_machine_has(nvml: FakeNvml) -> None:
    nvml.refused["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    device = opened(nvml, declared=1 << 50)
    assert isinstance(device, NvidiaDevice)
    reading = device.read()
    assert reading.free_at_most_bytes is not None and "Declare" not in (reading.reason or "")
    ledger = Ledger("gpu0", declared_bytes=1 << 50)
    ledger.observe(reading)
    assert ledger.available_bytes is not None and ledger.available_bytes <= reading.free_at_most_bytes
