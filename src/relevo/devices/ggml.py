"""A card as the engine sees it: Vulkan, ROCm and Metal, where no management library of the maker is used.

The engine is asked in a process of its own, because loading a backend touches a driver that may take the process
down or hang. Its word is not always good: of AMD cards the kernel's figures are taken instead (see amd.py); Metal
counts only the asking process, so what is free is the system's word; and some drivers, Intel's above all, call
everything free whatever is used. That is a bound from above, and where it is all there is, a declared budget counts.
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
from relevo.core.leases.reading import Reading
from relevo.devices.amd import find_amd_card
from relevo.devices.device import CARD_LAG_S, DeviceKind, gone
from relevo.devices.device import STALE_AFTER_S as KERNEL_STALE_AFTER_S
from relevo.devices.events import DeviceEvent, DeviceEventKind, EventBox
from relevo.devices.host import memory_available
from relevo.devices.uevents import CardWatch

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
    pci_address: str | None = None
    """Like "0000:03:00.0"; None where the engine does not tell it."""


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
                pci_address=d.get("pci_address"),
            )
            for d in raw["devices"]
        ),
    )


class EngineDevice:
    """One card, watched through the engine by a thread of its own, or through the kernel where it is AMD's.

    `declared_bytes`: the budget where nobody tells the free memory; then what is leased is all that is known.
    `ask`: returns the engine's facts; blocks, and may raise DeviceError.
    """

    emulated = False
    lag_s = CARD_LAG_S

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
        self._amd = find_amd_card(
            backend=card.backend,
            description=card.description,
            pci_address=card.pci_address,
            integrated=card.kind == "igpu",
            root=root,
        )
        self._watching: CardWatch | None = None
        self._pci_address = card.pci_address if self._amd is None else self._amd.pci_address
        self._box = EventBox()
        self._gone_told = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._reading = self._judge(card)

    @property
    def stale_after_s(self) -> float:
        """The engine is asked less often than the kernel, because every question starts a process."""
        return STALE_AFTER_S if self._amd is None else KERNEL_STALE_AFTER_S

    @property
    def tells(self) -> str:
        """For people: what is known of this card, from whom, and what is not."""
        if self._amd is not None:
            told = self._amd.tells
        elif self.kind is DeviceKind.METAL:
            told = (
                "The engine tells the limit; what is free is the system's word, as the card shares its memory. "
                "Beyond the limit memory is swapped out rather than refused."
            )
        elif self._reading.free_bytes is None:
            told = f"What is free is not known. {self._reading.reason}"
        else:
            told = f"The engine is asked every {self._interval_s:g} s for total and free memory, and for nothing else."
        heard = self._watching is not None and self._watching.hears and self._pci_address is not None
        return told if not heard else f"{told} The kernel announces when the card hangs."

    def start(self) -> None:
        """Begin to watch. Called twice, nothing more happens."""
        if self._watching is None and self.kind in (DeviceKind.VULKAN, DeviceKind.ROCM):
            self._watching = CardWatch(self._pci_address)
        asks = self._amd is None and self.kind is not DeviceKind.CUDA  # the kernel is asked directly, at every reading
        if self._thread is None and asks:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._watch, name=f"engine-{self.name}", daemon=True)
            self._thread.start()

    def stop(self, wait_s: float = 1.0) -> None:
        """Stop watching. A question under way is left to end by itself."""
        self._stopped.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(wait_s)
        if self._watching is not None:
            self._watching.close()
            self._watching = None

    def read(self) -> Reading:
        """What was seen last; unknown when that is too long ago. Never waits for the engine."""
        now = self._clock()
        if self._amd is not None:
            self._reading = self._note_gone(self._amd.read(now))
            return self._reading
        reading = self._reading
        age_s = now - reading.read_at
        if reading.free_bytes is not None and age_s > STALE_AFTER_S:
            return self._unknown(
                reading.total_bytes, f"The engine has not said anything of this card for {age_s:.0f} s."
            )
        return reading

    def held_by(self, pid: int) -> int | None:
        """What the kernel says that a worker holds; only of AMD cards does it say so."""
        return None if self._amd is None else self._amd.held_by(pid)

    def events(self) -> tuple[DeviceEvent, ...]:
        """What happened since the last time."""
        if self._watching is not None:
            for event in self._watching.take(self._clock()):
                self._box.put(event)
        return self._box.take()

    def refresh(self) -> Reading:
        """Ask now. Blocks: for the watching thread and for tests."""
        if self._amd is not None or self.kind is DeviceKind.CUDA:
            return self.read()
        try:
            facts = self._ask()
        except DeviceError as e:
            self._reading = self._unknown(None, e.message)
            return self._reading
        card = next((device for device in facts.devices if device.name == self.engine_device), None)
        if card is None:
            unseen = f"The engine does not see {self.engine_device} any more."
            self._reading = self._note_gone(gone(unseen, self._clock()))
        else:
            self._gone_told = False
            self._reading = self._judge(card)
        return self._reading

    def _judge(self, card: EngineDeviceFacts) -> Reading:
        now = self._clock()
        if self._amd is not None:
            return self._amd.read(now)
        total, free = card.total_bytes, card.free_bytes
        if self.kind is DeviceKind.CUDA:
            costly = (
                "Its maker's library does not answer, and to ask the engine takes hundreds of MiB of the card itself."
            )
            return self._unknown(total, costly)
        if free is None or not total:
            return self._unknown(total, "The engine does not tell this card's memory.")
        if self.kind is DeviceKind.METAL:
            available = memory_available(self._root)
            if available is None:
                return self._unknown(total, "The system does not tell what memory it has left.", at_most=free)
            return Reading(total, min(free, available), read_at=now)
        if free >= total:
            all_free = "This driver calls all of the card's memory free, whatever is used: that is only an upper bound."
            return self._unknown(total, all_free, at_most=free)
        return Reading(total, free, read_at=now)

    def _unknown(self, total_bytes: int | None, reason: str, at_most: int | None = None) -> Reading:
        more = "" if self.declared_bytes is not None else " Declare total_bytes for the device."
        return Reading(total_bytes, None, read_at=self._clock(), reason=reason + more, free_at_most_bytes=at_most)

    def _note_gone(self, reading: Reading) -> Reading:
        """A card that was there and is not shown any more: told once, until it is back."""
        is_gone = reading.total_bytes is None
        if is_gone and not self._gone_told:
            self._box.put(DeviceEvent(DeviceEventKind.OFF_THE_BUS, "gone", reading.reason or "", self._clock()))
        self._gone_told = is_gone
        return reading

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
