"""How a model is to be loaded: the options that cost memory, and what a device is charged before it was learned."""

from __future__ import annotations

import msgspec

from relevo.core.cells import PROBE_CELLS
from relevo.core.events import StartModel
from relevo.core.memory.repack import X86_TYPES

MIB = 2**20


VOCABULARY_BYTES_A_TOKEN = 320
"""What a worker's own tables of a token take, in private memory. Measured: 16 MiB for 49,152, 46 MiB for 151,936."""


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is to be loaded; the fields of StartModel that cost memory, and what this machine has taught."""

    on_device: bool
    """Layers go to an accelerator. False: everything is the host's."""
    gpu_layers: int = 999
    """As llama.cpp counts: the output head is one, the last layers follow. Beyond all of them means all."""
    host_expert_layers: int = 0
    """So many of the first layers on the device leave their experts' tensors in host RAM."""
    context_tokens: int = 4096
    """Of the whole pool (fast) or of each slot (strict)."""
    sequences: int = 1
    """llama.cpp's n_seq_max: slots, and what else the worker keeps a sequence for."""
    shared_cells: bool = True
    """One pool for all sequences (the fast profile); else a stream for each (strict)."""
    batch_tokens: int = 512
    ubatch_tokens: int = 128
    outputs: int = 8
    """Rows of one step that give logits (n_outputs_max)."""
    kv_type: str = "f16"
    flash_attention: bool = True
    copies_cache: bool = False
    """Flash attention of this kind of device keeps an f16 copy of a layer's quantized cache in its compute buffer."""
    use_mmap: bool = True
    """Weights on the host are pages of the file; else the process' own copy."""
    repacked_types: frozenset[str] = frozenset()
    """Number types whose matrices the CPU keeps in another order, in memory of the process' own."""
    projector_bytes: int = 0
    context_bytes: int | None = 512 * MIB
    """Of the device's driver; `DEVICE_START` has values to begin with, until it is learned."""
    pool_bytes: int | None = None
    """None: the bound of `pool_bound`."""
    fragmentation_bytes: int = 0
    margin_bytes: int = 512 * MIB
    host_context_bytes: int = 48 * MIB
    """Python and the libraries of the worker process."""
    host_margin_bytes: int = 32 * MIB


class DeviceStart(msgspec.Struct, frozen=True):
    """What a kind of device is charged before this machine has taught better. `pool_bytes` None: `pool_bound`."""

    context_bytes: int
    pool_bytes: int | None
    margin_bytes: int


DEVICE_START: dict[str, DeviceStart] = {
    "nvidia": DeviceStart(512 * MIB, None, 512 * MIB),
    "amd": DeviceStart(400 * MIB, None, 512 * MIB),
    "vulkan": DeviceStart(350 * MIB, None, 512 * MIB),
    "emulated": DeviceStart(0, 0, 0),  # its memory is a number in a ledger; nothing else can want it
    "cpu": DeviceStart(0, 0, 32 * MIB),
}


COPIES_CACHE = frozenset({"nvidia", "amd"})
"""Kinds of device whose flash attention works on an f16 copy of a quantized cache (ggml-cuda/fattn-common.cuh)."""


def load_options(
    start: StartModel,
    *,
    on_device: bool,
    learned: DeviceStart,
    fragmentation_bytes: int = 0,
    repacked_types: frozenset[str] = X86_TYPES,
    copies_cache: bool = False,
) -> LoadOptions:
    """The options that a worker makes of StartModel.

    The fast profile keeps one sequence more than slots, and cells for it, for probes; the strict one sets KV type
    and flash attention itself, and never repacks. As many rows give logits as there are sequences. `repacked_types`: of
    this machine's CPU (`repack.repacked_types`). `copies_cache`: whether the device's kind is one of COPIES_CACHE.
    """
    strict = start.profile == "strict"
    sequences = start.slots if strict else start.slots + 1
    return LoadOptions(
        on_device=on_device,
        gpu_layers=start.gpu_layers,
        host_expert_layers=start.host_expert_layers,
        context_tokens=start.context_tokens if strict else start.context_tokens + PROBE_CELLS,
        sequences=sequences,
        shared_cells=not strict,
        batch_tokens=start.batch_tokens,
        ubatch_tokens=start.ubatch_tokens,
        outputs=sequences,
        kv_type="q8_0" if strict else start.kv_type,
        flash_attention=strict or start.flash_attention,
        use_mmap=start.use_mmap,
        copies_cache=copies_cache,
        repacked_types=repacked_types if start.repack and not strict else frozenset(),
        context_bytes=learned.context_bytes,
        pool_bytes=learned.pool_bytes,
        fragmentation_bytes=fragmentation_bytes,
        margin_bytes=learned.margin_bytes,
    )
