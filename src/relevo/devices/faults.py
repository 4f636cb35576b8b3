"""Faults of an emulated device, on demand: a small JSON file, `faults.json`, in the device's folder.

Whoever rehearses writes it (`write`, `clear`), as ballast registers itself there, and the device obeys it within one
tick, about 50 ms, for as long as it is there. Only emulated devices read it; a real one cannot be made to lie.
The fields are those of `Faults`, for example `{"lag_s": 1.2, "largest_block_bytes": 33554432}`. A file that is not
understood is logged, and what was in force before stays.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

FILE_NAME: Final = "faults.json"

_log = logging.getLogger("relevo.devices.faults")


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an emulated device does wrong. All of it may be combined."""

    largest_block_bytes: Annotated[int, Meta(ge=0)] | None = None
    """Free memory is in pieces: a single allocation above this fails although there are the bytes.

    A process's own start counts as well: below about 64 MiB a llama worker does not get as far as its model.
    """
    lag_s: Annotated[float, Meta(ge=0, le=5)] = 0.0
    """Readings show what was that long ago, and claim to be new. Real drivers: 0.5 to 1.5 s after a load or unload."""
    all_free: bool = False
    """Readings call everything free, whatever is used."""
    stale: bool = False
    """Readings stand still at what they were when this began, and say so by their time."""
    lost: bool = False
    """The device is gone: every process on it is killed, later ones too, and nothing can be read."""
    external_bytes: Annotated[int, Meta(ge=0)] = 0
    """A neighbour holds this much, without taking real memory as ballast does."""
    reset: int = 0
    """Each new number here resets the device once: every process on it is killed, and it works on."""
    xids: tuple[int, ...] = ()
    """Errors that are told like NVIDIA's, once whenever the file changes."""

    @property
    def sentence(self) -> str | None:
        """For people, so that no rehearsal passes for the truth; None where nothing is wrong."""
        if self == Faults():
            return None
        return f"Faults are played on it: {msgspec.json.encode(self).decode()}."


class FaultFile:
    """Watches one device's file. Looking costs a few microseconds while it does not change."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._seen: tuple[int, int, int] | None = None
        self.faults = Faults()

    def look(self) -> bool:
        """Whether the file changed since the last time; `faults` is what it says now."""
        try:
            status = self._path.stat()
        except OSError:
            changed, self._seen, self.faults = self._seen is not None, None, Faults()
            return changed
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self.faults = msgspec.json.decode(self._path.read_bytes(), type=Faults)
        except (OSError, msgspec.MsgspecError) as e:
            _log.error("%s is not understood, and what was in force stays: %s.", self._path, e)
            return False
        return True


def write(folder: Path, faults: Faults) -> None:
    """Put these faults in force on the emulated device of this folder, in place of those before. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{FILE_NAME}.{os.getpid()}"
    partial.write_bytes(msgspec.json.encode(faults))
    partial.rename(folder / FILE_NAME)


def clear(folder: Path) -> None:
    """Let the device be sound again. Raises OSError."""
    (folder / FILE_NAME).unlink(missing_ok=True)
