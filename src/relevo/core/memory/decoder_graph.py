"""The graph of a decoder, drawn from what its file holds: attention layers and feed-forward parts of every common form.

Order and shapes are those of llama.cpp v0.5.0: llama-graph.cpp (build_inp_embd, build_qkv, build_attn, build_ffn,
build_moe_ffn) and the models' own files. Scales, caps and activations that are computed in place change no size and
are left out.
"""

from __future__ import annotations

import msgspec

from relevo.core.memory.graph import Graph, Place, Tensor, computed, given, stored, viewed, written
from relevo.core.memory.graph_form import FeedForward, GraphForm, Residual

F16_BYTES = 2


class LayerGraph(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's widths in elements, where it lies, and the sizes of its weights."""

    heads: int
    kv_heads: int
    key_length: int
    value_length: int
    feed_forward: int
    slides: bool = False
    turned: bool = True
    """Its queries and keys are turned by their positions."""
    place: Place = Place.DEVICE
    host_experts: bool = False
    """Its experts stay on the host although it does not."""
    weights: tuple[tuple[str, int], ...] = ()
    """Bytes of the tensors by name that lie on the host: a device is shipped copies of them."""


class StepGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A whole step: its form, its layers, and the figures of the run. Counts in elements, rows and cells."""

    form: GraphForm
    layers: tuple[LayerGraph, ...]
    embedding: int
    vocabulary: int
    rows: int
    outputs: int
    streams: int
    cells: int
    window_cells: int
    flash_attention: bool
    cache_element: tuple[int, int] = (2, 1)
    """Bytes of so many elements of the cache: f16 is (2, 1), q8_0 (34, 32)."""
    copies_cache: bool = False
    """Flash attention on the device works on an f16 copy of a quantized cache."""
    rotated_keys: int = 0
    """Width of the rotation that a quantized cache's keys go through; 0: none."""
    rotated_values: int = 0
    experts: int = 0
    experts_used: int = 0
    expert_feed_forward: int = 0
    on_device: bool = True
    head_place: Place = Place.DEVICE
    head_bytes: int = 0


class _Inputs:
    """What the host writes before a step. Not all of it is used by every layer."""

    def __init__(self, step: StepGraph) -> None:
        rows, mask_bytes = step.rows, 2 if step.flash_attention else 4
        positions = rows * step.form.positions
        self.positions = given((positions,), 4 * positions)
        self.outputs = given((step.outputs,), 4 * step.outputs)
        # One tensor a place, shared by its layers (TENSOR_DUPLICATED in llama-model.cpp).
        half = step.layers[0].key_length // 2
        self.factors = {place: stored(place, 4 * half, weight=True) for place in Place}
        self.caches = []
        widest = max(layer.kv_heads * layer.value_length for layer in step.layers)
        for cells in (step.cells, step.window_cells) if step.form.windowed else (step.cells,):
            values = rows if step.flash_attention else rows * widest
            self.caches.append(
                _CacheInputs(
                    keys=given((rows,), 8 * rows),
                    values=given((values,), 8 * values),
                    mask=given((cells, rows // step.streams, 1, step.streams), mask_bytes * cells * rows),
                    key_rotation=_rotation(step.rotated_keys),
                    value_rotation=_rotation(step.rotated_values),
                    cells=cells,
                )
            )

    def cache(self, layer: LayerGraph) -> _CacheInputs:
        return self.caches[-1 if layer.slides else 0]


class _CacheInputs(msgspec.Struct):
    keys: Tensor
    values: Tensor
    mask: Tensor
    key_rotation: Tensor | None
    value_rotation: Tensor | None
    cells: int


def _rotation(width: int) -> Tensor | None:
    return given((width, width), 4 * width * width) if width else None


def decoder_graph(step: StepGraph) -> Graph:
    """The tensors of one prompt step in the order of their computation."""
    graph, inputs = Graph(), _Inputs(step)
    rows, form = step.rows, step.form
    table = stored(Place.HOST, weight=True)
    current = _rows_of(table, given((rows,), 4 * rows), (step.embedding, rows))
    graph.expand(current)
    graph.expand(given((step.embedding, rows), 4 * step.embedding * rows))  # for input that is no token
    for index, layer in enumerate(step.layers):
        last = index == len(step.layers) - 1
        current = _Layer(step, layer, inputs, graph, last and not form.late_rows).build(current)
    if form.late_rows:
        current.output = True
        current = _rows_of(current, inputs.outputs, (step.embedding, step.outputs))
    current = _norm(form, current, step.head_place, 4 * step.embedding)
    current.output = True
    logits = _product(stored(step.head_place, step.head_bytes, weight=True), current, step.vocabulary)
    if form.head_bias:
        logits = _with(logits, step.head_place, 4 * step.vocabulary)
    logits.output = True
    graph.expand(logits)
    return graph


def tensors_of(step: StepGraph, graph: Graph, layers: int) -> int:
    """How many tensors the engine's graph has with so many layers, of which this graph may show fewer.

    Beside the drawn ones: steps that change no size, and two views more a layer where each slot has a stream.
    """
    form, shown = step.form, len(step.layers)
    hidden = 0
    if layers > shown > 1:
        one_less = msgspec.structs.replace(step, layers=step.layers[: shown - 1])
        hidden = (layers - shown) * (graph.count - decoder_graph(one_less).count)
    views = 2 if step.streams > 1 else 0
    return graph.count + hidden + layers * (form.still_steps_a_layer + views) + form.still_steps


def _rows_of(source: Tensor, chosen: Tensor, shape: tuple[int, ...]) -> Tensor:
    tensor = computed(shape, source, chosen)
    tensor.rows = 0
    return tensor


def _product(weight: Tensor, source: Tensor, width: int) -> Tensor:
    return computed((width, *source.shape[1:]), weight, source)


def _with(source: Tensor, place: Place, size: int = 0) -> Tensor:
    """Multiplied by, or added to, a vector of the file."""
    return computed(source.shape, source, stored(place, size, weight=True), in_place=True)


def _sum(one: Tensor, other: Tensor) -> Tensor:
    return computed(one.shape, one, other, in_place=True)


def _norm(form: GraphForm, source: Tensor, place: Place, size: int = 0) -> Tensor:
    normed = _with(computed(source.shape, source, in_place=not form.layer_norm), place, size)
    return _with(normed, place, size) if form.norm_bias else normed


class _Layer:
    """Draws one layer; `build` returns its output."""

    def __init__(self, step: StepGraph, layer: LayerGraph, inputs: _Inputs, graph: Graph, drops_rows: bool) -> None:
        self.step, self.layer, self.inputs, self.graph, self.drops_rows = step, layer, inputs, graph, drops_rows
        self.form = step.form
        self._sizes = dict(layer.weights)

    def _weight(self, name: str) -> Tensor:
        at_home = self.layer.host_experts and "exps." in name
        return stored(Place.HOST if at_home else self.layer.place, self._sizes.get(name, 0), weight=True)

    def _biased(self, source: Tensor, role: str) -> Tensor:
        return _with(source, self.layer.place, self._sizes.get(f"{role}.bias", 0))

    def _vector(self, length: int) -> Tensor:
        return stored(self.layer.place, 4 * length, weight=True)

    def _sinks(self) -> list[Tensor]:
        return [self._vector(self.layer.heads)] if self.form.sinks else []

    def _normed(self, source: Tensor) -> Tensor:
        return _norm(self.form, source, self.layer.place, 4 * self.step.embedding)

    def build(self, source: Tensor) -> Tensor:
        form = self.form
        normed = self._normed(source) if form.pre_norms else source
        attention = self._attention(normed)
        if self.drops_rows:
            attention = self._dropped(attention)
            kept = self._dropped(source)
            normed = self._dropped(normed) if form.residual is Residual.SHARED_NORM else normed
        else:
            kept = source
        if form.post_norms:
            attention = self._normed(attention)
        if form.residual is not Residual.SEQUENTIAL:
            base = normed if form.residual is Residual.SHARED_NORM else self._normed(kept)
            if form.attention_first:
                return _sum(_sum(attention, self._feed_forward(base)), kept)
            return _sum(_sum(self._feed_forward(base), kept), attention)
        base = _sum(attention, kept)
        result = self._feed_forward(self._normed(base) if form.pre_norms else base)
        if form.post_norms:
            result = self._normed(result)
        return _sum(base, result) if form.input_first else _sum(result, base)

    def _dropped(self, source: Tensor) -> Tensor:
        return _rows_of(source, self.inputs.outputs, (source.shape[0], self.step.outputs))

    # -------------------------------------------------------------- attention

    def _attention(self, normed: Tensor) -> Tensor:
        layer, cache = self.layer, self.inputs.cache(self.layer)
        query, key, value = self._projections(normed)
        query, key = self._turned(query), self._turned(key)
        query, key = self._rotated(query, cache.key_rotation), self._rotated(key, cache.key_rotation)
        value = self._rotated(value, cache.value_rotation)
        for tensor in (query, key, value) if self.form.windowed else (query, value, key):
            self.graph.expand(tensor)
        keys, values = self._cache(layer.key_length), self._cache(layer.value_length)
        rows = self.step.rows
        self.graph.expand(written(keys, viewed(key, (layer.kv_heads * layer.key_length, rows)), cache.keys))
        width = layer.kv_heads * layer.value_length
        flat = viewed(value, (width, rows)) if value.strides is None else computed((width, rows), value)
        if self.step.flash_attention:
            flat = viewed(value, (width, rows), straight=value.strides is None)
            self.graph.expand(written(values, flat, cache.values))
        else:
            self.graph.expand(written(viewed(values, (1,)), viewed(flat, (1, width * rows)), cache.values))
        mixed = (self._flash if self.step.flash_attention else self._scores)(query, keys, values, cache)
        self.graph.expand(mixed)
        mixed = self._rotated(mixed, cache.value_rotation)
        result = _product(self._weight("attn_output.weight"), mixed, self.step.embedding)
        return self._biased(result, "attn_output") if self.form.output_bias else result

    def _projections(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer, rows = self.layer, self.step.rows
        shapes = (
            (layer.key_length, layer.heads, rows),
            (layer.key_length, layer.kv_heads, rows),
            (layer.value_length, layer.kv_heads, rows),
        )
        if self.form.fused_qkv:
            width = sum(shape[0] * shape[1] for shape in shapes)
            whole = _product(self._weight("attn_qkv.weight"), normed, width)
            if self.form.qkv_bias:
                whole = self._biased(whole, "attn_qkv")
            # Each starts inside the first row of all three and ends inside the last.
            query, key, value = (
                viewed(whole, shape, straight=False, size=4 * (width * (rows - 1) + shape[0] * shape[1]))
                for shape in shapes
            )
            return query, key, value
        found = []
        for role, shape in zip(("attn_q", "attn_k", "attn_v"), shapes, strict=True):
            tensor = _product(self._weight(f"{role}.weight"), normed, shape[0] * shape[1])
            if self.form.qkv_bias:
                tensor = self._biased(tensor, role)
            if self.form.wide_qk_norms and role != "attn_v":
                tensor = self._head_norm(tensor)
            found.append(viewed(tensor, shape))
        return found[0], found[1], found[2]

    def _turned(self, source: Tensor) -> Tensor:
        """Query or key with its norm, if it has one, and its position (ROPE)."""
        if self.form.qk_norms and not self.form.wide_qk_norms:
            source = self._head_norm(source)
        if not self.layer.turned:
            return source
        factors = [self.inputs.factors[self.layer.place]] if self.form.rope_factors else []
        turned = computed(source.shape, source, self.inputs.positions, *factors, in_place=True)
        turned.floating = True
        return turned

    def _head_norm(self, source: Tensor) -> Tensor:
        normed = computed(source.shape, source, in_place=not self.form.layer_norm)
        return _with(normed, self.layer.place, 4 * source.shape[0])

    def _rotated(self, source: Tensor, rotation: Tensor | None) -> Tensor:
        if rotation is None:
            return source
        width, shape = rotation.shape[0], source.shape
        count = 1
        for length in shape:
            count *= length
        flat = (width, count // width)
        straight = viewed(source, flat) if source.strides is None else computed(flat, source)
        return viewed(computed(flat, rotation, straight), shape)

    def _cache(self, length: int) -> Tensor:
        bytes_, elements = self.step.cache_element
        count = self.step.streams * self.inputs.cache(self.layer).cells * self.layer.kv_heads * length
        return stored(self.layer.place, count * bytes_ // elements)

    def _seen(self, source: Tensor) -> Tensor:
        """A view with dimensions exchanged."""
        return viewed(viewed(source, source.shape, straight=False), source.shape, straight=False)

    def _flash(self, query: Tensor, keys: Tensor, values: Tensor, cache: _CacheInputs) -> Tensor:
        layer, rows = self.layer, self.step.rows
        shape = (layer.value_length, layer.heads, rows // self.step.streams, self.step.streams)
        mixed = computed(shape, self._seen(query), self._seen(keys), self._seen(values), cache.mask, *self._sinks())
        mixed.floating = True
        if self.step.copies_cache and self.step.cache_element[1] > 1:
            width = layer.kv_heads * (layer.key_length + layer.value_length)
            mixed.kernel_bytes = F16_BYTES * self.step.streams * cache.cells * width
        return viewed(mixed, (layer.value_length * layer.heads, rows))

    def _scores(self, query: Tensor, keys: Tensor, values: Tensor, cache: _CacheInputs) -> Tensor:
        layer, rows, streams = self.layer, self.step.rows, self.step.streams
        shape = (cache.cells, rows // streams, layer.heads, streams)
        scores = computed(shape, self._seen(keys), self._seen(query))
        scores = computed(shape, scores, cache.mask, *self._sinks(), in_place=True)
        mixed = computed((layer.value_length, rows // streams, layer.heads, streams), self._seen(values), scores)
        exchanged = viewed(mixed, mixed.shape, straight=False)
        return computed((layer.value_length * layer.heads, rows), exchanged)

    # ----------------------------------------------------------- feed-forward

    def _feed_forward(self, source: Tensor) -> Tensor:
        form, width = self.form, self.layer.feed_forward
        if form.feed_forward is FeedForward.EXPERTS:
            return self._experts(source)
        up = _product(
            self._weight("ffn_up.weight"), source, 2 * width if form.feed_forward is FeedForward.FUSED else width
        )
        if form.feed_forward_bias:
            up = self._biased(up, "ffn_up")
        if form.feed_forward is FeedForward.GATED:
            gate = _product(self._weight("ffn_gate.weight"), source, width)
            if form.feed_forward_bias:
                gate = self._biased(gate, "ffn_gate")
            inner = computed(up.shape, gate, up)
        elif form.feed_forward is FeedForward.FUSED:
            inner = computed((width, *up.shape[1:]), up)
        else:
            inner = computed(up.shape, up, in_place=True)
        result = _product(self._weight("ffn_down.weight"), inner, self.step.embedding)
        return self._biased(result, "ffn_down") if form.feed_forward_bias else result

    def _experts(self, source: Tensor) -> Tensor:
        step, form, graph = self.step, self.form, self.graph
        rows, used, width = source.shape[1], step.experts_used, step.expert_feed_forward
        scores = _product(self._weight("ffn_gate_inp.weight"), source, step.experts)
        if form.expert_bias:
            scores = self._biased(scores, "ffn_gate_inp")
        if not form.chosen_softmax:
            scores = computed(scores.shape, scores, in_place=True)
        ordered = computed((step.experts, rows), scores)
        chosen = viewed(ordered, (used, rows), straight=False, size=4 * step.experts * rows)
        weights = _rows_of(viewed(scores, (1, step.experts, rows)), chosen, (1, used, rows))
        if form.chosen_softmax:
            flat = viewed(weights, (used, rows))
            weights = viewed(computed(flat.shape, flat, in_place=True), (1, used, rows))
        if form.normed_weights:
            flat = viewed(weights, (used, rows))
            total = computed((1, rows), flat)
            total = computed((1, rows), total, in_place=True)
            weights = viewed(computed(flat.shape, flat, total, in_place=True), (1, used, rows))
        graph.expand(weights)
        spread = viewed(source, (step.embedding, 1, rows))
        up = self._of_experts("ffn_up_exps", spread, chosen, width)
        gate = self._of_experts("ffn_gate_exps", spread, chosen, width)
        inner = computed(gate.shape, gate, up)
        down = self._of_experts("ffn_down_exps", inner, chosen, step.embedding)
        down = graph.expand(computed(down.shape, down, weights, in_place=True))
        parts = [
            graph.expand(viewed(down, (step.embedding, rows), straight=False, size=down.bytes)) for _ in range(used)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = graph.expand(computed((step.embedding, rows), total, part, in_place=True))
        return total if used > 1 else computed(total.shape, total)

    def _of_experts(self, role: str, source: Tensor, chosen: Tensor, width: int) -> Tensor:
        used, rows = self.step.experts_used, source.shape[2]
        result = computed((width, used, rows), self._weight(f"{role}.weight"), source, chosen)
        result.rows = rows
        if self.form.expert_bias:
            bias = self._weight(f"{role}.bias")
            result = computed(result.shape, result, bias, chosen, in_place=True)
        return result
