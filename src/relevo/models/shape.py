"""From a file's header to the record that its memory is computed from.

The tensor table decides what a layer is (attention, a state, experts), the keys how wide it is, and `engine_rules`
what only the engine's code knows. Where they contradict each other nothing is claimed: the part is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from relevo.core.errors import ModelFileError
from relevo.core.memory.repack import ROWS_STEP
from relevo.core.memory.shape import DEVICE_ALIGNMENT_BYTES, HOST_ALIGNMENT_BYTES, LayerShape, ModelShape
from relevo.models import engine_rules as rules
from relevo.models.gguf import GgufHeader, LongArray, Tensor
from relevo.models.graph_form import graph_form
from relevo.models.states import state_widths

MAX_LAYERS = 4096
_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)")
_INPUT_TENSORS = frozenset({"token_embd", "token_types", "position_embd", "per_layer_token_embd", "hrm_z_l_init"})
_FIRST_LAYER_TENSORS = frozenset({"token_embd_norm", "per_layer_model_proj", "per_layer_proj_norm"})
_ROTARY_TENSORS = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})
_ATTENTION = ("attn_q.", "attn_k.", "attn_qkv.", "attn_q_a.", "attn_kv_a_mqa.", "attn_output.")
_INDEXER = ("indexer.attn_k.",)
_STATE = ("ssm_", "time_mix_", "shortconv.")
_EXPERTS = re.compile(r"ffn_(up|down|gate|gate_up)_(ch)?exps\.")


class _Layer:
    """What the tensor table says of one layer."""

    def __init__(self) -> None:
        self.weights_bytes = 0
        self.padding_bytes = 0
        self.expert_bytes = 0
        self.tensors: dict[str, int] = {}

    @property
    def names(self) -> Iterable[str]:
        return self.tensors

    def add(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor.size_bytes
        size = _aligned(tensor.size_bytes, HOST_ALIGNMENT_BYTES)
        self.weights_bytes += size
        self.padding_bytes += -size % DEVICE_ALIGNMENT_BYTES
        if _EXPERTS.match(name):
            self.expert_bytes += size

    def has(self, prefixes: Iterable[str]) -> bool:
        return any(name.startswith(prefix) for name in self.names for prefix in prefixes)


class _Table(msgspec.Struct):
    """The tensor table by place."""

    layers: list[_Layer]
    input_bytes: int = 0
    output_bytes: int = 0
    output_padding_bytes: int = 0
    rotary_bytes: int = 0
    rotary_padding_bytes: int = 0
    embedding: Tensor | None = None
    """The table of a model without a head of its own."""
    repackable_bytes: dict[str, int] = {}


def shape_of(header: GgufHeader) -> ModelShape:
    """The memory-relevant facts of a model.

    Raises ModelFileError when a fact that every transformer states is missing or cannot be true.
    """
    count = _required(header, "block_count")
    if count > MAX_LAYERS:
        raise _wrong(header, f"it claims {count} layers")
    embedding = _required(header, "embedding_length")
    if header.vocabulary_tokens is None:
        raise _wrong(header, "it states no vocabulary size")
    table = _table(header, count)
    ahead = _optional(header, "nextn_predict_layers", 0)
    if ahead > count:
        raise _wrong(header, f"it claims {ahead} of its {count} layers to predict ahead")
    trunk = count - ahead
    window, slides = _window(header, trunk, count)
    unknown = _unknown(header, table, trunk)
    latent = any(layer.has(("attn_k_b.",)) for layer in table.layers)
    form = graph_form(header, windowed=window is not None)
    if isinstance(form, str):
        unknown["compute_bytes"] = f"The compute buffer of this model has no closed form: {form}."
    return ModelShape(
        architecture=header.architecture,
        embedding=embedding,
        vocabulary_tokens=header.vocabulary_tokens,
        context_trained_tokens=header.context_trained_tokens,
        layers=_layers(header, table, slides, trunk, latent=latent),
        input_weights_bytes=table.input_bytes,
        output_weights_bytes=table.output_bytes,
        output_padding_bytes=table.output_padding_bytes,
        rotary_bytes=table.rotary_bytes,
        rotary_padding_bytes=table.rotary_padding_bytes,
        tied_table_bytes=0 if table.embedding is None else _aligned(table.embedding.size_bytes, DEVICE_ALIGNMENT_BYTES),
        tied_table_type=None if table.embedding is None else table.embedding.type,
        tied_table_is_read_twice=table.embedding is not None and header.architecture in rules.READS_TIED_TABLE_TWICE,
        repackable_bytes=table.repackable_bytes,
        experts=_optional(header, "expert_count", 0),
        experts_used=max(_per_layer(header, "expert_used_count", count, 0)),
        expert_feed_forward=max(_per_layer(header, "expert_feed_forward_length", count, 0)),
        shared_expert_feed_forward=_optional(header, "expert_shared_feed_forward_length", 0),
        latent_attention=latent,
        window_tokens=window,
        predicts_ahead=ahead > 0,
        embeds=header.of_model("attention.causal") is False
        or header.of_model("pooling_type") is not None
        or header.architecture in rules.KEEPS_NOTHING,
        graph=None if isinstance(form, str) else form,
        tensor_count=len(header.tensors),
        head_bytes=sum(tensor.size_bytes for tensor in header.tensors if tensor.name == "output.weight")
        or (0 if table.embedding is None else table.embedding.size_bytes),
        unknown=unknown,
    )


def _table(header: GgufHeader, count: int) -> _Table:
    table = _Table([_Layer() for _ in range(count)])
    names = {tensor.name for tensor in header.tensors}
    tied = "output.weight" not in names and header.architecture not in rules.HAS_NO_HEAD
    first = _FIRST_LAYER_TENSORS
    if "output_norm.weight" not in names and tied:  # LFM2 calls it by the name of the other
        first -= {"token_embd_norm"}
    for tensor in header.tensors:
        found = _LAYER.fullmatch(tensor.name)
        stem = tensor.name.rpartition(".")[0]
        if found:
            layer = int(found[1])
            if layer >= count:
                raise _wrong(header, f"the tensor {tensor.name!r} belongs to no layer")
            table.layers[layer].add(found[2], tensor)
        elif stem in _INPUT_TENSORS:
            table.input_bytes += _aligned(tensor.size_bytes, HOST_ALIGNMENT_BYTES)
        elif stem in _ROTARY_TENSORS:
            size = _aligned(tensor.size_bytes, HOST_ALIGNMENT_BYTES)
            table.rotary_bytes += size
            table.rotary_padding_bytes += -size % DEVICE_ALIGNMENT_BYTES
        elif stem in first:
            table.layers[0].weights_bytes += _aligned(tensor.size_bytes, HOST_ALIGNMENT_BYTES)
        else:
            size = _aligned(tensor.size_bytes, HOST_ALIGNMENT_BYTES)
            table.output_bytes += size
            table.output_padding_bytes += -size % DEVICE_ALIGNMENT_BYTES
        if tensor.name == "token_embd.weight" and tied:
            table.embedding = tensor
        if (stem not in _INPUT_TENSORS or tensor is table.embedding) and _repackable(tensor):
            table.repackable_bytes[tensor.type] = table.repackable_bytes.get(tensor.type, 0) + tensor.size_bytes
    return table


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step


def _repackable(tensor: Tensor) -> bool:
    """A matrix, or one of each expert, whose rows come in the step of the CPU's kernels."""
    dimensions = len([length for length in tensor.shape if length > 1])
    experts = dimensions == 3 and "exps" in tensor.name
    return (dimensions == 2 or experts) and tensor.shape[1] % ROWS_STEP == 0


def _layers(
    header: GgufHeader, table: _Table, slides: tuple[bool, ...], trunk: int, *, latent: bool
) -> tuple[LayerShape, ...]:
    count = len(table.layers)
    heads = _per_layer(header, "attention.head_count", count, 0 if _keeps_states(table) else None)
    kv_heads = _per_layer(header, "attention.head_count_kv", count, heads)
    feed_forward = _per_layer(header, "feed_forward_length", count, 0)
    full, window = _head_lengths(header, heads[0])
    recurrent = _recurrent_layers(header, table, trunk)
    attending = [
        width > 0 and not (_attends_or_feeds(header) and feed_forward[at]) for at, width in enumerate(kv_heads)
    ]
    holds_kv = _caches(header, table, recurrent, attending, trunk)
    conv, mixer = state_widths(header, heads[0], full[0])
    indexer = _optional(header, "attention.indexer.key_length", 0)
    kept = rules.LOADED_OF_LAYERS_AHEAD.get(header.architecture, ())
    layers = []
    for at, found in enumerate(table.layers):
        in_trunk = at < trunk
        key, value = window if slides[at] else full
        layers.append(
            LayerShape(
                # Layers that predict ahead are left in the file: the engine loads them for a draft's context only.
                weights_bytes=found.weights_bytes if in_trunk else sum(found.tensors.get(name, 0) for name in kept),
                padding_bytes=found.padding_bytes if in_trunk else 0,
                expert_bytes=found.expert_bytes if in_trunk else 0,
                heads=heads[at],
                kv_heads=kv_heads[at],
                key_length=key,
                value_length=0 if latent else value,
                feed_forward=feed_forward[at],
                holds_kv=holds_kv[at],
                slides=slides[at],
                indexer_key_length=indexer if in_trunk and found.has(_INDEXER) else 0,
                conv_state=conv if recurrent[at] else 0,
                mixer_state=mixer if recurrent[at] else 0,
                tensors=tuple(found.tensors.items()),
            )
        )
    filled = sum(1 for layer in layers if layer.tensors)
    if 2 * filled < len(layers):  # a few may be empty; thousands would only cost whoever weighs them time
        raise _wrong(header, f"it claims {len(layers)} layers and holds tensors of {filled}")
    return tuple(layers)


def _caches(
    header: GgufHeader, table: _Table, recurrent: tuple[bool, ...], attending: list[bool], trunk: int
) -> tuple[bool, ...]:
    """Which layers have a cache of their own.

    All of a plain model, even one whose attention is gone; of a mixture those that attend, and there the engine asks
    no more of a layer that predicts ahead, while everywhere else such a layer has none.
    """
    count = len(table.layers)
    if header.architecture in rules.KEEPS_NOTHING:
        return (False,) * count
    cached = rules.LAYERS_WITH_CACHE.get(header.architecture, count)
    if header.architecture in rules.READS_SHARED_LAYERS:
        cached -= min(cached, _optional(header, "attention.shared_kv_layers", 0))
    if not any(recurrent):
        return tuple(at < min(trunk, cached) for at in range(count))
    if _linear(header):
        return tuple(attending[at] and not recurrent[at] and at < trunk for at in range(count))
    return tuple(attending[at] and (at >= trunk or table.layers[at].has(_ATTENTION)) for at in range(count))


def _attends_or_feeds(header: GgufHeader) -> bool:
    return header.architecture in rules.ATTENDS_WITHOUT_FEED_FORWARD


def _keeps_states(table: _Table) -> bool:
    return any(layer.has(_STATE) for layer in table.layers)


def _linear(header: GgufHeader) -> bool:
    return header.architecture in rules.LINEAR_ATTENTION_PERIOD


def _recurrent_layers(header: GgufHeader, table: _Table, trunk: int) -> tuple[bool, ...]:
    """By the layer's tensors; linear attention looks like the other kind, and goes by the keys."""
    count = len(table.layers)
    if not _linear(header):
        return tuple(at < trunk and layer.has(_STATE) for at, layer in enumerate(table.layers))
    stated = header.of_model("attention.recurrent_layers")
    if isinstance(stated, tuple) and len(stated) == count:
        return tuple(at < trunk and bool(item) for at, item in enumerate(stated))
    period = _optional(header, "full_attention_interval", rules.LINEAR_ATTENTION_PERIOD[header.architecture])
    return tuple(at < trunk and (at + 1) % max(1, period) != 0 for at in range(count))


def _head_lengths(header: GgufHeader, first_heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(keys, values) of one head: in a layer that sees everything, and in one that sees a window.

    Without heads in its first layer a model is taken for one without attention, whatever it states.
    """
    if not first_heads and header.architecture not in rules.READS_KEY_LENGTH_AGAIN:
        full = (0, 0)
    else:
        default = _required(header, "embedding_length") // first_heads if first_heads else 0
        full = (
            _optional(header, "attention.key_length", default),
            _optional(header, "attention.value_length", default),
        )
    return full, (
        _optional(header, "attention.key_length_swa", full[0]),
        _optional(header, "attention.value_length_swa", full[1]),
    )


def _window(header: GgufHeader, trunk: int, count: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and which layers slide. A pattern is a period, or says it of each layer."""
    rule = rules.WINDOWS.get(header.architecture)
    none = (False,) * count
    if rule is None or (rule.layers is not None and rule.layers != trunk):
        return None, none
    tokens = _optional(header, "attention.sliding_window", rule.default_tokens)
    if not tokens:
        return None, none
    tokens = rule.fixed_tokens or tokens
    pattern = header.of_model("attention.sliding_window_pattern")
    if isinstance(pattern, tuple) and rule.period != 0:
        padded = (*pattern, *none)[:count]
        return tokens, tuple(bool(slides) for slides in padded)
    period = rule.period
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0 and period:
        period = pattern
    if period is None:
        raise _wrong(header, "it has a sliding window and does not state which layers see it")
    full = 0 if rule.first_is_full else period - 1
    return tokens, tuple(at < trunk and (period == 0 or at % period != full) for at in range(count))


def _unknown(header: GgufHeader, table: _Table, trunk: int) -> dict[str, str]:
    """Parts that the formulas do not describe for this model, with the reason."""
    why = _why_unknown(header, table, trunk)
    return {} if why is None else {"kv_bytes": why, "state_bytes": why}


def _why_unknown(header: GgufHeader, table: _Table, trunk: int) -> str | None:
    for key, sentence in rules.UNUSUAL_KEYS.items():
        if header.of_model(key) is not None:
            return sentence
    if header.architecture not in rules.ARCHITECTURES:
        return f"What the architecture {header.architecture!r} keeps for its sequences has not been measured."
    if not trunk:
        return "It is nothing but layers that predict ahead for another model."
    prefix = f"{header.architecture}.attention."
    strange = [
        key for key in header.metadata if key.startswith(prefix) and key[len(prefix) :] not in rules.ATTENTION_KEYS
    ]
    if strange:
        return f"The key {strange[0]!r} is not one that this engine has."
    compressed = _optional(header, "attention.key_length_mla", 0) > 0
    if compressed != any(layer.has(("attn_k_b.",)) for layer in table.layers):
        return "Its keys and its tensors do not agree whether attention is compressed."
    recurrent = _recurrent_layers(header, table, trunk)
    if _keeps_states(table) and any(layer.has(_STATE) != recurrent[at] for at, layer in enumerate(table.layers)):
        return "Its keys and its tensors do not agree which layers are recurrent."
    if _optional(header, "attention.indexer.key_length", 0) and not compressed:
        return "It has an indexer beside ordinary keys and values."
    types = header.of_model("attention.indexer.types")
    indexed = [layer.has(_INDEXER) for layer in table.layers[:trunk]]
    if isinstance(types, tuple) and indexed != [bool(item) for item in (*types, *(False,) * trunk)[:trunk]]:
        return "Its keys and its tensors do not agree which layers have an indexer."
    return None


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


def _per_layer(header: GgufHeader, key: str, layers: int, otherwise: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """A figure that files give once for all layers, or for each."""
    value = header.of_model(key)
    if value is None and otherwise is not None:
        return otherwise if isinstance(otherwise, tuple) else (otherwise,) * layers
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


def _wrong(header: GgufHeader, what: str) -> ModelFileError:
    return ModelFileError(f"The memory of {header.path} cannot be computed: {what}.")
