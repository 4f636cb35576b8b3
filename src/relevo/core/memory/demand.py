"""Predicted memory of a model load, by named part, on the device and on the host.

Weights and KV cache follow exactly from the file's header, and so does the compute buffer of every graph that was
measured (`compute_buffer`). What no header tells (driver context, pools) is learned on the machine. A part that is not
known is None, with its reason; then the total is not known either.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relevo.core.memory.compute_buffer import compute_bytes, host_compute_bytes, output_bytes, pool_bound
from relevo.core.memory.kv_cache import kv_layer_bytes, state_layer_bytes
from relevo.core.memory.load import (
    DEVICE_START,
    MIB,
    VOCABULARY_BYTES_A_TOKEN,
    DeviceStart,
    LoadOptions,
    load_options,
)
from relevo.core.memory.placement import device_layers, repacked_bytes, weights_bytes
from relevo.core.memory.shape import ModelShape

__all__ = [
    "DEVICE_START",
    "MIB",
    "PARTS",
    "Demand",
    "DeviceStart",
    "LoadOptions",
    "cells_for",
    "load_options",
    "model_demand",
]

PARTS = (
    "weights_bytes",
    "kv_bytes",
    "state_bytes",
    "compute_bytes",
    "output_bytes",
    "projector_bytes",
    "context_bytes",
    "pool_bytes",
    "fragmentation_bytes",
    "margin_bytes",
)


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device. None: not known; `reasons` says why, under the part's name."""

    weights_bytes: int | None = 0
    """Tensors placed here; on a host, those the CPU repacks are in it as pages of the file and as its own."""
    kv_bytes: int | None = 0
    """Keys and values of all cells; allocated whole when the model is loaded."""
    state_bytes: int | None = 0
    """Fixed state of recurrent layers."""
    compute_bytes: int | None = 0
    """Intermediate results of one micro-batch."""
    output_bytes: int | None = 0
    """Logits of all sequences."""
    projector_bytes: int | None = 0
    """A vision or audio projector and its graph."""
    context_bytes: int | None = 0
    """What the driver, or the process itself, takes before any model."""
    pool_bytes: int | None = 0
    """Temporary memory the backend keeps once it has grown to it."""
    fragmentation_bytes: int | None = 0
    """Lost between allocations."""
    margin_bytes: int | None = 0
    """Held back for the error of all of the above."""
    mapped_bytes: int = 0
    """Of the weights, pages of the file that the kernel may drop and read again; the rest is the process' own."""
    spent_bytes: int = 0
    """Of the mapped pages, those that are read once, to be repacked. The kernel may have them back for good after the
    load, so they are in the weights, as the engine counts them, and not in the sum."""
    reasons: dict[str, str] = {}

    @property
    def cached_bytes(self) -> int:
        """Pages of the file that are read again and again while it computes."""
        return self.mapped_bytes - self.spent_bytes

    @property
    def private_bytes(self) -> int:
        """Known bytes that only the end of the process gives back: all but the mapped pages."""
        return self.known_bytes - self.cached_bytes

    def parts(self) -> dict[str, int | None]:
        """Every part by its name, in the order of PARTS."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total_bytes(self) -> int | None:
        """The sum; None as soon as one part is not known."""
        return None if None in self.parts().values() else self.known_bytes

    @property
    def known_bytes(self) -> int:
        """The sum of the known parts: what it takes at least."""
        return sum(value or 0 for value in self.parts().values()) - self.spent_bytes


def model_demand(shape: ModelShape, options: LoadOptions) -> tuple[Demand, Demand]:
    """Demand of a load: (on the device, on the host). Without a device the first is zero throughout.

    Formulas: weights by tensor table and placement (`placement`), KV and state layer by layer (`kv_cache`), compute
    and output (`compute_buffer`).
    """
    return (_on_device(shape, options) if options.on_device else Demand()), _on_host(shape, options)


def cells_for(prompt_tokens: int, outputs: Sequence[int]) -> int:
    """Cells of a shared pool that a request can need: its prompt once, and the allowed output of every choice."""
    return prompt_tokens + sum(outputs)


def _on_device(shape: ModelShape, options: LoadOptions) -> Demand:
    reasons: dict[str, str] = {}
    layers, _ = device_layers(shape, options)
    here = slice(shape.layer_count - layers, None)
    if options.context_bytes is None:
        reasons["context_bytes"] = "What the driver takes on this device has not been measured yet."
    return Demand(
        weights_bytes=_known("weights_bytes", _weights(shape, weights_bytes(shape, options)[0]), reasons),
        kv_bytes=_known("kv_bytes", _sum(kv_layer_bytes(shape, options), here), reasons),
        state_bytes=_known("state_bytes", _sum(state_layer_bytes(shape, options), here), reasons),
        compute_bytes=_known("compute_bytes", compute_bytes(shape, options), reasons),
        projector_bytes=options.projector_bytes,
        context_bytes=options.context_bytes,
        pool_bytes=pool_bound(shape, options) if options.pool_bytes is None else options.pool_bytes,
        fragmentation_bytes=options.fragmentation_bytes,
        margin_bytes=options.margin_bytes,
        reasons=reasons,
    )


def _on_host(shape: ModelShape, options: LoadOptions) -> Demand:
    reasons: dict[str, str] = {}
    layers, _ = device_layers(shape, options)
    here = slice(0, shape.layer_count - layers)
    _, weights = weights_bytes(shape, options)
    repacked = repacked_bytes(shape, options)
    return Demand(
        weights_bytes=_known("weights_bytes", _weights(shape, weights + repacked), reasons),
        mapped_bytes=weights if options.use_mmap else 0,
        spent_bytes=min(repacked, weights) if options.use_mmap else 0,
        kv_bytes=_known("kv_bytes", _sum(kv_layer_bytes(shape, options), here), reasons),
        state_bytes=_known("state_bytes", _sum(state_layer_bytes(shape, options), here), reasons),
        compute_bytes=_known("compute_bytes", host_compute_bytes(shape, options), reasons),
        output_bytes=output_bytes(shape, options),
        projector_bytes=0 if options.on_device else options.projector_bytes,
        context_bytes=options.host_context_bytes + VOCABULARY_BYTES_A_TOKEN * shape.vocabulary_tokens,
        margin_bytes=options.host_margin_bytes,
        reasons=reasons,
    )


def _weights(shape: ModelShape, found: int) -> int | str:
    return shape.unknown.get("weights_bytes", found)


def _sum(layers: list[int] | str, here: slice) -> int | str:
    return layers if isinstance(layers, str) else sum(layers[here])


def _known(part: str, found: int | str, reasons: dict[str, str]) -> int | None:
    """The figure, or None with its reason noted."""
    if isinstance(found, str):
        reasons[part] = found
        return None
    return found
