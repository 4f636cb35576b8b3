"""The limits that the kernel's control groups put on this process: its own group's and those of every group above.

Both versions are read, with the mount table to tell where they are; inside a container the groups above its own are
often not to be seen, and then what can be seen counts. Formats: Linux Documentation/admin-guide/cgroup-v2.rst and
cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_NO_LIMIT_BYTES: Final = 1 << 60
"""Version 1 writes a number near 2 to the 63rd where there is no limit."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One group with a limit on memory."""

    group: str
    """Its path below the mount, "/" for the topmost one that is seen."""
    limit_bytes: int
    """The hard limit, or the one above which the kernel slows its processes down, if that is lower."""
    left_bytes: int
    """What of it is not used. Pages of files that can be dropped at once count as not used."""


@dataclass(frozen=True, slots=True)
class _Mount:
    """Where a hierarchy is mounted, and which of its groups is at the top there."""

    point: Path
    top: PurePosixPath


class ControlGroups:
    """This process's groups as they are when it is made; a process is seldom moved to others."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._v2 = tuple(_groups(root, version=2, controller=""))
        self._v1_memory = tuple(_groups(root, version=1, controller="memory"))
        self._v1_cpu = tuple(_groups(root, version=1, controller="cpu"))

    def memory_limits(self) -> tuple[MemoryLimit, ...]:
        """Every limit on the way from this process's group to the top, its own first. Empty: there is none."""
        found = [_memory_v2(folder, group) for folder, group in self._v2]
        found += [_memory_v1(folder, group) for folder, group in self._v1_memory]
        return tuple(limit for limit in found if limit is not None)

    def memory_counts(self) -> dict[str, int]:
        """How often memory events happened to this process's group: `oom_kill`, `oom`, `max`, `high`.

        `oom_kill` counts processes of the own group only; the others count at every group whose limit it shares.
        """
        counts: dict[str, int] = {}
        for level, (folder, _) in enumerate(self._v2):
            for key, value in _pairs(folder / "memory.events").items():
                if key in ("oom", "max", "high") or (key == "oom_kill" and level == 0):
                    counts[key] = counts.get(key, 0) + value
        for level, (folder, _) in enumerate(self._v1_memory):
            failures = number(folder / "memory.failcnt")
            if failures is not None:
                counts["max"] = counts.get("max", 0) + failures
            kills = _pairs(folder / "memory.oom_control").get("oom_kill") if level == 0 else None
            if kills is not None:
                counts["oom_kill"] = counts.get("oom_kill", 0) + kills
        return counts

    def pressure_files(self) -> list[Path]:
        """Where memory pressure is told: of the machine, and of this process's group where it has its own."""
        return [self._root / "proc/pressure/memory", *(folder / "memory.pressure" for folder, _ in self._v2[:1])]

    def cpu_quota(self) -> float | None:
        """Cores' worth of time that this process's groups may use: the least on the way up. None: not limited."""
        quotas = [_quota_v2(folder) for folder, _ in self._v2] + [_quota_v1(folder) for folder, _ in self._v1_cpu]
        known = [quota for quota in quotas if quota is not None]
        return min(known) if known else None


def number(path: Path) -> int | None:
    """The number in a file; None where it is missing, or says something else ("max", "-1" for no limit)."""
    try:
        found = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return found if found >= 0 else None


def _memory_v2(folder: Path, group: str) -> MemoryLimit | None:
    limits = [found for name in ("memory.max", "memory.high") if (found := number(folder / name)) is not None]
    used = number(folder / "memory.current")
    if not limits or used is None:
        return None
    droppable = _pairs(folder / "memory.stat").get("inactive_file", 0)
    return MemoryLimit(group, min(limits), max(0, min(limits) - used + min(droppable, used)))


def _memory_v1(folder: Path, group: str) -> MemoryLimit | None:
    used = number(folder / "memory.usage_in_bytes")
    stat = _pairs(folder / "memory.stat")
    # The group's own limit, and the least of those above, which the kernel tells even where they cannot be seen.
    limits = [number(folder / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")]
    known = [limit for limit in limits if limit is not None and limit < _NO_LIMIT_BYTES]
    if not known or used is None:
        return None
    droppable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return MemoryLimit(group, min(known), max(0, min(known) - used + min(droppable, used)))


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (int(word) for word in (folder / "cpu.max").read_text(encoding="ascii").split()[:2])
    except (OSError, ValueError):  # missing, or "max"
        return None
    return quota / period if quota > 0 and period > 0 else None


def _quota_v1(folder: Path) -> float | None:
    quota_us, period_us = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us else None


def _groups(root: Path, *, version: int, controller: str) -> Iterator[tuple[Path, str]]:
    """(folder, path) of this process's group and of each above it that can be seen, its own first."""
    mount = _mount(root, version, controller)
    own = _own_group(root, version, controller)
    try:
        below = own.relative_to(mount.top)
    except ValueError:  # the group is not below what is mounted here: only the top can be read
        below = PurePosixPath()
    if ".." in below.parts:  # it is outside the container's own view
        below = PurePosixPath()
    for group in (below, *below.parents) if below.parts else (below,):
        folder = mount.point / group
        if folder.is_dir():
            yield folder, "/" if not group.parts else f"/{group}"


def _mount(root: Path, version: int, controller: str) -> _Mount:
    usual = root / "sys/fs/cgroup" / controller if version == 1 else root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return _Mount(usual, PurePosixPath("/"))
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if (version == 2 and kind[0] == "cgroup2") or (
            version == 1 and kind[0] == "cgroup" and controller in kind[2].split(",")
        ):
            return _Mount(root / fields[4].lstrip("/"), PurePosixPath(fields[3]))
    return _Mount(usual, PurePosixPath("/"))


def _own_group(root: Path, version: int, controller: str) -> PurePosixPath:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        number_, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (version == 2 and number_ == "0") or (version == 1 and controller in controllers.split(",")):
            return PurePosixPath(path or "/")
    return PurePosixPath("/")


def _pairs(path: Path) -> dict[str, int]:
    """A file of lines "name number"."""
    pairs: dict[str, int] = {}
    try:
        for line in path.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(" ")
            if value.strip().isdecimal():
                pairs[name] = int(value)
    except OSError:
        pass
    return pairs
