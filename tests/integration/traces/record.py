"""Records what a device says while real processes load, leave and play: `python -m tests.integration.traces.record`.

The device is the emulated one with real processes on it, and what it says wrong is played (see devices/faults.py).
Beside each reading stands the truth, which the kernel tells: what our own processes hold, and what a neighbour holds.
A trace is one JSON object a line: first a header, then readings (`free_bytes` ...) and what we did (`do`), by time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relevo.devices import faults
from relevo.devices.faults import Faults
from relevo.devices.soft import SoftDevice
from tests.integration.fakes.growing import Grower

MIB = 1 << 20
TOTAL = 1024 * MIB
EVERY_S = 0.25
HERE = Path(__file__).parent


class Recording:
    """One scene: a device, a neighbour, our own processes, and what is written down."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self._begin = time.monotonic()
        self.device = SoftDevice("gpu0", TOTAL, folder=self.folder, clock=self.now)
        self.game = Grower()
        self.device.register(self.game.pid)
        self.ours: dict[str, Grower] = {}
        self.lines: list[dict[str, Any]] = []

    def now(self) -> float:
        return round(time.monotonic() - self._begin, 3)

    def fault(self, played: Faults) -> None:
        faults.write(self.folder, played)

    def load(self, holder: str, bytes_: int) -> None:
        """Start a worker, which takes its memory half a second later, and is ready after another half."""
        worker = Grower()
        own = self._held(worker)
        self._do("load", holder, lease_bytes=bytes_ + own + 8 * MIB)
        self.ours[holder] = worker
        self.device.register(worker.pid)
        self.wait(0.5)
        assert worker.grow(bytes_) == "ok"
        self.wait(0.5)
        self._do("ready", holder, observed_bytes=self._held(worker))

    def unload(self, holder: str) -> None:
        """End a worker; its memory is free when its process is gone."""
        self._do("unload", holder)
        self.ours.pop(holder).close()
        self._do("gone", holder)

    def died(self, holder: str) -> None:
        """Somebody killed it."""
        self.ours[holder].popen.wait(5)
        self.unload(holder)

    def wait(self, seconds: float) -> None:
        """Let time pass and write down what the device says."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            said = self.device.tick()
            line: dict[str, Any] = {"at": self.now(), "total_bytes": said.total_bytes, "free_bytes": said.free_bytes}
            if said.read_at < line["at"] - 0.1:
                line["read_at"] = said.read_at
            if said.reason is not None:
                line["reason"] = said.reason
            line["ours_bytes"] = sum(self._held(worker) for worker in self.ours.values())
            line["foreign_bytes"] = self._held(self.game)
            self.lines.append(line)
            time.sleep(max(0.0, EVERY_S - 0.001))

    def close(self) -> None:
        for worker in (self.game, *self.ours.values()):
            worker.close()
        self._folder.cleanup()
        source = "the emulated device with real processes; the fault is played, the truth is the kernel's"
        header = {"trace": self.name, "source": source, "total_bytes": TOTAL}
        text = "\n".join(json.dumps(line) for line in (header, *self.lines))
        (HERE / f"{self.name}.jsonl").write_text(text + "\n")

    def _do(self, what: str, holder: str, **more: int) -> None:
        self.lines.append({"at": self.now(), "do": what, "holder": holder} | more)

    def _held(self, grower: Grower) -> int:
        return self.device.held_by(grower.pid) or 0


def lag(scene: Recording) -> None:
    """Two loads and two unloads, each shown 1.2 s late."""
    scene.fault(Faults(lag_s=1.2))
    scene.wait(2)
    scene.load("chat", 300 * MIB)
    scene.load("speech", 200 * MIB)
    scene.wait(3)
    scene.unload("chat")
    scene.wait(1)
    scene.load("chat", 250 * MIB)
    scene.wait(2)
    scene.unload("speech")
    scene.unload("chat")
    scene.wait(8)


def game(scene: Recording) -> None:
    """A game starts in two steps, stays, and ends; a worker of ours runs all the time."""
    scene.wait(1)
    scene.load("chat", 300 * MIB)
    scene.wait(3)
    scene.game.grow(150 * MIB)
    scene.wait(2)
    scene.game.grow(250 * MIB)
    scene.wait(6)
    scene.game.grow(-1)
    scene.game.grow(-1)
    scene.wait(30)


def lost(scene: Recording) -> None:
    """The device is lost under a worker, and is back after four seconds."""
    scene.wait(1)
    scene.load("chat", 300 * MIB)
    scene.wait(2)
    scene.fault(Faults(lost=True))
    scene.wait(0.5)
    scene.died("chat")
    scene.wait(4)
    faults.clear(scene.folder)
    scene.game = Grower()
    scene.device.register(scene.game.pid)
    scene.wait(2)
    scene.load("chat", 300 * MIB)
    scene.wait(2)


def reset(scene: Recording) -> None:
    """The driver resets the device; every process on it dies, the neighbour's too."""
    scene.wait(1)
    scene.game.grow(200 * MIB)
    scene.load("chat", 300 * MIB)
    scene.wait(2)
    scene.fault(Faults(reset=1))
    scene.wait(0.25)
    scene.died("chat")
    scene.wait(2)
    scene.load("chat", 300 * MIB)
    scene.wait(8)


def stale(scene: Recording) -> None:
    """The readings stand still; a game that starts meanwhile is not in them."""
    scene.wait(1)
    scene.load("chat", 300 * MIB)
    scene.wait(2)
    scene.fault(Faults(stale=True))
    scene.wait(2)
    scene.game.grow(400 * MIB)
    scene.wait(34)
    faults.clear(scene.folder)
    scene.wait(2)


def all_free(scene: Recording) -> None:
    """A game and a worker of ours run; then the driver begins to call everything free, though neither gave anything."""
    scene.wait(1)
    scene.game.grow(300 * MIB)
    scene.wait(1)
    scene.load("chat", 300 * MIB)
    scene.wait(3)
    scene.fault(Faults(all_free=True))
    scene.wait(25)
    faults.clear(scene.folder)
    scene.wait(2)


SCENES: dict[str, Callable[[Recording], None]] = {
    scene.__name__: scene for scene in (lag, game, lost, reset, stale, all_free)
}


def record(name: str) -> None:
    """Play one scene and write its trace."""
    scene = Recording(name)
    try:
        SCENES[name](scene)
    finally:
        scene.close()


if __name__ == "__main__":
    playing = [threading.Thread(target=record, args=(name,)) for name in sys.argv[1:] or SCENES]
    for thread in playing:
        thread.start()
    for thread in playing:
        thread.join()
