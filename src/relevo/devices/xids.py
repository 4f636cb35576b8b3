"""NVIDIA's error numbers ("Xid") and what each asks for.

Sources: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors) as encoded in leptonai/gpud; the list of
application errors in NVIDIA/k8s-device-plugin. They disagree about 109: the plugin calls it an application's error,
the catalogue asks for a reset. Here its process is started again; if that fails, the breaker's probe says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from relevo.devices.events import DeviceEventKind

RECOVERY_CHANGED_XID: Final = 154
"""Says that the driver's recovery action changed: the action itself is read from the driver."""

_K = DeviceEventKind


@dataclass(frozen=True, slots=True)
class Xid:
    """One number."""

    number: int
    kind: DeviceEventKind
    what: str
    """What happened, to be read after "The driver reports"."""

    @property
    def sentence(self) -> str:
        """For people."""
        return f"The driver reports {self.what} (Xid {self.number}). {self.kind.sentence}"


_TABLE: Final[Mapping[DeviceEventKind, Mapping[int, str]]] = {
    _K.RESTART_ENGINE: {
        8: "that a program's work took too long and was stopped",
        11: "a broken command from a program",
        13: "an illegal access or instruction by a program on the card",
        31: "that a program touched memory of the card that is not its own",
        32: "a broken command stream from a program",
        39: "an error of a copy engine",
        40: "an error of a copy engine",
        41: "an error of a copy engine",
        68: "an error of the video decoder",
        69: "an error in a program's use of the graphics engine",
        94: "a memory error that was contained: only the program that met it is concerned",
        109: "that switching to another program's work timed out",
    },
    _K.RESET_NEEDED: {
        46: "that the card stopped working on what it was given",
        48: "a memory error that cannot be corrected",
        62: "that the card's own controller halted",
        64: "that a faulty row of memory could not be replaced",
        95: "a memory error that was not contained",
        110: "a security fault of the card",
        119: "that the card's own processor does not answer",
        120: "an error of the card's own processor",
        136: "a fault while the links between cards were trained",
        140: "memory errors that could not be corrected",
        143: "a fault while the card was initialized",
        155: "a fault of the links inside the card's package",
        156: "that too many faulty resources were retired",
        158: "a fatal timeout inside the card",
    },
    _K.OFF_THE_BUS: {79: "that the card fell off the bus"},
    _K.LINK: {74: "an error of the link between cards"},
    _K.POWER: {54: "that the card's power cable is not connected or gives too little"},
    _K.RECOVERY_CHANGED: {RECOVERY_CHANGED_XID: "that what the card needs to recover has changed"},
    _K.INFORMATION: {
        43: "that a program's work on the card stopped",
        45: "that a program's work was cleaned up after it ended or was killed",
        63: "that a faulty row of memory was replaced",
        92: "many memory errors that could be corrected",
        93: "that the card's settings could not be written",
    },
}

XIDS: Final[Mapping[int, Xid]] = MappingProxyType(
    {number: Xid(number, kind, what) for kind, numbers in _TABLE.items() for number, what in numbers.items()}
)
"""Every number that is known here."""


def xid(number: int) -> Xid:
    """The meaning of a number; one that is not listed is suspect, as new numbers come with every driver."""
    known = XIDS.get(number)
    return known or Xid(number, _K.SUSPECT, "an error that only NVIDIA's catalogue of errors explains")
