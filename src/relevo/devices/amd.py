"""AMD cards through the kernel's own figures (sysfs), which count every program's use.

The engine's figures have left other programs out at times, so they are not used for these cards. Nothing here
touches the card: the kernel answers from its own books. Files: Linux Documentation/gpu/amdgpu/driver-misc.rst and
drm-usage-stats.rst.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relevo.core.leases.reading import Reading
from relevo.core.units import size_text
from relevo.devices.device import gone
from relevo.devices.host import memory_available

_CARVE_OUT_BELOW_BYTES: Final = 2 << 30
"""An integrated card's own part of memory is small; no card of its own with so little can run a model."""
_MAKERS_WORDS: Final = ("amd", "radeon", "radv")
_UNITS: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class AmdMemory:
    """What the kernel says of a card's memory, in bytes."""

    vram_total_bytes: int
    vram_used_bytes: int
    visible_total_bytes: int | None
    """The part of it that the processor can reach. Less than all of it makes loading slower, and nothing else."""
    gtt_total_bytes: int
    """The most that the card may borrow of the machine's memory."""
    gtt_used_bytes: int


class AmdCard:
    """One card. `integrated`: it borrows the machine's memory, and that part counts as well."""

    def __init__(
        self,
        folder: Path,
        *,
        integrated: bool = False,
        root: Path = Path("/"),
        host_available: Callable[[], int | None] | None = None,
    ) -> None:
        self._folder = folder
        self._root = root
        self._host_available = host_available or (lambda: memory_available(root))
        self.pci_address = _pci_address(folder)
        memory = self.memory()
        carve_out = memory is not None and memory.vram_total_bytes < _CARVE_OUT_BELOW_BYTES
        self.integrated = integrated or carve_out

    @property
    def tells(self) -> str:
        """For people: what the kernel says of this card, and what it does not."""
        memory = self.memory()
        if memory is None:
            return "The kernel does not tell this card's memory."
        told = "The kernel tells total and used memory, everybody's use included, and what our own workers hold"
        if self.integrated:
            told += "; the card shares the machine's memory, so what the machine has left bounds it"
        elif memory.visible_total_bytes is not None and memory.visible_total_bytes < memory.vram_total_bytes:
            told += f"; only {size_text(memory.visible_total_bytes)} of it can be reached by the processor"
        return f"{told}. It does not tell whether free memory is in one piece."

    def memory(self) -> AmdMemory | None:
        """The kernel's figures; None when the card or its driver is gone."""
        total, used = self._figure("vram_total"), self._figure("vram_used")
        if total is None or used is None:
            return None
        return AmdMemory(
            total,
            used,
            self._figure("vis_vram_total"),
            self._figure("gtt_total") or 0,
            self._figure("gtt_used") or 0,
        )

    def read(self, now: float) -> Reading:
        """Total and free. Of an integrated card, borrowed memory is free only where the machine has it."""
        memory = self.memory()
        if memory is None:
            return gone("The kernel does not show this AMD card any more.", now)
        total, free = memory.vram_total_bytes, max(0, memory.vram_total_bytes - memory.vram_used_bytes)
        if not self.integrated:
            return Reading(total, free, read_at=now)
        borrowed = max(0, memory.gtt_total_bytes - memory.gtt_used_bytes)
        available = self._host_available()
        if available is None:
            shared = "This card shares the machine's memory, and the machine does not tell what it has left."
            return Reading(total + memory.gtt_total_bytes, None, read_at=now, reason=shared)
        return Reading(total + memory.gtt_total_bytes, free + min(borrowed, available), read_at=now)

    def held_by(self, pid: int) -> int | None:
        """What a process of this user holds on the card: a hint. None where the kernel does not let us see.

        A card opened several times by one process, or shared with a child, is told once for each client.
        """
        held: dict[str, int] = {}
        try:
            for entry in (self._root / "proc" / str(pid) / "fdinfo").iterdir():
                try:
                    fields = _fields(entry.read_text(encoding="utf-8", errors="replace"))
                except OSError:
                    continue  # closed meanwhile
                if fields.get("drm-driver") == "amdgpu" and fields.get("drm-pdev") == self.pci_address:
                    kinds = ("vram", "gtt") if self.integrated else ("vram",)
                    held[fields.get("drm-client-id", entry.name)] = sum(_held(fields, kind) for kind in kinds)
        except OSError:
            return None
        return sum(held.values()) if held else None

    def _figure(self, name: str) -> int | None:
        try:
            return int((self._folder / f"mem_info_{name}").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None


def amd_cards(root: Path = Path("/"), *, integrated: bool = False) -> list[AmdCard]:
    """Every AMD card the kernel shows, in the order of their numbers."""
    folders = sorted(root.glob("sys/class/drm/card*/device"), key=lambda f: (len(f.parent.name), f.parent.name))
    return [AmdCard(f, integrated=integrated, root=root) for f in folders if (f / "mem_info_vram_total").is_file()]


def find_amd_card(
    *, backend: str, description: str, pci_address: str | None, integrated: bool, root: Path = Path("/")
) -> AmdCard | None:
    """The kernel's card behind the engine's. None: it is none of AMD's, or which of several cannot be told."""
    cards = amd_cards(root, integrated=integrated)
    if pci_address is not None:
        return next((card for card in cards if card.pci_address == pci_address.lower()), None)
    words = f"{backend} {description}".lower()
    named = backend.lower() in ("rocm", "hip") or any(word in words for word in _MAKERS_WORDS)
    return cards[0] if named and len(cards) == 1 else None


def _pci_address(folder: Path) -> str | None:
    """As the kernel names it in the card's own announcement."""
    try:
        for line in (folder / "uevent").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition("=")
            if name == "PCI_SLOT_NAME":
                return value.strip().lower()
    except OSError:
        pass
    return None


def _held(fields: dict[str, str], kind: str) -> int:
    """Resident where it is told, else the older name of the same figure."""
    for name in (f"drm-resident-{kind}", f"drm-memory-{kind}"):
        value = fields.get(name, "").split()
        if value and value[0].isdecimal():
            return int(value[0]) * (_UNITS.get(value[1], 1) if len(value) > 1 else 1)
    return 0


def _fields(text: str) -> dict[str, str]:
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}
