"""A thin binding of llama.cpp v0.5.0: only the functions Relevo calls, through cffi in ABI mode.

Nothing in C checks that these declarations and the library agree, so `load_native` proves it before anything else
trusts it: the versions, and every field of the default parameters, must be those of the release.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from relevo.core.errors import LibraryError
from relevo.workers.llama.native_log import NativeLog

RELEASE: Final = "0.5.0"
GGML_SERIES: Final = "0.25."
_WARNING: Final = 3
_GPU_BACKENDS: Final = ("cuda", "hip", "musa", "vulkan", "metal", "sycl", "cann", "opencl")
_DEVICE_TYPES: Final = ("cpu", "gpu", "igpu", "accelerator", "meta")

MODEL_DEFAULTS: Final[dict[str, int | float | bool | None]] = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "progress_callback": None,
    "progress_callback_user_data": None,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}

CONTEXT_DEFAULTS: Final[dict[str, int | float | bool | None]] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval": None,
    "cb_eval_user_data": None,
    "type_k": 1,
    "type_v": 1,
    "abort_callback": None,
    "abort_callback_data": None,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}


class LayoutMismatch(LibraryError):
    """The llama.cpp library is not the release Relevo was written for."""

    code = "layout"


@dataclass(frozen=True, slots=True)
class Device:
    """Something ggml can compute on. A memory figure is None where the device reports none."""

    name: str
    description: str
    kind: str  # cpu | gpu | igpu | accelerator | meta
    backend: str
    memory_free_bytes: int | None
    memory_total_bytes: int | None


@dataclass(frozen=True, slots=True)
class CpuVariant:
    """A CPU library in the folder. `score` 0: this machine lacks instructions it needs; None: it keeps no score."""

    name: str  # "haswell"; "" for the one without a variant
    path: Path
    score: int | None


class _Symbols:
    """Functions by name, from whichever of the libraries has them."""

    def __init__(self, libraries: list[Any]) -> None:
        self._libraries = libraries

    def __getattr__(self, name: str) -> Any:
        for library in self._libraries:
            try:
                function = getattr(library, name)
            except AttributeError:
                continue
            setattr(self, name, function)
            return function
        raise LayoutMismatch(f"The llama.cpp library has no function {name}; use release v{RELEASE}.")


class Native:
    """The loaded libraries. `call` has every declared C function; `ffi` makes and reads C data."""

    def __init__(self, folder: Path, ffi: Any, call: Any, log: NativeLog, cpu_library: str | None) -> None:
        self.folder = folder
        self.ffi = ffi
        self.call = call
        self.log = log
        self.cpu_library = cpu_library  # file name of the CPU library that computes; None: linked in or not loaded

    @property
    def engine(self) -> str:
        """For people and fingerprints: release of llama.cpp and of ggml."""
        llama = self.string(self.call.llama_version()).removesuffix("-dev")
        return f"llama.cpp v{llama} (ggml {self.string(self.call.ggml_version())})"

    def string(self, pointer: Any) -> str:
        """A C string as text; empty for NULL."""
        return self.ffi.string(pointer).decode("utf-8", "replace") if pointer else ""

    def devices(self) -> list[Device]:
        """All devices of the loaded backends."""
        return [self._describe(self.call.ggml_backend_dev_get(i)) for i in range(self.call.ggml_backend_dev_count())]

    def device_handle(self, name: str) -> Any | None:
        """The device with this ggml name ("Vulkan0", "CUDA0"), or None."""
        for i in range(self.call.ggml_backend_dev_count()):
            handle = self.call.ggml_backend_dev_get(i)
            if self.string(self.call.ggml_backend_dev_name(handle)) == name:
                return handle
        return None

    def system_info(self) -> str:
        """The instruction sets and options the libraries compute with, as they print it."""
        return self.string(self.call.llama_print_system_info())

    def _describe(self, handle: Any) -> Device:
        call = self.call
        free, total = self.ffi.new("size_t *"), self.ffi.new("size_t *")
        call.ggml_backend_dev_memory(handle, free, total)
        kind = call.ggml_backend_dev_type(handle)
        known = int(total[0]) > 0
        return Device(
            name=self.string(call.ggml_backend_dev_name(handle)),
            description=self.string(call.ggml_backend_dev_description(handle)),
            kind=_DEVICE_TYPES[kind] if 0 <= kind < len(_DEVICE_TYPES) else f"type {kind}",
            backend=self.string(call.ggml_backend_reg_name(call.ggml_backend_dev_backend_reg(handle))),
            memory_free_bytes=int(free[0]) if known else None,
            memory_total_bytes=int(total[0]) if known else None,
        )


_keep_alive: list[Any] = []  # the library may log until the process ends, so its callback is never freed
_loaded: dict[tuple[Path, str | None, bool, bool], Native] = {}


def load_native(libraries: Path, cpu_variant: str | None = None, gpu: bool = False, backends: bool = True) -> Native:
    """Load llama.cpp from this folder and prove that it is the release this binding describes.

    `cpu_variant` ("haswell") takes exactly that CPU library; otherwise the best one for this machine is taken.
    `gpu` also loads the GPU backends in the folder. `backends=False` loads none: enough for a vocabulary.
    Once a process: another call with the same arguments returns the same object.

    Raises LibraryError (nothing usable in the folder, or no such variant), LayoutMismatch (another release).
    """
    key = (libraries, cpu_variant, gpu, backends)
    if key in _loaded:
        return _loaded[key]
    os.environ["GGML_NO_BACKTRACE"] = "1"  # else a dying library starts a debugger, which writes to stdout
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(Path(__file__).with_name("llama_v0_5_0.cdef").read_text("utf-8"))
    handles = [_open(ffi, find_library(libraries, name)) for name in ("ggml-base", "ggml", "llama")]
    call = _Symbols(list(reversed(handles)))
    _prove_versions(ffi, call)
    _prove_defaults(ffi, call)
    log = NativeLog()

    @ffi.callback("void(int32_t, const char *, void *)")  # type: ignore[untyped-decorator]
    def receive(level: int, text: Any, _data: Any) -> None:
        log.add(level, ffi.string(text).decode("utf-8", "replace"))

    _keep_alive.append((receive, handles))
    call.llama_log_set(receive, ffi.NULL)
    cpu_library = None
    if backends:
        cpu_library = _load_cpu(ffi, call, libraries, cpu_variant)
        if gpu:
            _load_gpu_backends(ffi, call, libraries, log)
    call.llama_backend_init()
    native = _loaded[key] = Native(libraries, ffi, call, log, cpu_library)
    return native


def find_library(folder: Path, name: str) -> Path:
    """The shared library called `name` in this folder, under any of the names builds give it.

    "llama" is found as libllama.so, libllama.vulkan.v0.5.0.so, libllama.so.0, libllama.0.dylib, llama.dll.
    Raises LibraryError.
    """
    shape = re.compile(rf"(?:lib)?{re.escape(name)}(?:\.[a-z]+)?(?:\.v?\d[\d.]*)?\.(?:so(?:\.\d+)*|dylib|dll)")
    try:
        found = sorted((p for p in folder.iterdir() if shape.fullmatch(p.name)), key=lambda p: (len(p.name), p.name))
    except OSError as e:
        raise LibraryError(f"The folder of llama.cpp libraries {folder} cannot be read: {e.strerror}.") from None
    if not found:
        raise LibraryError(f"There is no {name} library in {folder}; it must hold llama.cpp v{RELEASE}.")
    return found[0].resolve()


def cpu_variants(folder: Path, ffi: Any = None) -> list[CpuVariant]:
    """The CPU libraries of this folder with their scores on this machine, best first.

    ggml's own rule: a library scores the instruction sets it uses, 0 when this machine lacks one.
    """
    if ffi is None:
        import cffi

        ffi = cffi.FFI()
        ffi.cdef("int ggml_backend_score(void);")
    shape = re.compile(r"(?:lib)?ggml-cpu(?:-([\w.-]+?))?\.(?:so|dylib|dll)")
    variants = []
    for path in sorted(folder.iterdir()):
        if not (found := shape.fullmatch(path.name)):
            continue
        try:
            handle = ffi.dlopen(str(path))
        except OSError:
            variants.append(CpuVariant(found[1] or "", path, 0))
            continue
        try:
            score = int(handle.ggml_backend_score())
        except AttributeError:
            score = None
        ffi.dlclose(handle)
        variants.append(CpuVariant(found[1] or "", path, score))
    return sorted(variants, key=lambda v: -1 if v.score is None else v.score, reverse=True)


def _open(ffi: Any, path: Path) -> Any:
    try:
        return ffi.dlopen(str(path))
    except OSError as e:
        raise LibraryError(f"The library {path.name} cannot be loaded: {e}.") from None


def _prove_versions(ffi: Any, call: Any) -> None:
    llama = ffi.string(call.llama_version()).decode("utf-8", "replace")
    ggml = ffi.string(call.ggml_version()).decode("utf-8", "replace")
    if llama.removesuffix("-dev") != RELEASE or not ggml.startswith(GGML_SERIES):
        raise LayoutMismatch(
            f"The libraries are llama.cpp {llama} with ggml {ggml}; Relevo needs llama.cpp {RELEASE} with ggml "
            f"{GGML_SERIES}x."
        )


def _prove_defaults(ffi: Any, call: Any) -> None:
    """Compare every field of the default parameters with the release's: a field that moved shows here."""
    for kind, parameters, expected in (
        ("model", call.llama_model_default_params(), MODEL_DEFAULTS),
        ("context", call.llama_context_default_params(), CONTEXT_DEFAULTS),
    ):
        for field, right in expected.items():
            found = getattr(parameters, field)
            if right is None:
                same, found = found == ffi.NULL, str(found)
            else:
                same = found == right
            if not same:
                raise LayoutMismatch(
                    f"The llama.cpp library's default {kind} parameter {field} is {found} where release v{RELEASE} has "
                    f"{right}: it is another release, or was built with other structures."
                )


def _load_cpu(ffi: Any, call: Any, folder: Path, wanted: str | None) -> str | None:
    """Register one CPU library; return its file name, or None when the CPU backend is linked in."""
    if call.ggml_backend_reg_by_name(b"CPU") != ffi.NULL:
        if wanted is not None:
            raise LibraryError(
                f"The libraries in {folder} have their CPU part linked in, so the variant {wanted} cannot be chosen."
            )
        return None
    variants = cpu_variants(folder, ffi)
    if wanted is not None:
        usable = [v for v in variants if v.name == wanted]
        if not usable:
            known = ", ".join(v.name for v in variants) or "none"
            raise LibraryError(f"There is no CPU library for {wanted} in {folder}; there are: {known}.")
        if usable[0].score == 0:
            raise LibraryError(f"This machine lacks instructions that the CPU library for {wanted} needs.")
    else:
        usable = [v for v in variants if v.score != 0]
        if not usable:
            raise LibraryError(f"There is no CPU library in {folder} that this machine can run.")
    if call.ggml_backend_load(os.fsencode(usable[0].path)) == ffi.NULL:
        raise LibraryError(f"The CPU library {usable[0].path.name} could not be started.")
    return usable[0].path.name


def _load_gpu_backends(ffi: Any, call: Any, folder: Path, log: NativeLog) -> None:
    """Register every GPU backend in the folder. One that cannot load (no driver) is noted, not fatal: the device
    that was asked for is looked up by name afterwards."""
    for name in _GPU_BACKENDS:
        try:
            path = find_library(folder, f"ggml-{name}")
        except LibraryError:
            continue
        if call.ggml_backend_load(os.fsencode(path)) == ffi.NULL:
            log.add(_WARNING, f"The GPU library {path.name} could not be started (driver or runtime missing).\n")
