"""What the kernel announces of graphics cards: one that hung ("wedged"), and one that is gone.

The kernel sends these to whoever listens on a netlink socket, users without privileges included, but seldom into
containers. Format and recovery methods: Linux Documentation/gpu/drm-uapi.rst, "Device Wedging".
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from relevo.devices.events import DeviceEvent, DeviceEventKind

_NETLINK_KOBJECT_UEVENT: Final = 15
_KERNEL_GROUP: Final = 1
_MOST_AT_ONCE: Final = 256
_LONGEST_BYTES: Final = 16384

_log = logging.getLogger("relevo.devices.uevents")

METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rebind": "its driver must be unbound from it and bound again",
        "bus-reset": "its bus must be reset, with the driver unbound meanwhile",
        "cold-reset": "it must lose its power for a moment",
        "vendor-specific": "its maker's own way is needed",
        "unknown": "the driver does not know how, so restart the machine",
    }
)
"""How a card that hung can be brought back, by the kernel's words."""


class CardWatch:
    """Listens for what happens to one card. Without permission, or off Linux, it hears nothing and says so.

    `pci_address`: like "0000:03:00.0"; None: it cannot be told which card it is, so every card's events are taken.
    """

    def __init__(self, pci_address: str | None) -> None:
        self._pci_address = pci_address
        self._socket = _listen()

    @property
    def hears(self) -> bool:
        """Whether the kernel lets us listen."""
        return self._socket is not None

    def take(self, now: float) -> list[DeviceEvent]:
        """What was announced since the last time. Never waits."""
        found: list[DeviceEvent] = []
        for _ in range(_MOST_AT_ONCE if self._socket is not None else 0):
            assert self._socket is not None
            try:
                data, sender = self._socket.recvfrom(_LONGEST_BYTES)
            except BlockingIOError:
                break
            except OSError as e:
                if e.errno != errno.ENOBUFS:
                    self.close()
                    break
                lost = "Some announcements of the kernel were lost, and one may have been about this card."
                found.append(DeviceEvent(DeviceEventKind.SUSPECT, "lost", lost, now))
                continue
            if sender[0] == 0:  # any program may send to us; only the kernel's own number counts
                event = card_event(parse(data), self._pci_address, now)
                if event is not None:
                    found.append(event)
        return found

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def parse(data: bytes) -> dict[str, str]:
    """The fields of an announcement: `ACTION@path`, then `NAME=value`, each ended by a zero byte."""
    fields: dict[str, str] = {}
    for part in data.decode("utf-8", "replace").split("\0")[1:]:
        name, equals, value = part.partition("=")
        if equals:
            fields[name] = value
    return fields


def card_event(fields: Mapping[str, str], pci_address: str | None, now: float) -> DeviceEvent | None:
    """What an announcement means for this card; None when it is about something else."""
    path = fields.get("DEVPATH", "")
    if fields.get("SUBSYSTEM") != "drm" or (pci_address is not None and f"/{pci_address}/" not in f"{path}/"):
        return None
    name = path.rpartition("/")[2]
    if fields.get("ACTION") == "remove" and name.startswith("card") and "-" not in name:  # with "-": a screen's plug
        return DeviceEvent(DeviceEventKind.OFF_THE_BUS, "removed", "The kernel removed this card.", now)
    told = fields.get("WEDGED")
    if told is None:
        return None
    methods = [method for method in told.split(",") if method]
    guilty = f", when process {fields['PID']} ({fields.get('TASK', 'unnamed')}) used it" if "PID" in fields else ""
    if methods == ["none"]:
        sentence = (
            f"The card hung{guilty}, and its driver reset it: it works, but every process on it lost its context."
        )
        return DeviceEvent(DeviceEventKind.RESET_DONE, "wedged none", sentence, now)
    ways = ", or ".join(METHODS.get(method, f"by {method}") for method in methods) or METHODS["unknown"]
    sentence = f"The card hung{guilty} and does not come back by itself: {ways}."
    return DeviceEvent(DeviceEventKind.RESET_NEEDED, f"wedged {told}", sentence, now)


def _listen() -> socket.socket | None:
    if sys.platform != "linux":
        return None
    listening = None
    try:
        listening = socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, _NETLINK_KOBJECT_UEVENT
        )
        listening.bind((0, _KERNEL_GROUP))
    except OSError as e:
        _log.info("What the kernel announces of graphics cards cannot be heard here: %s.", e)
        if listening is not None:
            with contextlib.suppress(OSError):
                listening.close()
        return None
    return listening
