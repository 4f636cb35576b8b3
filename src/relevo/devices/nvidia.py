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
from relevo.core.ledger import Reading
from relevo.devices.device import DeviceKind

INTERVAL_S: Final = 0.5
SILENT_AFTER_S: Final = 5.0
OPEN_TIMEOUT_S: Final = 10.0

_log = logging.getLogger("relevo.devices.nvidia")

_LOST_NAMES: Final = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")
_DRIVER_NAMES: Final = (
    "NVML_ERROR_UNINITIALIZED",
    "NVML_ERROR_DRIVER_NOT_LOADED",
    "NVML_ERROR_LIBRARY_NOT_FOUND",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
)


@dataclass(frozen=True, slots=True)
class NvidiaFacts:
    """What does not change while the driver runs."""

    index: int
    uuid: str
    card: str
    driver: str


class NvidiaDevice:
    """One card. `start` begins to watch it; `stop` ends that. Both may be called twice.

    `nvml`: the `pynvml` module (of nvidia-ml-py); passed in so that a test can let it fail.
    """

    kind = DeviceKind.NVIDIA
    emulated = False

    def __init__(
        self,
        name: str,
        index: int = 0,
        *,
        nvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.name = name
        self.index = index
        self.facts: NvidiaFacts | None = None
        self.fault: str | None = None
        """`device_lost` or `driver` while the driver says so; None otherwise."""
        self._nvml = nvml
        self._clock = clock
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._first = threading.Event()
        self._thread: threading.Thread | None = None
        self._reading = Reading(None, None, read_at=clock(), reason=f"Device {name} has not been read yet.")

    @property
    def description(self) -> str:
        """For people: the card's name and driver."""
        if self.facts is None:
            return f"NVIDIA card {self.index}"
        return f"{self.facts.card}, driver {self.facts.driver}"

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
        if reading.free_bytes is not None and silent_s > SILENT_AFTER_S:
            return Reading(
                reading.total_bytes,
                None,
                read_at=reading.read_at,
                reason=f"The NVIDIA driver has not answered for {silent_s:.0f} s.",
            )
        return reading

    def _watch(self) -> None:
        nvml, handle = None, None
        while not self._stopped.is_set():
            try:
                if nvml is None or handle is None:
                    nvml = self._nvml or _import_nvml()
                    nvml.nvmlInit()
                    handle = nvml.nvmlDeviceGetHandleByIndex(self.index)
                    self.facts = NvidiaFacts(
                        self.index,
                        _text(nvml.nvmlDeviceGetUUID(handle)),
                        _text(nvml.nvmlDeviceGetName(handle)),
                        _text(nvml.nvmlSystemGetDriverVersion()),
                    )
                self._reading = self._ask(nvml, handle)
            except Exception as e:  # NVML's errors are made at run time, and a thread must not end on one
                self.fault, reason = _explain(nvml, e)
                self._reading = Reading(None, None, read_at=self._clock(), reason=reason)
                if self.fault is not None:
                    handle = None  # after a reset or a reload the old handle is worth nothing
            self._first.set()
            self._stopped.wait(self._interval_s)
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except Exception:
                _log.debug("NVML did not shut down cleanly.", exc_info=True)

    def _ask(self, nvml: Any, handle: Any) -> Reading:
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            reserved = int(memory.reserved)
        except nvml.NVMLError as e:
            if _code(e) not in (
                _number(nvml, "NVML_ERROR_FUNCTION_NOT_FOUND"),
                _number(nvml, "NVML_ERROR_INVALID_ARGUMENT"),
            ):
                raise
            memory, reserved = nvml.nvmlDeviceGetMemoryInfo(handle), 0  # an older driver counts it as used
        self.fault = None
        return Reading(int(memory.total), int(memory.free), reserved, self._clock())


def list_cards(nvml: Any = None) -> list[NvidiaFacts]:
    """Every card the driver shows. Call it from a process or thread that may hang. Raises DeviceError."""
    found = []
    try:
        nvml = nvml or _import_nvml()
        nvml.nvmlInit()
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
                found.append(NvidiaFacts(index, uuid, name, _text(nvml.nvmlSystemGetDriverVersion())))
        finally:
            nvml.nvmlShutdown()
    except Exception as e:
        raise DeviceError(_explain(nvml, e)[1]) from e
    return found


def _explain(nvml: Any, error: Exception) -> tuple[str | None, str]:
    """(what it means for the breaker, a sentence)."""
    code = _code(error)
    if nvml is None or code is None:
        return "driver", f"The NVIDIA management library cannot be used: {error}."
    if code in (_number(nvml, name) for name in _LOST_NAMES):
        return "device_lost", f"The driver says that the card is gone or needs a reset ({error})."
    if code in (_number(nvml, name) for name in _DRIVER_NAMES):
        return (
            "driver",
            f"The NVIDIA driver is not usable ({error}). After an update of the driver, restart the machine.",
        )
    if code == _number(nvml, "NVML_ERROR_NOT_SUPPORTED"):
        return (
            None,
            "This card does not report its memory (it shares the machine's). Declare total_bytes for the device.",
        )
    if code in (_number(nvml, "NVML_ERROR_NOT_FOUND"), _number(nvml, "NVML_ERROR_INVALID_ARGUMENT")):
        return "driver", f"The driver shows no card with this number ({error})."
    return None, f"The NVIDIA driver could not be asked: {error}."


def _code(error: Exception) -> int | None:
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else None


def _number(nvml: Any, name: str) -> int | None:
    value = getattr(nvml, name, None)
    return value if isinstance(value, int) else None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _import_nvml() -> Any:
    import pynvml

    return pynvml
