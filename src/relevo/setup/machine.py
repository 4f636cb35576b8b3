"""What this machine has that decides which native libraries fit it. Looks only; loads no driver."""

from __future__ import annotations

import ctypes.util
import platform
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_VENDORS: Final = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts the choice of libraries depends on."""

    system: str
    """"linux", "darwin" or "win32"."""
    processor: str
    """"x86_64" or "aarch64", whatever the system calls it."""
    glibc: tuple[int, int] | None = None
    """Version of the GNU C library; None where there is none."""
    nvidia_driver: int | None = None
    """Major version of the NVIDIA driver that runs; None where none does."""
    cards: frozenset[str] = field(default_factory=frozenset)
    """Makers of the graphics cards that have a render node: "nvidia", "amd", "intel"."""
    vulkan: bool = False
    """Whether a Vulkan loader is installed."""


def look_at_machine(root: Path = Path("/")) -> Machine:
    """Read the facts of this machine. What cannot be read counts as absent. `root` is the root of the file system."""
    return Machine(
        system=sys.platform,
        processor={"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower()),
        glibc=_glibc(),
        nvidia_driver=nvidia_driver(root),
        cards=_cards(root),
        vulkan=ctypes.util.find_library("vulkan") is not None,
    )


def nvidia_driver(root: Path = Path("/")) -> int | None:
    """Major version of the loaded NVIDIA kernel driver, from the kernel itself."""
    for name in ("sys/module/nvidia/version", "proc/driver/nvidia/version"):
        try:
            text = (root / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found = re.search(r"\b(\d{3,4})\.\d+", text)
        if found:
            return int(found.group(1))
    return None


def _cards(root: Path) -> frozenset[str]:
    found = set()
    for path in root.glob("sys/class/drm/renderD*/device/vendor"):
        try:
            vendor = path.read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if vendor in _VENDORS:
            found.add(_VENDORS[vendor])
    return frozenset(found)


def _glibc() -> tuple[int, int] | None:
    name, version = platform.libc_ver()
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if name == "glibc" and found else None
