"""The compute buffer: intermediate results of one micro-batch, on the device and on the host; and what goes with it.

The engine lays out the worst prompt step (as many rows as a micro-batch has, every cell in use) and takes the peak of
the layout. The peak is not a sum: it follows from the order of the graph and from the allocator's choices. So both
are replayed here, on sizes alone: `decoder_graph` draws the graph, `graph_memory` lays it out. For the forms it knows
the result is what the engine reserves, to the byte (tests/golden). Where it is not known it is said to be unknown, and
the engine's own dry run answers instead.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm

import msgspec

from relevo.core.memory.decoder_graph import LayerGraph, StepGraph, decoder_graph, tensors_of
from relevo.core.memory.graph import Place
from relevo.core.memory.graph_form import FeedForward, Turned
from relevo.core.memory.graph_memory import graph_bytes
from relevo.core.memory.kv_cache import cells_of, rows_of, window_cells_of
from relevo.core.memory.load import MIB, LoadOptions
from relevo.core.memory.placement import device_layers
from relevo.core.memory.quantization import BY_NAME
from relevo.core.memory.shape import ModelShape

ROTATION_STEP = 64
"""Keys and values of a quantized cache are rotated where their heads are a multiple of this wide."""
MAX_LAYERS = 512
MAX_EXPERTS = 1024
"""llama.cpp's own limits (llama-hparams.h)."""
_GRAPH_LEAST = 1024
_TABLE_SIZES = (1031, 2053, 4099, 8209, 16411, 32771, 65537, 131101)
_LONGEST_PERIOD = 8
_BLOCKS_COME_BACK = 6
_NOT_MEASURED = "The compute buffer of this model has no closed form: nothing is known of its graph."


def compute_bytes(shape: ModelShape, options: LoadOptions) -> int | str:
    """The device's buffer for one micro-batch; 0 without a device; or the reason why it is not known.

    Of a device that computes every operation and orders none anew (CUDA's default; llama.cpp v0.5.0). With layers
    left to the host it holds copies of their weights too: from 32 rows on the engine ships them there. Not in it:
    what a backend's kernels allocate for themselves, see `pool_bound`.
    """
    found = _buffers(shape, options)
    return found if isinstance(found, str) else found[0]


def host_compute_bytes(shape: ModelShape, options: LoadOptions) -> int | str:
    """The host's buffer: all of the step on the CPU; beside a device, inputs and what the device leaves to it."""
    found = _buffers(shape, options)
    return found if isinstance(found, str) else found[1]


def output_bytes(shape: ModelShape, options: LoadOptions) -> int:
    """Logits of all sequences, on the host."""
    return options.sequences * shape.vocabulary_tokens * 4


def pool_bound(shape: ModelShape, options: LoadOptions) -> int:
    """Bound on a backend's temporary pool: q8_1 copies of activations, and of a quantized KV layer an f16 copy.

    Where the device is known to keep that copy in the compute buffer it is there and not here. Fitted to nothing yet;
    a start value, to be replaced by what the machine shows.
    """
    rows = min(options.ubatch_tokens, options.batch_tokens)
    feed_forward = max((layer.feed_forward for layer in shape.layers), default=0)
    pool = 64 * MIB + int(1.125 * rows * max(shape.embedding, feed_forward))
    if options.kv_type not in ("f16", "bf16", "f32") and not options.copies_cache:
        streams, cells = cells_of(options)
        widths = (layer.kv_heads * (layer.key_length + layer.value_length) for layer in shape.layers)
        pool += 2 * streams * cells * max(widths, default=0)
    return max(128 * MIB, pool)


def _buffers(shape: ModelShape, options: LoadOptions) -> tuple[int, int] | str:
    """(device, host), or why they are not known."""
    if "compute_bytes" in shape.unknown:
        return shape.unknown["compute_bytes"]
    if shape.graph is None:
        return _NOT_MEASURED
    if options.kv_type not in BY_NAME:
        return f"The KV type {options.kv_type!r} is not known."
    why = _uneven(shape)
    if why is not None:
        return f"The compute buffer of this model has no closed form: {why}."
    device, host, tensors = _laid_out(_step(shape, options, shape.graph.windowed), shape.layer_count)
    room = _graph_room(shape.tensor_count)
    if shape.tensor_count and tensors > room:
        return f"The engine would abort: its graph has {tensors} tensors with these options, and room for {room}."
    return device, host


@lru_cache(maxsize=4096)
def _laid_out(step: StepGraph, layers: int) -> tuple[int, int, int]:
    """(device, host, tensors of the graph with all layers)."""
    graph = decoder_graph(step)
    tensors = tensors_of(step, graph, layers)
    return *graph_bytes(graph, step.on_device), tensors


def _graph_room(tensors: int) -> int:
    """Tensors that the engine's table of a graph holds: the prime after a power of two that it makes of the file's.

    Sources: graph_max_nodes in llama-context.cpp and ggml_hash_size in ggml.c. One more than it can find room for ends
    the process (ggml_hash_find_or_insert).
    """
    wanted = max(_GRAPH_LEAST, 8 * (tensors + 1))  # one more where a tied table is counted as the head too
    return next((prime for prime in _TABLE_SIZES if prime >= wanted), wanted)


def _uneven(shape: ModelShape) -> str | None:
    """Figures that do not go with any form, as the end of a sentence."""
    if shape.layer_count > MAX_LAYERS or shape.experts > MAX_EXPERTS:
        return "it has more layers or experts than the engine takes"
    first = shape.layers[0]
    widths = (first.heads, first.kv_heads, first.key_length, first.value_length, first.feed_forward)
    if not (first.heads and first.kv_heads and first.key_length and first.value_length):
        return "it has layers without attention"
    for layer in shape.layers:
        if not layer.holds_kv:
            return "some of its layers keep no keys and values"
        if (layer.heads, layer.kv_heads, layer.key_length, layer.value_length, layer.feed_forward) != widths:
            return "its layers differ in width"
    experts = shape.graph is not None and shape.graph.feed_forward is FeedForward.EXPERTS
    if experts and not 0 < shape.experts_used <= shape.experts:
        return "it does not say how many of its experts are used"
    return None


def _step(shape: ModelShape, options: LoadOptions, windowed: bool) -> StepGraph:
    """The worst prompt step of these options (llama_context::sched_reserve and graph_reserve)."""
    assert shape.graph is not None
    streams, cells = cells_of(options)
    rows, sequences = rows_of(options), max(1, options.sequences)
    kind = BY_NAME[options.kv_type]
    rotated = kind.block_elements > 1
    first = shape.layers[0]
    layers, head = device_layers(shape, options)
    return StepGraph(
        form=shape.graph,
        layers=_layers(shape, options, layers),
        embedding=shape.embedding,
        vocabulary=shape.vocabulary_tokens,
        rows=-(-rows // sequences) * sequences,
        outputs=min(rows, max(options.outputs, sequences)),
        streams=streams,
        cells=cells,
        window_cells=window_cells_of(shape, options) if windowed else cells,
        flash_attention=options.flash_attention,
        cache_element=(kind.block_bytes, kind.block_elements),
        copies_cache=options.copies_cache,
        rotated_keys=_rotation(first.key_length) if rotated else 0,
        rotated_values=ROTATION_STEP if rotated and first.value_length % ROTATION_STEP == 0 else 0,
        experts=shape.experts,
        experts_used=shape.experts_used,
        expert_feed_forward=shape.expert_feed_forward or first.feed_forward,
        on_device=options.on_device,
        head_place=Place.DEVICE if head else Place.HOST,
        head_bytes=0 if head or not options.on_device else shape.head_bytes,
    )


def _rotation(width: int) -> int:
    """The widest power of two that divides a head, of ROTATION_STEP at least; 0: it is not rotated."""
    return width & -width if width % ROTATION_STEP == 0 else 0


def _layers(shape: ModelShape, options: LoadOptions, on_device: int) -> tuple[LayerGraph, ...]:
    """The layers that decide: the rest repeat them, and find the same blocks free."""
    border = shape.layer_count - on_device
    drawn = [_layer(shape, at, Place.HOST if at < border else Place.DEVICE, options) for at in range(shape.layer_count)]
    host, device = drawn[:border], drawn[border:]
    split = min(options.host_expert_layers, len(device))
    for at in range(split):
        experts = tuple(item for item in shape.layers[border + at].tensors if "exps." in item[0])
        device[at] = msgspec.structs.replace(device[at], host_experts=True, weights=experts)
    # Left to the host, layers take turns in more ways; only equal ones are cut there.
    return (*_repeated(host, 1), *_repeated(device[:split], 1), *_repeated(device[split:], _LONGEST_PERIOD))


def _layer(shape: ModelShape, at: int, place: Place, options: LoadOptions) -> LayerGraph:
    layer = shape.layers[at]
    shipped = options.on_device and place is Place.HOST
    return LayerGraph(
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        key_length=layer.key_length,
        value_length=layer.value_length,
        feed_forward=layer.feed_forward,
        slides=layer.slides,
        turned=_turned(shape, at),
        place=place,
        weights=layer.tensors if shipped else (),
    )


def _turned(shape: ModelShape, at: int) -> bool:
    assert shape.graph is not None
    if shape.graph.turned is Turned.WINDOWED:
        return shape.layers[at].slides
    return shape.graph.turned is Turned.ALL or (at + 1) % 4 != 0


def _repeated(layers: list[LayerGraph], longest_period: int) -> list[LayerGraph]:
    """Enough of layers that repeat with a period, ending where they end. All, if none repeats.

    Blocks that one layer leaves free and the next takes come back after one, two or three layers, so a multiple of
    six and of the period can be left out and change nothing, once two periods have set the blocks.
    """
    for period in range(1, longest_period + 1):
        step = lcm(period, _BLOCKS_COME_BACK)
        least = max(_BLOCKS_COME_BACK, 2 * period)
        kept = least + (len(layers) - least) % step
        if kept < len(layers) and all(layers[at] == layers[at + period] for at in range(len(layers) - period)):
            return layers[:kept]
    return layers
