"""A card as the engine sees it: Vulkan, ROCm and Metal, where no management library of the maker is used.

The engine is asked in a process of its own, because loading a backend touches a driver that may take the process
down or hang. For AMD cards the kernel's own figures are better than the engine's (which have left other programs'
use out), so those are used where they are readable. Where neither tells the free memory, a declared budget counts.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from relevo.core.errors import DeviceError
from relevo.core.ledger import Reading
from relevo.devices.device import DeviceKind

INSPECT_TIMEOUT_S: Final = 30.0
INTERVAL_S: Final = 10.0
STALE_AFTER_S: Final = 60.0
_TOLD_CHARACTERS: Final = 300

_log = logging.getLogger("relevo.devices.ggml")

_KINDS: Final = (
    ("vulkan", DeviceKind.VULKAN),
    ("rocm", DeviceKind.ROCM),
    ("hip", DeviceKind.ROCM),
    ("metal", DeviceKind.METAL),
    ("mtl", DeviceKind.METAL),
    ("cuda", DeviceKind.CUDA),
)


@dataclass(frozen=True, slots=True)
class EngineDeviceFacts:
    """One device of the engine. Memory figures are None where it gives none."""

    name: str
    description: str
    kind: str
    """The engine's own word: "cpu", "gpu", "igpu", "accel"."""
    backend: str
    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a folder of libraries sees on this machine."""

    engine: str
    cpu_library: str | None
    cpu_variants: tuple[str, ...]
    """CPU libraries that run on this processor, the best first; empty where the CPU code is linked in."""
    devices: tuple[EngineDeviceFacts, ...]

    @property
    def cards(self) -> tuple[EngineDeviceFacts, ...]:
        """The devices that layers can be put on, in the engine's order."""
        return tuple(device for device in self.devices if device.kind in ("gpu", "igpu"))

    @property
    def best_cpu_variant(self) -> str | None:
        """Name of the CPU library the engine takes by itself."""
        return self.cpu_variants[0] if self.cpu_variants else None


def inspect(libraries: Path, timeout_s: float = INSPECT_TIMEOUT_S, command: list[str] | None = None) -> EngineFacts:
    """Ask the engine, in another process. Blocks up to `timeout_s`: not for the event loop. Raises DeviceError."""
    command = command or [sys.executable, "-I", "-m", "relevo.workers.llama.inspect"]
    try:
        done = subprocess.run(
            [*command, "--libraries", str(libraries), "--json"],
            capture_output=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"The engine did not say within {timeout_s:g} s what it sees; a driver may hang.") from None
    except OSError as e:
        raise DeviceError(f"The program that asks the engine does not start: {e.strerror or e}.") from e
    try:
        lines = done.stdout.decode("utf-8", "replace").strip().splitlines()  # a driver may print before it
        raw = json.loads(lines[-1])
        if "error" in raw:
            raise DeviceError(str(raw["error"]))
        return _facts(raw)
    except (ValueError, IndexError, KeyError, TypeError) as e:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        last = words[-1][:_TOLD_CHARACTERS] if words else "it said nothing"
        raise DeviceError(f"The engine could not be asked (exit code {done.returncode}): {last}") from e


def _facts(raw: dict[str, Any]) -> EngineFacts:
    return EngineFacts(
        engine=str(raw["engine"]),
        cpu_library=raw.get("cpu_library"),
        cpu_variants=tuple(str(v["name"]) for v in raw.get("cpu_variants", ()) if v["name"] and (v["score"] or 0) > 0),
        devices=tuple(
            EngineDeviceFacts(
                name=str(d["name"]),
                description=str(d["description"]),
                kind=str(d["kind"]),
                backend=str(d["backend"]),
                total_bytes=d.get("memory_total_bytes"),
                free_bytes=d.get("memory_free_bytes"),
            )
            for d in raw["devices"]
        ),
    )


class EngineDevice:
    """One card, watched through the engine (or the kernel, for AMD) by a thread of its own.

    `declared_bytes`: the budget where nobody tells the free memory; then what is leased is all that is known.
    `ask`: returns the engine's facts; blocks, and may raise DeviceError.
    """

    emulated = False

    def __init__(
        self,
        name: str,
        card: EngineDeviceFacts,
        ask: Callable[[], EngineFacts],
        *,
        declared_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
        root: Path = Path("/"),
    ) -> None:
        self.name = name
        self.kind = kind_of(card.backend)
        self.engine_device = card.name
        self.description = f"{card.description} ({card.backend})"
        self.declared_bytes = declared_bytes
        self._ask = ask
        self._clock = clock
        self._interval_s = interval_s
        self._root = root
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._reading = self._judge(card)

    def start(self) -> None:
        """Begin to watch. Called twice, nothing more happens."""
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._watch, name=f"engine-{self.name}", daemon=True)
            self._thread.start()

    def stop(self, wait_s: float = 1.0) -> None:
        """Stop watching. A question under way is left to end by itself."""
        self._stopped.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(wait_s)

    def read(self) -> Reading:
        """What was seen last; unknown when that is too long ago. Never waits."""
        reading = self._reading
        age_s = self._clock() - reading.read_at
        if self.declared_bytes is None and reading.free_bytes is not None and age_s > STALE_AFTER_S:
            reason = f"The engine has not said anything of this card for {age_s:.0f} s."
            return Reading(reading.total_bytes, None, read_at=reading.read_at, reason=reason)
        return reading

    def refresh(self) -> Reading:
        """Ask now. Blocks: for the watching thread and for tests."""
        try:
            facts = self._ask()
        except DeviceError as e:
            self._reading = self._unknown(None, e.message)
            return self._reading
        card = next((device for device in facts.devices if device.name == self.engine_device), None)
        if card is None:
            self._reading = self._unknown(None, f"The engine does not see {self.engine_device} any more.")
        else:
            self._reading = self._judge(card)
        return self._reading

    def _judge(self, card: EngineDeviceFacts) -> Reading:
        kernel = amd_memory(self._root) if self.kind in (DeviceKind.ROCM, DeviceKind.VULKAN) else None
        if kernel is not None:
            return Reading(kernel[0], kernel[1], read_at=self._clock())
        if card.free_bytes is None or not card.total_bytes:
            return self._unknown(card.total_bytes, "The engine does not tell this card's memory.")
        if card.free_bytes >= card.total_bytes and self.kind is DeviceKind.VULKAN:
            # Some drivers always say that everything is free: an upper bound, never a promise.
            return self._unknown(card.total_bytes, "This driver calls all of the card's memory free, whatever is used.")
        return Reading(card.total_bytes, card.free_bytes, read_at=self._clock())

    def _unknown(self, total_bytes: int | None, reason: str) -> Reading:
        more = "" if self.declared_bytes is not None else " Declare total_bytes for the device."
        return Reading(total_bytes, None, read_at=self._clock(), reason=reason + more)

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self.refresh()
            except Exception:  # a thread that ended silently would leave old figures standing
                _log.exception("Device %s could not be read.", self.name)


def kind_of(backend: str) -> DeviceKind:
    """The kind of device behind an engine's backend. Raises DeviceError for one that is not known."""
    for part, kind in _KINDS:
        if part in backend.lower():
            return kind
    raise DeviceError(f"The engine's backend {backend} is not one that Relevo knows.")


def amd_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(total, free) of the one AMD card, from the kernel. None with no card, with several, or an integrated one."""
    found = []
    for folder in root.glob("sys/class/drm/card*/device"):
        try:
            total = int((folder / "mem_info_vram_total").read_text(encoding="ascii"))
            used = int((folder / "mem_info_vram_used").read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        found.append((total, max(0, total - used)))
    # An integrated card's own part is tiny beside what it borrows from RAM: the engine's sum is nearer the truth.
    return found[0] if len(found) == 1 and found[0][0] >= 1 << 31 else None
