"""What happened to a device, beside its figures: told once, in a sentence, with what it means for its workers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from relevo.core.breaker import FaultKind
from relevo.core.described import Described

KEPT: Final = 64


class DeviceEventKind(Described):
    """What an event means for whoever uses the device."""

    RESTART_ENGINE = (
        "restart_engine",
        "A program on the device did wrong or was stopped: its process must be started again, the device is fine.",
    )
    RESET_DONE = "reset_done", "The device was reset by its driver: it works, but every process on it lost its context."
    RESET_NEEDED = "reset_needed", "Only a reset of the device heals it."
    OFF_THE_BUS = "off_the_bus", "The device is gone; a restart of the machine or a power cycle may bring it back."
    LINK = "link", "The link between cards failed: work that is spread over several cards cannot be trusted."
    POWER = "power", "The device does not get the power it needs: a person must look at its cable and supply."
    RECOVERY_CHANGED = "recovery_changed", "The driver says that what the device needs has changed."
    DRIVER_CHANGED = "driver_changed", "The driver was updated or unloaded under us; the machine must be restarted."
    SILENT = "silent", "The driver does not answer: a call into it hangs, or it is gone."
    SUSPECT = "suspect", "An error whose meaning is not known here: a probe must show whether the device still works."
    MEMORY_LIMIT = "memory_limit", "A memory limit was reached: whoever is under it waits or is refused."
    MEMORY_KILL = "memory_kill", "The kernel killed a process for want of memory."
    INFORMATION = "information", "Something that follows from another event, or that needs no act."

    @property
    def fault(self) -> FaultKind | None:
        """What the device's breaker is told; None: nothing, it concerns single processes or nobody."""
        return FAULTS.get(self)


_K = DeviceEventKind

FAULTS: Final[Mapping[DeviceEventKind, FaultKind]] = MappingProxyType(
    {
        _K.RESET_DONE: FaultKind.STICKY_DEVICE,
        _K.RESET_NEEDED: FaultKind.RESET_CLASS,
        _K.OFF_THE_BUS: FaultKind.DEVICE_LOST,
        _K.POWER: FaultKind.RESET_CLASS,
        _K.DRIVER_CHANGED: FaultKind.DEVICE_LOST,
        _K.SILENT: FaultKind.DEVICE_LOST,
    }
)
"""Not in it: a recovery action that changed. Where the new one can be read, the event is of the kind it asks for."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """One thing that happened, as the driver or the kernel told it."""

    kind: DeviceEventKind
    code: str
    """The teller's own name for it: "xid 79", "wedged rebind", "oom_kill"."""
    sentence: str
    """For people: what happened, and what would be right."""
    at: float
    """Monotonic seconds, when we learned of it."""


class EventBox:
    """Events until somebody takes them. Filled from any thread; the oldest go when nobody does."""

    def __init__(self, kept: int = KEPT) -> None:
        self._events: deque[DeviceEvent] = deque(maxlen=kept)
        self._lock = threading.Lock()
        self.lost = 0
        """How many were pushed out unread."""

    def put(self, event: DeviceEvent) -> None:
        """Add one."""
        with self._lock:
            self.lost += len(self._events) == self._events.maxlen
            self._events.append(event)

    def take(self) -> tuple[DeviceEvent, ...]:
        """All since the last time, oldest first."""
        with self._lock:
            events = tuple(self._events)
            self._events.clear()
        return events
