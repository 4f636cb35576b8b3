"""What is decided from a machine's facts: which libraries, which CPU library stands in, how many threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from relevo.core.errors import DeviceError, LibraryError
from relevo.devices.device import Device, DeviceKind
from relevo.devices.ggml import EngineDevice, EngineDeviceFacts, EngineFacts, amd_memory, kind_of
from relevo.devices.host import HostDevice, cgroup_memory, default_threads, free_cores, usable_cores
from relevo.devices.variants import STAND_INS, cpu_variant
from relevo.setup.libraries import SETS, choose, fitting_sets
from relevo.setup.machine import Machine, look_at_machine, nvidia_driver

MIB = 1 << 20
LINUX = {"system": "linux", "processor": "x86_64", "glibc": (2, 36)}
ZEN4 = ["zen4", "cooperlake", "icelake", "skylakex", "haswell", "sandybridge", "sse42", "x64"]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "linux-x64"),
        ({"nvidia_driver": 580}, "linux-x64-cuda"),
        ({"nvidia_driver": 595, "cards": frozenset({"nvidia"})}, "linux-x64-cuda"),
        ({"nvidia_driver": 579}, "linux-x64-cuda12"),
        ({"nvidia_driver": 525}, "linux-x64-cuda12"),
        ({"nvidia_driver": 470}, "linux-x64"),
        ({"cards": frozenset({"amd"}), "vulkan": True}, "linux-x64-vulkan"),
        ({"cards": frozenset({"intel"}), "vulkan": True}, "linux-x64-vulkan"),
        ({"cards": frozenset({"amd"}), "vulkan": False}, "linux-x64"),
        ({"cards": frozenset({"nvidia"}), "vulkan": True}, "linux-x64"),
        ({"cards": frozenset({"amd", "nvidia"}), "vulkan": True, "nvidia_driver": 550}, "linux-x64-cuda12"),
        ({"processor": "aarch64"}, "linux-arm64"),
    ],
)
def test_libraries_are_chosen_by_what_the_machine_has(facts: dict[str, object], expected: str) -> None:
    assert choose(Machine(**{**LINUX, **facts})).name == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "facts", [{"system": "darwin"}, {"system": "win32"}, {"glibc": None}, {"glibc": (2, 31)}, {"processor": "riscv64"}]
)
def test_where_no_set_fits_the_error_says_what_to_do(facts: dict[str, object]) -> None:
    with pytest.raises(LibraryError, match=r"relevo\.setup --build"):
        choose(Machine(**{**LINUX, **facts}))  # type: ignore[arg-type]


def test_a_machine_with_a_card_can_still_use_the_sets_for_less() -> None:
    names = [s.name for s in fitting_sets(Machine(**LINUX, nvidia_driver=590))]  # type: ignore[arg-type]
    assert names == ["linux-x64-cuda", "linux-x64-cuda12", "linux-x64"]


def test_every_part_of_every_set_is_pinned() -> None:
    for library_set in SETS.values():
        for part in library_set.parts:
            pin = getattr(part, "integrity", None) or getattr(part, "sha256", "")
            assert pin.startswith("sha512-") or len(pin) == 64
            assert part.members and part.version[0].isdigit()


def test_the_driver_is_read_from_the_kernel(tmp_path: Path) -> None:
    assert nvidia_driver(tmp_path) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    version = tmp_path / "proc/driver/nvidia/version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 13.2"
    )
    assert nvidia_driver(tmp_path) == 580
    vendor = tmp_path / "sys/class/drm/renderD128/device"
    vendor.mkdir(parents=True)
    (vendor / "vendor").write_text("0x10de\n")
    machine = look_at_machine(tmp_path)
    assert machine.cards == {"nvidia"} and machine.nvidia_driver == 580


def test_the_stand_in_computes_with_other_instructions_than_the_twin() -> None:
    assert cpu_variant("zen4", ZEN4) == "haswell"
    assert cpu_variant("haswell", ["haswell", "ivybridge", "sandybridge", "sse42", "x64"]) == "sandybridge"
    assert cpu_variant("x64", ["x64"], equal_arithmetic=True) == "x64"
    assert cpu_variant(None, []) is None
    with pytest.raises(DeviceError, match="equal_arithmetic = true"):
        cpu_variant("x64", ["x64"])
    for best, others in STAND_INS.items():
        assert best not in others


def test_inside_a_container_its_limit_counts(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path) is None
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert cgroup_memory(tmp_path) is None
    (group / "memory.max").write_text(f"{512 * MIB}\n")
    (group / "memory.current").write_text(f"{400 * MIB}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {100 * MIB}\n")
    assert cgroup_memory(tmp_path) == (512 * MIB, 212 * MIB)
    reading = HostDevice(root=tmp_path, clock=lambda: 7.0).read()
    assert reading.total_bytes == 512 * MIB and reading.read_at == 7.0
    assert reading.free_bytes is not None and reading.free_bytes <= 212 * MIB
    (group / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 0.5
    assert free_cores(tmp_path, load=0.0) == default_threads(tmp_path, load=0.0) == 1


def test_a_busy_machine_leaves_a_worker_at_least_half_its_cores() -> None:
    usable = usable_cores()
    assert free_cores(load=0.0) == int(usable)
    assert free_cores(load=1000.0) == max(1, int(usable // 2))
    assert 1 <= default_threads() <= usable


def test_pressure_is_read_where_the_kernel_tells_it(tmp_path: Path) -> None:
    host = HostDevice(root=tmp_path)
    assert isinstance(host, Device)
    assert host.pressure() is None
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/pressure/memory").write_text(
        "some avg10=12.50 avg60=3.00 avg300=1.00 total=9\nfull avg10=5.25 avg60=1.00 avg300=0.10 total=4\n"
    )
    pressure = host.pressure()
    assert pressure is not None and (pressure.some_percent, pressure.full_percent) == (12.5, 5.25)


def _card(name: str = "Vulkan0", free: int | None = 3 * MIB, total: int | None = 8 * MIB) -> EngineDeviceFacts:
    return EngineDeviceFacts(name, "A card", "gpu", name.rstrip("0123456789"), total, free)


def _facts(*cards: EngineDeviceFacts) -> EngineFacts:
    return EngineFacts("llama.cpp", None, (), cards)


def test_a_card_is_read_through_the_engine(tmp_path: Path) -> None:
    seen = [_facts(_card(free=2 * MIB)), _facts()]
    device = EngineDevice("gpu0", _card(), lambda: seen.pop(0), clock=lambda: 0.0, root=tmp_path)
    assert isinstance(device, Device)
    assert device.kind is DeviceKind.VULKAN and device.read().free_bytes == 3 * MIB
    assert device.refresh().free_bytes == 2 * MIB
    gone = device.refresh()
    assert gone.free_bytes is None and gone.reason is not None and "does not see Vulkan0 any more" in gone.reason


def test_a_driver_that_calls_everything_free_is_not_believed(tmp_path: Path) -> None:
    card = _card(free=8 * MIB)
    reading = EngineDevice("gpu0", card, _facts, root=tmp_path).read()
    assert reading.free_bytes is None and reading.total_bytes == 8 * MIB
    assert reading.reason is not None and "Declare total_bytes" in reading.reason
    declared = EngineDevice("gpu0", card, _facts, declared_bytes=4 * MIB, root=tmp_path).read()
    assert declared.reason is not None and "Declare" not in declared.reason


def test_old_figures_of_an_engine_are_not_shown_as_new(tmp_path: Path) -> None:
    now = [0.0]
    device = EngineDevice("gpu0", _card(), _facts, clock=lambda: now[0], root=tmp_path)
    now[0] = 61.0
    assert device.read().free_bytes is None


def test_an_amd_cards_memory_comes_from_the_kernel(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/drm/card1/device"
    folder.mkdir(parents=True)
    (folder / "mem_info_vram_total").write_text(str(16 << 30))
    (folder / "mem_info_vram_used").write_text(str(5 << 30))
    assert amd_memory(tmp_path) == (16 << 30, 11 << 30)
    device = EngineDevice("gpu0", _card("ROCm0", None, None), _facts, root=tmp_path)
    assert device.read().free_bytes == 11 << 30
    other = tmp_path / "sys/class/drm/card2/device"
    other.mkdir(parents=True)
    for name in ("mem_info_vram_total", "mem_info_vram_used"):
        (other / name).write_text("1")
    assert amd_memory(tmp_path) is None  # which of two it is cannot be told


def test_kinds_follow_the_engines_backends() -> None:
    assert [kind_of(b) for b in ("Vulkan", "ROCm", "MTL", "CUDA")] == [
        DeviceKind.VULKAN,
        DeviceKind.ROCM,
        DeviceKind.METAL,
        DeviceKind.CUDA,
    ]
    with pytest.raises(DeviceError, match="SYCL"):
        kind_of("SYCL")
