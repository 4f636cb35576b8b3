"""Every architecture of which anything is claimed: a small model of it is grown, and weighed by both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relevo.models.engine_rules import ARCHITECTURES, WINDOWS
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of
from tests.golden.families_state import FAMILIES
from tests.golden.growth import EXPERTS, LAYERS, Grown, grow
from tests.golden.keeping import measured, predicted
from tests.golden.oracle import Placement, Setting, weigh
from tests.integration import conftest

pytestmark = pytest.mark.proof
libraries = conftest.libraries

SETTINGS = (
    Setting(context_tokens=2048, ubatch_tokens=128),
    Setting(context_tokens=3000, sequences=2, unified=False, ubatch_tokens=64, kv_type="q8_0"),
    Setting(context_tokens=2048, sequences=2, ubatch_tokens=64, flash_attention=False),
)
"""Grok is never given flash attention, and so no quantized cache."""
WINDOW = {"attention.sliding_window": 300}
FLAGS = {"attention.sliding_window_pattern": [at % 4 != 1 for at in range(LAYERS)]}
LATENT = {
    "attention.head_count_kv": 1,
    "attention.key_length": 192,
    "attention.value_length": 128,
    "attention.key_length_mla": 96,
    "attention.value_length_mla": 64,
}
MIXED = {"attention.head_count_kv": [2 if at % 3 == 1 else 0 for at in range(LAYERS)]}
AHEAD = {"nextn_predict_layers": 1}
MIXED_AHEAD = {"attention.head_count_kv": [*MIXED["attention.head_count_kv"][:-1], 2]}
LATENT_MIXED = LATENT | {"attention.head_count_kv": [1 if at % 3 == 1 else 0 for at in range(LAYERS)]}
GATED = {"expert_gating_func": 2}
ALL_HEADS = {"attention.head_count_kv": 8}

NEEDS: dict[str, dict[str, Any]] = {
    "bailingmoe3": LATENT_MIXED,
    "chameleon": {"vocab_size": 16384},
    "deepseek2": LATENT,
    "deepseek2-ocr": ALL_HEADS,
    "deepseek32": LATENT,
    "dots1": ALL_HEADS | GATED,
    "jamba": MIXED,
    "lfm2": MIXED,
    "lfm2moe": MIXED,
    "minicpm3": ALL_HEADS | {"rope.dimension_count": 32},
    "minimax-m2": GATED,
    "mistral4": LATENT,
    "olmoe": ALL_HEADS,
    "plamo2": MIXED | {"ssm.group_count": 0},
    "rwkv6qwen2": {"token_shift_count": 1},
    "smallthinker": GATED,
}
"""What a file of these must state for the engine to make anything of it."""

HOLDS: dict[str, dict[str, tuple[int, ...]]] = {
    "jina-bert-v2": {"ffn_up.weight": (512, 1024)},
    "laguna": {"attn_gate.weight": (512, 8)},
}
"""Tensors that the engine does not ask for, but looks at."""

DRAWN = {
    "falcon-h1": "Falcon-H1-1.5B",
    "granitehybrid": "Granite-4.0-H-Tiny",
    "phi3": "Phi-3-mini",
    "glm-dsa": "GLM-5.2",
    "kimi-linear": "Kimi-Linear-48B",
    "nemotron_h": "Nemotron-H-8B",
    "nemotron_h_moe": "Nemotron-H-8B",
    "arwkv7": "ARWKV-7-1.5B",
    "qwen35": "Qwen3.5-9B",
    "qwen35moe": "Qwen3.5-9B",
    "qwen3next": "Qwen3-Next-80B",
    "rwkv6": "RWKV-6-1.6B",
    "rwkv7": "ARWKV-7-1.5B",
}
"""Architectures whose graphs take no widths but their own, and the drawn family that stands for them."""

ASKED = [(name, "as it is") for name in sorted(ARCHITECTURES - DRAWN.keys())]
ASKED += [(name, wish) for name in sorted(WINDOWS) for wish in ("without a window", "each layer flagged")]
ASKED += [(name, "a layer ahead") for name in ("glm4", "exaone4", "jamba", "lfm2", "lfm2moe", "plamo2")]
ASKED.remove(("afmoe", "without a window"))  # the engine itself falls over it


def grown(libraries: Path, architecture: str, wish: str) -> Grown:
    """With a window stated, used or not; with experts where there is no other way."""
    keys = NEEDS.get(architecture, {})
    if wish != "without a window":
        keys = WINDOW | keys
    if wish == "a layer ahead":
        keys = keys | AHEAD | (MIXED_AHEAD if "attention.head_count_kv" in keys else {})
    if wish == "each layer flagged":
        keys = keys | FLAGS
    found = grow(libraries, architecture, keys, HOLDS.get(architecture))
    return found if found.stuck is None else grow(libraries, architecture, keys | EXPERTS, HOLDS.get(architecture))


def test_an_architecture_that_cannot_be_grown_was_drawn() -> None:
    assert {*DRAWN.values()} <= {family.name for family in FAMILIES}


@pytest.mark.parametrize(("architecture", "wish"), ASKED)
def test_what_is_claimed_of_an_architecture_is_what_the_engine_does(
    architecture: str, wish: str, libraries: Path, tmp_path: Path
) -> None:
    found = grown(libraries, architecture, wish)
    assert found.stuck is None, found.stuck
    file = found.family(architecture).write(tmp_path)
    shape = shape_of(read_header(file))
    assert not {"weights_bytes", "kv_bytes", "state_bytes"} & set(shape.unknown)
    settings = [setting for setting in SETTINGS if architecture != "grok" or setting.kv_type == "f16"]
    for placement in (Placement(accelerator=""), Placement(gpu_layers=5)):
        for setting, weighed in zip(settings, weigh(libraries, file, placement, settings), strict=True):
            assert predicted(shape, setting, placement) == measured(weighed), (placement, setting)
