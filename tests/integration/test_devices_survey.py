"""What `relevo doctor` is told of a machine's devices, from recorded trees and a driver that answers or hangs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pynvml

from relevo.devices.survey import survey

from .fakes.nvml import FakeNvml

GIB = 1 << 30


def _machine(root: Path) -> None:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: {32 << 20} kB\nMemAvailable: {20 << 20} kB\n")
    card = root / "sys/class/drm/card1/device"
    card.mkdir(parents=True)
    (card / "uevent").write_text("PCI_SLOT_NAME=0000:03:00.0\n")
    (card / "mem_info_vram_total").write_text(str(16 * GIB))
    (card / "mem_info_vram_used").write_text(str(4 * GIB))


def test_each_device_says_what_is_known_of_it_and_what_is_not(tmp_path: Path) -> None:
    _machine(tmp_path)
    host, nvidia, amd = survey(root=tmp_path, nvml=FakeNvml(24 * GIB, 20 * GIB, GIB // 2))
    assert (host.name, nvidia.name, amd.name) == ("host", "nvidia 0", "amd 0")
    assert host.known and "20.0 GiB of 32.0 GiB free" in host.sentence
    assert nvidia.known and nvidia.sentence.startswith("A Card 3000, driver 590.44.01: 20.0 GiB of 24.0 GiB free. The")
    assert "it does not tell whether free memory is in one piece" in nvidia.sentence
    assert amd.known and amd.sentence.startswith("12.0 GiB of 16.0 GiB free, at 0000:03:00.0. The kernel tells")


def test_a_card_that_shares_the_machines_memory_says_what_to_declare(tmp_path: Path) -> None:
    nvml = FakeNvml(24 * GIB, 20 * GIB, 0)
    nvml.refused["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    card = next(told for told in survey(root=tmp_path, nvml=nvml) if told.name == "nvidia 0")
    assert card.known is False and "Declare total_bytes" in card.sentence


def test_a_divided_card_names_its_slices(tmp_path: Path) -> None:
    nvml = FakeNvml(24 * GIB, 20 * GIB, 0)
    nvml.divide(1)
    card = next(told for told in survey(root=tmp_path, nvml=nvml) if told.name == "nvidia 0")
    assert card.known is False and "MIG-1" in card.sentence


def test_a_driver_that_hangs_is_a_finding_and_hangs_nobody(tmp_path: Path) -> None:
    nvml = FakeNvml(24 * GIB, 20 * GIB, 0)
    nvml.hang = threading.Event()
    began = time.monotonic()
    try:
        told = survey(root=tmp_path, nvml=nvml, timeout_s=0.2)
        assert time.monotonic() - began < 5
        assert next(t for t in told if t.name == "nvidia").known is None
    finally:
        nvml.hang.set()


def test_without_a_driver_there_is_nothing_to_tell_of_its_cards(tmp_path: Path) -> None:
    nvml = FakeNvml(24 * GIB, 20 * GIB, 0)
    nvml.fault = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert [told.name for told in survey(root=tmp_path, nvml=nvml)] == ["host"]
