"""A device: something with memory that can be leased, and what it says of itself."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from relevo.core.described import Described
from relevo.core.ledger import Reading


class DeviceKind(Described):
    """What sort of device it is."""

    HOST = "host", "The machine's own memory, which the CPU route leases from."
    NVIDIA = "nvidia", "An NVIDIA card, watched through the driver's management library."
    VULKAN = "vulkan", "A card used through Vulkan, watched through the engine."
    ROCM = "rocm", "An AMD card used through ROCm, watched through the engine."
    METAL = "metal", "An Apple graphics processor, watched through the engine."
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
        """For people: the card's name, or what the stand-in is."""
        ...

    @property
    def engine_device(self) -> str:
        """The engine's name for it ("CUDA0", "Vulkan0"), or "cpu"."""
        ...

    def read(self) -> Reading:
        """The newest figures. What is not known is None, with the reason."""
        ...
