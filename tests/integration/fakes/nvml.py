"""Stands in for the driver's management library: same names and error numbers as pynvml, figures and faults as told."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pynvml


class FakeNvml:
    """A driver with one card. `fault`: the number every question is answered with; `hang`: wait for it first."""

    def __init__(self, total: int, free: int, reserved: int) -> None:
        self.memory = SimpleNamespace(total=total, free=free, reserved=reserved, used=total - free - reserved)
        self.fault: int | None = None
        self.old_driver = False
        self.hang: threading.Event | None = None
        self.opened = 0
        self.closed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)  # error classes and numbers are the real ones

    def _ask(self) -> None:
        if self.hang is not None:
            self.hang.wait(30)
        if self.fault is not None:
            raise pynvml.NVMLError(self.fault)

    def nvmlInit(self) -> None:
        self._ask()
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        if index > 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return object()

    def nvmlDeviceGetUUID(self, _handle: object) -> str:
        return "GPU-1"

    def nvmlDeviceGetName(self, _handle: object) -> bytes:
        return b"A Card 3000"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "590.44.01"

    def nvmlDeviceGetMemoryInfo(self, _handle: object, version: int | None = None) -> SimpleNamespace:
        self._ask()
        if version is not None and self.old_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return self.memory
