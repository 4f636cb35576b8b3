"""One NVIDIA card as the driver's management library (NVML) tells it. Every call here may hang with the driver.

The library grows with the driver: what is missing in an older one is a figure that is not known, never an error.
All names and numbers come from the `pynvml` module (of nvidia-ml-py) by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from relevo.core.described import Described
from relevo.devices.events import DeviceEventKind

_log = logging.getLogger("relevo.devices.nvidia")

_ALL_INSTANCES: Final = 0xFFFFFFFF
_WAITING_EVENTS: Final = 32
_NOT_AVAILABLE_BYTES: Final = 2**64 - 1
"""What the driver writes for the memory of a process that it does not know (Windows, WSL2)."""


class RecoveryAction(Described):
    """What the driver says that the card needs."""

    NONE = "none", "The card needs nothing."
    GPU_RESET = "gpu_reset", "The card needs a reset: end every program on it, then run `nvidia-smi --gpu-reset`."
    NODE_REBOOT = "node_reboot", "The machine needs a restart."
    DRAIN_P2P = "drain_p2p", "Work that joins this card with others must end."
    DRAIN_AND_RESET = "drain_and_reset", "Work that is under way may end; then the card needs a reset."
    RECOVER_IMEX_DOMAIN = "recover_imex_domain", "The group of machines that share memory with this one needs a repair."
    BUS_RESET = "bus_reset", "The card needs a reset of its bus."
    SYSTEM_REBOOT = "system_reboot", "The whole machine needs a restart, its firmware included."
    OTHER = "other", "The card needs something that this version of Relevo does not know; `nvidia-smi -q` may tell."

    @property
    def event(self) -> DeviceEventKind:
        """The kind of event that a change to this action is."""
        if self is RecoveryAction.NONE:
            return DeviceEventKind.INFORMATION
        joined = (RecoveryAction.DRAIN_P2P, RecoveryAction.RECOVER_IMEX_DOMAIN)
        return DeviceEventKind.LINK if self in joined else DeviceEventKind.RESET_NEEDED


_OLDER: Final = (
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_INVALID_ARGUMENT",
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
)
"""How a driver says that it does not know the newer form of a question."""

_ACTION_PREFIX: Final = "NVML_GPU_RECOVERY_ACTION_"


@dataclass(frozen=True, slots=True)
class Trouble:
    """What an error of the library means."""

    fault: str | None
    """`device_lost`, `reset_required` or `driver`; None: the question failed, not the card."""
    event: DeviceEventKind | None
    sentence: str


@dataclass(frozen=True, slots=True)
class CardEvent:
    """An event as the driver gave it: an Xid's number, or a name of another event type."""

    xid: int | None
    name: str


class NotOneCard(Exception):
    """The card is divided, or there is no such card. The message is a sentence for people."""


class Card:
    """An open card, or one slice of a divided card.

    `which`: a number in the driver's order, a PCI address ("0000:01:00.0"), or a UUID ("GPU-...", "MIG-...") or its
    beginning. Raises NotOneCard, and the library's own errors.
    """

    def __init__(self, nvml: Any, which: int | str) -> None:
        self._nvml = nvml
        self._handle = _handle(nvml, which)
        self._parent = self._handle
        self._instance: int | None = None
        if attempt(nvml, "nvmlDeviceIsMigDeviceHandle", self._handle):
            self._parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)
            self._instance = attempt(nvml, "nvmlDeviceGetGpuInstanceId", self._handle)
        else:
            self._refuse_divided()
        self._events: Any = self._register()

    @property
    def is_slice(self) -> bool:
        """Whether it is a slice of a divided card (MIG)."""
        return self._parent is not self._handle

    @property
    def tells_events(self) -> bool:
        """Whether the driver tells errors as they happen; it does not on Windows."""
        return self._events is not None

    def uuid(self) -> str:
        """The driver's name for good."""
        return text(self._nvml.nvmlDeviceGetUUID(self._handle))

    def name(self) -> str:
        """The card's name."""
        return text(self._nvml.nvmlDeviceGetName(self._handle))

    def pci_address(self) -> str | None:
        """Like "0000:01:00.0", as the kernel writes it."""
        info = attempt(self._nvml, "nvmlDeviceGetPciInfo", self._parent)
        return None if info is None else short_pci(text(info.busId))

    def memory(self) -> tuple[int, int, int]:
        """(total, free, what the driver keeps for itself) in bytes. An older driver counts its own part as used."""
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(self._handle, version=nvml.nvmlMemory_v2)
            return int(memory.total), int(memory.free), int(memory.reserved)
        except (AttributeError, nvml.NVMLError) as e:
            if not isinstance(e, AttributeError) and code(e) not in numbers(nvml, *_OLDER):
                raise
        memory = nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(memory.total), int(memory.free), 0

    def processes(self, proc: Path = Path("/proc")) -> dict[int, int] | None:
        """Bytes held by pid. None where the driver does not tell, or speaks of processes that are not seen here.

        Inside a container without the host's process numbers, a pid of the driver may be anybody's here: so one
        unknown pid makes all of them worthless.
        """
        held: dict[int, int] = {}
        for question in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            found = attempt(self._nvml, question, self._handle)
            if found is None:
                return None
            for process in found:
                bytes_ = process.usedGpuMemory
                if bytes_ is None or bytes_ == _NOT_AVAILABLE_BYTES or not (proc / str(process.pid)).exists():
                    return None
                held[process.pid] = max(held.get(process.pid, 0), int(bytes_))
        return held

    def recovery_action(self) -> RecoveryAction | None:
        """What the driver says the card needs; None where it does not tell (older drivers, many home cards)."""
        field = number(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
        values = None if field is None else attempt(self._nvml, "nvmlDeviceGetFieldValues", self._parent, [field])
        if not values or values[0].nvmlReturn != number(self._nvml, "NVML_SUCCESS"):
            return None
        told = int(values[0].value.uiVal)
        for action in RecoveryAction:
            if number(self._nvml, _ACTION_PREFIX + action.name) == told:
                return action
        return RecoveryAction.OTHER

    def wait(self, timeout_s: float) -> list[CardEvent]:
        """Events since the last time; waits up to `timeout_s` for the first. Raises the library's errors."""
        found = list(self._waiting(timeout_s)) if self._events is not None else []
        return [event for event in found if event is not None]

    def close(self) -> None:
        """Give the event set back."""
        if self._events is not None:
            attempt(self._nvml, "nvmlEventSetFree", self._events)
            self._events = None

    def _waiting(self, timeout_s: float) -> Iterator[CardEvent | None]:
        nvml, timeout_ms = self._nvml, max(1, round(timeout_s * 1000))
        for _ in range(_WAITING_EVENTS):
            try:
                data = nvml.nvmlEventSetWait(self._events, timeout_ms)
            except nvml.NVMLError as e:
                if code(e) == number(nvml, "NVML_ERROR_TIMEOUT"):
                    return
                raise
            timeout_ms = 0
            yield self._event(data)

    def _event(self, data: Any) -> CardEvent | None:
        instance = getattr(data, "gpuInstanceId", _ALL_INSTANCES)
        if self._instance is not None and instance not in (self._instance, _ALL_INSTANCES):
            return None  # it concerns another slice of the card
        kind = int(data.eventType)
        if kind == number(self._nvml, "nvmlEventTypeXidCriticalError"):
            return CardEvent(int(data.eventData), "xid")
        for name in ("nvmlEventTypeGpuRecoveryAction", "nvmlEventTypeGpuUnavailableError"):
            if kind == number(self._nvml, name):
                return CardEvent(None, name)
        return None

    def _register(self) -> Any:
        """Ask to be told of errors. Only whole cards can be asked for, so a slice listens to its card."""
        nvml = self._nvml
        wanted = 0
        for name in ("XidCriticalError", "GpuRecoveryAction", "GpuUnavailableError"):
            wanted |= number(nvml, f"nvmlEventType{name}") or 0
        wanted &= attempt(nvml, "nvmlDeviceGetSupportedEventTypes", self._parent) or 0
        events = attempt(nvml, "nvmlEventSetCreate") if wanted else None
        if events is None:
            return None
        try:
            nvml.nvmlDeviceRegisterEvents(self._parent, wanted, events)
        except nvml.NVMLError as e:
            _log.info("The driver does not tell errors of this card as they happen: %s.", e)
            attempt(nvml, "nvmlEventSetFree", events)
            return None
        return events

    def _refuse_divided(self) -> None:
        mode = attempt(self._nvml, "nvmlDeviceGetMigMode", self._handle)
        if not mode or mode[0] != number(self._nvml, "NVML_DEVICE_MIG_ENABLE"):
            return
        slices = ", ".join(_slices(self._nvml, self._handle)) or "none has been made yet"
        raise NotOneCard(
            "This card is divided into slices (MIG), and its own figures are those of all slices together. "
            f"Name one slice by its UUID instead (here: {slices})."
        )


def explain(nvml: Any, error: Exception) -> Trouble:
    """What an error means, in a sentence."""
    kind, found = DeviceEventKind, code(error)
    if isinstance(error, NotOneCard):
        return Trouble("driver", None, str(error))
    if nvml is None or found is None:
        return Trouble("driver", None, f"The NVIDIA management library cannot be used: {error}.")
    if found == number(nvml, "NVML_ERROR_GPU_IS_LOST"):
        lost = f"The driver says that the card is gone ({error}). A restart of the machine may bring it back."
        return Trouble("device_lost", kind.OFF_THE_BUS, lost)
    if found == number(nvml, "NVML_ERROR_RESET_REQUIRED"):
        return Trouble("reset_required", kind.RESET_NEEDED, f"The driver says that the card needs a reset ({error}).")
    if found == number(nvml, "NVML_ERROR_LIB_RM_VERSION_MISMATCH"):
        updated = "The NVIDIA driver was updated, but the old one is still running: restart the machine."
        return Trouble("driver", kind.DRIVER_CHANGED, updated)
    if found in numbers(nvml, "NVML_ERROR_DRIVER_NOT_LOADED", "NVML_ERROR_LIBRARY_NOT_FOUND"):
        gone = f"The NVIDIA driver is not usable ({error}). After an update of the driver, restart the machine."
        return Trouble("driver", kind.DRIVER_CHANGED, gone)
    if found == number(nvml, "NVML_ERROR_UNINITIALIZED"):
        return Trouble("driver", None, f"The NVIDIA driver is not usable ({error}).")
    if found == number(nvml, "NVML_ERROR_NOT_SUPPORTED"):
        return Trouble(None, None, "This card does not report its memory (it shares the machine's).")
    if found in numbers(nvml, "NVML_ERROR_NOT_FOUND", "NVML_ERROR_INVALID_ARGUMENT", "NVML_ERROR_GPU_NOT_FOUND"):
        return Trouble("driver", None, f"The driver shows no such card ({error}).")
    if found == number(nvml, "NVML_ERROR_NO_PERMISSION"):
        return Trouble(None, None, f"This user may not ask the driver ({error}).")
    return Trouble(None, None, f"The NVIDIA driver could not be asked: {error}.")


def attempt(nvml: Any, name: str, *arguments: Any) -> Any:
    """Call a function that an older library or driver may not have; None where it refuses. A lost card is raised."""
    try:
        return getattr(nvml, name)(*arguments)
    except AttributeError:
        return None
    except nvml.NVMLError as e:
        if code(e) in numbers(nvml, "NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED"):
            raise
        return None


def code(error: Exception) -> int | None:
    """The library's number of an error; None for an error that is not the library's."""
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else None


def number(nvml: Any, name: str) -> int | None:
    """A constant; None where this version of the library has none of that name."""
    value = getattr(nvml, name, None)
    return value if isinstance(value, int) else None


def numbers(nvml: Any, *names: str) -> set[int]:
    """Those of these constants that there are."""
    return {found for name in names if (found := number(nvml, name)) is not None}


def text(value: Any) -> str:
    """Older versions of the library answer in bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def short_pci(address: str) -> str:
    """A PCI address as the kernel writes it: the library writes its domain with eight digits."""
    domain, _, rest = address.strip().lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}" if rest.count(":") else address.strip().lower()


def visible_card(number_in_engine: int, visible: str | None) -> int | str:
    """Which card the engine's CUDA device of this number is: a number in PCI order, or a UUID.

    `visible`: the value of CUDA_VISIBLE_DEVICES, which renumbers the cards; None where it is not set. With
    CUDA_DEVICE_ORDER=PCI_BUS_ID, as workers are started, its numbers are the driver's.
    """
    if not visible:
        return number_in_engine
    entries = [entry.strip() for entry in visible.split(",")]
    if number_in_engine >= len(entries):
        return number_in_engine
    entry = entries[number_in_engine]
    return int(entry) if entry.isdecimal() else entry


def _handle(nvml: Any, which: int | str) -> Any:
    if isinstance(which, int):
        return nvml.nvmlDeviceGetHandleByIndex(which)
    if not which.upper().startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByPciBusId(which)
    try:
        return nvml.nvmlDeviceGetHandleByUUID(which)
    except nvml.NVMLError as e:
        if code(e) not in numbers(nvml, "NVML_ERROR_NOT_FOUND", "NVML_ERROR_INVALID_ARGUMENT"):
            raise
        matching = [h for uuid, h in _all_uuids(nvml) if uuid.lower().startswith(which.lower())]
        if len(matching) == 1:
            return matching[0]
        raise NotOneCard(f"{len(matching)} cards have a UUID that begins with {which}; there must be one.") from None


def _all_uuids(nvml: Any) -> Iterator[tuple[str, Any]]:
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        yield text(nvml.nvmlDeviceGetUUID(handle)), handle
        yield from _slice_handles(nvml, handle)


def _slices(nvml: Any, handle: Any) -> list[str]:
    return [uuid for uuid, _ in _slice_handles(nvml, handle)]


def _slice_handles(nvml: Any, handle: Any) -> Iterator[tuple[str, Any]]:
    for index in range(attempt(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = attempt(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if part is not None:
            yield text(nvml.nvmlDeviceGetUUID(part)), part
