"""NVIDIA cards through the driver's management library (NVML). No CUDA context is ever made just to look.

A driver in trouble can block a call for minutes, so only a thread of our own calls it, and `read` returns what that
thread saw last. Not hearing from the driver is itself a reading: unknown, with the reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from relevo.core.errors import DeviceError
from relevo.core.leases.reading import Reading
from relevo.devices.device import CARD_LAG_S, STALE_AFTER_S, DeviceKind, gone
from relevo.devices.events import DeviceEvent, DeviceEventKind, EventBox
from relevo.devices.host import memory_available
from relevo.devices.nvml import Card, CardEvent, RecoveryAction, Trouble, attempt, explain, text
from relevo.devices.xids import RECOVERY_CHANGED_XID, xid

INTERVAL_S: Final = 0.25
RETRY_S: Final = 2.0
"""How long after a fault the driver is opened again: opening it is slow, and a lost card seldom returns."""
SILENT_AFTER_S: Final = 5.0
OPEN_TIMEOUT_S: Final = 10.0
RECOVERY_EVERY_S: Final = 5.0
_NO_MEMORY_OF_ITS_OWN: Final = "NVML_ERROR_NOT_SUPPORTED"

_log = logging.getLogger("relevo.devices.nvidia")


@dataclass(frozen=True, slots=True)
class NvidiaFacts:
    """What does not change while the driver runs."""

    index: int
    uuid: str
    card: str
    driver: str
    pci_address: str | None = None
    is_slice: bool = False
    """A slice of a divided card (MIG)."""


class NvidiaDevice:
    """One card, or one slice of a divided card. `start` begins to watch it; `stop` ends that. Both may be called twice.

    `index`: the engine's number for it. `which`: the card in the driver's words where that is another (see
    `nvml.Card`); None: the same number. `declared_bytes`: the budget where the card shares the machine's memory.
    `nvml`: the `pynvml` module (of nvidia-ml-py); passed in so that a test can let it fail.
    """

    kind = DeviceKind.NVIDIA
    emulated = False
    lag_s = CARD_LAG_S
    stale_after_s = STALE_AFTER_S

    def __init__(
        self,
        name: str,
        index: int = 0,
        *,
        which: int | str | None = None,
        declared_bytes: int | None = None,
        nvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self.name = name
        self.index = index
        self.which = index if which is None else which
        self.declared_bytes = declared_bytes
        self.facts: NvidiaFacts | None = None
        self.fault: str | None = None
        """`device_lost`, `reset_required` or `driver` while the driver says so; None otherwise."""
        self.recovery_action: RecoveryAction | None = None
        """What the driver says the card needs; None where it does not tell. Probe only at `none` or None."""
        self.library_answers = False
        """Whether the management library could be used at all, whatever it said of this card."""
        self._nvml = nvml
        self._clock = clock
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._recovery_read_at: float | None = None
        self._held: dict[int, int] | None = None
        self._tells_events = False
        self._troubled: DeviceEventKind | None = None
        self._silence_told = False
        self._box = EventBox()
        self._stopped = threading.Event()
        self._first = threading.Event()
        self._thread: threading.Thread | None = None
        self._reading = Reading(None, None, read_at=clock(), reason=f"Device {name} has not been read yet.")

    @property
    def description(self) -> str:
        """For people: the card's name and driver."""
        if self.facts is None:
            return f"NVIDIA card {self.which}"
        return f"{self.facts.card}, driver {self.facts.driver}"

    @property
    def tells(self) -> str:
        """For people: what the driver says of this card, and what it does not."""
        if self.facts is None:
            return "The driver has not been heard yet."
        if self.fault is not None:
            return f"Nothing is told of it now. {self._reading.reason}"
        shared = self._reading.total_bytes is None and self._reading.free_at_most_bytes is not None
        told = ["no memory (it is the machine's)" if shared else "total, free and the driver's own part of memory"]
        told += ["errors as they happen"] * self._tells_events
        told += ["each process's share"] * (self._held is not None)
        told += ["what it needs to recover"] * (self.recovery_action is not None)
        untold = ["whether free memory is in one piece"]
        untold += ["errors as they happen"] * (not self._tells_events)
        untold += ["each process's share"] * (self._held is None)
        untold += ["what it needs to recover"] * (self.recovery_action is None)
        return f"The driver tells {', '.join(told)}; it does not tell {', '.join(untold)}."

    @property
    def engine_device(self) -> str:
        """The engine numbers cards as NVML does when its process has CUDA_DEVICE_ORDER=PCI_BUS_ID."""
        return f"CUDA{self.index}"

    def start(self, wait_s: float = OPEN_TIMEOUT_S) -> None:
        """Begin to watch, and wait for the first answer. Raises DeviceError when there is none or no card."""
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._watch, name=f"nvml-{self.name}", daemon=True)
            self._thread.start()
        if not self._first.wait(wait_s):
            raise DeviceError(f"Device {self.name}: the NVIDIA driver did not answer within {wait_s:g} s.")
        if self.facts is None:
            raise DeviceError(f"Device {self.name}: {self._reading.reason}")

    def stop(self, wait_s: float = 1.0) -> None:
        """Stop watching. A thread that hangs inside the driver is left behind; it dies with the process."""
        self._stopped.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(wait_s)

    def read(self) -> Reading:
        """What the driver said last; unknown when it has been silent for too long. Never waits."""
        reading = self._reading
        silent_s = self._clock() - reading.read_at
        if silent_s <= SILENT_AFTER_S or reading.free_bytes is None:
            return reading
        reason = f"The NVIDIA driver has not answered for {silent_s:.0f} s."
        return gone(reason, reading.read_at, reading.total_bytes)

    def held_by(self, pid: int) -> int | None:
        """What the driver says that a process holds on the card. A hint; None where it does not tell."""
        held = self._held
        return None if held is None or self.read().free_bytes is None else held.get(pid)

    def events(self) -> tuple[DeviceEvent, ...]:
        """What happened since the last time."""
        silent_s = self._clock() - self._reading.read_at
        if silent_s <= SILENT_AFTER_S:
            self._silence_told = False
        elif self._thread is not None and not self._silence_told:
            self._silence_told = True
            self._tell(DeviceEventKind.SILENT, "silent", f"The NVIDIA driver has not answered for {silent_s:.0f} s.")
        return self._box.take()

    # -- in the watching thread

    def _watch(self) -> None:
        nvml, card = None, None
        while not self._stopped.is_set():
            try:
                if card is None:
                    nvml = self._nvml or _import_nvml()
                    card = self._open(nvml)
                self._look(nvml, card)
                self._first.set()
                self._listen(nvml, card)
            except Exception as e:  # NVML's errors are made at run time, and a thread must not end on one
                trouble = explain(nvml, e)
                self._note(trouble)
                if trouble.fault is not None and card is not None:
                    _close(nvml, card)
                    card = None  # after a reset or a reload the old handle is worth nothing
                self._first.set()
                self._stopped.wait(self._interval_s if card is not None else self._retry_s)
        if card is not None:
            _close(nvml, card)

    def _open(self, nvml: Any) -> Card:
        nvml.nvmlInit()
        self.library_answers = True
        try:
            card = Card(nvml, self.which)
            self.facts = NvidiaFacts(
                self.index,
                card.uuid(),
                card.name(),
                text(nvml.nvmlSystemGetDriverVersion()),
                card.pci_address(),
                card.is_slice,
            )
        except Exception:
            attempt(nvml, "nvmlShutdown")
            raise
        self._tells_events = card.tells_events
        self._recovery_read_at = None
        return card

    def _look(self, nvml: Any, card: Card) -> None:
        """Take the figures, and from time to time what the card needs."""
        try:
            total, free, reserved = card.memory()
            reading = Reading(total, free, reserved, self._clock())
        except nvml.NVMLError as e:
            if getattr(e, "value", None) != getattr(nvml, _NO_MEMORY_OF_ITS_OWN, None):
                raise
            reading = self._shared(explain(nvml, e).sentence)
        self._held = card.processes()
        now = self._clock()
        if self._recovery_read_at is None or now - self._recovery_read_at >= RECOVERY_EVERY_S:
            self._look_at_recovery(card)
        self._reading = reading
        if self.fault is not None:
            self._tell(DeviceEventKind.INFORMATION, "answers", "The NVIDIA driver answers for this card again.")
        self.fault = self._troubled = None

    def _shared(self, sentence: str) -> Reading:
        """Its memory is the machine's: what the machine has left is a bound, and only a declared budget counts."""
        more = "" if self.declared_bytes is not None else " Declare total_bytes for the device."
        return Reading(None, None, read_at=self._clock(), reason=sentence + more, free_at_most_bytes=memory_available())

    def _look_at_recovery(self, card: Card) -> bool:
        """Whether the recovery action changed; then that is told."""
        self._recovery_read_at = self._clock()
        action, before = card.recovery_action(), self.recovery_action
        self.recovery_action = action
        if action is None or action is (before or RecoveryAction.NONE):
            return False
        self._tell(action.event, f"recovery {action}", f"The NVIDIA driver now says: {action.sentence}")
        return True

    def _listen(self, nvml: Any, card: Card) -> None:
        """Wait until the next reading is due, and take what the driver tells meanwhile."""
        if not card.tells_events:
            self._stopped.wait(self._interval_s)
            return
        try:
            for event in card.wait(self._interval_s):
                self._take(card, event)
        except nvml.NVMLError as e:
            if explain(nvml, e).fault is not None:
                raise
            _log.warning("Device %s: the driver stopped telling errors as they happen: %s.", self.name, e)
            card.close()
            self._tells_events = False

    def _take(self, card: Card, event: CardEvent) -> None:
        changed = self._look_at_recovery(card)
        if event.xid is None:
            if event.name == "nvmlEventTypeGpuUnavailableError":
                sentence = "The driver says that the card cannot be used any more."
                self._tell(DeviceEventKind.OFF_THE_BUS, "unavailable", sentence)
            return
        known = xid(event.xid)
        if event.xid == RECOVERY_CHANGED_XID and changed:
            return  # told, with what is needed
        kind, sentence = known.kind, known.sentence
        if kind is DeviceEventKind.SUSPECT and self.recovery_action not in (None, RecoveryAction.NONE):
            assert self.recovery_action is not None
            kind, sentence = self.recovery_action.event, f"{sentence} {self.recovery_action.sentence}"
        self._tell(kind, f"xid {event.xid}", sentence)

    def _note(self, trouble: Trouble) -> None:
        self.fault = trouble.fault
        self._held = None
        now = self._clock()
        unknown = Reading(None, None, read_at=now, reason=trouble.sentence)
        self._reading = unknown if trouble.fault is None else gone(trouble.sentence, now)
        if trouble.event is not None and trouble.event is not self._troubled:
            self._tell(trouble.event, trouble.fault or "driver", trouble.sentence)
        self._troubled = trouble.event

    def _tell(self, kind: DeviceEventKind, code: str, sentence: str) -> None:
        self._box.put(DeviceEvent(kind, code, sentence, self._clock()))


def list_cards(nvml: Any = None) -> list[NvidiaFacts]:
    """Every card the driver shows. Call it from a process or thread that may hang. Raises DeviceError."""
    found = []
    try:
        nvml = nvml or _import_nvml()
        nvml.nvmlInit()
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                name, uuid = text(nvml.nvmlDeviceGetName(handle)), text(nvml.nvmlDeviceGetUUID(handle))
                found.append(NvidiaFacts(index, uuid, name, text(nvml.nvmlSystemGetDriverVersion())))
        finally:
            nvml.nvmlShutdown()
    except Exception as e:
        raise DeviceError(explain(nvml, e).sentence) from e
    return found


def _close(nvml: Any, card: Card) -> None:
    for what in (card.close, nvml.nvmlShutdown):
        try:
            what()
        except Exception:
            _log.debug("NVML did not close cleanly.", exc_info=True)


def _import_nvml() -> Any:
    import pynvml

    return pynvml
