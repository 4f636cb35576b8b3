"""Weights, cache and state of unusual families against the engine's own dry run, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from relevo.core.memory.demand import model_demand
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of
from tests.golden.families_state import FAMILIES, Draft, Family, attention, gated
from tests.golden.keeping import measured, options, predicted
from tests.golden.oracle import Placement, Setting, weigh

SETTINGS = (
    Setting(context_tokens=4096, kv_type="bf16"),
    Setting(context_tokens=30000, sequences=3, unified=False, ubatch_tokens=192, kv_type="q8_0"),
    Setting(context_tokens=32768, sequences=2, ubatch_tokens=256, flash_attention=False),
    Setting(context_tokens=700, sequences=4, ubatch_tokens=2048, kv_type="q5_1"),
    Setting(context_tokens=131072, ubatch_tokens=64, kv_type="q4_0"),
)
LARGE_STATE_BYTES = 120 * 2**20
"""The dry run allocates states really; models with more of it for a sequence are asked for one sequence only."""

WITH_CARD = ("DeepSeek-V3.2", "Gemma-4-E4B", "MiMo-V2-Flash", "Granite-4.0-H-Tiny")
"""Tied tables, tables of positions, shared caches, experts, layers that predict ahead: what lies on which side."""


def compare(family: Family, folder: Path, libraries: Path, placement: Placement, *settings: Setting) -> None:
    """One process of the engine for all settings of one load."""
    file = family.write(folder)
    shape = shape_of(read_header(file))
    assert not {"weights_bytes", "kv_bytes", "state_bytes"} & set(shape.unknown)
    if 4 * sum(layer.conv_state + layer.mixer_state for layer in shape.layers) > LARGE_STATE_BYTES:
        settings = tuple(setting for setting in settings if setting.sequences == 1)
    for setting, weighed in zip(settings, weigh(libraries, file, placement, settings), strict=True):
        assert predicted(shape, setting, placement) == measured(weighed), setting


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_a_family_keeps_follows_from_its_header_to_the_byte(
    family: Family, libraries: Path, tmp_path: Path
) -> None:
    compare(family, tmp_path, libraries, Placement(accelerator=""), *SETTINGS)


@pytest.mark.parametrize("placement", [Placement(host_experts=3), Placement(gpu_layers=9)])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in WITH_CARD], ids=lambda f: f.name)
def test_what_lies_on_the_card_and_what_on_the_host_is_known_to_the_byte(
    family: Family, placement: Placement, libraries: Path, tmp_path: Path
) -> None:
    compare(family, tmp_path, libraries, placement, SETTINGS[1])


@pytest.mark.parametrize("flash_attention", [True, False])
def test_a_cache_that_is_not_computed_is_one_the_engine_does_not_make(
    flash_attention: bool, libraries: Path, tmp_path: Path
) -> None:
    """Heads of 80, as Phi-2 has them: a row of all heads is whole blocks of q8_0, a head is not."""
    draft = Draft("llama", 1, 320, 512, feed_forward_length=640, attention__head_count=4, rope__dimension_count=80)
    draft.layer(0, attention(320, 320, 320), gated(320, 640))
    file = draft.family("Wide-Heads").write(tmp_path)
    shape, cpu = shape_of(read_header(file)), Placement(accelerator="")
    asked = [Setting(kv_type=kind, flash_attention=flash_attention) for kind in ("f16", "q8_0")]
    plain, quantized = weigh(libraries, file, cpu, asked)
    assert predicted(shape, asked[0], cpu) == measured(plain)
    _, host = model_demand(shape, options(asked[1], cpu))
    assert host.kv_bytes is None
    assert "one block" in host.reasons["kv_bytes"] or not flash_attention
    assert quantized.error is not None
