"""Which form of graph a file has: told by its tensors and keys, and refused as soon as one of them is not explained.

The order of a graph's steps is in the engine's code and in no file, so a form is claimed only for architectures whose
graph was compared with the engine's own reservation, byte for byte, over many settings (GRAPHS). But the name alone
never decides: every tensor of every layer must be one that the form knows, every layer must hold the same, and no key
may ask for a step that the form has not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from relevo.core.memory.graph_form import FeedForward, GraphForm, Residual, Turned
from relevo.models.gguf import GgufHeader

_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)")


class _Graph(msgspec.Struct, frozen=True, kw_only=True):
    """What of an architecture's graph only the engine's code tells (src/models/*.cpp, llama.cpp v0.5.0)."""

    layer_norm: bool = False
    fused_gate: bool = False
    """`ffn_up` holds the gate too, where there is no `ffn_gate`."""
    second_norm: str = "ffn_norm.weight"
    """The norm before the feed-forward part."""
    without_second_norm: Residual | None = None
    """What a file without that norm means; None: it has not been measured."""
    parallel_key: bool = False
    """The file states whether both parts work side by side."""
    normed_weights: bool = False
    chosen_softmax: bool = False
    late_rows: bool = False
    input_first: bool = False
    attention_first: bool = False
    pre_norms: bool = True
    wide_qk_norms: bool = False
    still_steps: tuple[int, int] = (0, 0)
    """Steps that change no size: in a layer, and outside the layers."""
    positions: int = 1
    turned: Turned = Turned.ALL
    turned_without_window: Turned = Turned.ALL
    """Of a file in which no layer sees a window."""


GRAPHS: dict[str, _Graph] = {
    "arcee": _Graph(still_steps=(1, 0)),
    "cohere2": _Graph(layer_norm=True, without_second_norm=Residual.SHARED_NORM, turned=Turned.WINDOWED),
    "command-r": _Graph(layer_norm=True, without_second_norm=Residual.SHARED_NORM),
    "ernie4_5": _Graph(),
    "exaone": _Graph(),
    "exaone4": _Graph(pre_norms=False, turned=Turned.WINDOWED),
    "gemma": _Graph(still_steps=(1, 1)),
    "gemma2": _Graph(still_steps=(1, 4)),
    "gemma3": _Graph(still_steps=(1, 1)),
    "glm4": _Graph(fused_gate=True),
    "gpt-oss": _Graph(second_norm="post_attention_norm.weight", chosen_softmax=True, late_rows=True),
    "gptneox": _Graph(layer_norm=True, parallel_key=True),
    "granite": _Graph(normed_weights=True, still_steps=(2, 2)),
    "granitemoe": _Graph(normed_weights=True, still_steps=(2, 2)),
    "internlm2": _Graph(),
    "llama": _Graph(normed_weights=True),
    "minicpm": _Graph(normed_weights=True, still_steps=(2, 2)),
    "mistral3": _Graph(normed_weights=True),
    "nemotron": _Graph(layer_norm=True, still_steps=(1, 0)),
    "olmo2": _Graph(pre_norms=False, wide_qk_norms=True),
    "olmoe": _Graph(wide_qk_norms=True),
    "orion": _Graph(layer_norm=True),
    "phi2": _Graph(layer_norm=True, without_second_norm=Residual.SHARED_NORM, attention_first=True, still_steps=(1, 0)),
    "phi3": _Graph(fused_gate=True, input_first=True, still_steps=(1, 0)),
    "qwen2": _Graph(),
    "qwen2vl": _Graph(positions=4),
    "qwen3": _Graph(),
    "qwen3moe": _Graph(normed_weights=True),
    "seed_oss": _Graph(second_norm="post_attention_norm.weight"),
    "smollm3": _Graph(turned=Turned.THREE_OF_FOUR, turned_without_window=Turned.THREE_OF_FOUR),
    "stablelm": _Graph(layer_norm=True),
    "starcoder2": _Graph(layer_norm=True),
}
"""Architectures whose graphs were measured; tests/golden compares each with the engine."""

_STEPS = {
    "expert_group_count": "its experts are chosen by groups",
    "expert_shared_count": "it has shared experts",
    "leading_dense_block_count": "its first layers differ from the others",
    "nextn_predict_layers": "it predicts several tokens ahead",
    "deepstack_mapping": "layers take a projector's input",
    "swiglu_clamp_exp": "its activations are clamped",
    "swiglu_clamp_shexp": "its activations are clamped",
    "pooling_type": "it is an embedding model",
    "attention.temperature_length": "its attention is scaled by position",
    "attention.temperature_scale": "its attention is scaled by position",
    "attention.indexer.key_length": "its attention has an indexer",
    "attention.relative_buckets_count": "its attention adds a bias by distance",
    "attention.max_alibi_bias": "its attention adds a bias by distance",
}
"""Keys that ask for a step no form has."""

_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_OUTSIDE = frozenset({"token_embd.weight", "output_norm.weight", "output.weight"})
_ROPE_FACTORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_OUTSIDE_KNOWN = _ROPE_FACTORS | {"output_norm.bias", "output.bias"}
_EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def graph_form(header: GgufHeader, *, windowed: bool) -> GraphForm | str:
    """The form of this model's graph, or why none describes it, as the end of a sentence.

    `windowed`: some layers see a window and have a cache of their own.
    """
    graph = GRAPHS.get(header.architecture)
    if graph is None:
        return f"the graph of the architecture {header.architecture!r} has not been measured"
    for key, why in _STEPS.items():
        if header.of_model(key):
            return why
    if header.of_model("attention.causal") is False:
        return "it is an embedding model"
    if header.of_model("rope.dimension_sections") is not None and graph.positions == 1:
        return "its positions are of several numbers"
    layers, outside = _names(header)
    first = layers.get(0, frozenset())
    for at, names in layers.items():
        if names != first:
            return f"its layers differ: layer {at} does not hold what layer 0 holds"
    reader = _Reader(graph, first, outside, header)
    form = reader.form(windowed)
    left = reader.unexplained()
    if left is not None and not isinstance(form, str):
        return f"the form has no place for its tensor {left!r}"
    return form


def _names(header: GgufHeader) -> tuple[dict[int, frozenset[str]], frozenset[str]]:
    layers: dict[int, set[str]] = {}
    outside = set()
    for tensor in header.tensors:
        found = _LAYER.fullmatch(tensor.name)
        if found:
            layers.setdefault(int(found[1]), set()).add(found[2])
        else:
            outside.add(tensor.name)
    return {at: frozenset(names) for at, names in layers.items()}, frozenset(outside)


class _Missing(Exception):
    """A tensor without which the form does not hold."""


class _Reader:
    """Reads a form off the names of one layer, and remembers which of them it has explained."""

    def __init__(self, graph: _Graph, layer: frozenset[str], outside: frozenset[str], header: GgufHeader) -> None:
        self._graph, self._layer, self._outside, self._header = graph, layer, outside, header
        self._explained: set[str] = set()

    def unexplained(self) -> str | None:
        """A tensor that the form has no place for."""
        left = sorted(self._layer - self._explained) + sorted(self._outside - _OUTSIDE - _OUTSIDE_KNOWN)
        return left[0] if left else None

    def form(self, windowed: bool) -> GraphForm | str:
        try:
            return self._form(windowed)
        except _Missing as e:
            return f"its layers have no {e}"

    def _form(self, windowed: bool) -> GraphForm:
        graph = self._graph
        self._need(("attn_norm.weight", "attn_output.weight") if graph.pre_norms else ("attn_output.weight",))
        residual = self._residual() if graph.pre_norms else Residual.SEQUENTIAL
        norm_bias = self._all(("attn_norm.bias",))
        if norm_bias:
            second = graph.second_norm.replace(".weight", ".bias")
            self._need((second,) if graph.second_norm in self._layer else ())
            if "output_norm.bias" not in self._outside:
                raise _Missing("output_norm.bias")
        fused = self._all(("attn_qkv.weight",))
        if not fused:
            self._need(("attn_q.weight", "attn_k.weight", "attn_v.weight"))
        experts = self._all(tuple(f"{role}.weight" for role in _EXPERTS))
        return GraphForm(
            residual=residual,
            feed_forward=FeedForward.EXPERTS if experts else self._dense(),
            layer_norm=graph.layer_norm,
            norm_bias=norm_bias,
            fused_qkv=fused,
            qkv_bias=self._all(("attn_qkv.bias",)) if fused else self._all(_BIASES),
            output_bias=self._all(("attn_output.bias",)),
            qk_norms=self._all(("attn_q_norm.weight", "attn_k_norm.weight")),
            post_norms=self._post_norms(),
            feed_forward_bias=self._dense_bias(),
            expert_bias=experts and self._all(tuple(f"{role}.bias" for role in _EXPERTS)),
            normed_weights=experts and graph.normed_weights,
            chosen_softmax=experts and graph.chosen_softmax,
            windowed=windowed,
            late_rows=graph.late_rows,
            input_first=graph.input_first,
            attention_first=graph.attention_first,
            pre_norms=graph.pre_norms,
            wide_qk_norms=graph.wide_qk_norms,
            turned=graph.turned if windowed else graph.turned_without_window,
            head_bias="output.bias" in self._outside,
            rope_factors=bool(_ROPE_FACTORS & self._outside),
            still_steps_a_layer=self._still_steps(),
            still_steps=graph.still_steps[1],
            positions=graph.positions,
            sinks=self._all(("attn_sinks.weight",)),
        )

    def _still_steps(self) -> int:
        """Of a layer; two of them scale what is added to the input, in files that say by how much."""
        steps = self._graph.still_steps[0]
        return steps if steps < 2 or self._header.of_model("residual_scale") else 0

    def _post_norms(self) -> bool:
        names = ("post_attention_norm.weight", "post_ffw_norm.weight")
        if not self._graph.pre_norms:
            self._need(names)
        return self._all(names)

    def _residual(self) -> Residual:
        graph = self._graph
        if self._all((graph.second_norm,)):
            side_by_side = graph.parallel_key and self._header.of_model("use_parallel_residual") is True
            return Residual.OWN_NORM if side_by_side else Residual.SEQUENTIAL
        if graph.without_second_norm is None:
            raise _Missing(graph.second_norm)
        return graph.without_second_norm

    def _dense(self) -> FeedForward:
        self._need(("ffn_up.weight", "ffn_down.weight"))
        if self._all(("ffn_gate.weight",)):
            return FeedForward.GATED
        return FeedForward.FUSED if self._graph.fused_gate else FeedForward.PLAIN

    def _dense_bias(self) -> bool:
        gate = ("ffn_gate.bias",) if "ffn_gate.weight" in self._layer else ()
        return self._all((*gate, "ffn_up.bias", "ffn_down.bias"))

    def _all(self, names: Iterable[str]) -> bool:
        """Whether the layer holds all of these, which then are explained."""
        wanted = set(names)
        if not wanted <= self._layer:
            return False
        self._explained |= wanted
        return True

    def _need(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._layer:
                raise _Missing(name)
            self._explained.add(name)
