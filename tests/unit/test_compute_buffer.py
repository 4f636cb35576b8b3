"""The compute buffer: a graph laid out on sizes, the forms a file can have, and what is said where none fits."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relevo.core.memory import graph as g
from relevo.core.memory.compute_buffer import compute_bytes, host_compute_bytes
from relevo.core.memory.demand import model_demand
from relevo.core.memory.graph import Graph, Place, computed, stored, viewed
from relevo.core.memory.graph_form import FeedForward, GraphForm, Residual
from relevo.core.memory.graph_memory import graph_bytes
from relevo.core.memory.kv_cache import rows_of
from relevo.core.memory.load import LoadOptions
from relevo.core.memory.shape import ModelShape
from relevo.models.gguf import read_header
from relevo.models.graph_form import GRAPHS
from relevo.models.shape import shape_of
from tests.golden import families_attention as files
from tests.golden.families_attention import FAMILIES, MORE_FAMILIES, Blueprint, Family, shorter
from tests.golden.header_file import Scalar, Tensor, write_header

MIB = 2**20


def on_device(**changes: object) -> LoadOptions:
    usual = {"context_tokens": 8192, "batch_tokens": 2048, "ubatch_tokens": 512, "outputs": 1}
    return LoadOptions(on_device=True, **(usual | changes))  # type: ignore[arg-type]


def on_cpu(**changes: object) -> LoadOptions:
    return msgspec.structs.replace(on_device(**changes), on_device=False, gpu_layers=0)


def shape_from(family: Family, folder: Path) -> ModelShape:
    return shape_of(read_header(family.write(folder)))


def changed(
    blueprint: Blueprint, folder: Path, keys: dict[str, Scalar], more: list[Tensor], less: str = "-"
) -> ModelShape:
    """The shape of two layers of this model with some keys and tensors more, and tensors of a name less."""
    family = shorter(blueprint, 2)
    tensors = [tensor for tensor in family.tensors if less not in tensor[0]] + more
    return shape_of(read_header(write_header(folder / "m.gguf", {**family.keys, **keys}, tensors)))


# --------------------------------------------------------------- layout


def laid_out(graph: Graph) -> int:
    return graph_bytes(graph, on_device=False)[1]


def test_a_result_may_take_the_memory_of_its_only_source() -> None:
    graph = Graph()
    first = computed((256, 4), g.given((256, 4), 4096))
    graph.expand(computed((256, 4), computed((256, 4), first, in_place=True)))
    assert laid_out(graph) == 2 * 4096


def test_what_is_still_needed_is_not_taken_over() -> None:
    graph = Graph()
    first = computed((256, 4), g.given((256, 4), 4096))
    second = computed((256, 4), first, in_place=True)
    graph.expand(computed((256, 4), second, first))
    assert laid_out(graph) == 3 * 4096


def test_a_result_that_is_read_afterwards_keeps_its_memory() -> None:
    graph = Graph()
    result = computed((256, 4), g.given((8,), 32))
    result.output = True
    graph.expand(computed((256, 4), result, in_place=True))
    assert laid_out(graph) == 32 + 2 * 4096


def test_a_view_keeps_what_it_shows() -> None:
    graph = Graph()
    whole = computed((256, 4), g.given((256, 4), 4096))
    part = viewed(whole, (128, 8))
    other = computed((1024, 4), part)
    graph.expand(computed((256, 4), other, part))
    assert laid_out(graph) == 4096 * 4 + 2 * 4096


def test_freed_neighbours_merge_and_a_hole_is_taken_before_the_end() -> None:
    graph = Graph()
    four = [graph.expand(computed((256,), g.given((8,), 32))) for _ in range(4)]
    kept = graph.expand(computed((8,), four[3]))  # where the inputs were
    graph.expand(computed((64,), *four[:2]))  # frees two neighbours
    graph.expand(computed((512,), kept))  # as large as both
    assert laid_out(graph) == 4 * 32 + 4 * 1024


def test_weights_on_the_host_are_copied_for_a_step_of_many_rows() -> None:
    def graph(rows: int) -> Graph:
        drawn = Graph()
        inner = computed((64, rows), stored(Place.HOST, 65536, weight=True), g.given((64, rows), 256 * rows))
        drawn.expand(computed((64, rows), stored(Place.DEVICE, 65536, weight=True), inner))
        return drawn

    many_device, many_host = graph_bytes(graph(32), on_device=True)
    few_device, few_host = graph_bytes(graph(31), on_device=True)
    assert many_device >= 65536 > few_device
    assert many_host == 32 * 256
    assert few_host == 2 * 31 * 256


# --------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("blueprint", "form"),
    [
        (files.LLAMA_2_7B, GraphForm()),
        (files.LLAMA_32_1B, GraphForm(rope_factors=True)),
        (files.QWEN25_05B, GraphForm(qkv_bias=True)),
        (files.QWEN3_4B, GraphForm(qk_norms=True)),
        (
            files.GEMMA_3_12B,
            GraphForm(qk_norms=True, post_norms=True, windowed=True, still_steps_a_layer=1, still_steps=1),
        ),
        (files.COMMAND_R_35B, GraphForm(layer_norm=True, residual=Residual.SHARED_NORM)),
        (
            files.PHI_4,
            GraphForm(fused_qkv=True, feed_forward=FeedForward.FUSED, input_first=True, still_steps_a_layer=1),
        ),
        (files.MIXTRAL_8X7B, GraphForm(feed_forward=FeedForward.EXPERTS, normed_weights=True)),
        (
            files.PYTHIA_69B,
            GraphForm(
                residual=Residual.OWN_NORM,
                feed_forward=FeedForward.PLAIN,
                layer_norm=True,
                norm_bias=True,
                fused_qkv=True,
                qkv_bias=True,
                output_bias=True,
                feed_forward_bias=True,
            ),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_form_is_read_off_the_tensors(blueprint: Blueprint, form: GraphForm, tmp_path: Path) -> None:
    assert shape_from(shorter(blueprint, 2), tmp_path).graph == form


def test_every_measured_architecture_has_a_file_that_proves_it() -> None:
    assert {family.keys["general.architecture"] for family in (*FAMILIES, *MORE_FAMILIES)} == set(GRAPHS)


@pytest.mark.parametrize(
    ("keys", "more", "less", "why"),
    [
        ({}, [("blk.0.attn_gate.weight", (4096, 256), "q4_k")], "-", "layer 1 does not hold what layer 0 holds"),
        ({}, [(f"blk.{i}.ssm_a", (4096,), "f32") for i in range(2)], "-", "no place for its tensor 'ssm_a'"),
        ({}, [("dense_2.weight", (4096, 256), "q4_k")], "-", "no place for its tensor 'dense_2.weight'"),
        ({}, [(f"blk.{i}.post_ffw_norm.weight", (4096,), "f32") for i in range(2)], "-", "post_ffw_norm"),
        ({}, [(f"blk.{i}.attn_q.bias", (4096,), "f32") for i in range(2)], "-", "attn_q.bias"),
        ({}, [], "ffn_norm", "its layers have no ffn_norm.weight"),
        ({}, [], "attn_k.", "its layers have no attn_k.weight"),
        ({}, [], "ffn_down", "its layers have no ffn_down.weight"),
        ({"llama.pooling_type": 1}, [], "-", "it is an embedding model"),
        ({"llama.attention.causal": False}, [], "-", "it is an embedding model"),
        ({"llama.nextn_predict_layers": 1}, [], "-", "predicts several tokens ahead"),
        ({"llama.expert_group_count": 4}, [], "-", "chosen by groups"),
        ({"llama.attention.temperature_scale": 0.1}, [], "-", "scaled by position"),
        ({"general.architecture": "unheard-of"}, [], "-", "'unheard-of' has not been measured"),
    ],
)
def test_a_file_that_no_form_explains_is_said_to_be_unknown(
    keys: dict[str, Scalar], more: list[Tensor], less: str, why: str, tmp_path: Path
) -> None:
    if architecture := keys.get("general.architecture"):
        own = shorter(files.LLAMA_2_7B, 2).keys
        keys = keys | {
            name.replace("llama.", f"{architecture}."): value
            for name, value in own.items()
            if name.startswith("llama.") and isinstance(value, int | float)
        }
    shape = changed(files.LLAMA_2_7B, tmp_path, keys, more, less)
    device, host = model_demand(shape, on_device())
    for demand in (device, host):
        assert demand.compute_bytes is None
        assert demand.total_bytes is None
        assert why in demand.reasons["compute_bytes"]
        assert demand.reasons["compute_bytes"].endswith(".")


def test_a_shape_without_a_form_is_unknown_too(tmp_path: Path) -> None:
    shape = msgspec.structs.replace(shape_from(shorter(files.LLAMA_2_7B, 2), tmp_path), graph=None)
    assert "nothing is known of its graph" in str(compute_bytes(shape, on_device()))
    assert "nothing is known of its graph" in str(host_compute_bytes(shape, on_device()))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 16}, "its layers differ in width"),
        ({"feed_forward": 8192}, "its layers differ in width"),
        ({"holds_kv": False}, "some of its layers keep no keys and values"),
    ],
)
def test_layers_of_several_widths_are_said_to_be_unknown(change: dict[str, int], why: str, tmp_path: Path) -> None:
    shape = shape_from(shorter(files.LLAMA_2_7B, 2), tmp_path)
    second = msgspec.structs.replace(shape.layers[1], **change)
    uneven = msgspec.structs.replace(shape, layers=(shape.layers[0], second))
    assert why in str(compute_bytes(uneven, on_device()))


@pytest.mark.parametrize("used", [0, 9])
def test_experts_without_a_sensible_choice_are_said_to_be_unknown(used: int, tmp_path: Path) -> None:
    shape = shape_from(shorter(files.MIXTRAL_8X7B, 2), tmp_path)
    strange = msgspec.structs.replace(shape, experts_used=used)
    assert "how many of its experts" in str(compute_bytes(strange, on_device()))


def test_nonsense_is_answered_at_once(tmp_path: Path) -> None:
    shape = shape_from(shorter(files.MIXTRAL_8X7B, 2), tmp_path)
    many = msgspec.structs.replace(shape, experts=2**32, experts_used=2**32)
    deep = msgspec.structs.replace(shape, layers=shape.layers * 300)
    assert "more layers or experts than the engine takes" in str(compute_bytes(many, on_device()))
    assert "more layers or experts than the engine takes" in str(compute_bytes(deep, on_device()))


def test_a_model_without_attention_is_said_to_be_unknown(tmp_path: Path) -> None:
    shape = shape_from(shorter(files.LLAMA_2_7B, 2), tmp_path)
    headless = tuple(msgspec.structs.replace(layer, heads=0) for layer in shape.layers)
    assert "without attention" in str(compute_bytes(msgspec.structs.replace(shape, layers=headless), on_device()))


@pytest.mark.parametrize(
    ("blueprint", "fine", "fatal"),
    [
        (files.PHI_4, on_cpu(sequences=3, kv_type="q8_0"), on_cpu(sequences=3, kv_type="q8_0", shared_cells=False)),
        (files.GRANITE_31_MOE_1B, on_cpu(), on_cpu(kv_type="q8_0")),
    ],
    ids=["a stream a slot", "experts"],
)
def test_a_graph_that_the_engine_has_no_room_for_is_said_to_end_it(
    blueprint: Blueprint, fine: LoadOptions, fatal: LoadOptions, tmp_path: Path
) -> None:
    """It sizes its table by the file's tensors, and a few tensors can make a large graph."""
    shape = shape_from(blueprint.family(), tmp_path)
    assert isinstance(host_compute_bytes(shape, fine), int)
    assert "The engine would abort" in str(host_compute_bytes(shape, fatal))


# --------------------------------------------------------------- figures


def test_the_buffer_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    whole = shape_from(files.LLAMA_31_8B.family(), tmp_path)
    short = shape_from(shorter(files.LLAMA_31_8B, 8), tmp_path)
    assert compute_bytes(whole, on_device()) == compute_bytes(short, on_device())
    assert host_compute_bytes(whole, on_cpu()) == host_compute_bytes(short, on_cpu())


def test_without_a_device_all_of_it_is_the_hosts(tmp_path: Path) -> None:
    shape = shape_from(shorter(files.QWEN3_4B, 4), tmp_path)
    assert compute_bytes(shape, on_cpu()) == 0
    assert host_compute_bytes(shape, on_cpu()) > host_compute_bytes(shape, on_device())  # type: ignore[operator]


def test_a_layer_left_to_the_host_makes_the_devices_buffer_larger(tmp_path: Path) -> None:
    """The device computes it all the same, from copies of its weights and its cache."""
    shape = shape_from(files.LLAMA_31_8B.family(), tmp_path)
    whole, partly = compute_bytes(shape, on_device()), compute_bytes(shape, on_device(gpu_layers=20))
    assert isinstance(whole, int)
    assert isinstance(partly, int)
    assert partly > whole + 8 * MIB
    few_rows = on_device(gpu_layers=20, ubatch_tokens=31)
    assert compute_bytes(shape, few_rows) < whole  # type: ignore[operator]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
def test_more_is_never_less_where_one_place_holds_all_layers(family: Family, tmp_path: Path) -> None:
    """With layers on both sides it can be: a larger tensor may find a better hole."""
    shape = shape_from(family, tmp_path)
    for name, steps in (
        ("context_tokens", (256, 8192, 32768)),
        ("ubatch_tokens", (16, 128, 512)),
        ("outputs", (1, 8, 512)),
    ):
        for options in (on_device, on_cpu):
            figures = [host_compute_bytes(shape, options(**{name: step})) for step in steps]
            figures_there = [compute_bytes(shape, options(**{name: step})) for step in steps]
            assert figures == sorted(figures)
            assert figures_there == sorted(figures_there)


BLUEPRINT_BY_NAME = {blueprint.name: blueprint for blueprint in files.BLUEPRINTS}
ANY_OPTIONS = st.fixed_dictionaries(
    {
        "gpu_layers": st.integers(0, 12),
        "ubatch_tokens": st.integers(1, 300),
        "context_tokens": st.integers(1, 5000),
        "sequences": st.integers(1, 9),
        "outputs": st.integers(1, 600),
        "shared_cells": st.booleans(),
        "flash_attention": st.booleans(),
    }
)


@cache
def two_layers_of(name: str) -> ModelShape:
    with tempfile.TemporaryDirectory() as folder:
        return shape_from(shorter(BLUEPRINT_BY_NAME[name], 2), Path(folder))


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(BLUEPRINT_BY_NAME)),
    layers=st.integers(1, 9),
    head=st.integers(1, 9).map(lambda times: 32 * times),
    asked=ANY_OPTIONS,
)
def test_whatever_is_asked_there_is_a_figure_and_the_host_holds_at_least_the_inputs(
    name: str, layers: int, head: int, asked: dict[str, int]
) -> None:
    whole = two_layers_of(name)
    drawn = [
        msgspec.structs.replace(layer, key_length=head, value_length=head) for layer in (whole.layers * layers)[:layers]
    ]
    shape = msgspec.structs.replace(whole, layers=tuple(drawn))
    options = on_device(**asked)
    device, host = compute_bytes(shape, options), host_compute_bytes(shape, options)
    assert isinstance(device, int)
    assert isinstance(host, int)
    assert device >= 0
    assert host >= 4 * shape.embedding * rows_of(options)
