"""A worker's load as people see it: what was predicted, by what, what the engine reported, what was observed."""

from __future__ import annotations

from typing import Any

from relevo.core.events import Ready
from relevo.core.memory.demand import Demand
from relevo.service.berths import Berth


def load_view(berth: Berth) -> dict[str, Any] | None:
    """None before the ladder was asked. A figure that is not known is null."""
    verdict = berth.life.verdict if berth.life is not None else berth.verdict
    if verdict is None:
        return None
    ready = berth.route.replica.ready
    life = berth.life
    lease = life.lease_on(berth.held) if life is not None else None
    return {
        "posture": str(berth.posture),
        "step": str(verdict.step),
        "reason": verdict.reason,
        "tier": str(berth.scales.tier(verdict.start)),
        "changes": [change.sentence for change in verdict.changes],
        "context_tokens": verdict.start.context_tokens,
        "slots": verdict.start.slots,
        "predicted": demand_view(verdict.device_demand),
        "predicted_host": demand_view(verdict.host_demand),
        "reported": None if ready is None else reported_view(ready),
        "observed_bytes": None if lease is None or not lease.use_known else lease.observed_bytes,
        "peak_bytes": None if life is None or not life.peak_bytes else life.peak_bytes,
    }


def demand_view(demand: Demand) -> dict[str, Any]:
    """Every part that is there, their sum, and why a part is not known."""
    parts: dict[str, Any] = {name: value for name, value in demand.parts().items() if value != 0}
    return {**parts, "total_bytes": demand.total_bytes, "reasons": demand.reasons}


def reported_view(ready: Ready) -> dict[str, int | None]:
    """The engine's own buffer lines."""
    return {
        "weights_bytes": ready.model_bytes,
        "kv_bytes": ready.kv_bytes,
        "state_bytes": ready.state_bytes,
        "compute_bytes": ready.compute_bytes,
        "output_bytes": ready.output_bytes,
        "host_weights_bytes": ready.host_model_bytes,
        "host_kv_bytes": ready.host_kv_bytes,
        "host_compute_bytes": ready.host_compute_bytes,
    }
