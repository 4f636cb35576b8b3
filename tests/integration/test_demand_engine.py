"""Predicted memory against what the real engine prints when it allocates it."""

from __future__ import annotations

from pathlib import Path

import pytest

from relevo.core.events import Ready, StartModel
from relevo.core.memory.demand import DEVICE_START, MIB, load_options, model_demand
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of

from .llama_process import LlamaProcess

PRINTED_TO = 0.011 * MIB  # the engine prints hundredths of a MiB


@pytest.mark.parametrize(
    "options",
    [
        {"context_tokens": 2048, "slots": 8, "batch_tokens": 512, "ubatch_tokens": 512},
        {"context_tokens": 512, "slots": 4, "batch_tokens": 256, "ubatch_tokens": 128, "profile": "strict"},
    ],
)
def test_a_load_takes_what_was_predicted(libraries: Path, demo_model: Path, options: dict[str, int | str]) -> None:
    with LlamaProcess(libraries, demo_model) as worker:
        # Rewritten weights would be printed as a second buffer, and a repack is not what is weighed here.
        ready = worker.start(repack=False, **options)
        assert isinstance(ready, Ready)
    start = StartModel("demo", "cpu", str(demo_model), str(libraries), **options)  # type: ignore[arg-type]
    weighed = load_options(start, on_device=False, learned=DEVICE_START["cpu"])
    _, demand = model_demand(shape_of(read_header(demo_model)), weighed)
    assert demand.weights_bytes == pytest.approx(ready.model_bytes, abs=PRINTED_TO)
    assert demand.kv_bytes == pytest.approx(ready.kv_bytes, abs=PRINTED_TO)
    assert demand.output_bytes == pytest.approx(ready.output_bytes, abs=PRINTED_TO)
    assert demand.compute_bytes == pytest.approx(ready.compute_bytes, abs=PRINTED_TO)
