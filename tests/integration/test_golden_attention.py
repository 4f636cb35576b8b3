"""Predicted memory of attention models at their real dimensions equals what the engine plans, to the byte."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden.comparison import CPU, GRID, WHOLE, Case, compare, has_experts
from tests.golden.families_attention import BLUEPRINTS, FAMILIES, MORE_FAMILIES, Family, family
from tests.golden.header_file import write_header
from tests.golden.oracle import Placement, Setting, weigh

PARTS = ("weights", "kv", "compute")
FEW = (GRID[0], GRID[3], GRID[5], GRID[8])
"""Flash attention on and off, a quantized cache, slots with a stream each."""


def wrong(cases: list[Case]) -> list[str]:
    """Figures that are not the engine's, as sentences."""
    return [
        f"{case.name}: {part} on the {place} is {predicted}, and the engine plans {planned}"
        for case in cases
        if not refused(case)
        for part in PARTS
        for place, planned, predicted, error in case.errors(part)
        if predicted is None or error
    ]


def refused(case: Case) -> bool:
    """Whether the engine made no context: then the closed form must have said that it would abort."""
    if case.planned.error is None:
        return False
    assert "would abort" in case.host.reasons.get("compute_bytes", ""), f"{case.name}: {case.planned.error}"
    return True


@pytest.mark.parametrize("model", FAMILIES, ids=lambda one: one.name)
def test_a_load_takes_on_cpu_and_device_what_the_engine_plans(libraries: Path, model: Family) -> None:
    cases = compare(libraries, model, (CPU, WHOLE))
    assert len(cases) >= 16
    assert wrong(cases) == []


@pytest.mark.parametrize("model", FAMILIES, ids=lambda one: one.name)
def test_a_load_with_layers_on_both_sides_takes_what_the_engine_plans(libraries: Path, model: Family) -> None:
    """The device is shipped copies of the host's weights, and of its caches. Experts may stay on the host alone."""
    at_home = (Placement(host_experts=3), Placement(host_experts=999)) if has_experts(model) else ()
    assert wrong(compare(libraries, model, (Placement(gpu_layers=8), *at_home), FEW)) == []


@pytest.mark.parametrize("model", MORE_FAMILIES, ids=lambda one: one.name)
def test_a_graph_of_another_form_is_laid_out_as_the_engine_does(libraries: Path, model: Family) -> None:
    assert wrong(compare(libraries, model, (CPU, WHOLE, Placement(gpu_layers=8)), FEW)) == []


def drawn(seed: int) -> tuple[Family, list[dict[str, object]], int]:
    """A model of dimensions that nobody chose, some settings, and layers to put on the device."""
    draw = random.Random(seed)
    head, kv_heads = 64 * draw.randint(1, 4), draw.randint(1, 8)
    layers = draw.randint(1, 20)
    blueprint = replace(
        draw.choice([one for one in BLUEPRINTS if not one.with_ and not one.outside]),
        name=f"drawn-{seed}",
        head=head,
        kv_heads=kv_heads,
        heads=kv_heads * draw.randint(1, 6),
        layers=layers,
        feed_forward=32 * draw.randint(8, 700),
        vocabulary=draw.randint(1000, 260000),
        weights=draw.choice(["q8_0", "q4_0", "f16"]),
    )
    blueprint = replace(blueprint, embedding=blueprint.heads * head)
    grid: list[dict[str, object]] = []
    for flash in (True, True, False):
        sequences = draw.randint(1, 6)
        grid.append(
            {
                "flash_attention": flash,
                "kv_type": draw.choice(["f16", "q8_0", "q4_0"]) if flash else "f16",
                "context_tokens": draw.randint(256, 4000),
                "ubatch_tokens": draw.randint(1, 700),
                "sequences": sequences,
                "outputs": sequences + draw.randint(0, 600),
                "shared_cells": draw.random() < 0.5,
            }
        )
    return blueprint.family(), grid, draw.randint(0, layers + 1)


@pytest.mark.parametrize("seed", range(8))
def test_dimensions_that_nobody_chose_are_laid_out_as_the_engine_does(libraries: Path, seed: int) -> None:
    model, grid, gpu_layers = drawn(seed)
    assert wrong(compare(libraries, model, (CPU, WHOLE, Placement(gpu_layers=gpu_layers)), grid)) == []


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Gemma-3-12B", "Qwen3-30B-A3B"])
def test_no_layer_or_the_head_alone_on_the_device(libraries: Path, name: str) -> None:
    assert wrong(compare(libraries, family(name), (Placement(gpu_layers=0), Placement(gpu_layers=1)), FEW)) == []


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Gemma-3-12B", "Qwen3-0.6B", "Mixtral-8x7B"])
def test_a_card_that_copies_a_quantized_cache_to_f16_takes_what_the_engine_plans(libraries: Path, name: str) -> None:
    """As CUDA's flash attention does, whole and with layers on the host."""
    cards = (Placement(accelerator="cuda"), Placement(accelerator="cuda", gpu_layers=8))
    cases = compare(libraries, family(name), cards, (GRID[0], GRID[3], GRID[4], GRID[10]))
    assert wrong(cases) == []
    plain = compare(libraries, family(name), (WHOLE,), (GRID[4],))[0]
    assert cases[2].device.compute_bytes > plain.device.compute_bytes  # type: ignore[operator]


def test_an_engine_that_dies_says_so_and_the_next_setting_is_tried(libraries: Path, tmp_path: Path) -> None:
    file = family("Phi-4").write(tmp_path)
    fatal = Setting(context_tokens=3000, sequences=3, unified=False, ubatch_tokens=128, kv_type="q8_0")
    before, died, after = weigh(libraries, file, CPU, [Setting(), fatal, Setting()])
    assert before == after
    assert before.host("compute") > 0
    assert "The engine ended with" in (died.error or "")


def test_a_file_that_the_engine_refuses_is_said_to_be_refused(libraries: Path, tmp_path: Path) -> None:
    file = write_header(tmp_path / "m.gguf", {"general.architecture": "unheard-of"}, [])
    [answer] = weigh(libraries, file, CPU, [Setting()])
    assert "cannot load this file" in (answer.error or "")
