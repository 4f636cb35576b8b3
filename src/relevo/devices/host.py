"""The machine itself: its memory, how hard it is pressed, and how many cores a worker may count on."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from relevo.core.ledger import Reading
from relevo.devices.device import DeviceKind

_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Pressure:
    """Share of the last ten seconds in which work stood still for want of memory, in percent (kernel: PSI)."""

    some_percent: float
    """At least one task waited."""
    full_percent: float
    """Every task waited."""


class HostDevice:
    """The host's RAM. Inside a container its limit counts where it is the smaller one."""

    name = "host"
    kind = DeviceKind.HOST
    emulated = False
    engine_device = "cpu"

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, root: Path = Path("/")) -> None:
        self._clock = clock
        self._root = root

    @property
    def description(self) -> str:
        """For people."""
        return f"this machine's memory, {usable_cores(self._root):g} usable cores"

    def read(self) -> Reading:
        """MemTotal and MemAvailable, or the container's limit and what is left of it. Quick."""
        try:
            memory = psutil.virtual_memory()
        except (OSError, psutil.Error) as e:
            return Reading(None, None, read_at=self._clock(), reason=f"The system does not tell its memory: {e}.")
        total, free = int(memory.total), int(memory.available)
        limit = cgroup_memory(self._root)
        if limit is not None:
            total, free = min(total, limit[0]), min(free, limit[1])
        return Reading(total_bytes=total, free_bytes=free, read_at=self._clock())

    def pressure(self) -> Pressure | None:
        """How hard memory is pressed; None where the kernel does not tell."""
        try:
            text = (self._root / "proc/pressure/memory").read_text(encoding="ascii")
            lines = {line.split()[0]: line.split()[1] for line in text.splitlines() if line}
            return Pressure(float(lines["some"].partition("=")[2]), float(lines["full"].partition("=")[2]))
        except (OSError, ValueError, KeyError, IndexError):
            return None


def cgroup_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(limit, what is left of it) of the memory group this process sees as its own, or None where it has no limit.

    Pages of files that the kernel can drop again ("inactive_file") count as free, as they do in MemAvailable.
    """
    v2, v1 = root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"
    for folder, limit_name, used_name, key in (
        (v2, "memory.max", "memory.current", "inactive_file"),
        (v1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is None or used is None or limit >= _NO_LIMIT_BYTES:
            continue
        return limit, max(0, limit - used + _stat(folder / "memory.stat", key))
    return None


def usable_cores(root: Path = Path("/")) -> float:
    """Cores this process may use: its affinity, or the container's share of time where that is less."""
    cores = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    quota = _cpu_quota(root)
    return cores if quota is None else min(cores, quota)


def free_cores(root: Path = Path("/"), load: float | None = None) -> int:
    """Whole cores a worker may count on: the usable ones less the load of the last minute, but never under half.

    The engine's threads wait for each other actively, so one thread too many costs far more than one too few:
    measured on two busy cores, two threads were ten times slower than one. `load` None: read it from the system.
    """
    usable = usable_cores(root)
    if load is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, math.floor(usable / 2), math.floor(usable - load))


def default_threads(root: Path = Path("/"), load: float | None = None) -> int:
    """CPU threads of a worker when the configuration names none: free cores, hyper-threads counted once."""
    physical = psutil.cpu_count(logical=False) or 1
    return max(1, min(free_cores(root, load), physical))


def _cpu_quota(root: Path) -> float | None:
    folder = root / "sys/fs/cgroup"
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    quota_us, period_us = _number(folder / "cpu/cpu.cfs_quota_us"), _number(folder / "cpu/cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # missing, or "max"
        return None


def _stat(path: Path, key: str) -> int:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
