"""An NVIDIA card seen through a driver that answers, refuses, loses the card, or hangs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import pynvml
import pytest

from relevo.core.errors import DeviceError
from relevo.core.leases.reading import Reading
from relevo.devices.device import Device
from relevo.devices.events import DeviceEvent, DeviceEventKind
from relevo.devices.nvidia import NvidiaDevice, list_cards
from relevo.devices.nvml import RecoveryAction, short_pci, visible_card
from relevo.devices.xids import XIDS, xid

from .fakes.nvml import FakeNvml

GIB = 1 << 30


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml(24 * GIB, 20 * GIB, GIB // 2)


@pytest.fixture
def device(nvml: FakeNvml) -> Iterator[NvidiaDevice]:
    watched = NvidiaDevice("gpu0", nvml=nvml, interval_s=0.01, retry_s=0.01)
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
    assert device.fault is None and device.events() == ()
    assert reading.free_at_most_bytes is not None and 0 < reading.free_at_most_bytes < 1 << 50
    assert "it is the machine's" in device.tells


@pytest.mark.parametrize(
    ("number", "fault", "kind", "words"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, "device_lost", DeviceEventKind.OFF_THE_BUS, "card is gone"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, "reset_required", DeviceEventKind.RESET_NEEDED, "needs a reset"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "driver", DeviceEventKind.DRIVER_CHANGED, "was updated"),
    ],
)
def test_a_lost_card_is_unknown_and_the_breaker_can_see_why(
    device: NvidiaDevice, nvml: FakeNvml, number: int, fault: str, kind: DeviceEventKind, words: str
) -> None:
    nvml.fault = number
    reading = _until(device, lambda r: r.free_bytes is None)
    assert device.fault == fault
    assert reading.reason is not None and words in reading.reason
    assert reading.free_at_most_bytes == 0 and device.tells.startswith("Nothing is told of it now.")
    told = _events(device, 1)
    assert [e.kind for e in told] == [kind] and told[0].kind.fault is not None and words in told[0].sentence
    for _ in range(3):  # told once, however long it lasts
        seen_at = device.read().read_at
        _until(device, lambda r, seen_at=seen_at: r.read_at > seen_at)
    assert device.events() == ()
    nvml.fault = None
    assert _until(device, lambda r: r.free_bytes == 20 * GIB) and device.fault is None
    assert nvml.opened >= 2  # the old handle was worth nothing
    back = _events(device, 1)
    assert [e.kind for e in back] == [DeviceEventKind.INFORMATION] and "answers" in back[0].sentence
    device.stop()
    assert nvml.opened == nvml.closed


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
        assert [e.kind for e in device.events()] == [DeviceEventKind.SILENT]
        assert device.events() == ()  # told once, not each time
        start = time.monotonic()
        device.read()
        assert time.monotonic() - start < 0.5
    finally:
        nvml.hang.set()
        device.stop()


def test_a_start_that_cannot_work_says_why(nvml: FakeNvml) -> None:
    with pytest.raises(DeviceError, match="no such card"):
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


@pytest.mark.parametrize(("number", "kind"), [(13, "restart_engine"), (79, "off_the_bus"), (119, "reset_needed")])
def test_an_xid_is_told_with_what_it_asks_for(device: NvidiaDevice, nvml: FakeNvml, number: int, kind: str) -> None:
    nvml.xid(number)
    (event,) = _events(device, 1)
    assert (event.kind, event.code) == (kind, f"xid {number}") and f"Xid {number}" in event.sentence
    assert device.events() == ()


def test_several_xids_at_once_are_all_told_in_order(device: NvidiaDevice, nvml: FakeNvml) -> None:
    for number in (31, 45, 62):
        nvml.xid(number)
    assert [e.code for e in _events(device, 3)] == ["xid 31", "xid 45", "xid 62"]


def test_an_xid_that_is_not_known_is_suspect_unless_the_driver_says_what_it_needs(
    device: NvidiaDevice, nvml: FakeNvml
) -> None:
    nvml.xid(9999)
    assert [e.kind for e in _events(device, 1)] == [DeviceEventKind.SUSPECT]
    nvml.action = pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET
    nvml.xid(9998)
    told = _events(device, 2)
    assert [(e.kind, e.code) for e in told] == [("reset_needed", "recovery gpu_reset"), ("reset_needed", "xid 9998")]
    assert device.recovery_action is RecoveryAction.GPU_RESET


def test_a_changed_recovery_action_is_told_once_and_gone_when_it_is_none_again(
    device: NvidiaDevice, nvml: FakeNvml
) -> None:
    assert device.recovery_action is RecoveryAction.NONE
    nvml.action = pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET
    nvml.xid(154)
    (event,) = _events(device, 1)
    assert event.kind is DeviceEventKind.RESET_NEEDED and "reset" in event.sentence
    nvml.action = pynvml.NVML_GPU_RECOVERY_ACTION_NONE
    nvml.happen(pynvml.nvmlEventTypeGpuRecoveryAction)
    (event,) = _events(device, 1)
    assert event.kind is DeviceEventKind.INFORMATION and event.kind.fault is None
    nvml.action = 4711
    nvml.xid(154)
    assert [e.code for e in _events(device, 1)] == ["recovery other"]


def test_a_driver_that_does_not_tell_the_recovery_action_leaves_it_unknown(nvml: FakeNvml) -> None:
    nvml.refused["nvmlDeviceGetFieldValues"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    with _watched(nvml) as device:
        assert device.recovery_action is None and "does not tell" in device.tells
        nvml.xid(154)
        assert [e.kind for e in _events(device, 1)] == [DeviceEventKind.RECOVERY_CHANGED]


@pytest.mark.parametrize(
    "missing",
    [
        "nvmlDeviceGetFieldValues",
        "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        "nvmlEventTypeGpuRecoveryAction",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceIsMigDeviceHandle",
        "nvmlEventSetCreate",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetPciInfo",
        "nvmlMemory_v2",
        "NVML_ERROR_GPU_NOT_FOUND",
        "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    ],
)
def test_what_an_older_library_lacks_is_a_figure_not_known_and_no_error(nvml: FakeNvml, missing: str) -> None:
    nvml.missing.add(missing)
    with _watched(nvml) as device:
        assert device.read().free_bytes == 20 * GIB
        assert device.tells.startswith("The driver tells total")


def test_where_errors_are_not_told_the_figures_still_are(nvml: FakeNvml) -> None:
    nvml.supported_events = 0  # as on Windows
    with _watched(nvml) as device:
        nvml.memory.free = GIB
        assert _until(device, lambda r: r.free_bytes == GIB)
        assert "it does not tell whether free memory is in one piece, errors as they happen" in device.tells


def test_a_driver_that_stops_telling_errors_goes_on_telling_figures(device: NvidiaDevice, nvml: FakeNvml) -> None:
    nvml.refused["nvmlEventSetWait"] = pynvml.NVML_ERROR_UNKNOWN
    nvml.memory.free = GIB
    assert _until(device, lambda r: r.free_bytes == GIB).reason is None
    assert device.fault is None


def test_a_process_share_is_a_hint_only_where_it_is_told_of_processes_seen_here(
    device: NvidiaDevice, nvml: FakeNvml
) -> None:
    me = os.getpid()
    assert device.held_by(me) is None  # not on the list: perhaps the driver hides it
    nvml.processes = [(me, 3 * GIB)]
    _until(device, lambda _: device.held_by(me) == 3 * GIB)
    for useless in ([(me, None)], [(me, 2**64 - 1)], [(me, GIB), (2**22 + 7, GIB)]):
        nvml.processes = [(me, 3 * GIB)]
        _until(device, lambda _: device.held_by(me) == 3 * GIB)
        nvml.processes = useless
        _until(device, lambda _: device.held_by(me) is None)
    nvml.processes = [(me, GIB)]
    _until(device, lambda _: device.held_by(me) == GIB)
    nvml.refused["nvmlDeviceGetComputeRunningProcesses"] = pynvml.NVML_ERROR_NO_PERMISSION
    _until(device, lambda _: device.held_by(me) is None)


def test_a_divided_card_is_refused_and_names_its_slices(nvml: FakeNvml) -> None:
    nvml.divide(2)
    with pytest.raises(DeviceError, match=r"divided into slices \(MIG\).*MIG-1, MIG-2"):
        _start_and_stop(NvidiaDevice("gpu0", nvml=nvml, interval_s=0.01))
    assert nvml.opened == nvml.closed


def test_a_slice_has_its_own_figures_and_hears_what_concerns_it(nvml: FakeNvml) -> None:
    nvml.divide(2)
    with _watched(nvml, which="MIG-2") as device:
        assert device.facts is not None and device.facts.is_slice and device.facts.uuid == "MIG-2"
        assert nvml.registered is not None and nvml.registered[0] is nvml.card  # a slice cannot be listened to
        nvml.xid(31, instance=1)  # the neighbour's
        nvml.xid(13, instance=2)
        nvml.xid(79)  # everybody's
        assert [e.code for e in _events(device, 2)] == ["xid 13", "xid 79"]


def test_a_card_is_found_by_number_address_uuid_or_its_beginning(nvml: FakeNvml) -> None:
    for which in (0, "0000:01:00.0", "GPU-1", "gpu-"):
        with _watched(nvml, which=which) as device:
            assert device.facts is not None and device.facts.uuid == "GPU-1"
            assert device.facts.pci_address == "0000:01:00.0"
    with pytest.raises(DeviceError, match="0 cards have a UUID that begins with GPU-9"):
        _start_and_stop(NvidiaDevice("gpu0", which="GPU-9", nvml=nvml))


def test_the_engines_number_follows_what_is_visible_to_it() -> None:
    assert visible_card(1, None) == 1 and visible_card(1, "") == 1
    assert visible_card(0, "2,3") == 2 and visible_card(1, "2, GPU-77") == "GPU-77"
    assert visible_card(0, "MIG-5") == "MIG-5" and visible_card(4, "1") == 4
    assert short_pci("00000000:C1:00.0") == "0000:c1:00.0" and short_pci("0000:01:00.0") == "0000:01:00.0"


def test_every_known_xid_says_what_happened_and_what_it_means() -> None:
    for number, known in XIDS.items():
        assert known.number == number and str(number) in known.sentence and known.kind.sentence in known.sentence
    assert {XIDS[n].kind for n in (8, 11, 13, 31, 32, 39, 40, 41, 69, 94, 109)} == {DeviceEventKind.RESTART_ENGINE}
    needs_reset = (46, 48, 62, 64, 95, 110, 119, 120, 136, 140, 143, 155, 156, 158)
    assert {XIDS[n].kind for n in needs_reset} == {DeviceEventKind.RESET_NEEDED}
    assert {XIDS[n].kind for n in (43, 45, 63, 92, 93)} == {DeviceEventKind.INFORMATION}
    assert (xid(79).kind, xid(54).kind, xid(154).kind) == ("off_the_bus", "power", "recovery_changed")
    assert xid(4242).kind is DeviceEventKind.SUSPECT


@contextlib.contextmanager
def _watched(nvml: FakeNvml, which: int | str | None = None) -> Iterator[NvidiaDevice]:
    device = NvidiaDevice("gpu0", which=which, nvml=nvml, interval_s=0.01, retry_s=0.01)
    device.start()
    try:
        yield device
    finally:
        device.stop()


def _events(device: NvidiaDevice, count: int) -> list[DeviceEvent]:
    deadline = time.monotonic() + 10
    found: list[DeviceEvent] = []
    while len(found) < count:
        found += device.events()
        assert time.monotonic() < deadline, found
        time.sleep(0.002)
    return found


def _start_and_stop(device: NvidiaDevice) -> None:
    try:
        device.start()
    finally:
        device.stop()
