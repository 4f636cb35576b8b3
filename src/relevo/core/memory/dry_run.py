"""What the engine says it would allocate, without allocating it; and a demand that takes its word.

The engine builds model and context as for a real load, but with buffers of no size, and prints what it planned to a
hundredth of a MiB. Of weights it prints nothing: they are exact from the file's tensor table already.
"""

from __future__ import annotations

import msgspec

from relevo.core.memory.demand import Demand
from relevo.core.memory.tier import Tier

STAND_IN = "Accelerator0"
STAND_IN_CUDA = "AcceleratorCUDA0"
"""Devices that exist in dry runs alone: the engine plans for them as for a card that is not here. The second takes an
f16 copy of a quantized cache, as CUDA and HIP do."""
STAND_INS = frozenset({STAND_IN, STAND_IN_CUDA})

ROUNDS = 8
"""So often a ladder may come by loads that the engine has not planned yet, before what is known has to do."""
ASKED_AT_ONCE = 24
"""Loads of one round."""

PRINTED_TO_BYTES = 5243
"""Half a hundredth of a MiB: how far a printed figure can be from the true one."""


class DryCache(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache of the engine; a model with a sliding window has two."""

    cells: int
    """Of each stream."""
    device_bytes: int
    host_bytes: int
    layers: dict[int, str]
    """Every layer that keeps keys and values here, and the device they are on ("CPU": host RAM)."""


class DryRunFigures(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a load would allocate beside its weights. For a CPU route everything is the host's."""

    engine: str
    device: str
    compute_bytes: int
    host_compute_bytes: int
    output_bytes: int
    caches: tuple[DryCache, ...]
    state_bytes: int
    """State of recurrent layers on the device."""
    host_state_bytes: int
    expert_layers: tuple[int, ...]
    """Layers whose experts stay in host RAM although the layer is on the device."""
    repacks: bool
    """Whether some weights would be repacked for the CPU, which takes memory of its own."""
    took_ms: float

    @property
    def kv_bytes(self) -> int:
        """Keys and values on the device."""
        return sum(cache.device_bytes for cache in self.caches)

    @property
    def host_kv_bytes(self) -> int:
        """Keys and values in host RAM."""
        return sum(cache.host_bytes for cache in self.caches)


class DryRunRefused(msgspec.Struct, frozen=True, tag=True):
    """There are no figures.

    `code`: one of StartFailed's (library, layout, model_file, allocation, device, internal), or timeout, died (the
    process ended, by whatever signal) or protocol (what it printed is not an answer).
    """

    code: str
    message: str


DryRunAnswer = DryRunFigures | DryRunRefused


class Weighed(msgspec.Struct, frozen=True):
    """The demand of a load on device and host, and where its least certain figures come from."""

    device: Demand
    host: Demand
    tier: Tier


_PLANNED = ("kv_bytes", "state_bytes", "compute_bytes", "output_bytes")


def wants_dry_run(device: Demand, host: Demand) -> bool:
    """Whether a part is unknown that a dry run would tell."""
    return any(getattr(demand, part) is None for demand in (device, host) for part in _PLANNED)


def with_dry_run(device: Demand, host: Demand, figures: DryRunFigures) -> Weighed:
    """Take KV, state, compute and output from a dry run of the same load; their reasons for being unknown go.

    A closed form that agrees to the printed digit stays: it is exact where the engine prints hundredths.
    """
    return Weighed(
        device=_taken(
            device,
            caches=len(figures.caches),
            kv_bytes=figures.kv_bytes,
            state_bytes=figures.state_bytes,
            compute_bytes=figures.compute_bytes,
        ),
        host=_taken(
            host,
            caches=len(figures.caches),
            kv_bytes=figures.host_kv_bytes,
            state_bytes=figures.host_state_bytes,
            compute_bytes=figures.host_compute_bytes,
            output_bytes=figures.output_bytes,
        ),
        tier=Tier.DRY_RUN,
    )


def _taken(demand: Demand, *, caches: int, **planned: int) -> Demand:
    changes: dict[str, int] = {}
    for part, planned_bytes in planned.items():
        known = getattr(demand, part)
        figures = 2 * caches if part == "kv_bytes" else 1  # a cache's keys and values are printed apart
        if known is None or abs(known - planned_bytes) > figures * PRINTED_TO_BYTES:
            changes[part] = planned_bytes
    reasons = {part: why for part, why in demand.reasons.items() if part not in planned}
    return msgspec.structs.replace(demand, **changes, reasons=reasons)
