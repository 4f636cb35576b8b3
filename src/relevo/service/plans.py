"""From a model's configuration to how its workers are started, and to what they will take. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from relevo.config import ModelConfig, flash_attention_of
from relevo.core.demand import DEVICE_START, Demand, load_options, model_demand
from relevo.core.events import StartModel
from relevo.core.shape import ModelShape

PROCESS_BYTES = 512 * 2**20
"""Bound on a worker's private memory besides the model: interpreter, libraries, arenas, thread stacks, as reserved."""
RESERVED_BYTES = 128 * 2**20
"""What a worker reserves beyond what is resident; an emulated accelerator counts it. Seen: 30 MiB beyond the plan."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a worker takes: bytes to lease on its device, and its hard bound on private memory."""

    lease_bytes: int
    data_limit_bytes: int | None


def cpu_plan(name: str, config: ModelConfig, path: Path, libraries: Path, *, on_card: bool, threads: int) -> StartModel:
    """How the CPU route's worker is started. `on_card`: the model's other route computes on a real card."""
    return StartModel(
        model=name,
        route="cpu",
        path=str(path),
        libraries=str(libraries),
        context_tokens=config.cpu_context_tokens or config.context_tokens,
        slots=config.cpu_slots or config.slots,
        batch_tokens=config.batch_tokens,
        ubatch_tokens=config.ubatch_tokens,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        kv_type="q8_0" if config.profile == "strict" else config.kv_type,
        flash_attention=flash_attention_of(config, on_card=on_card),
        profile=config.profile,
        threads=config.threads or threads,
        repack=config.profile == "fast",
    )


def gpu_plan(cpu: StartModel, config: ModelConfig, shape: ModelShape, engine_device: str) -> StartModel:
    """How the worker on a real card is started. Twins share the KV type and flash attention, not the profile."""
    layers = shape.layer_count + 1  # the output head counts as one
    return msgspec.structs.replace(
        cpu,
        route="gpu" if config.gpu_layers >= layers else "hybrid",
        device=engine_device,
        gpu_layers=min(config.gpu_layers, layers),
        context_tokens=config.context_tokens,
        slots=config.slots,
        profile="fast",
    )


def emulated_plan(cpu: StartModel, config: ModelConfig, variant: str | None) -> StartModel:
    """How the worker on an emulated accelerator is started: unmapped, so that all its memory can be bounded."""
    return msgspec.structs.replace(
        cpu,
        route="gpu",
        context_tokens=config.context_tokens,
        slots=config.slots,
        cpu_variant=variant,
        use_mmap=False,
    )


def demand_on_host(shape: ModelShape, plan: StartModel) -> Demand:
    """What a CPU worker will take of RAM, by part."""
    return model_demand(shape, load_options(plan, on_device=False, learned=DEVICE_START["cpu"]))[1]


def demand_on_card(shape: ModelShape, plan: StartModel, kind: str) -> tuple[Demand, Demand]:
    """What a worker on a card will take: (of the card, of RAM), by part."""
    learned = DEVICE_START.get(kind, DEVICE_START["vulkan"])
    return model_demand(shape, load_options(plan, on_device=True, learned=learned))


def footprint_on_host(shape: ModelShape, plan: StartModel) -> Footprint:
    """Mapped weights count in the lease, but not against the worker's private memory."""
    host = demand_on_host(shape, plan)
    weights = host.weights_bytes or 0
    private = host.known_bytes - weights + PROCESS_BYTES + (weights if plan.repack or not plan.use_mmap else 0)
    unknown = _unknown_bytes(host)
    return Footprint(host.known_bytes + unknown, private + private // 4 + unknown)


def footprint_emulated(shape: ModelShape, plan: StartModel) -> Footprint:
    """All of the worker's private memory, as the kernel counts it; the device itself keeps the bound."""
    return Footprint(footprint_on_host(shape, plan).lease_bytes + RESERVED_BYTES, None)


def footprint_on_card(shape: ModelShape, plan: StartModel, kind: str) -> Footprint:
    """What the card must have free."""
    device, _ = demand_on_card(shape, plan, kind)
    return Footprint(device.known_bytes + _unknown_bytes(device), None)


def _unknown_bytes(demand: Demand) -> int:
    """Parts without a closed form (a mixture of experts' compute buffer, say) are charged a quarter of the weights."""
    return (demand.weights_bytes or 0) // 4 if demand.total_bytes is None else 0
