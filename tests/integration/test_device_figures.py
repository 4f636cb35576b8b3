"""The closed form against what the engine planned on a real device's backend; the figures are a fixture.

`make golden-device` takes them anew where there is a device; this compares where there is none.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from relevo.core.memory.demand import DEVICE_START, Demand, load_options, model_demand
from relevo.core.memory.shape import ModelShape
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of
from tests.golden.device_figures import FAMILIES, FIGURES, DeviceCase, DeviceFigures, digest_of, start_of

ALIGNED_TO_BYTES = 4096  # the closed form leaves out how a backend aligns its tensors
FIXTURE = msgspec.json.decode(FIGURES.read_bytes(), type=DeviceFigures)
VULKAN = DEVICE_START["vulkan"]


def cases_of(family: str) -> list[DeviceCase]:
    return [case for case in FIXTURE.cases if case.family == family and case.error is None]


def predicted(shape: ModelShape, path: Path, case: DeviceCase) -> tuple[Demand, Demand]:
    start = start_of(path, Path("libraries"), FIXTURE.device, case.options)
    return model_demand(shape, load_options(start, on_device=True, learned=VULKAN))


@pytest.fixture
def drawn(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelShape, Path, list[DeviceCase]]:
    """The shape of a family, its file, and its cases."""
    family = FAMILIES[request.param]
    path = family.write(tmp_path)
    kept = FIXTURE.families[request.param]
    assert digest_of(path) == kept, f"{request.param} was drawn anew: run `make golden-device` where there is a device."
    return shape_of(read_header(path)), path, cases_of(request.param)


def test_the_fixture_has_every_family():
    assert set(FIXTURE.families) == set(FAMILIES)
    assert len(FIXTURE.families) >= 25
    assert len([case for case in FIXTURE.cases if case.error is None]) >= 200


@pytest.mark.parametrize("drawn", sorted(FIXTURE.families), indirect=True)
def test_weights_and_caches_are_what_the_engine_planned(drawn):
    shape, path, cases = drawn
    for case in cases:
        assert case.device is not None
        assert case.host is not None
        for demand, planned in zip(predicted(shape, path, case), (case.device, case.host), strict=True):
            if demand.kv_bytes is not None and demand.state_bytes is not None:
                assert demand.kv_bytes + demand.state_bytes == planned.cache_bytes, case.options
        device, host = predicted(shape, path, case)
        assert device.weights_bytes is not None
        assert host.weights_bytes is not None
        planned_bytes = case.device.weights_bytes + case.host.weights_bytes
        error_bytes = device.weights_bytes + host.weights_bytes - planned_bytes
        assert abs(error_bytes) <= ALIGNED_TO_BYTES * (4 if shape.recurrent else 1)
        if shape.recurrent:  # this backend leaves some small tensors of recurrent layers to the CPU
            assert 0 <= device.weights_bytes - case.device.weights_bytes <= 0.04 * device.weights_bytes
        else:
            assert device.weights_bytes == pytest.approx(case.device.weights_bytes, abs=ALIGNED_TO_BYTES)


@pytest.mark.parametrize("drawn", sorted(FIXTURE.families), indirect=True)
def test_compute_buffers_are_what_the_engine_planned_or_said_to_be_unknown(drawn):
    shape, path, cases = drawn
    for case in cases:
        assert case.device is not None
        assert case.host is not None
        for demand, planned in zip(predicted(shape, path, case), (case.device, case.host), strict=True):
            if demand.compute_bytes is None:
                assert demand.reasons["compute_bytes"]
            else:
                assert demand.compute_bytes == pytest.approx(planned.compute_bytes, abs=ALIGNED_TO_BYTES), case.options


@pytest.mark.parametrize("drawn", ["Llama-3.1-8B", "Qwen3-4B", "Gemma-3-12B", "Mixtral-8x7B"], indirect=True)
def test_nothing_of_a_plain_model_is_unknown(drawn):
    shape, path, cases = drawn
    assert len(cases) >= 5
    for case in cases:
        device, host = predicted(shape, path, case)
        assert device.total_bytes is not None
        assert host.total_bytes is not None


def test_what_a_backends_own_order_of_the_graph_adds_is_within_the_margin():
    moved = [
        case.reordered_compute_bytes - case.device.compute_bytes
        for case in FIXTURE.cases
        if case.device is not None and case.reordered_compute_bytes is not None
    ]
    assert max(moved) > 0  # the closed form is no bound there
    assert max(moved) < VULKAN.margin_bytes // 4
