"""What a model keeps, told by its header: by what the file holds, and by the engine's code where it is silent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relevo.core.memory.shape import ModelShape
from relevo.models import engine_rules as rules
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of
from tests.golden.families_state import FAMILIES
from tests.golden.header_file import Tensor, write_header

ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
STATE = ("attn_norm", "ssm_in", "ssm_conv1d", "ssm_out")


def shape(
    folder: Path,
    architecture: str,
    layers: Sequence[Sequence[str]] = (ATTENTION,) * 4,
    outside: Sequence[str] = ("token_embd.weight", "output_norm.weight", "output.weight"),
    **keys: Any,
) -> ModelShape:
    """The shape of a file of 64-wide layers with these tensors; keys without the architecture, dots written as __."""
    all_keys: dict[str, Any] = {
        "block_count": len(layers),
        "embedding_length": 64,
        "vocab_size": 8,
        "context_length": 1024,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        **{name.replace("__", "."): value for name, value in keys.items()},
    }
    tensors: list[Tensor] = [(name, (64, 8), "q8_0") for name in outside]
    for at, names in enumerate(layers):
        tensors += [(f"blk.{at}.{name}.weight", (64, 64), "q8_0") for name in names]
    file_keys = {"general.architecture": architecture}
    file_keys |= {f"{architecture}.{name}": value for name, value in all_keys.items() if value is not None}
    return shape_of(read_header(write_header(folder / "model.gguf", file_keys, tensors)))


def slides(found: ModelShape) -> str:
    """Layers that see a window as w, the others as f."""
    return "".join("w" if layer.slides else "f" for layer in found.layers)


def family(name: str, folder: Path) -> ModelShape:
    return shape_of(read_header(next(f for f in FAMILIES if f.name == name).write(folder)))


# ------------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("architecture", "keys", "window", "expected"),
    [
        ("gemma3", {"attention__sliding_window": 512}, 512, "wwwwwfww"),
        ("gemma3", {}, None, "ffffffff"),
        ("gemma3", {"attention__sliding_window": 512, "attention__sliding_window_pattern": 2}, 512, "wfwfwfwf"),
        ("gemma2", {}, 4096, "wfwfwfwf"),
        ("gpt-oss", {"attention__sliding_window": 128}, 128, "wfwfwfwf"),
        ("laguna", {"attention__sliding_window": 512}, 512, "fwwwfwww"),
        ("smallthinker", {"attention__sliding_window": 100}, 4096, "fwwwfwww"),
        ("smallthinker", {"attention__sliding_window": 0}, None, "ffffffff"),
        ("llama4", {}, 8192, "wwwfwwwf"),
        ("llama4", {"attention__sliding_window": 0}, None, "ffffffff"),
        ("exaone4", {"attention__sliding_window": 4096}, None, "ffffffff"),  # slides in its large sister only
        ("phi3", {"attention__sliding_window": 2047}, None, "ffffffff"),
        ("llama", {"attention__sliding_window": 4096}, None, "ffffffff"),
        ("cohere2", {"attention__sliding_window": 4096, "nextn_predict_layers": 1}, 4096, "wwwfwwwf"),
    ],
)
def test_which_layers_see_a_window_is_as_the_engine_has_it(
    architecture: str, keys: dict[str, int], window: int | None, expected: str, tmp_path: Path
) -> None:
    found = shape(tmp_path, architecture, (ATTENTION,) * 8, **keys)
    assert (found.window_tokens, slides(found)) == (window, expected)


def test_a_file_that_says_of_each_layer_whether_it_slides_is_believed(tmp_path: Path) -> None:
    flags = [True, True, False, True]
    keys = {"attention__sliding_window": 512, "attention__sliding_window_pattern": flags}
    assert slides(shape(tmp_path, "gemma3", **keys)) == "wwfw"
    assert slides(shape(tmp_path, "step35", **keys)) == "wwfw"


def test_every_attention_layer_of_lfm2_slides_where_the_file_has_a_window(tmp_path: Path) -> None:
    layers = (("shortconv.conv",), ATTENTION, ("shortconv.conv",), ATTENTION)
    found = shape(
        tmp_path,
        "lfm2",
        layers,
        attention__head_count_kv=[0, 2, 0, 2],
        shortconv__l_cache=3,
        attention__sliding_window=64,
    )
    assert [layer.slides and layer.holds_kv for layer in found.layers] == [False, True, False, True]


def test_a_window_head_may_have_another_width(tmp_path: Path) -> None:
    found = family("Gemma-4-E4B", tmp_path)
    assert {(layer.slides, layer.key_length) for layer in found.layers} == {(True, 256), (False, 512)}


# -------------------------------------------------------------------- shared caches


def test_the_last_layers_of_gemma_read_an_earlier_cache(tmp_path: Path) -> None:
    assert [layer.holds_kv for layer in family("Gemma-3n-E4B", tmp_path).layers] == [True] * 20 + [False] * 15
    assert [layer.holds_kv for layer in family("Gemma-4-E4B", tmp_path).layers] == [True] * 24 + [False] * 18


def test_layers_that_predict_ahead_keep_nothing_and_stay_in_the_file(tmp_path: Path) -> None:
    found = shape(tmp_path, "glm4moe", nextn_predict_layers=1)
    assert [layer.holds_kv for layer in found.layers] == [True, True, True, False]
    assert [layer.weights_bytes > 0 for layer in found.layers] == [True, True, True, False]
    assert found.predicts_ahead


def test_a_mixture_keeps_a_cache_for_a_layer_that_predicts_ahead_unless_feed_forward_fills_it(tmp_path: Path) -> None:
    keys = {"attention__head_count_kv": [0, 2, 2], "nextn_predict_layers": 1}
    layers = (STATE, ATTENTION, ATTENTION)
    for width, expected in ((0, [False, True, True]), ([0, 0, 64], [False, True, False])):
        found = shape(tmp_path, "nemotron_h", layers, feed_forward_length=width, **keys)
        assert [layer.holds_kv for layer in found.layers] == expected
    assert shape(tmp_path, "jamba", layers, feed_forward_length=64, **keys).layers[2].holds_kv


# ---------------------------------------------------------------------- compressed


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-V2-Lite-old"])
def test_compressed_attention_is_told_by_its_tensors(name: str, tmp_path: Path) -> None:
    found = family(name, tmp_path)
    compressed = not name.endswith("old")
    assert found.architecture == "deepseek2"
    assert found.latent_attention is compressed
    layer = found.layers[0]
    width = (1, 576, 0) if compressed else (16, 192, 128)
    assert (layer.kv_heads, layer.key_length, layer.value_length) == width


def test_an_indexer_is_where_its_tensors_are(tmp_path: Path) -> None:
    found = family("GLM-5.2", tmp_path)
    assert [layer.indexer_key_length for layer in found.layers[:7]] == [128, 128, 128, 0, 0, 0, 128]
    assert found.layers[-1].indexer_key_length == 0  # it predicts ahead


# ------------------------------------------------------------------------- states


def test_a_layer_is_recurrent_when_it_holds_a_states_tensors(tmp_path: Path) -> None:
    ssm = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16, "ssm__group_count": 2}
    layers = (STATE, ATTENTION, ("attn_norm", "ffn_up"), (*STATE, *ATTENTION[1:]))
    found = shape(tmp_path, "granitehybrid", layers, attention__head_count_kv=[0, 2, 0, 2], **ssm)
    assert [layer.holds_kv for layer in found.layers] == [False, True, False, True]
    assert [layer.mixer_state for layer in found.layers] == [2048, 0, 0, 2048]
    assert found.layers[0].conv_state == 3 * (128 + 2 * 2 * 16)
    assert found.recurrent


@pytest.mark.parametrize(
    ("name", "conv", "mixer", "states", "caches"),
    [
        ("Mamba-130M", 3 * 1536, 1536 * 16, 24, 0),
        ("Mamba-2-370M", 3 * (2048 + 256), 2048 * 128, 48, 0),
        ("RWKV-6-1.6B", 2 * 2048, 64 * 2048, 24, 0),
        ("ARWKV-7-1.5B", 1536, 64 * 1536, 28, 0),
        ("Qwen3-Next-80B", 3 * 8192, 128 * 4096, 36, 12),
        ("Qwen3.5-9B", 3 * 8192, 128 * 4096, 24, 8),
        ("MiniMax-Text-01", 0, 128 * 128 * 64, 70, 10),
        ("Jamba-1.6-Mini", 3 * 8192, 8192 * 16, 28, 4),
        ("Falcon-H1-1.5B", 3 * (3072 + 512), 3072 * 256, 24, 24),
        ("Nemotron-H-8B", 3 * (8192 + 2048), 8192 * 128, 24, 4),
        ("LFM2-1.2B", 2 * 2048, 0, 10, 6),
        ("Kimi-Linear-48B", 9 * 4096, 128 * 128 * 32, 20, 7),
    ],
)
def test_states_are_as_wide_and_as_many_as_the_engines(
    name: str, conv: int, mixer: int, states: int, caches: int, tmp_path: Path
) -> None:
    found = family(name, tmp_path)
    kept = [layer for layer in found.layers if layer.conv_state or layer.mixer_state]
    assert {(layer.conv_state, layer.mixer_state) for layer in kept} == {(conv, mixer)}
    assert (len(kept), sum(layer.holds_kv for layer in found.layers)) == (states, caches)
    assert not {"kv_bytes", "state_bytes"} & set(found.unknown)


def test_a_model_without_heads_in_its_first_layer_has_keys_of_no_width(tmp_path: Path) -> None:
    heads = {"attention__head_count": [0, 4], "attention__head_count_kv": [0, 2], "attention__key_length": 16}
    layers = (STATE, ATTENTION)
    assert shape(tmp_path, "jamba", layers, **heads).layers[1].key_length == 0
    assert shape(tmp_path, "plamo2", layers, **heads).layers[1].key_length == 16


# ------------------------------------------------------------------------ encoders


def test_an_encoder_keeps_nothing_and_has_no_head(tmp_path: Path) -> None:
    found = family("bge-base-en", tmp_path)
    assert not any(layer.holds_kv for layer in found.layers)
    assert found.tied_table_bytes == 0
    assert found.embeds


def test_an_embedding_model_made_of_a_decoder_keeps_its_cache(tmp_path: Path) -> None:
    found = shape(tmp_path, "qwen3", pooling_type=3)
    assert found.embeds
    assert all(layer.holds_kv for layer in found.layers)


# -------------------------------------------------------------------------- tables


def test_a_tied_table_is_one_that_no_head_replaces(tmp_path: Path) -> None:
    outside = ("token_embd.weight", "output_norm.weight")
    found = shape(tmp_path, "llama", outside=outside)
    assert found.tied_table_bytes == 640  # 544, and what aligns it on a device
    assert shape(tmp_path, "llama").tied_table_bytes == 0
    assert shape(tmp_path, "bitnet", outside=outside).tied_table_bytes == 0
    assert shape(tmp_path, "gemma4", outside=outside).tied_table_is_read_twice
    assert not found.tied_table_is_read_twice


def test_what_stands_outside_the_layers_goes_to_its_side(tmp_path: Path) -> None:
    outside = (
        "token_embd.weight",
        "output_norm.weight",
        "output.weight",
        "token_embd_norm.weight",
        "rope_freqs.weight",
    )
    found, plain = shape(tmp_path, "llama", outside=outside), shape(tmp_path, "llama")
    assert found.layers[0].weights_bytes == plain.layers[0].weights_bytes + 544
    assert (found.input_weights_bytes, found.output_weights_bytes, found.rotary_bytes) == (544, 1088, 544)
    lfm2 = shape(tmp_path, "lfm2", outside=("token_embd.weight", "token_embd_norm.weight"))
    assert (lfm2.input_weights_bytes, lfm2.output_weights_bytes) == (544, 544)


def test_experts_are_told_by_their_tensors(tmp_path: Path) -> None:
    layers = ((*ATTENTION, "ffn_up"), (*ATTENTION, "ffn_up_exps", "ffn_gate_up_exps", "ffn_gate_inp", "ffn_up_shexp"))
    found = shape(tmp_path, "llama", layers, expert_count=8, expert_used_count=2)
    assert [layer.expert_bytes for layer in found.layers] == [0, 2 * 64 * 68]
    assert (found.experts, found.experts_used) == (8, 2)


def test_only_matrices_can_be_repacked_and_a_table_only_where_it_is_the_head(tmp_path: Path) -> None:
    whole = 4 * 5 * 64 * 68
    assert shape(tmp_path, "llama").repackable_bytes == {"q8_0": whole + 2 * 544}
    tied = shape(tmp_path, "llama", outside=("token_embd.weight",))
    assert tied.repackable_bytes == {"q8_0": whole + 544}
    assert tied.tied_table_type == "q8_0"


# ------------------------------------------------------------------------- unknown


def not_known(found: ModelShape) -> str:
    """The reason, which must be the same for cache and state."""
    assert found.unknown["kv_bytes"] == found.unknown["state_bytes"]
    return found.unknown["kv_bytes"]


@pytest.mark.parametrize("key", list(rules.UNUSUAL_KEYS))
def test_a_file_with_caches_of_their_own_kind_is_known_by_its_keys(key: str, tmp_path: Path) -> None:
    assert not_known(shape(tmp_path, "llama", **{key: 1})) == rules.UNUSUAL_KEYS[key]


def test_an_architecture_that_was_not_read_is_not_guessed(tmp_path: Path) -> None:
    assert "'novel' keeps for its sequences" in not_known(shape(tmp_path, "novel"))


def test_a_key_of_attention_that_the_engine_has_not_is_not_passed_over(tmp_path: Path) -> None:
    assert "llama.attention.spiral" in not_known(shape(tmp_path, "llama", attention__spiral=3))


@pytest.mark.parametrize(
    ("architecture", "layers", "keys", "words"),
    [
        ("deepseek2", (ATTENTION,), {"attention__key_length_mla": 192}, "whether attention is compressed"),
        ("deepseek2", ((*ATTENTION, "attn_k_b"),), {}, "whether attention is compressed"),
        ("qwen3next", (STATE, ATTENTION), {"attention__recurrent_layers": [False, True]}, "which layers are recurrent"),
        ("qwen3next", (ATTENTION, STATE), {}, "which layers are recurrent"),
        ("glm4moe", (ATTENTION,), {"nextn_predict_layers": 1}, "nothing but layers that predict ahead"),
        ("llama", (ATTENTION,), {"attention__indexer__key_length": 128}, "indexer beside"),
        (
            "glm-dsa",
            ((*ATTENTION, "attn_k_b", "indexer.attn_k"),) * 2,
            {"attention__key_length_mla": 192, "attention__indexer__types": [True, False]},
            "which layers have an indexer",
        ),
    ],
)
def test_what_cannot_be_so_or_is_only_a_part_makes_nothing_known(
    architecture: str, layers: Sequence[Sequence[str]], keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in not_known(shape(tmp_path, architecture, layers, **keys))


def test_every_rule_is_of_an_architecture_that_was_read() -> None:
    named = {*rules.WINDOWS, *rules.LAYERS_WITH_CACHE, *rules.READS_SHARED_LAYERS, *rules.IGNORES_GROUPS}
    named |= {*rules.LINEAR_ATTENTION_PERIOD, *rules.READS_KEY_LENGTH_AGAIN, *rules.HAS_NO_HEAD}
    named |= {*rules.LOADED_OF_LAYERS_AHEAD, *rules.READS_TIED_TABLE_TWICE, *rules.ATTENDS_WITHOUT_FEED_FORWARD}
    assert named <= rules.ARCHITECTURES
