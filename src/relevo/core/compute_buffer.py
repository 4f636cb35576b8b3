"""The compute buffer: intermediate results of one micro-batch, on the device and on the host.

It has a closed form for ordinary dense transformers, fitted to llama.cpp's own reservation (within 0.1 MiB of 12
dense models on an accelerator, and of SmolLM2-135M on the CPU, llama.cpp v0.5.0).
"""

from __future__ import annotations

from relevo.core.kv_cache import cells_of, rows_of
from relevo.core.load import MIB, LoadOptions
from relevo.core.placement import device_layers
from relevo.core.shape import ModelShape

CLOSED_FORM = frozenset({"llama", "qwen2", "qwen3", "mistral3", "smollm3", "granite", "internlm2"})
"""Architectures whose graph is the one the compute formula describes: gated feed-forward, grouped attention."""


def compute_bytes(shape: ModelShape, options: LoadOptions) -> int | str:
    """The device's largest set of intermediate results that live at once; or the reason why it is not known.

    flash attention: max(feed-forward peak, attention peak, logits peak); without it attention scores dominate.
    With a quantized KV cache the engine needs a little less: the figure is then a bound.
    """
    why = _unusual(shape)
    if why:
        return f"The compute buffer of this model has no closed form: {why}."
    rows, (_, cells) = rows_of(options), cells_of(options)
    width = max((layer.heads * layer.key_length for layer in shape.layers), default=0)
    kv_width = max((layer.kv_heads * (layer.key_length + layer.value_length) for layer in shape.layers), default=0)
    outputs = min(options.outputs, rows)
    logits = 4 * outputs * (shape.vocabulary_tokens + shape.embedding)
    if not options.flash_attention:
        heads = max((layer.heads for layer in shape.layers), default=0)
        attention = rows * 4 * (cells * (heads + 1) + 2 * shape.embedding + 2 * width + kv_width)
        return max(attention, logits)
    feed_forward = max((layer.feed_forward for layer in shape.layers), default=0)
    feed = rows * (4 * (3 * feed_forward + 2 * shape.embedding + width) + 2 * cells)
    attention = rows * (4 * (2 * shape.embedding + 2 * width + kv_width) + 2 * cells)
    return max(feed, attention, logits)


def host_compute_bytes(shape: ModelShape, options: LoadOptions) -> int | str:
    """The host's part; or the reason why it is not known.

    On the CPU the embedded input rows stay in the same buffer: measured, exact. Beside a device the host holds the
    inputs, and a whole layer's results where layers were left to it: all of it is the bound.
    """
    compute = compute_bytes(shape, options)
    if isinstance(compute, str):
        return compute
    rows, (_, cells) = rows_of(options), cells_of(options)
    if not options.on_device:
        return compute + rows * 4 * shape.embedding
    layers, _ = device_layers(shape, options)
    return rows * (8 * shape.embedding + 2 * cells) + (compute if layers < shape.layer_count else 0)


def output_bytes(shape: ModelShape, options: LoadOptions) -> int:
    """Logits of all sequences, on the host."""
    return options.sequences * shape.vocabulary_tokens * 4


def pool_bound(shape: ModelShape, options: LoadOptions) -> int:
    """Bound on a backend's temporary pool: q8_1 copies of activations, and of a quantized KV layer an f16 copy.

    Fitted to nothing yet; a start value, to be replaced by what the machine shows.
    """
    rows = min(options.ubatch_tokens, options.batch_tokens)
    feed_forward = max((layer.feed_forward for layer in shape.layers), default=0)
    pool = 64 * MIB + int(1.125 * rows * max(shape.embedding, feed_forward))
    if options.kv_type not in ("f16", "bf16", "f32"):
        streams, cells = cells_of(options)
        widths = (layer.kv_heads * (layer.key_length + layer.value_length) for layer in shape.layers)
        pool += 2 * streams * cells * max(widths, default=0)
    return max(128 * MIB, pool)


def _unusual(shape: ModelShape) -> str | None:
    """Why the closed form does not describe this model, as the end of a sentence; None when it does."""
    if shape.experts:
        return "it is a mixture of experts"
    if shape.latent_attention:
        return "its attention is compressed (MLA)"
    if shape.window_tokens:
        return "some of its layers see a sliding window"
    if shape.recurrent:
        return "it has recurrent layers"
    if shape.predicts_ahead:
        return "it predicts several tokens ahead"
    if shape.embeds:
        return "it is an embedding model"
    if shape.architecture not in CLOSED_FORM:
        return f"the architecture {shape.architecture!r} has not been measured"
    return None
