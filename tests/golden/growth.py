"""A small model of any architecture, grown from nothing by what the engine finds missing in it.

The loader names the next key or tensor that it wants, and the shape that it expects. So a header-only file can be
completed step by step for architectures nobody drew a family of, and what the closed form says of it be compared with
the engine. It proves widths, layers and placement; real models' proportions are the business of the families.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.golden.families_state import Family, Value
from tests.golden.header_file import write_header

LAYERS = 12
PATIENCE_S = 50
_STEPS = 4000
_MISSING = re.compile(r"missing tensor '([^']+)'|tensor '([^']+)' not found")
_MISSHAPEN = re.compile(r"tensor '([^']+)' has wrong shape; expected ([\d, ]+), got")
_UNSAID = re.compile(r"key not found in model: (\S+?)(?:;|$)")

BEGINNING: dict[str, Any] = {
    "block_count": LAYERS,
    "embedding_length": 512,
    "vocab_size": 512,
    "context_length": 4096,
    "feed_forward_length": 1024,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "rope.dimension_count": 64,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}
"""What every file states here, without the architecture's prefix."""

_WHEN_ASKED: dict[str, Any] = {
    "adapters.lora_rank": 16,
    "attention.clamp_kqv": 8.0,
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 64,
    "attention.kv_lora_rank": 128,
    "attention.max_alibi_bias": 8.0,
    "attention.q_lora_rank": 96,
    "attention.scale": 1.0,
    "attention.key_length_mla": 96,
    "attention.value_length_mla": 64,
    "attention.key_length_swa": 64,
    "attention.value_length_swa": 64,
    "attention.sliding_window": 300,
    "attention.sliding_window_pattern": [at % 4 != 1 for at in range(LAYERS)],
    "embedding_length_per_layer_input": 0,
    "embedding_scale": 1.0,
    "expert_chunk_feed_forward_length": 128,
    "expert_count": 8,
    "expert_feed_forward_length": 256,
    "expert_gating_func": 2,
    "expert_group_scale": 1.0,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 256,
    "expert_used_count": 2,
    "expert_weights_scale": 1.0,
    "experts_per_group": 2,
    "interleave_moe_layer_step": 1,
    "kda.gate_lower_bound": -5.0,
    "kda.head_dim": 64,
    "leading_dense_block_count": 1,
    "logit_scale": 1.0,
    "moe_every_n_layers": 2,
    "residual_scale": 1.0,
    "shortconv.l_cache": 3,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 1,
    "ssm.inner_size": 1024,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 64,
    "time_decay_extra_dim": 64,
    "time_mix_extra_dim": 32,
    "wkv.head_size": 64,
    "rope.dimension_sections": [11, 11, 10, 0],
    "swiglu_clamp_exp": [7.0] * LAYERS,
    "use_parallel_residual": True,
    **{f"xielu.{name}": [0.8] * LAYERS for name in ("alpha_n", "alpha_p", "beta", "eps")},
    **{f"attention.{name}_lora_rank": 32 for name in ("decay", "iclr", "value_residual_mix", "gate")},
}

EXPERTS: dict[str, Any] = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256}


class Grown(msgspec.Struct, frozen=True):
    """A file that the engine loads, or why none came of it."""

    keys: dict[str, Any]
    tensors: list[tuple[str, tuple[int, ...], str]]
    stuck: str | None = None

    def family(self, name: str) -> Family:
        """As the families that were drawn."""
        return Family(name, self.keys, tuple((name, tuple(shape), kind) for name, shape, kind in self.tensors))


class _Task(msgspec.Struct):
    libraries: str
    architecture: str
    keys: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


def grow(
    libraries: Path, architecture: str, keys: Mapping[str, Value], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Grown:
    """Grow a file of this architecture; `keys` come beside those of BEGINNING, `shapes` into every layer.

    In a process of its own: an engine that is asked for nonsense may abort. Then `stuck` has its last words.
    """
    task = _Task(str(libraries), architecture, {**BEGINNING, **keys}, dict(shapes or {}))
    process = subprocess.run(
        [sys.executable, "-m", "tests.golden.growth"],
        input=msgspec.json.encode(task),
        capture_output=True,
        cwd=Path(__file__).parents[2],
        timeout=PATIENCE_S,
        check=False,
    )
    if process.returncode:
        words = process.stderr.decode(errors="replace").strip().splitlines()
        return Grown({}, [], f"The engine ended with {process.returncode}: {words[-1] if words else 'no word'}")
    return msgspec.json.decode(process.stdout, type=Grown)


class _Grower:
    """The engine in this process, asked again and again."""

    def __init__(self, task: _Task) -> None:
        from relevo.workers.llama.native import load_native

        self._native = load_native(Path(task.libraries), gpu=False)
        self._devices = self._native.ffi.new("ggml_backend_dev_t[]", [self._native.ffi.NULL])
        self._architecture = task.architecture
        own = {f"{task.architecture}.{name}": value for name, value in task.keys.items()}
        self._keys: dict[str, Any] = {"general.architecture": task.architecture, **own}
        self._keys["tokenizer.ggml.token_type_count"] = 2
        self._shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (512, 512)}
        self._shapes |= {f"blk.{at}.{name}": shape for at in range(LAYERS) for name, shape in task.shapes.items()}

    def grow(self, path: Path) -> Grown:
        before = ""
        for _ in range(_STEPS):
            complaint = self._complaint(path)
            if complaint is None:
                return Grown(self._keys, self._table())
            if complaint == before or not self._mend(complaint):
                return Grown(self._keys, self._table(), complaint[-300:])
            before = complaint
        return Grown(self._keys, self._table(), "It was not complete in the end.")

    def _table(self) -> list[tuple[str, tuple[int, ...], str]]:
        return [(name, shape, "f32") for name, shape in self._shapes.items()]

    def _complaint(self, path: Path) -> str | None:
        native = self._native
        write_header(path, self._keys, self._table())
        native.log.begin_load()
        parameters = native.call.llama_model_default_params()
        parameters.devices = self._devices
        parameters.n_gpu_layers = 0
        parameters.load_mode = 0
        parameters.no_alloc = True
        model = native.call.llama_model_load_from_file(os.fsencode(path), parameters)
        if model == native.ffi.NULL:
            return "; ".join(native.log.errors)
        native.call.llama_model_free(model)
        return None

    def _mend(self, complaint: str) -> bool:
        """Give it what it asks for; False when nobody knows what that is."""
        if found := _MISSING.search(complaint):
            self._shapes[found[1] or found[2]] = (32,)
        elif found := _MISSHAPEN.search(complaint):
            shape = [int(length) for length in found[2].split(",")]
            while len(shape) > 1 and shape[-1] == 1:
                shape.pop()
            self._shapes[found[1]] = tuple(shape)
        elif found := _UNSAID.search(complaint):
            name = found[1].removeprefix(self._architecture + ".")
            if name not in _WHEN_ASKED:
                return False
            self._keys[found[1]] = _WHEN_ASKED[name]
        else:
            return False
        return True


def main() -> None:
    """Answer the task on standard input with what grew."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=_Task)
    with tempfile.TemporaryDirectory() as folder:
        grown = _Grower(task).grow(Path(folder) / "model.gguf")
    sys.stdout.buffer.write(msgspec.json.encode(grown))


if __name__ == "__main__":
    main()
