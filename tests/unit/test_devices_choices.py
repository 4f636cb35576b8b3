"""What is decided from a machine's facts: which libraries, which CPU library stands in, how many threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from relevo.core.errors import DeviceError, LibraryError
from relevo.devices.host import default_threads, free_cores, usable_cores
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


def test_a_busy_machine_leaves_a_worker_at_least_half_its_cores() -> None:
    usable = usable_cores()
    assert free_cores(load=0.0) == int(usable)
    assert free_cores(load=1000.0) == max(1, int(usable // 2))
    assert 1 <= default_threads() <= usable
