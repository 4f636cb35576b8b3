"""Keys, values and recurrent states: what a context keeps for its sequences, layer by layer.

All of it follows exactly from the header and the options, and is allocated whole when the context is made. Sources:
llama-context.cpp (padding, streams), llama-kv-cache.cpp, llama-kv-cache-iswa.cpp, llama-kv-cache-dsa.cpp and
llama-memory-recurrent.cpp of llama.cpp v0.5.0.
"""

from __future__ import annotations

from relevo.core.memory.load import LoadOptions
from relevo.core.memory.quantization import BY_NAME, NumberType
from relevo.core.memory.shape import LayerShape, ModelShape

CELL_STEP = 256
"""llama.cpp rounds the cells of a stream up to this."""
STATE_ELEMENT_BYTES = 4
"""Recurrent states are kept in f32, whatever the KV type."""


def cells_of(options: LoadOptions) -> tuple[int, int]:
    """(streams, cells of each): what the engine makes of the context asked for."""
    cells = _padded(options.context_tokens)
    return (1, cells) if options.shared_cells else (options.sequences, cells)


def rows_of(options: LoadOptions) -> int:
    """Tokens of one micro-batch: what was asked, and never more than the context or a step has."""
    streams = 1 if options.shared_cells else options.sequences
    return min(options.ubatch_tokens, options.batch_tokens, streams * options.context_tokens)


def window_cells_of(shape: ModelShape, options: LoadOptions) -> int:
    """Cells of a stream of the layers that see a window: the window of each sharer and one micro-batch more."""
    _, cells = cells_of(options)
    if not shape.window_tokens:
        return cells
    sharers = options.sequences if options.shared_cells else 1
    return _padded(min(cells, shape.window_tokens * sharers + rows_of(options)))


def kv_layer_bytes(shape: ModelShape, options: LoadOptions) -> list[int] | str:
    """KV cache of each layer, all streams together; or the reason why it is not known.

    A row of keys and a row of values a cell; of a compressed row (MLA) there are no values. Without flash attention
    values lie transposed, and where their width differs between layers all are padded to the widest. Layers of
    sparse attention keep the keys of their indexer beside.
    """
    if "kv_bytes" in shape.unknown:
        return shape.unknown["kv_bytes"]
    kind = BY_NAME.get(options.kv_type)
    if kind is None:
        return f"The KV type {options.kv_type!r} is not known."
    why = _unfit(shape, kind, flash_attention=options.flash_attention)
    if why is not None:
        return why
    streams, cells = cells_of(options)
    window_cells = window_cells_of(shape, options)
    widest = max((layer.kv_heads * layer.value_length for layer in shape.layers), default=0)
    return [
        streams * (window_cells if layer.slides else cells) * _row_bytes(layer, kind, options, widest)
        for layer in shape.layers
    ]


def state_layer_bytes(shape: ModelShape, options: LoadOptions) -> list[int] | str:
    """Recurrent state of each layer, all sequences together; or the reason why it is not known.

    One state a sequence, never more or less: neither the context nor the KV type matters.
    """
    if "state_bytes" in shape.unknown:
        return shape.unknown["state_bytes"]
    sequences = max(1, options.sequences)
    return [STATE_ELEMENT_BYTES * sequences * (layer.conv_state + layer.mixer_state) for layer in shape.layers]


def _unfit(shape: ModelShape, kind: NumberType, *, flash_attention: bool) -> str | None:
    """Why the engine would make no context with this type of cache; None when it would."""
    if kind.block_elements == 1:
        return None
    if not flash_attention:
        return f"A KV cache of {kind.name} needs flash attention."
    for layer in shape.layers:
        for length in (layer.key_length, layer.value_length, layer.indexer_key_length):
            if length % kind.block_elements:
                size = f"its heads are {length} wide, and {kind.block_elements} are one block"
                return f"The KV type {kind.name} does not suit the model: {size}."
    return None


def _row_bytes(layer: LayerShape, kind: NumberType, options: LoadOptions, widest: int) -> int:
    if not layer.holds_kv:
        return 0
    values = layer.kv_heads * layer.value_length if options.flash_attention else widest
    return sum(kind.row_bytes(width) for width in (layer.kv_heads * layer.key_length, values, layer.indexer_key_length))


def _padded(count: int) -> int:
    return -(-count // CELL_STEP) * CELL_STEP
