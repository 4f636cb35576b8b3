"""Cards through the engine and through the kernel: whose word is taken for what, and what is only a bound."""

from __future__ import annotations

import errno
import socket
import sys
from pathlib import Path

import pytest

from relevo.core.errors import DeviceError
from relevo.devices.amd import AmdCard, amd_cards, find_amd_card
from relevo.devices.device import Device, DeviceKind
from relevo.devices.events import DeviceEventKind
from relevo.devices.ggml import EngineDevice, EngineDeviceFacts, EngineFacts, kind_of
from relevo.devices.uevents import CardWatch, card_event, parse

MIB = 1 << 20
GIB = 1 << 30


def _card(
    name: str = "Vulkan0",
    free: int | None = 3 * MIB,
    total: int | None = 8 * MIB,
    *,
    kind: str = "gpu",
    pci: str | None = None,
) -> EngineDeviceFacts:
    return EngineDeviceFacts(name, "A card", kind, name.rstrip("0123456789"), total, free, pci)


def _facts(*cards: EngineDeviceFacts) -> EngineFacts:
    return EngineFacts("llama.cpp", None, (), cards)


def _meminfo(root: Path, available: int) -> None:
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {available >> 9} kB\nMemAvailable: {available >> 10} kB\n")


def _amd(root: Path, number: int, pci: str, **figures: int) -> Path:
    folder = root / f"sys/class/drm/card{number}/device"
    folder.mkdir(parents=True)
    (folder / "uevent").write_text(f"DRIVER=amdgpu\nPCI_CLASS=30000\nPCI_SLOT_NAME={pci}\nMODALIAS=x\n")
    for name, value in figures.items():
        (folder / f"mem_info_{name}").write_text(f"{value}\n")
    return folder


# -- the engine's word


def test_a_card_is_read_through_the_engine(tmp_path: Path) -> None:
    seen = [_facts(_card(free=2 * MIB)), _facts(), _facts()]
    device = EngineDevice("gpu0", _card(), lambda: seen.pop(0), clock=lambda: 0.0, root=tmp_path)
    assert isinstance(device, Device)
    assert device.kind is DeviceKind.VULKAN and device.read().free_bytes == 3 * MIB
    assert device.refresh().free_bytes == 2 * MIB
    gone = device.refresh()
    assert gone.free_bytes is None and gone.reason is not None and "does not see Vulkan0 any more" in gone.reason
    assert gone.free_at_most_bytes == 0
    device.refresh()
    assert [e.kind for e in device.events()] == [DeviceEventKind.OFF_THE_BUS]
    assert device.held_by(1) is None and "asked every" in EngineDevice("g", _card(), _facts, root=tmp_path).tells


@pytest.mark.parametrize("free", [8 * MIB, 9 * MIB])
def test_a_driver_that_calls_everything_free_gives_only_a_bound(tmp_path: Path, free: int) -> None:
    card = _card(free=free)
    device = EngineDevice("gpu0", card, _facts, root=tmp_path)
    reading = device.read()
    assert reading.free_bytes is None and reading.total_bytes == 8 * MIB and reading.free_at_most_bytes == free
    assert reading.reason is not None and "Declare total_bytes" in reading.reason
    assert "only an upper bound" in device.tells
    declared = EngineDevice("gpu0", card, _facts, declared_bytes=4 * MIB, root=tmp_path).read()
    assert declared.reason is not None and "Declare" not in declared.reason


def test_old_figures_of_an_engine_are_not_shown_as_new(tmp_path: Path) -> None:
    now = [0.0]
    device = EngineDevice("gpu0", _card(), _facts, clock=lambda: now[0], root=tmp_path)
    now[0] = 61.0
    reading = device.read()
    assert reading.free_bytes is None and reading.reason is not None and "for 61 s" in reading.reason


def test_an_engine_that_cannot_be_asked_makes_the_card_unknown(tmp_path: Path) -> None:
    def ask() -> EngineFacts:
        raise DeviceError("A driver hangs.")

    device = EngineDevice("gpu0", _card(), ask, root=tmp_path)
    reading = device.refresh()
    assert reading.free_bytes is None and reading.reason is not None and reading.reason.startswith("A driver hangs.")


def test_metals_limit_is_the_engines_and_what_is_free_the_systems(tmp_path: Path) -> None:
    """Metal counts only the process that asks, so its own figure says nearly everything is free."""
    card = _card("MTL0", free=11 * GIB, total=11 * GIB)
    _meminfo(tmp_path, 4 * GIB)
    device = EngineDevice("gpu0", card, _facts, root=tmp_path)
    reading = device.read()
    assert device.kind is DeviceKind.METAL
    assert (reading.total_bytes, reading.free_bytes, reading.reason) == (11 * GIB, 4 * GIB, None)
    _meminfo(tmp_path, 14 * GIB)
    assert EngineDevice("gpu0", card, _facts, root=tmp_path).read().free_bytes == 11 * GIB
    assert "swapped out rather than refused" in device.tells


def test_kinds_follow_the_engines_backends() -> None:
    assert [kind_of(b) for b in ("Vulkan", "ROCm", "MTL", "CUDA")] == [
        DeviceKind.VULKAN,
        DeviceKind.ROCM,
        DeviceKind.METAL,
        DeviceKind.CUDA,
    ]
    with pytest.raises(DeviceError, match="SYCL"):
        kind_of("SYCL")


def test_a_cuda_card_is_never_asked_through_the_engine_because_asking_takes_its_memory(tmp_path: Path) -> None:
    def ask() -> EngineFacts:
        raise AssertionError("asked")

    device = EngineDevice("gpu0", _card("CUDA0", free=20 * GIB, total=24 * GIB), ask, root=tmp_path)
    device.start()
    reading = device.refresh()
    assert (reading.total_bytes, reading.free_bytes) == (24 * GIB, None)
    assert reading.reason is not None and "Declare total_bytes" in reading.reason
    device.stop()


# -- AMD


def test_an_amd_cards_memory_comes_from_the_kernel_at_every_reading(tmp_path: Path) -> None:
    folder = _amd(tmp_path, 1, "0000:03:00.0", vram_total=16 * GIB, vram_used=5 * GIB)
    device = EngineDevice("gpu0", _card("ROCm0", None, None), _facts, root=tmp_path)
    assert device.read().free_bytes == 11 * GIB
    (folder / "mem_info_vram_used").write_text(str(6 * GIB))
    assert device.read().free_bytes == device.refresh().free_bytes == 10 * GIB
    assert "everybody's use included" in device.tells


def test_a_card_that_leaves_is_unknown_and_told_once(tmp_path: Path) -> None:
    folder = _amd(tmp_path, 1, "0000:03:00.0", vram_total=16 * GIB, vram_used=5 * GIB)
    device = EngineDevice("gpu0", _card("ROCm0", None, None), _facts, root=tmp_path)
    (folder / "mem_info_vram_used").unlink()
    for _ in range(2):
        reading = device.read()
        assert reading.free_bytes is None and reading.reason is not None and "any more" in reading.reason
        assert reading.free_at_most_bytes == 0
    assert [e.kind for e in device.events()] == [DeviceEventKind.OFF_THE_BUS]
    (folder / "mem_info_vram_used").write_text("0")
    assert device.read().free_bytes == 16 * GIB


def test_which_of_several_cards_it_is_follows_from_its_address_or_is_not_known(tmp_path: Path) -> None:
    _amd(tmp_path, 0, "0000:03:00.0", vram_total=16 * GIB, vram_used=0)
    _amd(tmp_path, 1, "0000:c1:00.0", vram_total=24 * GIB, vram_used=0)

    def found(pci: str | None, backend: str = "ROCm") -> AmdCard | None:
        return find_amd_card(backend=backend, description="", pci_address=pci, integrated=False, root=tmp_path)

    second = found("0000:C1:00.0")
    assert second is not None and second.read(0.0).total_bytes == 24 * GIB
    assert found(None) is None and found("0000:99:00.0") is None
    assert [card.pci_address for card in amd_cards(tmp_path)] == ["0000:03:00.0", "0000:c1:00.0"]


def test_another_makers_card_beside_one_of_amds_is_not_mistaken_for_it(tmp_path: Path) -> None:
    _amd(tmp_path, 0, "0000:03:00.0", vram_total=16 * GIB, vram_used=0)
    assert EngineDevice("gpu0", _card(free=2 * MIB), _facts, root=tmp_path).read().free_bytes == 2 * MIB
    radeon = EngineDeviceFacts("Vulkan0", "AMD Radeon RX 7900 XT (RADV NAVI31)", "gpu", "Vulkan", MIB, MIB)
    assert EngineDevice("gpu0", radeon, _facts, root=tmp_path).read().free_bytes == 16 * GIB


def test_an_integrated_card_counts_what_it_may_borrow_where_the_machine_has_it(tmp_path: Path) -> None:
    figures = {"vram_total": GIB // 2, "vram_used": GIB // 4, "gtt_total": 16 * GIB, "gtt_used": 2 * GIB}
    _amd(tmp_path, 0, "0000:c4:00.0", **figures)
    _meminfo(tmp_path, 20 * GIB)
    (card,) = amd_cards(tmp_path)
    assert card.integrated  # so small a part of its own belongs to no card that stands alone
    reading = card.read(0.0)
    assert (reading.total_bytes, reading.free_bytes) == (16 * GIB + GIB // 2, 14 * GIB + GIB // 4)
    _meminfo(tmp_path, 3 * GIB)
    assert card.read(0.0).free_bytes == 3 * GIB + GIB // 4
    assert "shares the machine's memory" in card.tells
    blind = AmdCard(tmp_path / "sys/class/drm/card0/device", host_available=lambda: None)
    assert blind.read(0.0).free_bytes is None and blind.read(0.0).reason is not None


def test_an_integrated_card_with_a_large_part_of_its_own_is_told_by_the_engine(tmp_path: Path) -> None:
    _amd(tmp_path, 0, "0000:c4:00.0", vram_total=8 * GIB, vram_used=0, gtt_total=12 * GIB, gtt_used=0)
    _meminfo(tmp_path, 64 * GIB)
    facts = _card("ROCm0", None, None, kind="igpu")
    assert EngineDevice("gpu0", facts, _facts, root=tmp_path).read().total_bytes == 20 * GIB
    assert EngineDevice("gpu0", _card("ROCm0", None, None), _facts, root=tmp_path).read().total_bytes == 8 * GIB


def test_a_small_window_to_the_cards_memory_is_told(tmp_path: Path) -> None:
    _amd(tmp_path, 0, "0000:03:00.0", vram_total=16 * GIB, vram_used=0, vis_vram_total=256 * MIB)
    (card,) = amd_cards(tmp_path)
    assert "only 256 MiB of it can be reached by the processor" in card.tells


def test_what_a_worker_holds_is_summed_over_its_clients_each_once(tmp_path: Path) -> None:
    _amd(tmp_path, 0, "0000:03:00.0", vram_total=16 * GIB, vram_used=0)
    (card,) = amd_cards(tmp_path)
    assert card.held_by(77) is None
    folder = tmp_path / "proc/77/fdinfo"
    folder.mkdir(parents=True)
    (folder / "0").write_text("pos:\t0\nflags:\t02\n")
    assert card.held_by(77) is None
    common = "pos: 0\ndrm-driver:\tamdgpu\ndrm-pdev:\t0000:03:00.0\n"
    (folder / "5").write_text(common + "drm-client-id:\t9\ndrm-memory-vram:\t2048 KiB\ndrm-memory-gtt: 1 MiB\n")
    (folder / "6").write_text(common + "drm-client-id:\t9\ndrm-memory-vram:\t2048 KiB\n")  # a duplicate
    (folder / "7").write_text(common + "drm-client-id:\t12\ndrm-resident-vram:\t4 MiB\ndrm-memory-vram: 9 MiB\n")
    (folder / "8").write_text("drm-driver: amdgpu\ndrm-pdev: 0000:99:00.0\ndrm-client-id: 1\ndrm-memory-vram: 8 MiB\n")
    assert card.held_by(77) == 6 * MIB


# -- announcements

PATH = "/devices/pci0000:00/0000:00:03.1/0000:03:00.0/drm/card1"


def _announced(**fields: str) -> bytes:
    named = {"ACTION": "change", "DEVPATH": PATH, "SUBSYSTEM": "drm", "SEQNUM": "7"} | fields
    return b"\0".join([f"{named['ACTION']}@{PATH}".encode(), *(f"{k}={v}".encode() for k, v in named.items())]) + b"\0"


@pytest.mark.parametrize(
    ("told", "kind", "words"),
    [
        ("none", "reset_done", "lost its context"),
        ("rebind", "reset_needed", "unbound from it and bound again"),
        ("rebind,bus-reset", "reset_needed", "bound again, or its bus must be reset"),
        ("vendor-specific", "reset_needed", "maker's own way"),
        ("unknown", "reset_needed", "restart the machine"),
        ("firmware-flash", "reset_needed", "by firmware-flash"),
    ],
)
def test_a_card_that_hung_is_told_with_what_brings_it_back(told: str, kind: str, words: str) -> None:
    event = card_event(parse(_announced(WEDGED=told)), "0000:03:00.0", 5.0)
    assert event is not None and event.kind == kind and words in event.sentence and event.at == 5.0
    assert event.kind.fault is not None


def test_the_process_that_made_it_hang_is_named() -> None:
    event = card_event(parse(_announced(WEDGED="none", PID="4711", TASK="game")), None, 0.0)
    assert event is not None and "when process 4711 (game) used it" in event.sentence


def test_other_announcements_are_about_something_else() -> None:
    for fields in ({"HOTPLUG": "1"}, {"WEDGED": "none", "SUBSYSTEM": "usb"}, {}):
        assert card_event(parse(_announced(**fields)), None, 0.0) is None
    assert card_event(parse(_announced(WEDGED="none")), "0000:04:00.0", 0.0) is None
    assert parse(b"") == {} and card_event(parse(b"libudev\0\xff\xfe"), None, 0.0) is None


def test_a_card_that_is_removed_is_gone_and_a_screen_is_not() -> None:
    event = card_event(parse(_announced(ACTION="remove")), "0000:03:00.0", 0.0)
    assert event is not None and event.kind is DeviceEventKind.OFF_THE_BUS
    assert card_event(parse(_announced(ACTION="remove", DEVPATH=f"{PATH}/card1-DP-1")), "0000:03:00.0", 0.0) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's announcements are Linux's")
def test_announcements_by_anybody_but_the_kernel_do_not_count() -> None:
    watch = CardWatch(None)
    if watch._socket is None:
        pytest.skip("this process may not listen to the kernel's announcements")
    port = watch._socket.getsockname()[0]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15) as stranger:
        try:
            stranger.sendto(_announced(WEDGED="rebind"), (port, 0))
        except OSError as e:
            assert e.errno in (errno.EPERM, errno.ECONNREFUSED)  # without privileges the kernel refuses it already
    assert watch.take(0.0) == []
    watch.close()
    watch.close()
    assert not watch.hears and watch.take(0.0) == []
