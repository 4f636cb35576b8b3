"""Predicted memory against figures measured on the real engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from relevo.core.errors import ModelFileError
from relevo.core.events import StartModel
from relevo.core.memory.demand import DEVICE_START, MIB, Demand, LoadOptions, cells_for, load_options, model_demand
from relevo.core.memory.graph_form import GraphForm
from relevo.core.memory.placement import device_layers
from relevo.core.memory.shape import LayerShape, ModelShape
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of

from . import gguf_writer as w

# SmolLM2-135M-Instruct Q4_1: 30 layers, tied embeddings stored as q8_0; 92.10 MiB of tensors, 28.69 of them the table.
SMOLLM = ModelShape(
    architecture="llama",
    embedding=576,
    vocabulary_tokens=49152,
    context_trained_tokens=8192,
    layers=(
        LayerShape(weights_bytes=2_216_448, heads=9, kv_heads=3, key_length=64, value_length=64, feed_forward=1536),
    )
    * 30,
    input_weights_bytes=30_081_024,
    output_weights_bytes=2304,
    tied_table_bytes=30_081_024,
    graph=GraphForm(),
    head_bytes=30_081_024,
)

# Llama-3.1-8B-Instruct Q4_K_M: 4,912,898,304 B of tensors, of them 281.81 MiB the table and about 410 the head.
TABLE = 128256 * 4096 // 256 * 144
HEAD = 128256 * 4096 // 256 * 210 + 4096 * 4
LAYER = LayerShape(
    weights_bytes=(4_912_898_304 - TABLE - HEAD) // 32,
    heads=32,
    kv_heads=8,
    key_length=128,
    value_length=128,
    feed_forward=14336,
)
LLAMA = ModelShape(
    architecture="llama",
    embedding=4096,
    vocabulary_tokens=128256,
    context_trained_tokens=131072,
    layers=(LAYER,) * 32,
    input_weights_bytes=TABLE,
    output_weights_bytes=HEAD,
    graph=GraphForm(),
    head_bytes=HEAD,
)


def on_device(shape: ModelShape, **options: object) -> Demand:
    return model_demand(shape, LoadOptions(on_device=True, **options))[0]  # type: ignore[arg-type]


def on_host(shape: ModelShape, **options: object) -> Demand:
    return model_demand(shape, LoadOptions(on_device=False, **options))[1]  # type: ignore[arg-type]


def mib(value: int | None) -> float:
    assert value is not None
    return round(value / MIB, 2)


@pytest.mark.parametrize(
    ("options", "kv", "compute"),
    [
        # n_ctx, n_ubatch, n_seq_max, n_outputs_max: what llama.cpp v0.5.0 printed on the CPU
        ({"context_tokens": 1024, "ubatch_tokens": 512, "outputs": 8}, 22.5, 14.51),
        ({"context_tokens": 1024, "ubatch_tokens": 512, "outputs": 512}, 22.5, 98.25),
        ({"context_tokens": 1024, "ubatch_tokens": 128, "outputs": 8}, 22.5, 3.63),
        ({"context_tokens": 8192, "ubatch_tokens": 128, "outputs": 256, "sequences": 9}, 180.0, 24.58),
        ({"context_tokens": 4096, "ubatch_tokens": 512, "outputs": 9, "sequences": 9}, 90.0, 17.55),
        ({"context_tokens": 1024, "ubatch_tokens": 512, "sequences": 8, "shared_cells": False}, 180.0, 14.51),
        ({"context_tokens": 8192, "ubatch_tokens": 512, "flash_attention": False, "sequences": 8}, 180.0, 166.38),
    ],
)
def test_the_smallest_model_on_the_cpu_is_predicted_as_the_engine_reserves(
    options: dict[str, object], kv: float, compute: float
) -> None:
    demand = on_host(SMOLLM, **options)
    assert mib(demand.weights_bytes) == 92.10
    assert mib(demand.kv_bytes) == kv
    assert mib(demand.compute_bytes) == compute


def test_a_quantized_cache_is_exact() -> None:
    demand = on_host(SMOLLM, context_tokens=4096, ubatch_tokens=512, kv_type="q8_0", outputs=9, sequences=9)
    assert mib(demand.kv_bytes) == 47.81
    strict = on_host(SMOLLM, context_tokens=4096, kv_type="q8_0", sequences=9, shared_cells=False)
    assert mib(strict.kv_bytes) == 430.31


def test_logits_take_four_bytes_a_token_and_sequence() -> None:
    assert mib(on_host(SMOLLM, sequences=1).output_bytes) == 0.19
    assert mib(on_host(SMOLLM, sequences=9).output_bytes) == 1.69


def test_tied_embeddings_are_charged_on_both_sides_of_the_bus() -> None:
    device, host = model_demand(SMOLLM, LoadOptions(on_device=True))
    assert mib(device.weights_bytes) == 92.10
    assert mib(host.weights_bytes) == 28.69
    assert host.kv_bytes == 0


def test_llama_8b_weights_split_as_published_logs_show() -> None:
    device, host = model_demand(LLAMA, LoadOptions(on_device=True))
    assert mib(device.weights_bytes) == 4403.49
    assert mib(host.weights_bytes) == 281.81


@pytest.mark.parametrize(
    ("context", "f16", "q8_0", "q4_0"),
    [(4096, 512, 272, 144), (8000, 1024, 544, 288), (32768, 4096, 2176, 1152), (131072, 16384, 8704, 4608)],
)
def test_llama_8b_cache_by_type(context: int, f16: int, q8_0: int, q4_0: int) -> None:
    for kind, expected in (("f16", f16), ("q8_0", q8_0), ("q4_0", q4_0)):
        assert mib(on_device(LLAMA, context_tokens=context, kv_type=kind).kv_bytes) == expected


@pytest.mark.parametrize(
    ("context", "rows", "flash", "outputs", "expected"),
    [
        (4096, 512, True, 8, 112),
        (8192, 512, True, 8, 116),
        (32768, 512, True, 8, 140),
        (131072, 512, True, 8, 236),
        (8192, 128, True, 8, 29),
        (8192, 256, True, 8, 58),
        (8192, 1024, True, 8, 232),
        (8192, 2048, True, 8, 464),
        (8192, 512, False, 8, 564),
        (32768, 512, False, 8, 2148),
        (8192, 512, True, 512, 258.5),
    ],
)
def test_llama_8b_compute_buffer(context: int, rows: int, flash: bool, outputs: int, expected: float) -> None:
    demand = on_device(
        LLAMA, context_tokens=context, ubatch_tokens=rows, batch_tokens=2048, flash_attention=flash, outputs=outputs
    )
    assert mib(demand.compute_bytes) == pytest.approx(expected, abs=0.05)  # positions and other small inputs


@pytest.mark.parametrize(("layers", "kv"), [(16, 480), (31, 960), (33, 1024), (999, 1024), (1, 0), (0, 0)])
def test_partly_offloaded_layers_take_their_cache_with_them(layers: int, kv: int) -> None:
    device, host = model_demand(LLAMA, LoadOptions(on_device=True, gpu_layers=layers, context_tokens=8192))
    assert mib(device.kv_bytes) == kv
    assert mib(host.kv_bytes) == 1024 - kv
    whole = LLAMA.input_weights_bytes + LLAMA.output_weights_bytes + sum(layer.weights_bytes for layer in LLAMA.layers)
    assert (device.weights_bytes or 0) + (host.weights_bytes or 0) == whole


def test_one_layer_on_the_device_is_the_head_alone() -> None:
    assert device_layers(LLAMA, LoadOptions(on_device=True, gpu_layers=1)) == (0, True)
    assert device_layers(LLAMA, LoadOptions(on_device=True, gpu_layers=0)) == (0, False)
    assert mib(on_device(LLAMA, gpu_layers=1).weights_bytes) == 410.99


def test_the_published_total_of_a_full_load() -> None:
    demand = on_device(LLAMA, context_tokens=8192, ubatch_tokens=512, context_bytes=0, pool_bytes=0, margin_bytes=0)
    assert mib(demand.total_bytes) == 5543.5


def with_layers(*layers: LayerShape, **changes: object) -> ModelShape:
    return msgspec.structs.replace(LLAMA, layers=layers, **changes)  # type: ignore[arg-type]


def test_what_a_header_cannot_tell_is_unknown_with_its_reason() -> None:
    why = {"kv_bytes": "It keeps something strange.", "state_bytes": "It keeps something strange."}
    device, host = model_demand(msgspec.structs.replace(LLAMA, unknown=why), LoadOptions(on_device=True))
    assert (device.kv_bytes, device.state_bytes, device.total_bytes) == (None, None, None)
    assert device.reasons == why
    assert host.total_bytes is None
    assert device.known_bytes > 4403 * MIB


def test_compressed_attention_has_no_value_cache() -> None:
    """DeepSeek-V2-Lite at 32k: 972 MiB."""
    lite = with_layers(*(LayerShape(heads=16, kv_heads=1, key_length=576, value_length=0),) * 27, latent_attention=True)
    assert mib(on_device(lite, context_tokens=32768).kv_bytes) == 972


@pytest.mark.parametrize(
    ("context", "rows", "sequences", "expected"),
    [
        (8192, 512, 1, 512 + 480),
        (32768, 512, 1, 2048 + 480),
        (32768, 2048, 1, 2048 + 960),
        (32768, 512, 4, 2048 + 1440),
    ],
)
def test_layers_that_see_a_window_keep_only_the_window(context: int, rows: int, sequences: int, expected: int) -> None:
    """Gemma-3-12B: 48 layers, every sixth full, a window of 1024."""
    full = LayerShape(heads=16, kv_heads=8, key_length=256, value_length=256)
    slides = msgspec.structs.replace(full, slides=True)
    gemma = with_layers(*(*(slides,) * 5, full) * 8, window_tokens=1024)
    options = {"context_tokens": context, "ubatch_tokens": rows, "batch_tokens": 2048, "sequences": sequences}
    assert mib(on_device(gemma, **options).kv_bytes) == expected


def test_the_options_are_what_the_worker_makes_of_its_first_frame() -> None:
    start = StartModel("m", "gpu", "/m.gguf", "/lib", slots=8, context_tokens=1024, gpu_layers=99)
    fast = load_options(start, on_device=True, learned=DEVICE_START["emulated"])
    assert (fast.sequences, fast.outputs, fast.shared_cells, fast.kv_type) == (9, 9, True, "f16")
    assert model_demand(SMOLLM, fast)[0].parts()["context_bytes"] == 0
    strict = load_options(
        msgspec.structs.replace(start, profile="strict", flash_attention=False),
        on_device=False,
        learned=DEVICE_START["cpu"],
    )
    assert (strict.sequences, strict.shared_cells, strict.kv_type, strict.flash_attention) == (8, False, "q8_0", True)
    assert mib(model_demand(SMOLLM, strict)[1].kv_bytes) == pytest.approx(22.5 * 8 * 34 / 64, abs=0.01)


def test_an_unmeasured_driver_context_makes_the_total_unknown() -> None:
    demand = on_device(LLAMA, context_bytes=None)
    assert demand.total_bytes is None
    assert "measured" in demand.reasons["context_bytes"]


def test_without_a_device_nothing_is_asked_of_it() -> None:
    device, _ = model_demand(LLAMA, LoadOptions(on_device=False))
    assert device.total_bytes == 0


def test_a_request_takes_its_prompt_once_and_the_output_of_each_choice() -> None:
    assert cells_for(100, [50]) == 150
    assert cells_for(100, [50, 50, 50]) == 250


# --------------------------------------------------------------- from the header


def shape(tmp_path: Path, keys: list[bytes], tensors: list[tuple[str, tuple[int, ...], int]] = w.TENSORS) -> ModelShape:
    path = tmp_path / "model.gguf"
    path.write_bytes(w.file(keys, tensors))
    return shape_of(read_header(path))


def test_the_shape_is_read_from_the_header(tmp_path: Path) -> None:
    found = shape(tmp_path, w.keys())
    assert (found.embedding, found.vocabulary_tokens) == (64, 6)
    like = LayerShape(heads=4, kv_heads=2, key_length=16, value_length=16, feed_forward=96)
    tensors = (("attn_q.weight", 64 * 40), ("attn_norm.weight", 256))
    assert found.layers == (msgspec.structs.replace(like, weights_bytes=64 * 40 + 256, tensors=tensors), like)
    # The table has 408 bytes: 416 where the host aligns it, 512 on a device.
    assert (found.input_weights_bytes, found.output_weights_bytes, found.tied_table_bytes) == (416, 256, 512)
    assert set(found.unknown) == {"compute_bytes"}  # it lacks most of a model's tensors


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    found = shape(tmp_path, w.keys(), [*w.TENSORS, ("output.weight", (64, 6), 8)])
    assert (found.output_weights_bytes, found.tied_table_bytes) == (256 + 416, 0)


def test_figures_by_layer_and_explicit_head_lengths_are_taken(tmp_path: Path) -> None:
    keys = [
        *w.keys(head_count_kv=w.array("llama.attention.head_count_kv", 4, [2, 4])),
        w.key("llama.attention.key_length", 4, 32),
        w.key("llama.attention.value_length", 4, 24),
    ]
    found = shape(tmp_path, keys)
    assert [(layer.kv_heads, layer.key_length, layer.value_length) for layer in found.layers] == [
        (2, 32, 24),
        (4, 32, 24),
    ]
    assert on_host(found, context_tokens=256).kv_bytes == 256 * (2 + 4) * (32 + 24) * 2


@pytest.mark.parametrize(
    "keys",
    [
        w.keys(block_count=None),
        w.keys(block_count=w.key("llama.block_count", 4, 2**31)),
        w.keys(block_count=w.key("llama.block_count", 8, "two")),
        w.keys(embedding_length=None),
        w.keys(head_count=None),
        w.keys(head_count_kv=w.array("llama.attention.head_count_kv", 4, [2])),
        w.keys(head_count_kv=w.array("llama.attention.head_count_kv", 5, [2, -2])),
        w.keys(vocab_size=None, tokens=None),
        [*w.keys(), w.key("llama.expert_count", 6, 1.5)],
    ],
)
def test_a_header_that_cannot_be_true_is_refused(tmp_path: Path, keys: list[bytes]) -> None:
    with pytest.raises(ModelFileError, match="cannot be computed"):
        shape(tmp_path, keys)


def test_a_tensor_of_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no layer"):
        shape(tmp_path, w.keys(), [("blk.2.attn_q.weight", (64, 64), 3)])
