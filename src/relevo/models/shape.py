"""From a file's header to the record that its memory is computed from."""

from __future__ import annotations

import re

from relevo.core.demand import ModelShape
from relevo.core.errors import ModelFileError
from relevo.models.gguf import GgufHeader, LongArray

MAX_LAYERS = 4096
_LAYER = re.compile(r"blk\.(\d{1,4})\.")
_INPUT_TENSORS = ("token_embd", "token_types", "position_embd", "per_layer_token_embd")
_RECURRENT_KEYS = (
    "ssm.conv_kernel",
    "ssm.state_size",
    "wkv.head_size",
    "shortconv.l_cache",
    "kda.head_dim",
    "full_attention_interval",
)


def shape_of(header: GgufHeader) -> ModelShape:
    """The memory-relevant facts of a model.

    Raises ModelFileError when a fact that every transformer states is missing or cannot be true.
    """
    layers = _required(header, "block_count")
    if layers > MAX_LAYERS:
        raise _wrong(header, f"it claims {layers} layers")
    embedding = _required(header, "embedding_length")
    recurrent = any(header.of_model(key) is not None for key in _RECURRENT_KEYS)
    heads = _per_layer(header, "attention.head_count", layers, 0 if recurrent else None)
    kv_heads = _per_layer(header, "attention.head_count_kv", layers, None) if _has(header, "head_count_kv") else heads
    most_heads = max(heads, default=0)
    head_length = embedding // most_heads if most_heads else 0
    if header.vocabulary_tokens is None:
        raise _wrong(header, "it states no vocabulary size")
    by_layer, inputs, outputs = [0] * layers, 0, 0
    names = set()
    for tensor in header.tensors:
        names.add(tensor.name)
        found = _LAYER.match(tensor.name)
        if found:
            layer = int(found[1])
            if layer >= layers:
                raise _wrong(header, f"the tensor {tensor.name!r} belongs to no layer")
            by_layer[layer] += tensor.size_bytes
        elif tensor.name.startswith(_INPUT_TENSORS):
            inputs += tensor.size_bytes
        else:
            outputs += tensor.size_bytes
    table = next((t.size_bytes for t in header.tensors if t.name == "token_embd.weight"), 0)
    return ModelShape(
        architecture=header.architecture,
        embedding=embedding,
        vocabulary_tokens=header.vocabulary_tokens,
        context_trained_tokens=header.context_trained_tokens,
        feed_forward=_per_layer(header, "feed_forward_length", layers, 0),
        heads=heads,
        kv_heads=kv_heads,
        key_length=_optional(header, "attention.key_length", head_length),
        value_length=_optional(header, "attention.value_length", head_length),
        layer_weights_bytes=tuple(by_layer),
        input_weights_bytes=inputs,
        output_weights_bytes=outputs,
        tied_table_bytes=0 if "output.weight" in names else table,
        experts=_optional(header, "expert_count", 0),
        latent_attention=any(".attn_k_b." in name for name in names),
        window_tokens=_optional(header, "attention.sliding_window", 0) or None,
        window_layers=_window_layers(header, layers),
        recurrent=recurrent or any(".ssm_" in name or ".time_mix_" in name for name in names),
        predicts_ahead=_optional(header, "nextn_predict_layers", 0) > 0,
        embeds=header.of_model("attention.causal") is False or header.of_model("pooling_type") is not None,
    )


def _has(header: GgufHeader, key: str) -> bool:
    return header.of_model(f"attention.{key}") is not None


def _required(header: GgufHeader, key: str) -> int:
    value = header.count(f"{header.architecture}.{key}")
    if not value:
        raise _wrong(header, f"it does not state {header.architecture}.{key}")
    return value


def _optional(header: GgufHeader, key: str, otherwise: int) -> int:
    value = header.of_model(key)
    if value is None:
        return otherwise
    if not isinstance(value, int) or value < 0:
        raise _wrong(header, f"{header.architecture}.{key} is not a whole number")
    return int(value)


def _per_layer(header: GgufHeader, key: str, layers: int, otherwise: int | None) -> tuple[int, ...]:
    """A figure that files give once for all layers, or for each."""
    value = header.of_model(key)
    if value is None and otherwise is not None:
        return (otherwise,) * layers
    if isinstance(value, int) and value >= 0:
        return (int(value),) * layers
    if isinstance(value, tuple) and len(value) == layers:
        whole = tuple(item for item in value if isinstance(item, int) and item >= 0)
        if len(whole) == layers:
            return whole
    if value is None or isinstance(value, (str, float, int)):
        raise _wrong(header, f"it does not state {header.architecture}.{key}")
    length = value.length if isinstance(value, LongArray) else len(value)
    raise _wrong(header, f"{header.architecture}.{key} has {length} entries for {layers} layers")


def _window_layers(header: GgufHeader, layers: int) -> tuple[bool, ...]:
    """By layer where the file says so, or every n-th layer full; empty where only the architecture's code knows."""
    pattern = header.of_model("attention.sliding_window_pattern")
    if isinstance(pattern, tuple) and len(pattern) == layers:
        return tuple(bool(slides) for slides in pattern)
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        return tuple(layer % pattern < pattern - 1 for layer in range(layers))
    return ()


def _wrong(header: GgufHeader, what: str) -> ModelFileError:
    return ModelFileError(f"The memory of {header.path} cannot be computed: {what}.")
