"""The machine itself: its memory, how hard it is pressed, and how many cores a worker may count on."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

from relevo.core.leases.reading import Reading
from relevo.core.memory.repack import ALL_TYPES, instructions_in, repacked_types
from relevo.core.units import size_text
from relevo.devices.cgroups import ControlGroups, MemoryLimit
from relevo.devices.device import STALE_AFTER_S, DeviceKind
from relevo.devices.events import DeviceEvent, DeviceEventKind, EventBox
from relevo.processes.memory import resident_bytes

LIMIT_TOLD_EVERY_S: Final = 60.0
"""A group at its limit meets it thousands of times a second; that is told once in this time."""
GROUPS_LAST_S: Final = 60.0
"""How long the control groups found are taken for ours: looking for them costs more than reading them."""

_LIMITS: Final = {
    "oom": "Our group of processes could not get memory below its limit.",
    "max": "Our group of processes met its memory limit.",
    "high": "Our group of processes is above the limit where the kernel slows it down.",
}


@dataclass(frozen=True, slots=True)
class Pressure:
    """Share of the last ten seconds in which work stood still for want of memory, in percent (kernel: PSI)."""

    some_percent: float
    """At least one task waited."""
    full_percent: float
    """Every task waited."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The machine's memory at one moment, in bytes."""

    total_bytes: int
    available_bytes: int
    """What new work can have without swapping, as the kernel estimates it (MemAvailable)."""
    zfs_cache_bytes: int
    """What ZFS's cache would give back: it is not in MemAvailable, although it shrinks when memory is wanted."""
    swap_total_bytes: int
    swap_free_bytes: int
    limits: tuple[MemoryLimit, ...] = ()


class HostDevice:
    """The host's RAM. The limits of its control groups (containers, services) count where they are smaller."""

    name = "host"
    kind = DeviceKind.HOST
    emulated = False
    engine_device = "cpu"
    lag_s = 0.0  # the kernel itself counts
    stale_after_s = STALE_AFTER_S

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, root: Path = Path("/")) -> None:
        self._clock = clock
        self._root = root
        self._box = EventBox()
        self._groups = ControlGroups(root)
        self._groups_found_at = clock()
        self._counts: dict[str, int] | None = None
        self._limit_told_at: dict[str, float] = {}

    @property
    def description(self) -> str:
        """For people."""
        return f"this machine's memory, {usable_cores(self._root):g} usable cores"

    @property
    def tells(self) -> str:
        """For people: what the system says, and what it does not."""
        memory = host_memory(self._root, self._groups)
        if memory is None:
            return "The system does not tell its memory."
        told = "The system tells its total and available memory"
        if memory.zfs_cache_bytes:
            told += f", of which {size_text(memory.zfs_cache_bytes)} are ZFS's cache, given back slowly"
        if memory.limits:
            least = min(memory.limits, key=lambda limit: limit.limit_bytes)
            told += f"; a limit of {size_text(least.limit_bytes)} is set for the group {least.group}"
        if self.pressure() is None:
            told += "; it does not tell how hard memory is pressed"
        return f"{told}. It does not tell what other programs are about to take."

    def stop(self) -> None:
        """Nothing watches it beside its readers."""

    def read(self) -> Reading:
        """Total and available memory, or what the groups' limits leave of them. Takes in events too. Quick."""
        now = self._clock()
        if now - self._groups_found_at > GROUPS_LAST_S:
            self._groups, self._groups_found_at = ControlGroups(self._root), now
        memory = host_memory(self._root, self._groups)
        if memory is None:
            return Reading(None, None, read_at=now, reason="The system does not tell its memory.")
        total = min((memory.total_bytes, *(limit.limit_bytes for limit in memory.limits)))
        free = min(memory.total_bytes, memory.available_bytes + memory.zfs_cache_bytes)
        free = min((total, free, *(limit.left_bytes for limit in memory.limits)))
        self._take_in_events(now)
        return Reading(total_bytes=total, free_bytes=free, read_at=now)

    def held_by(self, pid: int) -> int | None:
        """What of a process is in RAM now, mapped files included."""
        return resident_bytes(pid)

    def events(self) -> tuple[DeviceEvent, ...]:
        """What the kernel did since the last time for want of memory, as far as `read` has seen it."""
        return self._box.take()

    def pressure(self) -> Pressure | None:
        """How hard memory is pressed, in the machine or in our group, whichever is more; None where it is not told."""
        found = [pressure for path in self._groups.pressure_files() if (pressure := _pressure(path)) is not None]
        if not found:
            return None
        return Pressure(max(p.some_percent for p in found), max(p.full_percent for p in found))

    def _take_in_events(self, now: float) -> None:
        counts = self._groups.memory_counts()
        kills = _vmstat_kills(self._root)
        if kills is not None:
            counts["vmstat oom_kill"] = kills
        before, self._counts = self._counts, counts
        if before is None:
            return  # what happened before we looked is not ours to tell
        grown = {key: count - before.get(key, count) for key, count in counts.items()}
        ours, everywhere = grown.get("oom_kill", 0), grown.get("vmstat oom_kill", 0)
        if ours > 0:
            self._tell_kill("oom_kill", f"The kernel killed {_processes(ours)} of our group for want of memory.", now)
        if everywhere > ours:
            sentence = f"The kernel killed {_processes(everywhere - ours)} on this machine for want of memory."
            self._tell_kill("vmstat oom_kill", sentence, now)
        for key, sentence in _LIMITS.items():
            told_at = self._limit_told_at.get(key)
            if grown.get(key, 0) > 0 and (told_at is None or now - told_at >= LIMIT_TOLD_EVERY_S):
                self._limit_told_at[key] = now
                self._box.put(DeviceEvent(DeviceEventKind.MEMORY_LIMIT, key, sentence, now))

    def _tell_kill(self, code: str, sentence: str, now: float) -> None:
        self._box.put(DeviceEvent(DeviceEventKind.MEMORY_KILL, code, sentence, now))


def host_memory(root: Path = Path("/"), groups: ControlGroups | None = None) -> HostMemory | None:
    """The machine's memory as the system tells it; None where it does not. `groups` None: they are looked for."""
    told = _meminfo(root)
    limits = (groups or ControlGroups(root)).memory_limits()
    if "MemTotal" in told and "MemAvailable" in told:
        return HostMemory(
            told["MemTotal"],
            told["MemAvailable"],
            _zfs_cache(root),
            told.get("SwapTotal", 0),
            told.get("SwapFree", 0),
            limits,
        )
    try:
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    except (OSError, psutil.Error, RuntimeError):
        return None
    return HostMemory(int(memory.total), int(memory.available), 0, int(swap.total), int(swap.free), limits)


def memory_available(root: Path = Path("/")) -> int | None:
    """What new work can have of the machine's memory; for cards that share it. None where it is not told."""
    told = _meminfo(root).get("MemAvailable")
    if told is not None:
        return told
    try:
        return int(psutil.virtual_memory().available)
    except (OSError, psutil.Error, RuntimeError):
        return None


def usable_cores(root: Path = Path("/")) -> float:
    """Cores this process may use: its affinity, or its control groups' share of time where that is less."""
    cores = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    quota = ControlGroups(root).cpu_quota()
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


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    told: dict[str, int] = {}
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, rest = line.partition(":")
            value = rest.split()
            if value and value[0].isdecimal():
                told[name] = int(value[0]) * (1024 if value[1:] == ["kB"] else 1)
    except OSError:
        pass
    return told


def _zfs_cache(root: Path) -> int:
    """What ZFS's cache holds above the least it keeps (arcstats: size, c_min), in bytes."""
    found: dict[str, int] = {}
    try:
        for line in (root / "proc/spl/kstat/zfs/arcstats").read_text(encoding="ascii", errors="replace").splitlines():
            fields = line.split()
            if len(fields) == 3 and fields[0] in ("size", "c_min"):
                found[fields[0]] = int(fields[2])
    except (OSError, ValueError):
        return 0
    return max(0, found["size"] - found["c_min"]) if len(found) == 2 else 0


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


def _vmstat_kills(root: Path) -> int | None:
    try:
        for line in (root / "proc/vmstat").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _pressure(path: Path) -> Pressure | None:
    try:
        text = path.read_text(encoding="ascii")
        lines = {line.split()[0]: line.split()[1] for line in text.splitlines() if line}
        return Pressure(float(lines["some"].partition("=")[2]), float(lines["full"].partition("=")[2]))
    except (OSError, ValueError, KeyError, IndexError):
        return None


def floor_bytes(total_bytes: int | None, configured_bytes: int | None = None) -> int | None:
    """MemAvailable never to go below: the larger of a tenth of RAM and 2 GiB, but at most a quarter of it."""
    if configured_bytes is not None or total_bytes is None:
        return configured_bytes
    return min(max(total_bytes // 10, 2 << 30), total_bytes // 4)


def cpu_repacks(root: Path = Path("/")) -> frozenset[str]:
    """Number types that this machine's CPU keeps in another order; where it does not tell, all that any keeps."""
    try:
        told = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ALL_TYPES
    return repacked_types(instructions_in(told))
