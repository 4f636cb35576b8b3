"""What the engine itself would allocate, to the byte: its no-allocation dry run, one short-lived process a file.

The engine's log tells sizes to a hundredth of a MiB and, in a dry run, none of weights and cache. The C++ function
behind its memory breakdown tells all of them exactly. It returns a std::map, which is walked here as libstdc++ lays
it out (GCC's stl_tree.h): for tests on Linux x86-64 alone; the product reads the log.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from relevo.core.memory.dry_run import STAND_INS
from relevo.core.memory.quantization import NUMBER_TYPES

ACCELERATORS = ("", "plain", "cuda")
PATIENCE_S = 50
_NUMBERS = {kind.name: number for number, kind in NUMBER_TYPES.items()}
_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"
_OUTPUT = re.compile(r"output buffer size\s*=\s*([\d.]+) MiB")
_MIB = 2**20


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How a context is asked for. The fields are the engine's own, with `context_tokens` as it takes it (all slots)."""

    context_tokens: int = 8192
    sequences: int = 1
    unified: bool = True
    batch_tokens: int = 2048
    ubatch_tokens: int = 512
    outputs: int = 1
    """n_outputs_max; never fewer than sequences."""
    kv_type: str = "f16"
    value_type: str | None = None
    """None: as the keys."""
    flash_attention: bool = True
    embeddings: bool = False
    full_window: bool = False


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where weights go: one load for all settings."""

    accelerator: str = "plain"
    """"": the CPU alone; "plain": a stand-in for a card; "cuda": one that also copies a quantized cache to f16."""
    gpu_layers: int = 999
    host_experts: int = 0
    """So many of the first layers keep their experts on the host."""


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in one buffer type."""

    name: str
    model_bytes: int
    context_bytes: int
    """KV cache and recurrent state."""
    compute_bytes: int

    @property
    def on_device(self) -> bool:
        """Whether it is the accelerator's own memory."""
        return self.name in STAND_INS


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's answer to one setting. `error`: why it made no context; then the rest is empty."""

    buffers: tuple[Buffer, ...] = ()
    output_bytes: int = 0
    """Logits and their kin, to 0.01 MiB."""
    error: str | None = None

    def device(self, part: str) -> int:
        """Bytes of "model", "context" or "compute" on the accelerator."""
        return sum(getattr(b, f"{part}_bytes") for b in self.buffers if b.on_device)

    def host(self, part: str) -> int:
        """Bytes of "model", "context" or "compute" in the host's memory, pinned or not."""
        return sum(getattr(b, f"{part}_bytes") for b in self.buffers if not b.on_device)


class _Task(msgspec.Struct):
    """One load, and the settings that are to be tried with it."""

    libraries: str
    file: str
    placement: Placement
    settings: list[Setting]
    answers: str


def weigh(libraries: Path, file: Path, placement: Placement, settings: Sequence[Setting]) -> list[Weighed]:
    """Dry-run this file with every setting, in the order given; see `weigh_all`."""
    return weigh_all(libraries, file, [(placement, settings)])[0]


def weigh_all(libraries: Path, file: Path, loads: Sequence[tuple[Placement, Sequence[Setting]]]) -> list[list[Weighed]]:
    """Dry-run this file with every placement and setting, in the order given.

    A process of its own loads the model once a placement. Where it dies, that setting carries its last words as
    `error`, and another process goes on with the next.
    """
    wanted = [(at, setting) for at, (_, settings) in enumerate(loads) for setting in settings]
    found: list[Weighed] = []
    while len(found) < len(wanted):
        rest = wanted[len(found) :]
        tasks = [
            _Task(str(libraries), str(file), placement, [setting for of, setting in rest if of == at], "")
            for at, (placement, _) in enumerate(loads)
        ]
        found += _answers([task for task in tasks if task.settings], len(rest))
    answers = iter(found)
    return [[next(answers) for _ in settings] for _, settings in loads]


def _answers(tasks: list[_Task], count: int) -> list[Weighed]:
    """What one process answers: all, or as many as it lived for and its last words."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers"
        answers.touch()
        for task in tasks:
            task.answers = str(answers)
        process = subprocess.run(
            [sys.executable, "-m", "tests.golden.oracle"],
            input=msgspec.json.encode(tasks),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            timeout=PATIENCE_S,
            check=False,
        )
        found = [msgspec.json.decode(line, type=Weighed) for line in answers.read_bytes().splitlines()]
    if len(found) < count:
        last_words = process.stderr.decode(errors="replace").strip()[-600:]
        found.append(Weighed(error=f"The engine ended with {process.returncode}: {last_words}"))
    return found


class _NotLoaded(Exception):
    """The engine made no model of the file."""


class _Oracle:
    """The engine in this process, with one model loaded."""

    def __init__(self, task: _Task) -> None:
        import cffi

        from relevo.workers.llama.native import find_library, load_native
        from relevo.workers.llama.stand_in import Accelerator

        folder = Path(task.libraries)
        self.native = native = load_native(folder, gpu=False)
        self._ffi = cffi.FFI()
        self._ffi.cdef(
            f"struct map {{ char bytes[48]; }}; struct map {_BREAKDOWN}(void *); "
            "const char * ggml_backend_buft_name(void *); void * ggml_backend_cpu_buffer_type(void); "
            "struct override { const char * pattern; void * buft; };"
        )
        self._llama = self._ffi.dlopen(str(find_library(folder, "llama")))
        self._base = self._ffi.dlopen(str(find_library(folder, "ggml-base")))
        device = native.ffi.NULL
        if task.placement.accelerator:
            self._accelerator = Accelerator(find_library(folder, "ggml-base"), task.placement.accelerator == "cuda")
            device = native.ffi.cast("ggml_backend_dev_t", self._accelerator.handle)
        self._devices = native.ffi.new("ggml_backend_dev_t[]", [device, native.ffi.NULL])
        self._model = self._load(task)

    def _load(self, task: _Task) -> Any:
        native = self.native
        parameters = native.call.llama_model_default_params()
        parameters.devices = self._devices  # kept alive: the engine reads it again later
        parameters.n_gpu_layers = task.placement.gpu_layers if task.placement.accelerator else 0
        parameters.load_mode = 0
        parameters.no_alloc = True
        parameters.use_extra_bufts = False
        if task.placement.host_experts:
            self._overrides = self._experts_on_host(task.placement.host_experts)
            parameters.tensor_buft_overrides = native.ffi.cast(
                "void *", int(self._ffi.cast("uintptr_t", self._overrides))
            )
        model = native.call.llama_model_load_from_file(os.fsencode(task.file), parameters)
        if model == native.ffi.NULL:
            raise _NotLoaded("The engine cannot load this file: " + "; ".join(native.log.errors))
        return model

    def free(self) -> None:
        """Give the model back, so that another load can follow."""
        self.native.call.llama_model_free(self._model)

    def _experts_on_host(self, layers: int) -> Any:
        """As llama.cpp's own option for it: a pattern a layer, closed by an empty entry."""
        ffi = self._ffi
        host = self._base.ggml_backend_cpu_buffer_type()
        self._patterns = [
            ffi.new("char[]", rf"blk\.{layer}\.ffn_(up|down|gate|gate_up)_(ch|)exps".encode())
            for layer in range(layers)
        ]
        overrides = ffi.new("struct override[]", layers + 1)
        for override, pattern in zip(overrides, self._patterns, strict=False):
            override.pattern, override.buft = pattern, host
        return overrides

    def weigh(self, setting: Setting) -> Weighed:
        native = self.native
        native.log.errors.clear()
        parameters = native.call.llama_context_default_params()
        parameters.n_ctx = setting.context_tokens
        parameters.n_batch = setting.batch_tokens
        parameters.n_ubatch = setting.ubatch_tokens
        parameters.n_seq_max = setting.sequences
        parameters.n_outputs_max = max(setting.outputs, setting.sequences)
        parameters.n_outputs_max_per_seq = 1
        parameters.n_threads = parameters.n_threads_batch = 1
        parameters.flash_attn_type = int(setting.flash_attention)
        parameters.type_k = _NUMBERS[setting.kv_type]
        parameters.type_v = _NUMBERS[setting.value_type or setting.kv_type]
        parameters.embeddings = setting.embeddings
        parameters.swa_full = setting.full_window
        parameters.kv_unified = setting.unified
        context = native.call.llama_init_from_model(self._model, parameters)
        if context == native.ffi.NULL:
            return Weighed(error="; ".join(native.log.errors) or "The engine made no context and gave no reason.")
        try:
            output = native.log.find(_OUTPUT.pattern)
            return Weighed(
                buffers=self._breakdown(int(native.ffi.cast("uintptr_t", context))),
                output_bytes=round(float(output[1]) * _MIB) if output else 0,
            )
        finally:
            native.call.llama_free(context)

    def _breakdown(self, context: int) -> tuple[Buffer, ...]:
        """In-order walk of the map from buffer type to three sizes. A node: colour, parent, left, right, then it."""
        ffi = self._ffi
        header = getattr(self._llama, _BREAKDOWN)(ffi.cast("void *", context))
        root = ffi.cast("uintptr_t *", ffi.addressof(header))[2]
        found: list[Buffer] = []

        def walk(node: int) -> None:
            if not node:
                return
            words = ffi.cast("uintptr_t *", node)
            walk(words[2])
            name = ffi.string(self._base.ggml_backend_buft_name(ffi.cast("void *", words[4]))).decode()
            found.append(Buffer(name=name, model_bytes=words[5], context_bytes=words[6], compute_bytes=words[7]))
            walk(words[3])

        walk(root)
        return tuple(found)


def main() -> None:
    """Answer the tasks on standard input, a line of their file for each setting."""
    for task in msgspec.json.decode(sys.stdin.buffer.read(), type=list[_Task]):
        with Path(task.answers).open("ab", buffering=0) as answers:
            try:
                oracle = _Oracle(task)
            except _NotLoaded as e:
                for _ in task.settings:
                    answers.write(msgspec.json.encode(Weighed(error=str(e))) + b"\n")
                continue
            for setting in task.settings:
                answers.write(msgspec.json.encode(oracle.weigh(setting)) + b"\n")
            oracle.free()


if __name__ == "__main__":
    main()
