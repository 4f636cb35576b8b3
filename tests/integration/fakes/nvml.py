"""Stands in for the driver's management library: same names and error numbers as pynvml, figures and faults as told."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pynvml

ALL_INSTANCES = 0xFFFFFFFF


class Handle:
    """A card, or a slice of one."""

    def __init__(self, uuid: str, parent: Handle | None = None, instance: int = 0) -> None:
        self.uuid = uuid
        self.parent = parent
        self.instance = instance


class FakeNvml:
    """A driver with one card. `fault`: the number every question is answered with; `hang`: wait for it first.

    `missing`: names that this version of the module does not have. `refused`: function -> number it always raises.
    """

    def __init__(self, total: int, free: int, reserved: int) -> None:
        self.memory = SimpleNamespace(total=total, free=free, reserved=reserved, used=total - free - reserved)
        self.fault: int | None = None
        self.old_driver = False
        self.hang: threading.Event | None = None
        self.opened = 0
        self.closed = 0
        self.missing: set[str] = set()
        self.refused: dict[str, int] = {}
        self.card = Handle("GPU-1")
        self.slices: list[Handle] = []
        self.divided = False
        self.action = pynvml.NVML_GPU_RECOVERY_ACTION_NONE
        self.processes: list[tuple[int, int | None]] = []
        self.supported_events = pynvml.nvmlEventTypeAll
        self.registered: tuple[Any, int] | None = None
        self.happened: queue.Queue[SimpleNamespace] = queue.Queue()

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "__dict__").get("missing", ()):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("missing", ()):
            raise AttributeError(name)
        value = getattr(pynvml, name)  # error classes and numbers are the real ones
        if name.startswith("nvml") and callable(value) and not isinstance(value, type):
            raise AttributeError(f"{name} is not played here")
        return value

    def divide(self, count: int) -> None:
        """Turn MIG on and make slices."""
        self.divided = True
        self.slices = [Handle(f"MIG-{n + 1}", self.card, instance=n + 1) for n in range(count)]

    def happen(self, kind: int, data: int = 0, instance: int = ALL_INSTANCES) -> None:
        """Let the driver tell something."""
        self.happened.put(SimpleNamespace(eventType=kind, eventData=data, gpuInstanceId=instance))

    def xid(self, number: int, instance: int = ALL_INSTANCES) -> None:
        """Let the driver tell an error."""
        self.happen(pynvml.nvmlEventTypeXidCriticalError, number, instance)

    def _ask(self, name: str = "") -> None:
        if self.hang is not None:
            self.hang.wait(30)
        number = self.fault if self.fault is not None else self.refused.get(name)
        if number is not None:
            raise pynvml.NVMLError(number)

    def nvmlInit(self) -> None:
        self._ask()
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        if index > 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.card

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle:
        for handle in (self.card, *self.slices):
            if handle.uuid == uuid:
                return handle
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> Handle:
        if address != "0000:01:00.0":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.card

    def nvmlDeviceIsMigDeviceHandle(self, handle: Handle) -> bool:
        return handle.parent is not None

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Handle) -> Handle | None:
        return handle.parent

    def nvmlDeviceGetGpuInstanceId(self, handle: Handle) -> int:
        return handle.instance

    def nvmlDeviceGetMigMode(self, handle: Handle) -> list[int]:
        self._ask("nvmlDeviceGetMigMode")
        return [int(self.divided), int(self.divided)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int) -> Handle:
        if index >= len(self.slices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.slices[index]

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, _handle: Handle) -> bytes:
        return b"A Card 3000"

    def nvmlDeviceGetPciInfo(self, _handle: Handle) -> SimpleNamespace:
        return SimpleNamespace(busId=b"00000000:01:00.0")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "590.44.01"

    def nvmlDeviceGetMemoryInfo(self, _handle: Handle, version: int | None = None) -> SimpleNamespace:
        self._ask("nvmlDeviceGetMemoryInfo")
        if version is not None and self.old_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return self.memory

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: Handle) -> list[SimpleNamespace]:
        self._ask("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, _handle: Handle) -> list[SimpleNamespace]:
        return []

    def nvmlDeviceGetFieldValues(self, _handle: Handle, fields: list[int]) -> list[SimpleNamespace]:
        assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        number = self.refused.get("nvmlDeviceGetFieldValues", pynvml.NVML_SUCCESS)
        return [SimpleNamespace(nvmlReturn=number, value=SimpleNamespace(uiVal=self.action))]

    def nvmlDeviceGetSupportedEventTypes(self, handle: Handle) -> int:
        return self.supported_events if handle.parent is None else 0

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlEventSetFree(self, _events: object) -> None:
        self.registered = None

    def nvmlDeviceRegisterEvents(self, handle: Handle, kinds: int, events: object) -> None:
        self._ask("nvmlDeviceRegisterEvents")
        self.registered = (handle, kinds)

    def nvmlEventSetWait(self, _events: object, timeout_ms: int) -> SimpleNamespace:
        self._ask("nvmlEventSetWait")
        try:
            return self.happened.get(timeout=timeout_ms / 1000) if timeout_ms else self.happened.get_nowait()
        except queue.Empty:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
