"""What is kept for a load and where: our figures beside the engine's, part by part and side by side."""

from __future__ import annotations

from relevo.core.memory.demand import model_demand
from relevo.core.memory.load import LoadOptions
from relevo.core.memory.shape import ModelShape
from tests.golden.oracle import Placement, Setting, Weighed


def options(setting: Setting, placement: Placement) -> LoadOptions:
    """The same wish in our words. The dry run reads files, it maps none."""
    return LoadOptions(
        on_device=bool(placement.accelerator),
        gpu_layers=placement.gpu_layers,
        host_expert_layers=placement.host_experts,
        context_tokens=setting.context_tokens if setting.unified else setting.context_tokens // setting.sequences,
        sequences=setting.sequences,
        shared_cells=setting.unified,
        batch_tokens=setting.batch_tokens,
        ubatch_tokens=setting.ubatch_tokens,
        kv_type=setting.kv_type,
        flash_attention=setting.flash_attention,
        use_mmap=False,
    )


def predicted(shape: ModelShape, setting: Setting, placement: Placement) -> dict[str, tuple[int, int]]:
    """Our figures: weights, and cache and state together, as (device, host)."""
    device, host = model_demand(shape, options(setting, placement))
    return {
        "model": (device.weights_bytes or 0, host.weights_bytes or 0),
        "context": (
            (device.kv_bytes or 0) + (device.state_bytes or 0),
            (host.kv_bytes or 0) + (host.state_bytes or 0),
        ),
    }


def measured(weighed: Weighed) -> dict[str, tuple[int, int]]:
    """The engine's."""
    assert weighed.error is None, weighed.error
    return {part: (weighed.device(part), weighed.host(part)) for part in ("model", "context")}
