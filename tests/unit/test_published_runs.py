"""Loads that others published, recomputed: figures of real engines' logs, to the last digit they print."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from relevo.core.memory.demand import model_demand
from relevo.core.memory.load import LoadOptions
from relevo.core.memory.shape import LayerShape, ModelShape
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of
from tests.golden.families_attention import COMMAND_R_35B, LLAMA_31_8B, Blueprint

MIB = 2**20


def shape_from(blueprint: Blueprint, folder: Path) -> ModelShape:
    return shape_of(read_header(blueprint.family().write(folder)))


def mib(value: int | None) -> float:
    assert value is not None
    return round(value / MIB, 2)


def load(context_tokens: int, **changes: object) -> LoadOptions:
    usual = {"ubatch_tokens": 512, "batch_tokens": 2048, "outputs": 1}
    return LoadOptions(on_device=True, context_tokens=context_tokens, **(usual | changes))  # type: ignore[arg-type]


def test_llama_31_8b_at_8k_on_a_card(tmp_path: Path) -> None:
    """CUDA logs of the Q4_K_M file: 4403.49 and 281.81 of weights, 1024.00 of cache, 560.00 without flash attention.

    Those logs are of an earlier build; the present one plans 564.01 of compute.
    """
    device, host = model_demand(shape_from(LLAMA_31_8B, tmp_path), load(8192, flash_attention=False))
    assert (device.weights_bytes or 0) + (host.weights_bytes or 0) == 4_912_898_304
    assert (mib(device.weights_bytes), mib(host.weights_bytes)) == (4403.49, 281.81)
    assert mib(device.kv_bytes) == 1024.00
    assert mib(device.compute_bytes) == pytest.approx(560.00, rel=0.01)


@pytest.mark.parametrize(
    ("context", "kind", "compute"),
    [(8192, "f16", 116.01), (32768, "f16", 140.01), (8192, "q8_0", 108.09), (32768, "q8_0", 132.09)],
)
def test_llama_31_8b_with_flash_attention(context: int, kind: str, compute: float, tmp_path: Path) -> None:
    device, _ = model_demand(shape_from(LLAMA_31_8B, tmp_path), load(context, kv_type=kind))
    assert mib(device.compute_bytes) == compute


def test_command_r_at_4k_has_a_cache_of_five_gib(tmp_path: Path) -> None:
    """llama.cpp's pull request 6122: 5120 MiB."""
    device, _ = model_demand(shape_from(COMMAND_R_35B, tmp_path), load(4096))
    assert mib(device.kv_bytes) == 5120.00


def test_mistral_small_22b_at_48k_with_a_q8_cache(tmp_path: Path) -> None:
    """ollama's issue 6160: 5712.00 MiB."""
    mistral = Blueprint("Mistral-Small-22B", "llama", 56, 6144, 16384, 48, 8, 32768, head=128)
    device, _ = model_demand(shape_from(mistral, tmp_path), load(49152, kv_type="q8_0"))
    assert mib(device.kv_bytes) == 5712.00


def cache_of(layers: int, context_tokens: int, kv_type: str, layer: LayerShape, tmp_path: Path) -> float:
    shape = msgspec.structs.replace(shape_from(LLAMA_31_8B, tmp_path), layers=(layer,) * layers)
    return mib(model_demand(shape, load(context_tokens, kv_type=kv_type))[0].kv_bytes)


def test_deepseek_keeps_one_compressed_row_or_every_head(tmp_path: Path) -> None:
    """R1 at 32k, q8_0 (ik_llama.cpp's pull request 259): 1166.6. V2-Lite's old files (ollama's issue 5136): 8640."""
    compressed = LayerShape(heads=128, kv_heads=1, key_length=576, value_length=0)
    every_head = LayerShape(heads=16, kv_heads=16, key_length=192, value_length=128)
    assert cache_of(61, 32768, "q8_0", compressed, tmp_path) == 1166.62
    assert cache_of(27, 32768, "f16", every_head, tmp_path) == 8640.00
