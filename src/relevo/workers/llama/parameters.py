"""Parameters of a load, made in one place for the worker that loads and the dry run that only asks what it would take.

The engine keeps pointers to what the parameters point to, so the arrays must live as long as the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from relevo.core.cells import PROBE_CELLS
from relevo.core.events import StartModel
from relevo.models.gguf import read_header
from relevo.workers.llama.native import Native

KV_TYPES: Final = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
"""ggml's numbers of the types that a KV cache can have."""
UNQUANTIZED: Final = ("f32", "f16", "bf16")
_EXPERTS: Final = r"blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps"


@dataclass(frozen=True, slots=True)
class ModelParameters:
    """A llama_model_params, and everything it points to."""

    record: Any
    kept: tuple[Any, ...]


def model_parameters(native: Native, start: StartModel, device: Any | None, *, dry: bool = False) -> ModelParameters:
    """How the weights are loaded. `device` None: nothing goes to a GPU. `dry`: nothing is allocated or read.

    Raises ModelFileError where layers must be counted and the file's header cannot be read.
    """
    ffi = native.ffi
    record = native.call.llama_model_default_params()
    devices = ffi.new("ggml_backend_dev_t[]", [device, ffi.NULL] if device is not None else [ffi.NULL])
    record.devices = devices  # an empty list: no GPU even where its library is linked in
    record.n_gpu_layers = start.gpu_layers if device is not None else 0
    record.load_mode = 1 if start.use_mmap and not dry else 0  # the engine refuses to map in a dry run
    record.use_extra_bufts = start.repack and start.profile != "strict"
    record.no_alloc = dry
    kept = [devices]
    if device is not None and start.host_expert_layers > 0:
        pattern = ffi.new("char[]", expert_pattern(start).encode())
        overrides = ffi.new("struct llama_model_tensor_buft_override[2]")  # the second, empty, ends the list
        overrides[0].pattern = pattern
        overrides[0].buft = native.call.ggml_backend_cpu_buffer_type()
        record.tensor_buft_overrides = overrides
        kept += [pattern, overrides]
    return ModelParameters(record, tuple(kept))


def context_parameters(native: Native, start: StartModel) -> Any:
    """How the context is made: a llama_context_params, which points to nothing."""
    strict = start.profile == "strict"
    record = native.call.llama_context_default_params()
    record.n_ctx = start.context_tokens * start.slots if strict else start.context_tokens + PROBE_CELLS
    record.n_batch = start.batch_tokens
    record.n_ubatch = min(start.ubatch_tokens, start.batch_tokens)
    record.n_seq_max = sequences(start)
    record.n_outputs_max = sequences(start)  # fewer than n_seq_max aborts; more only costs memory
    record.n_outputs_max_per_seq = 1
    record.n_threads = record.n_threads_batch = start.threads
    record.flash_attn_type = 1 if start.flash_attention or strict else 0
    record.type_k = record.type_v = KV_TYPES["q8_0" if strict else start.kv_type]
    record.kv_unified = not strict
    record.swa_full = False  # sequences are only ever removed whole
    return record


def sequences(start: StartModel) -> int:
    """One more than slots, for the probe; in the strict profile it would cost a slot."""
    return start.slots if start.profile == "strict" else start.slots + 1


def expert_pattern(start: StartModel) -> str:
    """A pattern for the experts of the first `host_expert_layers` layers on the device, all kinds of them.

    The output head counts as one of `gpu_layers`, and the last repeating layers follow (llama-model.cpp).
    """
    first = 0
    if start.gpu_layers >= 0:
        header = read_header(Path(start.path))
        first = max(0, (header.count(f"{header.architecture}.block_count") or 0) + 1 - start.gpu_layers)
    return _EXPERTS.format(layers="|".join(str(first + i) for i in range(start.host_expert_layers)))
