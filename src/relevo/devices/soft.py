"""The emulated accelerator: no card at all, but a memory limit that holds and faults that are real.

Workers on it compute on the CPU. Their private memory (VmData) is the device's memory, and the governor lets the
kernel keep the total: each process may grow by what the others leave free, so an allocation beyond it fails in the
engine as it would on a card, and a reset kills every process on the device. What it cannot show is a card's speed,
its driver, or its own arithmetic; for the last, another CPU library stands in (see variants.py).

What goes wrong with real devices can be played on it (see faults.py): memory in pieces, readings that lag, lie or
stand still, a neighbour, a loss, a reset. The failures in the engine are then real ones.

Limits, to be honest about: memory is counted when it is reserved, and between two ticks two growing processes can
take the same free bytes, so `overshoot_bytes` is measured and shown.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relevo.core.errors import DeviceError
from relevo.core.leases.reading import Reading
from relevo.devices.ballast import registered_pids
from relevo.devices.device import CARD_LAG_S, STALE_AFTER_S, DeviceKind, gone
from relevo.devices.events import DeviceEvent, DeviceEventKind, EventBox
from relevo.devices.faults import FaultFile, Faults
from relevo.devices.xids import xid
from relevo.processes.identity import alive_since, kill_group
from relevo.processes.limits import limit_data_bytes
from relevo.processes.memory import data_bytes

TICK_S: Final = 0.05
SPARE_BYTES: Final = 4 << 20
"""Each process's own crumbs (messages, small objects) above a full device: those lie in RAM on a real machine too."""

KEPT_S: Final = 6.0
"""How far back what was used is remembered, for readings that lag."""

_log = logging.getLogger("relevo.devices.soft")


@dataclass(slots=True)
class _Process:
    pid: int
    start_ticks: int
    used_bytes: int = 0
    limit_bytes: int | None = None
    full_at_bytes: int | None = None
    """The least it held since the device is full; its spare bytes count from there. None: it is not full."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """A process on the device, and what it holds there."""

    pid: int
    used_bytes: int


class SoftDevice:
    """An emulated accelerator with `total_bytes` of memory.

    `folder`: where ballast puts its pid files (those processes register themselves), and faults their file.
    Raises DeviceError off Linux.
    """

    kind = DeviceKind.EMULATED
    emulated = True
    engine_device = "cpu"
    lag_s = CARD_LAG_S  # as of what it stands in for; its faults may play it
    stale_after_s = STALE_AFTER_S

    def __init__(
        self,
        name: str,
        total_bytes: int,
        *,
        folder: Path | None = None,
        spare_bytes: int = SPARE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if sys.platform != "linux":
            raise DeviceError(f"Device {name}: the emulated accelerator needs Linux.")
        if total_bytes <= 0:
            raise DeviceError(f"Device {name}: total_bytes must be positive, not {total_bytes}.")
        self.name = name
        self.total_bytes = total_bytes
        self.resets = 0
        self.overshoot_bytes = 0
        """The most that was ever held above the total: growth between two ticks, and every process's spare bytes."""
        self._folder = folder
        self._spare_bytes = spare_bytes
        self._clock = clock
        self._processes: dict[int, _Process] = {}
        self._fault_file = None if folder is None else FaultFile(folder)
        self._faults = Faults()
        self._resets_played = 0
        self._used_before: deque[tuple[float, int]] = deque()
        self._stale: Reading | None = None
        self._box = EventBox()
        self._lock = threading.RLock()  # readings may be taken in a thread while the loop ticks

    def __repr__(self) -> str:
        return (
            f"<SoftDevice {self.name}: {self.used_bytes} of {self.total_bytes} bytes, {len(self._processes)} processes>"
        )

    @property
    def description(self) -> str:
        """For people."""
        return f"emulated accelerator of {self.total_bytes >> 20} MiB: computes on the CPU, the kernel keeps its limit"

    @property
    def tells(self) -> str:
        """For people: what is known of it, and what is played on it."""
        told = (
            "The kernel tells each process's private memory, counted when it is reserved. It stands in for a card's "
            "memory limit; a card's speed, driver and arithmetic it cannot show."
        )
        played = self._faults.sentence
        return told if played is None else f"{told} {played}"

    @property
    def faults(self) -> Faults:
        """What is played on it, as of the last tick or reading."""
        return self._faults

    @property
    def used_bytes(self) -> int:
        """What all its processes, and a neighbour that is only played, held at the last tick or reading."""
        with self._lock:
            return sum(process.used_bytes for process in self._processes.values()) + self._faults.external_bytes

    @property
    def occupants(self) -> tuple[Occupant, ...]:
        """Who holds what, as of the last tick or reading."""
        with self._lock:
            return tuple(Occupant(process.pid, process.used_bytes) for process in self._processes.values())

    def register(self, pid: int, start_time: int | None = None) -> bool:
        """Put a process on the device and govern it from now on. False when it is gone already.

        `start_time` (clock ticks after boot) guards against a pid that was given away again; None: read now.
        """
        found = alive_since(pid)
        if found is None or (start_time is not None and found != start_time):
            return False
        with self._lock:
            if pid not in self._processes or self._processes[pid].start_ticks != found:
                self._processes[pid] = _Process(pid, found)
                self.tick()
            return pid in self._processes

    def forget(self, pid: int) -> None:
        """Take a process off the device and lift its limit. One that is not on it: nothing happens."""
        with self._lock:
            process = self._processes.pop(pid, None)
        if process is not None and alive_since(pid) == process.start_ticks:
            limit_data_bytes(pid, None)

    def tick(self) -> Reading:
        """Look at every process and set its limit anew. Call it about twenty times a second.

        A limit is what the process holds, what nobody holds (at most the largest piece of it), and its spare bytes.
        It never falls below what the process has; while the device is full, spare bytes are given only once.
        """
        with self._lock:
            self._look()
            free = max(0, self.total_bytes - self.used_bytes)
            block = self._faults.largest_block_bytes
            piece = free if block is None else min(free, block)
            for process in list(self._processes.values()):
                if free > 0:
                    process.full_at_bytes = None
                    limit = process.used_bytes + piece + self._spare_bytes
                else:
                    full_at = process.used_bytes if process.full_at_bytes is None else process.full_at_bytes
                    process.full_at_bytes = min(full_at, process.used_bytes)
                    limit = max(process.full_at_bytes + self._spare_bytes, process.used_bytes)
                if limit != process.limit_bytes and limit_data_bytes(process.pid, limit):
                    process.limit_bytes = limit
            return self._reading()

    def stop(self) -> None:
        """Nothing watches it beside its readers."""

    def read(self) -> Reading:
        """The figures as of now, from the kernel. Under a tenth of a millisecond a process."""
        with self._lock:
            self._look()
            return self._reading()

    def held_by(self, pid: int) -> int | None:
        """What a process on it holds now; None for one that is not on it."""
        with self._lock:
            return data_bytes(pid) if pid in self._processes else None

    def events(self) -> tuple[DeviceEvent, ...]:
        """What happened since the last time."""
        return self._box.take()

    def reset(self) -> int:
        """What a driver does in despair: every process on the device is killed. Returns how many were."""
        with self._lock:
            self._take_in_ballast()
            killed = self._kill_all()
            self.resets += 1
            _log.warning("Device %s was reset; processes killed: %s.", self.name, killed)
            return killed

    async def govern(self, interval_s: float = TICK_S) -> None:
        """Tick until cancelled. One bad tick is logged and does not end it."""
        while True:
            try:
                self.tick()
            except OSError:
                _log.exception("Device %s: a tick failed.", self.name)
            await asyncio.sleep(interval_s)

    def _look(self) -> None:
        """Take in who is there and what each holds, and what is to be played."""
        self._take_in_ballast()
        for process in list(self._processes.values()):
            used = data_bytes(process.pid)
            if used is None or alive_since(process.pid) != process.start_ticks:
                del self._processes[process.pid]
            else:
                process.used_bytes = used
        if self._fault_file is not None:
            if self._fault_file.look():
                self._play(self._fault_file.faults)
            if self._faults.lost:
                self._kill_all()
        now, used = self._clock(), self.used_bytes
        real_bytes = used - self._faults.external_bytes
        self.overshoot_bytes = max(self.overshoot_bytes, real_bytes - self.total_bytes)
        self._used_before.append((now, used))
        while self._used_before[0][0] < now - KEPT_S:
            self._used_before.popleft()

    def _reading(self) -> Reading:
        """What is said, which is not what is true while faults are played."""
        now, faults = self._clock(), self._faults
        if faults.lost:
            return gone("The emulated device is lost, as its faults.json says.", now)
        if faults.stale and self._stale is not None:
            return self._stale
        free = max(0, self.total_bytes - self._shown_used(now - faults.lag_s))
        block = None if faults.largest_block_bytes is None else min(free, faults.largest_block_bytes)
        reading = Reading(self.total_bytes, free, read_at=now, largest_block_bytes=block)
        self._stale = reading
        return reading

    def _shown_used(self, at: float) -> int:
        """What was used then, as far as it is remembered; nothing where everything is called free."""
        if self._faults.all_free:
            return 0
        if not self._faults.lag_s:
            return self._used_before[-1][1]
        return next((used for then, used in reversed(self._used_before) if then <= at), self._used_before[0][1])

    def _play(self, faults: Faults) -> None:
        before, self._faults = self._faults, faults
        _log.warning("Device %s: %s", self.name, faults.sentence or "No faults are played on it any more.")
        if faults.lost and not before.lost:
            self._tell(DeviceEventKind.OFF_THE_BUS, "lost", "The emulated device is lost, as its faults.json says.")
        if before.lost and not faults.lost:
            self._tell(DeviceEventKind.INFORMATION, "back", "The emulated device is back.")
        if faults.reset not in (0, self._resets_played):
            self._resets_played = faults.reset
            self.reset()
            self._tell(DeviceEventKind.RESET_DONE, "reset", "The emulated device was reset, as its faults.json says.")
        for number in faults.xids:
            known = xid(number)
            self._tell(known.kind, f"xid {number}", f"{known.sentence} (Emulated.)")

    def _tell(self, kind: DeviceEventKind, code: str, sentence: str) -> None:
        self._box.put(DeviceEvent(kind, code, sentence, self._clock()))

    def _kill_all(self) -> int:
        killed = 0
        for process in self._processes.values():
            if alive_since(process.pid) == process.start_ticks:
                kill_group(process.pid)
                killed += 1
        return killed

    def _take_in_ballast(self) -> None:
        if self._folder is None:
            return
        for pid, start_ticks in registered_pids(self._folder):
            if pid not in self._processes and alive_since(pid) == start_ticks:
                self._processes[pid] = _Process(pid, start_ticks)
