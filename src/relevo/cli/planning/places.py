"""Where a model's weights would lie when not all fit on the device, and what reading them there costs a token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relevo.core.memory.load import DEVICE_START, LoadOptions, load_options
from relevo.core.memory.placement import device_layers, weights_bytes

if TYPE_CHECKING:
    from relevo.cli.planning.sizing import Sizing
    from relevo.cli.planning.targets import Target
    from relevo.core.loads.verdict import LoadVerdict
    from relevo.core.memory.shape import ModelShape


@dataclass(frozen=True, slots=True)
class StoragePlace:
    """A place where weights would lie, and what one token costs to read them there."""

    place: str
    """gpu, ram or storage."""
    weights_bytes: int
    read_bytes: int
    """What one token reads of them: of a mixture of experts those it uses, of the embedding table one row."""
    bytes_a_s: float | None
    how: str
    """How the rate was measured, or why it was not."""

    @property
    def token_s(self) -> float | None:
        """Seconds a token, for reading alone."""
        return None if self.bytes_a_s is None else self.read_bytes / self.bytes_a_s


def places_of(sizing: Sizing, verdict: LoadVerdict, host: Target) -> tuple[StoragePlace, ...]:
    """The places as the ladder would load it. Empty where all weights are on the device, or in RAM as asked."""
    start = verdict.start
    on_card = sizing.gpu is not None and not sizing.target.emulated
    options = load_options(start, on_device=on_card and start.route in ("gpu", "hybrid"), learned=DEVICE_START["cpu"])
    on_device, on_host = weights_bytes(sizing.shape, options)
    stored = min(on_host, max(verdict.storage_bytes, _beyond(sizing, verdict, on_host, host)))
    if not stored and not (on_card and start.route in ("cpu", "hybrid")):
        return ()
    device_read, host_read = read_bytes(sizing.shape, options)
    return (
        *([_gpu(on_device, device_read)] if on_device else []),
        *([_ram(on_host - stored, _share(host_read, on_host - stored, on_host))] if on_host > stored else []),
        *([_storage(sizing, stored, _share(host_read, stored, on_host))] if stored else []),
    )


def read_bytes(shape: ModelShape, options: LoadOptions) -> tuple[int, int]:
    """What one token reads of the weights: (on the device, on the host)."""
    on_device, on_host = weights_bytes(shape, options)
    layers, head = device_layers(shape, options)
    first = shape.layer_count - layers
    left = shape.layers[: first + (options.host_expert_layers if layers else 0)]
    host_experts = sum(layer.expert_bytes for layer in left)
    device_experts = sum(layer.expert_bytes for layer in shape.layers) - host_experts
    idle = 1 - min(1.0, shape.experts_used / shape.experts) if shape.experts else 0.0
    table = shape.input_weights_bytes - (0 if head else shape.tied_table_bytes)  # without a head it is read as one
    return round(on_device - idle * device_experts), max(0, round(on_host - idle * host_experts) - table)


def _beyond(sizing: Sizing, verdict: LoadVerdict, on_host: int, host: Target) -> int:
    """What RAM has no room for beside what the process needs for itself; 0 where that is not known."""
    in_one = sizing.gpu is None or (sizing.target.emulated and verdict.start.route != "cpu")
    own = verdict.device_demand if in_one else verdict.host_demand
    if host.available_bytes is None or own.total_bytes is None:
        return 0
    return max(0, on_host - max(0, host.available_bytes - own.private_bytes))


def _share(read: int, part: int, whole: int) -> int:
    return read * part // whole


def _gpu(weights: int, read: int) -> StoragePlace:
    return StoragePlace("gpu", weights, read, None, "not measured: a device tells only when it computes")


def _ram(weights: int, read: int) -> StoragePlace:
    from relevo.cli.planning.read_rate import memory_rate

    return StoragePlace("ram", weights, read, memory_rate(), "one core copying; a rough figure")


def _storage(sizing: Sizing, weights: int, read: int) -> StoragePlace:
    from relevo.cli.planning.read_rate import storage_rate

    largest = max(sizing.header.parts, key=lambda part: part.file_bytes)
    rate = storage_rate(Path(largest.path))
    if rate is None:
        return StoragePlace("storage", weights, read, None, "the file cannot be read for a measurement")
    return StoragePlace("storage", weights, read, rate.bytes_a_s, rate.how)
