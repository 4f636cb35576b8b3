"""From a model's configuration to how its workers are started, and to what they will take. Pure."""

from __future__ import annotations

from pathlib import Path

import msgspec

from relevo.config import ModelConfig, flash_attention_of
from relevo.core.events import StartModel
from relevo.core.loads.wish import LoadWish
from relevo.core.memory.demand import Demand
from relevo.core.memory.shape import ModelShape

RESERVED_BYTES = 128 * 2**20
"""What a worker's process reserves besides the model; an emulated accelerator counts it. (Seen: 30 MiB.)"""
LEAST_CONTEXT_TOKENS = 4096
"""A context is reduced to this and no further, unless the configuration says otherwise."""
PROCESS_BYTES = 512 * 2**20
"""Bound on a worker's private memory besides the model: interpreter, libraries, arenas, thread stacks, as reserved."""


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


def hybrid_plan(whole: StartModel, *, emulated: bool) -> StartModel:
    """How the same model is started with a part of it in RAM. How large a part is the ladder's business.

    An emulated accelerator has no layers of its own: there the weights stay in RAM as pages of the file, and cells,
    buffers and process are on the device.
    """
    if emulated:
        return msgspec.structs.replace(whole, route="hybrid", use_mmap=True, repack=False)
    return msgspec.structs.replace(whole, route="hybrid")


def load_wish(
    holder: str, start: StartModel, shape: ModelShape, config: ModelConfig, cpu_start: StartModel | None
) -> LoadWish:
    """What a model's configuration asks of the ladder, and what it may give up."""
    return LoadWish(
        holder=holder,
        start=start,
        layers=shape.layer_count,
        expert_layers=sum(layer.expert_bytes > 0 for layer in shape.layers),
        allow=frozenset(config.reduce),
        least_context_tokens=min(config.least_context_tokens or LEAST_CONTEXT_TOKENS, start.context_tokens),
        offload=config.offload,
        from_storage=config.from_storage,
        priority=config.priority,
        most_context_tokens=shape.context_trained_tokens,
        cpu_start=cpu_start,
        recovery_budget_s=config.recovery_budget_s,
    )


def data_limit_bytes(demand: Demand) -> int:
    """The hard bound on a CPU worker's private memory: what it was weighed at and a quarter more, and the process.

    Mapped pages of the file are not its own, and do not count.
    """
    private = demand.private_bytes + PROCESS_BYTES
    return private + private // 4
