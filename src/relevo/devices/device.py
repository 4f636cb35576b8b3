"""A device: something with memory that can be leased, and what it says of itself."""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

from relevo.core.described import Described
from relevo.core.leases.reading import Reading
from relevo.devices.events import DeviceEvent

CARD_LAG_S: Final = 1.5
"""Seen on cards of all makers: 0.5 to 1.5 s from an allocation to the figure that shows it."""
STALE_AFTER_S: Final = 5.0
"""A neighbour that starts meanwhile is not seen, so no longer than this where readings are to be had every second."""


def gone(reason: str, read_at: float, total_bytes: int | None = None) -> Reading:
    """The reading of a device that cannot be used now: nothing of it is free, whatever was declared for it."""
    return Reading(total_bytes, None, read_at=read_at, reason=reason, free_at_most_bytes=0)


class DeviceKind(Described):
    """What sort of device it is."""

    HOST = "host", "The machine's own memory, which the CPU route leases from."
    NVIDIA = "nvidia", "An NVIDIA card, watched through the driver's management library."
    VULKAN = (
        "vulkan",
        "A card used through Vulkan, watched through the engine, or through the kernel where it is AMD's.",
    )
    ROCM = "rocm", "An AMD card used through ROCm, watched through the kernel."
    METAL = "metal", "An Apple graphics processor: its limit is the engine's word, what is free the system's."
    CUDA = "cuda", "An NVIDIA card watched through the engine, where the management library does not answer."
    EMULATED = "emulated", "No card at all: it computes on the CPU, and its memory limit is kept by the kernel."


@runtime_checkable
class Device(Protocol):
    """What the service asks of every device. Reading never waits for a driver."""

    @property
    def name(self) -> str:
        """As in the configuration: "gpu0", "host"."""
        ...

    @property
    def kind(self) -> DeviceKind:
        """What sort it is."""
        ...

    @property
    def emulated(self) -> bool:
        """True for a stand-in; shown wherever the device is shown."""
        ...

    @property
    def description(self) -> str:
        """For people: the card's name and driver, or what the stand-in is. Part of a worker's fingerprint."""
        ...

    @property
    def tells(self) -> str:
        """For people: what can be known of it here, and what cannot. May change while it runs."""
        ...

    @property
    def engine_device(self) -> str:
        """The engine's name for it ("CUDA0", "Vulkan0"), or "cpu"."""
        ...

    @property
    def lag_s(self) -> float:
        """How far its figures may be behind a load or an unload; for its ledger."""
        ...

    @property
    def stale_after_s(self) -> float:
        """How old a reading may be and still be decided on; for its ledger."""
        ...

    def read(self) -> Reading:
        """The newest figures. What is not known is None, with the reason."""
        ...

    def held_by(self, pid: int) -> int | None:
        """What a process holds on it, in bytes: a hint. None where that is not told."""
        ...

    def events(self) -> tuple[DeviceEvent, ...]:
        """What happened to it since the last time, oldest first."""
        ...

    def stop(self) -> None:
        """End whatever watches it. May be called twice."""
        ...
