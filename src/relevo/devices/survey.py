"""What can be told of the devices of this machine, without a configuration: for `relevo doctor`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from relevo.core.errors import DeviceError
from relevo.core.units import size_text
from relevo.devices.amd import amd_cards
from relevo.devices.device import Device
from relevo.devices.host import HostDevice
from relevo.devices.nvidia import NvidiaDevice, list_cards

TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Told:
    """One device, or why there is nothing to tell of a kind of them."""

    name: str
    known: bool | None
    """Whether its free memory is told; None: that could not be found out."""
    sentence: str


def survey(*, root: Path = Path("/"), nvml: Any = None, timeout_s: float = TIMEOUT_S) -> list[Told]:
    """The host, then every card whose maker's library or driver answers. Never raises, and never hangs.

    Cards that only the engine sees are not in it: they are told where the engine is asked.
    """
    found = [_told("host", HostDevice(root=root))]
    found += _within(timeout_s, "nvidia", lambda: _nvidia(nvml, timeout_s))
    found += _within(timeout_s, "amd", lambda: _amd(root))
    return found


def _nvidia(nvml: Any, timeout_s: float) -> list[Told]:
    """Nothing where there is no driver: whether there should be one is another check."""
    try:
        cards = list_cards(nvml)
    except DeviceError:
        return []
    found = []
    for card in cards:
        device = NvidiaDevice(f"nvidia {card.index}", card.index, nvml=nvml)
        try:
            device.start(timeout_s / 2)
            found.append(_told(device.name, device))
        except DeviceError as e:
            found.append(Told(device.name, False, e.message))
        finally:
            device.stop()
    return found


def _amd(root: Path) -> list[Told]:
    found = []
    for number, card in enumerate(amd_cards(root)):
        reading = card.read(0.0)
        where = f"{size_text(reading.free_bytes)} of {size_text(reading.total_bytes)} free, at {card.pci_address}. "
        found.append(Told(f"amd {number}", reading.free_bytes is not None, where + card.tells))
    return found


def _told(name: str, device: Device) -> Told:
    reading = device.read()
    free = f"{size_text(reading.free_bytes)} of {size_text(reading.total_bytes)} free"
    if reading.free_bytes is None:
        free = reading.reason or "its free memory is not known"
    return Told(name, reading.free_bytes is not None, f"{device.description}: {free.rstrip('.')}. {device.tells}")


def _within(timeout_s: float, name: str, look: Callable[[], list[Told]]) -> list[Told]:
    """In a thread that is left behind when it hangs inside a driver."""
    found: list[Told] = []

    def run() -> None:
        try:
            found.extend(look())
        except Exception as e:  # one that breaks is a finding, and the others still help
            found.append(Told(name, None, f"could not be looked at: {type(e).__name__}: {e}"))

    thread = threading.Thread(target=run, name=f"survey-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        return [*found, Told(name, None, f"the driver did not answer within {timeout_s:g} s; it may hang")]
    return found
