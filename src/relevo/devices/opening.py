"""From a card that the engine sees to the device that watches it: whose word is taken for which card."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relevo.core.errors import DeviceError
from relevo.devices.ggml import EngineDevice, EngineDeviceFacts, EngineFacts
from relevo.devices.nvidia import OPEN_TIMEOUT_S, NvidiaDevice
from relevo.devices.nvml import visible_card

_CUDA = "CUDA"

_log = logging.getLogger("relevo.devices")


def open_card(
    name: str,
    card: EngineDeviceFacts,
    ask: Callable[[], EngineFacts],
    *,
    declared_bytes: int | None = None,
    environment: Mapping[str, str] = os.environ,
    nvml: Any = None,
    root: Path = Path("/"),
    wait_s: float = OPEN_TIMEOUT_S,
) -> NvidiaDevice | EngineDevice:
    """Begin to watch the engine's `card` as the device `name`. Blocks up to `wait_s`.

    `ask` and `declared_bytes`: see EngineDevice. `environment`: what the workers will have; CUDA_VISIBLE_DEVICES
    renumbers cards there. An NVIDIA card whose maker's library does not answer (a container without it, some boards)
    is used by a declared budget alone. Raises DeviceError where the card cannot be used.
    """
    if card.name.startswith(_CUDA):
        number = int(card.name.removeprefix(_CUDA) or 0)
        named = visible_card(number, environment.get("CUDA_VISIBLE_DEVICES"))
        which = card.pci_address or named if isinstance(named, int) else named  # an address would not tell the slice
        nvidia = NvidiaDevice(name, number, which=which, declared_bytes=declared_bytes, nvml=nvml)
        try:
            nvidia.start(wait_s)
            return nvidia
        except DeviceError as e:
            nvidia.stop()
            if nvidia.library_answers or declared_bytes is None:
                raise
            _log.warning("%s The declared budget alone counts for it.", e.message)
    watched = EngineDevice(name, card, ask, declared_bytes=declared_bytes, root=root)
    watched.start()
    return watched
