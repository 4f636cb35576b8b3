"""Predicted memory of a model load, by named part, on the device and on the host.

Weights and KV cache follow exactly from the file's header. The compute buffer has a closed form for ordinary dense
transformers, fitted to llama.cpp's own reservation (within 0.1 MiB of 12 dense models on an accelerator, and of
SmolLM2-135M on the CPU, llama.cpp v0.5.0). What no header tells (driver context, pools) is learned on the machine.
A part that is not known is None, with its reason; then the total is not known either.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relevo.core.cells import PROBE_CELLS
from relevo.core.events import StartModel
from relevo.core.quantization import BY_NAME

MIB = 2**20
CELL_STEP = 256
"""llama.cpp rounds the cells of a stream up to this."""

CLOSED_FORM = frozenset({"llama", "qwen2", "qwen3", "mistral3", "smollm3", "granite", "internlm2"})
"""Architectures whose graph is the one the compute formula describes: gated feed-forward, grouped attention."""

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
    """Tensors placed here. On a host with mapping, pages of the file that the kernel may drop and read again."""
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
    reasons: dict[str, str] = {}

    def parts(self) -> dict[str, int | None]:
        """Every part by its name, in the order of PARTS."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total_bytes(self) -> int | None:
        """The sum; None as soon as one part is not known."""
        known = [value for value in self.parts().values() if value is not None]
        return sum(known) if len(known) == len(PARTS) else None

    @property
    def known_bytes(self) -> int:
        """The sum of the known parts: what it takes at least."""
        return sum(value or 0 for value in self.parts().values())


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What decides a model's memory, read from its header. Tuples have one entry a layer."""

    architecture: str
    embedding: int
    vocabulary_tokens: int
    context_trained_tokens: int | None
    feed_forward: tuple[int, ...]
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    key_length: int
    value_length: int
    layer_weights_bytes: tuple[int, ...]
    input_weights_bytes: int
    """The token embedding table and what else is read before the first layer; always on the host."""
    output_weights_bytes: int
    """The output norm, and the head where it is a tensor of its own."""
    tied_table_bytes: int = 0
    """Without a head of its own the model uses the embedding table; a device then gets this second copy of it."""
    experts: int = 0
    latent_attention: bool = False
    """Keys and values are one compressed row (MLA); there is no V cache."""
    window_tokens: int | None = None
    window_layers: tuple[bool, ...] = ()
    """Which layers see only the window. Empty where the header does not say: then all are charged in full."""
    recurrent: bool = False
    predicts_ahead: bool = False
    """Has layers for multi-token prediction, which bring a context of their own."""
    embeds: bool = False
    """An embedding or encoder model: every row of a batch is an output."""

    @property
    def layers(self) -> int:
        """Repeating layers."""
        return len(self.layer_weights_bytes)

    @property
    def unusual(self) -> str | None:
        """Why the closed form does not describe this model, as the end of a sentence; None when it does."""
        if self.experts:
            return "it is a mixture of experts"
        if self.latent_attention:
            return "its attention is compressed (MLA)"
        if self.window_tokens:
            return "some of its layers see a sliding window"
        if self.recurrent:
            return "it has recurrent layers"
        if self.predicts_ahead:
            return "it predicts several tokens ahead"
        if self.embeds:
            return "it is an embedding model"
        if self.architecture not in CLOSED_FORM:
            return f"the architecture {self.architecture!r} has not been measured"
        return None


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is to be loaded; the fields of StartModel that cost memory, and what this machine has taught."""

    on_device: bool
    """Layers go to an accelerator. False: everything is the host's."""
    gpu_layers: int = 999
    """As llama.cpp counts: the output head is one, the last layers follow. Beyond all of them means all."""
    context_tokens: int = 4096
    """Of the whole pool (fast) or of each slot (strict)."""
    sequences: int = 1
    """llama.cpp's n_seq_max: slots, and what else the worker keeps a sequence for."""
    shared_cells: bool = True
    """One pool for all sequences (the fast profile); else a stream for each (strict)."""
    batch_tokens: int = 512
    ubatch_tokens: int = 128
    outputs: int = 8
    """Rows of one step that give logits (n_outputs_max)."""
    kv_type: str = "f16"
    flash_attention: bool = True
    projector_bytes: int = 0
    context_bytes: int | None = 512 * MIB
    """Of the device's driver; `DEVICE_START` has values to begin with, until it is learned."""
    pool_bytes: int | None = None
    """None: the bound of `pool_bound`."""
    fragmentation_bytes: int = 0
    margin_bytes: int = 512 * MIB
    host_context_bytes: int = 64 * MIB
    """Python and the libraries of the worker process."""
    host_margin_bytes: int = 32 * MIB


class DeviceStart(msgspec.Struct, frozen=True):
    """What a kind of device is charged before this machine has taught better. `pool_bytes` None: `pool_bound`."""

    context_bytes: int
    pool_bytes: int | None
    margin_bytes: int


DEVICE_START: dict[str, DeviceStart] = {
    "nvidia": DeviceStart(512 * MIB, None, 512 * MIB),
    "amd": DeviceStart(400 * MIB, None, 512 * MIB),
    "vulkan": DeviceStart(350 * MIB, None, 512 * MIB),
    "emulated": DeviceStart(0, 0, 0),  # its memory is a number in a ledger; nothing else can want it
    "cpu": DeviceStart(0, 0, 32 * MIB),
}


def load_options(
    start: StartModel,
    *,
    on_device: bool,
    learned: DeviceStart,
    fragmentation_bytes: int = 0,
) -> LoadOptions:
    """The options that a worker makes of StartModel.

    The fast profile keeps one sequence more than slots, and cells for it, for probes; the strict one sets KV type
    and flash attention itself. As many rows give logits as there are sequences.
    """
    strict = start.profile == "strict"
    sequences = start.slots if strict else start.slots + 1
    return LoadOptions(
        on_device=on_device,
        gpu_layers=start.gpu_layers,
        context_tokens=start.context_tokens if strict else start.context_tokens + PROBE_CELLS,
        sequences=sequences,
        shared_cells=not strict,
        batch_tokens=start.batch_tokens,
        ubatch_tokens=start.ubatch_tokens,
        outputs=sequences,
        kv_type="q8_0" if strict else start.kv_type,
        flash_attention=strict or start.flash_attention,
        context_bytes=learned.context_bytes,
        pool_bytes=learned.pool_bytes,
        fragmentation_bytes=fragmentation_bytes,
        margin_bytes=learned.margin_bytes,
    )


def model_demand(shape: ModelShape, options: LoadOptions) -> tuple[Demand, Demand]:
    """Demand of a load: (on the device, on the host). Without a device the first is zero throughout.

    Formulas: weights by tensor table and placement (llama-model.cpp), KV = streams * cells * rows of all layers
    (llama-kv-cache.cpp), output = sequences * vocabulary * 4 B, compute as `_compute_bytes`.
    """
    return _with_device(shape, options) if options.on_device else (Demand(), _host_only(shape, options))


def cells_for(prompt_tokens: int, outputs: Sequence[int]) -> int:
    """Cells of a shared pool that a request can need: its prompt once, and the allowed output of every choice."""
    return prompt_tokens + sum(outputs)


def cells_of(options: LoadOptions) -> tuple[int, int]:
    """(streams, cells of each): what the engine makes of the context asked for."""
    cells = -(-options.context_tokens // CELL_STEP) * CELL_STEP
    return (1, cells) if options.shared_cells else (options.sequences, cells)


def kv_layer_bytes(shape: ModelShape, options: LoadOptions) -> list[int] | str:
    """KV cache of each layer, all streams together; or the reason why it is not known.

    A layer that sees a window keeps W tokens for each sequence and one micro-batch more (llama-kv-cache-iswa.cpp);
    where the header does not say which layers do, all are charged in full, which is a bound.
    """
    if shape.recurrent:
        return "Which of the model's layers keep keys and values, its header does not say."
    kind = BY_NAME.get(options.kv_type)
    if kind is None:
        return f"The KV type {options.kv_type!r} is not known."
    streams, cells = cells_of(options)
    window_cells = _window_cells(shape, options, cells)
    sizes = []
    for layer, kv_heads in enumerate(shape.kv_heads):
        try:
            row = kind.row_bytes(kv_heads * shape.key_length)
            if not shape.latent_attention:
                row += kind.row_bytes(kv_heads * shape.value_length)
        except ValueError as e:
            return f"This KV type does not suit the model: {e}"
        slides = bool(shape.window_layers) and shape.window_layers[layer]
        sizes.append(streams * (window_cells if slides else cells) * row)
    return sizes


def _window_cells(shape: ModelShape, options: LoadOptions, cells: int) -> int:
    if not shape.window_tokens:
        return cells
    sharers = options.sequences if options.shared_cells else 1
    wanted = shape.window_tokens * sharers + min(options.ubatch_tokens, options.batch_tokens)
    return min(cells, -(-wanted // CELL_STEP) * CELL_STEP)


def device_layers(shape: ModelShape, options: LoadOptions) -> tuple[int, bool]:
    """(repeating layers on the device, whether the output head is there). The last layers go first."""
    count = max(0, min(options.gpu_layers, shape.layers + 1))
    return max(0, count - 1), count > 0


def pool_bound(shape: ModelShape, options: LoadOptions) -> int:
    """Bound on a backend's temporary pool: q8_1 copies of activations, and of a quantized KV layer an f16 copy.

    Fitted to nothing yet; a start value, to be replaced by what the machine shows.
    """
    rows = min(options.ubatch_tokens, options.batch_tokens)
    pool = 64 * MIB + int(1.125 * rows * max(shape.embedding, max(shape.feed_forward, default=0)))
    if options.kv_type not in ("f16", "bf16", "f32"):
        streams, cells = cells_of(options)
        pool += 2 * streams * cells * max(shape.kv_heads, default=0) * (shape.key_length + shape.value_length)
    return max(128 * MIB, pool)


def _rows(options: LoadOptions) -> int:
    streams, cells = cells_of(options)
    return min(options.ubatch_tokens, options.batch_tokens, streams * cells)


def _compute_bytes(shape: ModelShape, options: LoadOptions) -> int | str:
    """The largest set of intermediate results that live at once; or the reason why it is not known.

    flash attention: max(feed-forward peak, attention peak, logits peak); without it attention scores dominate.
    With a quantized KV cache the engine needs a little less: the figure is then a bound.
    """
    if shape.unusual:
        return f"The compute buffer of this model has no closed form: {shape.unusual}."
    rows, (_, cells) = _rows(options), cells_of(options)
    width = max((h * shape.key_length for h in shape.heads), default=0)
    kv_width = max((h * (shape.key_length + shape.value_length) for h in shape.kv_heads), default=0)
    outputs = min(options.outputs, rows)
    logits = 4 * outputs * (shape.vocabulary_tokens + shape.embedding)
    if not options.flash_attention:
        heads = max(shape.heads, default=0)
        attention = rows * 4 * (cells * (heads + 1) + 2 * shape.embedding + 2 * width + kv_width)
        return max(attention, logits)
    feed_forward = max(shape.feed_forward, default=0)
    feed = rows * (4 * (3 * feed_forward + 2 * shape.embedding + width) + 2 * cells)
    attention = rows * (4 * (2 * shape.embedding + 2 * width + kv_width) + 2 * cells)
    return max(feed, attention, logits)


def _output_bytes(shape: ModelShape, options: LoadOptions) -> int:
    return options.sequences * shape.vocabulary_tokens * 4


def _state(shape: ModelShape, reasons: dict[str, str]) -> int | None:
    if not shape.recurrent:
        return 0
    reasons["state_bytes"] = "The state of recurrent layers is not computed yet."
    return None


def _note(reasons: dict[str, str], part: str, found: object) -> None:
    if isinstance(found, str):
        reasons[part] = found


def _with_device(shape: ModelShape, options: LoadOptions) -> tuple[Demand, Demand]:
    reasons: dict[str, str] = {}
    layers, head = device_layers(shape, options)
    here = slice(shape.layers - layers, shape.layers)
    rest = slice(0, shape.layers - layers)
    kv = kv_layer_bytes(shape, options)
    compute = _compute_bytes(shape, options)
    _note(reasons, "kv_bytes", kv)
    _note(reasons, "compute_bytes", compute)
    state = _state(shape, reasons)
    if options.context_bytes is None:
        reasons["context_bytes"] = "What the driver takes on this device has not been measured yet."
    rows, (_, cells) = _rows(options), cells_of(options)
    device = Demand(
        weights_bytes=sum(shape.layer_weights_bytes[here])
        + (shape.output_weights_bytes + shape.tied_table_bytes if head else 0),
        kv_bytes=None if isinstance(kv, str) else sum(kv[here]),
        state_bytes=state,
        compute_bytes=None if isinstance(compute, str) else compute,
        projector_bytes=options.projector_bytes,
        context_bytes=options.context_bytes,
        pool_bytes=pool_bound(shape, options) if options.pool_bytes is None else options.pool_bytes,
        fragmentation_bytes=options.fragmentation_bytes,
        margin_bytes=options.margin_bytes,
        reasons=reasons,
    )
    inputs = rows * (8 * shape.embedding + 2 * cells)
    # With layers left to the host its compute buffer holds a whole layer's results too; all of it is the bound.
    host_compute = None if isinstance(compute, str) else inputs + (compute if rest.stop else 0)
    left = 0 if head else shape.output_weights_bytes
    host = Demand(
        weights_bytes=shape.input_weights_bytes + sum(shape.layer_weights_bytes[rest]) + left,
        kv_bytes=None if isinstance(kv, str) else sum(kv[rest]),
        compute_bytes=host_compute,
        output_bytes=_output_bytes(shape, options),
        context_bytes=options.host_context_bytes,
        margin_bytes=options.host_margin_bytes,
        reasons={name: why for name, why in reasons.items() if name in ("kv_bytes", "compute_bytes")},
    )
    return device, host


def _host_only(shape: ModelShape, options: LoadOptions) -> Demand:
    reasons: dict[str, str] = {}
    kv = kv_layer_bytes(shape, options)
    compute = _compute_bytes(shape, options)
    _note(reasons, "kv_bytes", kv)
    _note(reasons, "compute_bytes", compute)
    return Demand(
        weights_bytes=shape.input_weights_bytes + sum(shape.layer_weights_bytes) + shape.output_weights_bytes,
        kv_bytes=None if isinstance(kv, str) else sum(kv),
        state_bytes=_state(shape, reasons),
        # On the CPU the embedded input rows stay in the same buffer: measured, exact.
        compute_bytes=None if isinstance(compute, str) else compute + _rows(options) * 4 * shape.embedding,
        output_bytes=_output_bytes(shape, options),
        projector_bytes=options.projector_bytes,
        context_bytes=options.host_context_bytes,
        margin_bytes=options.host_margin_bytes,
        reasons=reasons,
    )
