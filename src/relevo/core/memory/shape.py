"""What decides a model's memory: the facts of its header, one record a layer.

Filled by `models/shape.py` from the tensor table and the keys; read by the formulas of `kv_cache.py`,
`compute_buffer.py` and `demand.py`. Families are told apart by what a file holds, never by its architecture's name
alone; what a formula cannot do is written in `unknown`, under the name of the part of the demand, as a plain sentence.
"""

from __future__ import annotations

import msgspec

from relevo.core.memory.graph_form import GraphForm

DEVICE_ALIGNMENT_BYTES = 128
"""Of CUDA and most others."""
HOST_ALIGNMENT_BYTES = 32
"""Of the CPU's buffers, and of files."""


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """One repeating layer. Widths in elements, states in 4-byte elements of one sequence, weights in bytes."""

    weights_bytes: int = 0
    """All tensors of the layer."""
    padding_bytes: int = 0
    """What a device adds to begin every tensor at a multiple of `DEVICE_ALIGNMENT_BYTES`."""
    expert_bytes: int = 0
    """Of these, the experts' tensors, which a plan may leave in host RAM."""
    heads: int = 0
    """Query heads; 0: the layer has no attention."""
    kv_heads: int = 0
    key_length: int = 0
    """Width of a key of one head; of compressed attention, the whole compressed row."""
    value_length: int = 0
    """Width of a value of one head; 0 where values are a view of the keys (MLA) and no V cache exists."""
    feed_forward: int = 0
    """Width of the layer's dense feed-forward part; 0 where only experts or a mixer are there."""
    holds_kv: bool = True
    """Whether it has a KV cache of its own: not where it has no attention, or reads an earlier layer's."""
    slides: bool = False
    """Whether it sees only the window."""
    indexer_key_length: int = 0
    """Width of the key that the indexer of sparse attention keeps beside; 0: the layer has none."""
    conv_state: int = 0
    """Elements of a recurrent layer's convolution or shift state (n_r)."""
    mixer_state: int = 0
    """Elements of a recurrent layer's state proper (n_s)."""
    tensors: tuple[tuple[str, int], ...] = ()
    """Its tensors by name with their bytes: what a device is shipped copies of while the layer lies on the host."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """All that a model's memory follows from."""

    architecture: str
    embedding: int
    vocabulary_tokens: int
    context_trained_tokens: int | None
    layers: tuple[LayerShape, ...]
    input_weights_bytes: int
    """The token embedding table and what else is read before the first layer; always on the host."""
    output_weights_bytes: int
    """The output norm, and the head where it is a tensor of its own."""
    output_padding_bytes: int = 0
    """What a device adds to begin each of these at a multiple of `DEVICE_ALIGNMENT_BYTES`."""
    rotary_bytes: int = 0
    """Tables of rotary positions, which both sides need where layers lie on both."""
    rotary_padding_bytes: int = 0
    """What a device adds to begin each of these at a multiple of `DEVICE_ALIGNMENT_BYTES`."""
    tied_table_bytes: int = 0
    """Without a head of its own the model uses the embedding table; a device then gets this second copy of it."""
    experts: int = 0
    experts_used: int = 0
    expert_feed_forward: int = 0
    shared_expert_feed_forward: int = 0
    latent_attention: bool = False
    """Keys and values are one compressed row (MLA)."""
    window_tokens: int | None = None
    predicts_ahead: bool = False
    """Has layers for multi-token prediction, which bring a context of their own."""
    embeds: bool = False
    """An embedding or encoder model: every row of a batch is an output."""
    repackable_bytes: dict[str, int] = {}
    """Matrices by number type, a tied table among them: what a CPU may keep in another order."""
    tied_table_type: str | None = None
    """Number type of a tied table."""
    tied_table_is_read_twice: bool = False
    """Where the file is read and not mapped, the engine puts a tied table on the host twice."""
    graph: GraphForm | None = None
    """What its compute buffer follows from; None: no form describes its graph, and `unknown` may say why."""
    tensor_count: int = 0
    """Tensors of the file; 0: not known."""
    head_bytes: int = 0
    """The matrix that makes logits, its own or the embedding table."""
    unknown: dict[str, str] = {}
    """Parts of the demand that the closed form cannot give for this model, with the reason as a plain sentence."""

    @property
    def layer_count(self) -> int:
        """Repeating layers."""
        return len(self.layers)

    @property
    def recurrent(self) -> bool:
        """Whether any layer keeps a state of fixed size."""
        return any(layer.conv_state or layer.mixer_state for layer in self.layers)
