"""Weights, cache and state of unusual families against the engine's own dry run, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from relevo.models.gguf import read_header
from relevo.models.shape import shape_of
from tests.golden.families_state import FAMILIES, Family
from tests.golden.keeping import measured, predicted
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
