"""A demand that takes the engine's word for what the closed form cannot give, or gives only nearly."""

from __future__ import annotations

import msgspec
import pytest

from relevo.core.memory.demand import MIB, Demand
from relevo.core.memory.dry_run import DryCache, DryRunAnswer, DryRunFigures, DryRunRefused, with_dry_run
from relevo.core.memory.tier import Tier

WHY = "It has no closed form."


def figures(**changes: object) -> DryRunFigures:
    settings = {
        "engine": "e",
        "device": "CUDA0",
        "compute_bytes": 100 * MIB,
        "host_compute_bytes": 10 * MIB,
        "output_bytes": 2 * MIB,
        "caches": (DryCache(cells=256, device_bytes=30 * MIB, host_bytes=0, layers={0: "CUDA0"}),),
        "state_bytes": 5 * MIB,
        "host_state_bytes": 0,
        "expert_layers": (),
        "repacks": False,
        "took_ms": 3.0,
    }
    return msgspec.convert(settings | changes, DryRunFigures)


def test_unknown_parts_become_known_and_their_reasons_go():
    device = Demand(
        weights_bytes=7,
        compute_bytes=None,
        kv_bytes=None,
        state_bytes=None,
        context_bytes=None,
        reasons=dict.fromkeys(("compute_bytes", "kv_bytes", "state_bytes", "context_bytes"), WHY),
    )
    host = Demand(weights_bytes=3, compute_bytes=None, output_bytes=9, reasons={"compute_bytes": WHY})
    weighed = with_dry_run(device, host, figures())
    assert weighed.tier is Tier.DRY_RUN
    assert weighed.device.compute_bytes == 100 * MIB
    assert weighed.device.kv_bytes == 30 * MIB
    assert weighed.device.state_bytes == 5 * MIB
    assert weighed.host.compute_bytes == 10 * MIB
    assert weighed.host.output_bytes == 2 * MIB
    assert weighed.device.reasons == {"context_bytes": WHY}  # of that a dry run knows nothing
    assert weighed.device.total_bytes is None
    assert weighed.host.reasons == {}
    assert (weighed.device.weights_bytes, weighed.host.weights_bytes) == (7, 3)


def test_on_a_cpu_route_the_device_stays_empty():
    told = figures(
        device="cpu",
        compute_bytes=0,
        state_bytes=0,
        host_state_bytes=4 * MIB,
        caches=(DryCache(cells=256, device_bytes=0, host_bytes=30 * MIB, layers={0: "CPU"}),),
    )
    weighed = with_dry_run(Demand(), Demand(kv_bytes=None, reasons={"kv_bytes": WHY}), told)
    assert weighed.device == Demand()
    assert weighed.host.kv_bytes == 30 * MIB
    assert weighed.host.state_bytes == 4 * MIB


@pytest.mark.parametrize(("off_bytes", "stays"), [(0, True), (5000, True), (-5000, True), (20_000, False)])
def test_a_closed_form_that_agrees_to_the_printed_digit_stays_exact(off_bytes, stays):
    exact = 100 * MIB + off_bytes
    weighed = with_dry_run(Demand(compute_bytes=exact), Demand(), figures())
    assert weighed.device.compute_bytes == (exact if stays else 100 * MIB)


def test_a_closed_form_that_the_engine_contradicts_gives_way_even_where_it_said_less():
    weighed = with_dry_run(Demand(kv_bytes=60 * MIB, compute_bytes=1), Demand(kv_bytes=5 * MIB), figures())
    assert weighed.device.kv_bytes == 30 * MIB
    assert weighed.host.kv_bytes == 0
    assert weighed.device.compute_bytes == 100 * MIB


def test_several_caches_add_up():
    caches = tuple(DryCache(cells=c, device_bytes=c, host_bytes=2 * c, layers={}) for c in (100, 10))
    assert figures(caches=caches).kv_bytes == 110
    assert figures(caches=caches).host_kv_bytes == 220


@pytest.mark.parametrize("answer", [figures(), DryRunRefused("timeout", "It took too long.")])
def test_an_answer_survives_its_way_as_json(answer):
    assert msgspec.json.decode(msgspec.json.encode(answer), type=DryRunAnswer) == answer
