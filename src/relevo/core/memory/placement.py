"""Where a load's tensors lie: which layers go to the device, and what stays on the host.

Source: the layer assignment of llama-model.cpp, llama.cpp v0.5.0: the output head counts as one layer and goes
first, then the last repeating layers.
"""

from __future__ import annotations

from relevo.core.memory.load import LoadOptions
from relevo.core.memory.shape import ModelShape


def device_layers(shape: ModelShape, options: LoadOptions) -> tuple[int, bool]:
    """(repeating layers on the device, whether the output head is there). The last layers go first."""
    if not options.on_device:
        return 0, False
    count = max(0, min(options.gpu_layers, shape.layer_count + 1))
    return max(0, count - 1), count > 0


def weights_bytes(shape: ModelShape, options: LoadOptions) -> tuple[int, int]:
    """Tensors by where they lie: (on the device, on the host). A tied table that the device copies counts twice."""
    layers, head = device_layers(shape, options)
    first = shape.layer_count - layers
    there, here = shape.layers[first:], shape.layers[:first]
    left_experts = sum(layer.expert_bytes for layer in there[: options.host_expert_layers])
    device = sum(layer.weights_bytes + layer.padding_bytes for layer in there) - left_experts
    device += shape.rotary_bytes + shape.rotary_padding_bytes if there else 0
    host = shape.input_weights_bytes + sum(layer.weights_bytes for layer in here) + left_experts
    host += shape.rotary_bytes if here else 0
    if head:
        return device + shape.output_weights_bytes + shape.output_padding_bytes + shape.tied_table_bytes, host
    twice = shape.tied_table_is_read_twice and not options.use_mmap
    return device, host + shape.output_weights_bytes + (shape.tied_table_bytes if twice else 0)


def repacked_bytes(shape: ModelShape, options: LoadOptions) -> int:
    """What the CPU's own order of the host's matrices costs beside the file's: a bound.

    All of them where the file is mapped, for its pages stay; only a tied table's second copy where it is read. None
    where a device takes part: then the host's layers lie as they are.
    """
    if options.on_device:
        return 0
    if options.use_mmap:
        return sum(size for kind, size in shape.repackable_bytes.items() if kind in options.repacked_types)
    once = shape.tied_table_type in options.repacked_types and not shape.tied_table_is_read_twice
    return shape.tied_table_bytes if once else 0
