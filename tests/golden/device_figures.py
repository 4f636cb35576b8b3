"""What the engine would allocate on a real device's backend, to the byte: `make golden-device` where there is one.

Any device that ggml can plan for will do, a software Vulkan device too: nothing is computed and next to nothing
allocated. The loads are those the worker would make, with its own parameters, in a dry run; a process a family. The
figures are kept in device_figures.json, so that the closed form is compared with them where there is no device.

Two things of a Vulkan device are taken out, to be like the cards it stands for. The limit on one buffer's size, 128 MiB
in software and 4 GiB on cards, which moves larger tensors to the host: it is raised in this process' memory. And the
backend's own order of the graph, which moves the compute buffer by some MiB: planned without, and noted with.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relevo.core.events import StartModel
from relevo.models.gguf import read_header
from tests.golden import families_attention, families_state
from tests.golden.oracle import Buffer, _Oracle

FIGURES = Path(__file__).with_name("device_figures.json")
FAMILIES: dict[str, Any] = {
    family.name: family
    for family in (*families_state.FAMILIES, *families_attention.FAMILIES, *families_attention.MORE_FAMILIES)
}
PATIENCE_S = 300
_AS_BUILT = "GGML_VK_DISABLE_GRAPH_OPTIMIZE"


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one place: tensors, KV cache with recurrent state, intermediate results."""

    weights_bytes: int
    cache_bytes: int
    compute_bytes: int


class DeviceCase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One load: fields of StartModel that are not as usual, and what the engine planned; or why it could not."""

    family: str
    options: dict[str, Any]
    device: Planned | None = None
    host: Planned | None = None
    reordered_compute_bytes: int | None = None
    """On the device, in the backend's own order of the graph."""
    error: str | None = None


class DeviceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All cases of one device."""

    engine: str
    device: str
    """The engine's name of it, which is the name of its buffers."""
    description: str
    families: dict[str, str]
    """Digest of each family's file: drawn otherwise, its figures say nothing."""
    cases: tuple[DeviceCase, ...]


def options_for(family: Any) -> Iterator[dict[str, Any]]:
    """Loads of a family: usual ones, and with layers or experts left to the host."""
    layers = max((int(found[1]) + 1 for name, _, _ in family.tensors if (found := re.match(r"blk\.(\d+)\.", name))))
    usual = {"context_tokens": 8192, "batch_tokens": 512, "ubatch_tokens": 512, "slots": 4}
    yield usual
    if "q8_0" in getattr(family, "value_types", ("q8_0",)):
        yield usual | {"context_tokens": 4096, "kv_type": "q8_0", "ubatch_tokens": 128}
        yield usual | {"context_tokens": 1024, "profile": "strict", "slots": 2}
    yield usual | {"context_tokens": 4096, "flash_attention": False, "ubatch_tokens": 256, "slots": 1}
    yield usual | {"gpu_layers": layers // 2}
    if any("_exps." in name for name, _, _ in family.tensors):
        yield usual | {"host_expert_layers": layers // 2}


def start_of(path: Path, libraries: Path, device: str, options: dict[str, Any]) -> StartModel:
    """The order a worker would get."""
    settings = {"route": "gpu", "gpu_layers": 999} | options
    return StartModel(model="golden", path=str(path), libraries=str(libraries), device=device, **settings)


def digest_of(path: Path) -> str:
    """Of a model's header: keys and tensor table."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(read_header(path).header_bytes)).hexdigest()[:16]


class _DeviceOracle(_Oracle):
    """The engine in this process, with whatever devices it finds; it plans with the worker's own parameters."""

    def __init__(self, libraries: Path, device: str) -> None:
        import cffi

        from relevo.workers.llama.native import find_library, load_native
        from tests.golden.oracle import _BREAKDOWN

        self.native = load_native(libraries, gpu=True)
        self._ffi = cffi.FFI()
        self._ffi.cdef(
            f"struct map {{ char bytes[48]; }}; struct map {_BREAKDOWN}(void *); "
            "const char * ggml_backend_buft_name(void *); void * ggml_backend_dev_init(void *, const char *);"
        )
        self._llama = self._ffi.dlopen(str(find_library(libraries, "llama")))
        self._base = self._ffi.dlopen(str(find_library(libraries, "ggml-base")))
        handle = self.native.device_handle(device)
        if handle is None:
            raise SystemExit(f"There is no device {device}.")
        self._base.ggml_backend_dev_init(self._ffi.cast("void *", int(self.native.ffi.cast("uintptr_t", handle))), b"")
        facts = next(found for found in self.native.devices() if found.name == device)
        if facts.backend == "Vulkan":
            lift_buffer_limit(facts.description)

    def plan(self, start: StartModel) -> tuple[Buffer, ...]:
        """The buffers of this load. Raises StartFailure."""
        from relevo.workers.llama.model import check, find_device, load_weights, make_context

        call, native = self.native.call, self.native
        check(start)
        weights = load_weights(native, start, find_device(native, start), dry=True)
        try:
            context = make_context(native, weights, start)
            try:
                return self._breakdown(int(native.ffi.cast("uintptr_t", context)))
            finally:
                call.llama_free(context)
        finally:
            call.llama_model_free(weights.handle)


def lift_buffer_limit(description: str) -> int:
    """Make the Vulkan backend believe that one storage buffer may have 4 GiB less a byte; returns how many copies of
    the device's properties were changed.

    Its VkPhysicalDeviceProperties (vulkan_core.h: five numbers, the name, sixteen bytes, the limits) lie somewhere in
    this process. The neighbours of the limit tell whether a place that has the name is one.
    """
    wanted = description.encode() + b"\0"
    changed = 0
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        for line in maps.readlines():
            span, rights = line.split()[:2]
            if not rights.startswith("rw") or "[v" in line:
                continue
            first, last = (int(part, 16) for part in span.split("-"))
            try:
                memory.seek(first)
                content = memory.read(last - first)
            except OSError:
                continue
            at = content.find(wanted)
            while at >= 0:
                limits = at - 20 + 296
                uniform, storage, pushed = struct.unpack_from("<III", content.ljust(limits + 40, b"\0"), limits + 24)
                if uniform >= 16384 and storage >= 1 << 27 and 128 <= pushed <= 4096:
                    memory.seek(first + limits + 28)
                    memory.write(struct.pack("<I", 0xFFFFFFFF))
                    changed += 1
                at = content.find(wanted, at + 1)
    return changed


def _answer_for(libraries: Path, device: str, name: str, first: int) -> None:
    """Print a case a line, for one family from its load number `first` on: in a process of its own."""
    from relevo.workers.llama.model import StartFailure

    family = FAMILIES[name]
    oracle = _DeviceOracle(libraries, device)
    with tempfile.TemporaryDirectory() as folder:
        path = family.write(Path(folder))
        for options in list(options_for(family))[first:]:
            try:
                buffers = oracle.plan(start_of(path, libraries, device, options))
                there, here = (_planned(buffers, device, on_device) for on_device in (True, False))
                case = DeviceCase(family=name, options=options, device=there, host=here)
            except StartFailure as e:
                case = DeviceCase(family=name, options=options, error=e.message.replace(str(path), "the file"))
            sys.stdout.buffer.write(msgspec.json.encode(case) + b"\n")
            sys.stdout.buffer.flush()


def _planned(buffers: Sequence[Buffer], device: str, on_device: bool) -> Planned:
    chosen = [buffer for buffer in buffers if (buffer.name == device) == on_device]
    return Planned(
        sum(buffer.model_bytes for buffer in chosen),
        sum(buffer.context_bytes for buffer in chosen),
        sum(buffer.compute_bytes for buffer in chosen),
    )


def _ask(libraries: Path, device: str, family: Any, as_built: bool) -> list[DeviceCase]:
    """All loads of a family. One that ends the engine is recorded so, and the rest asked in another process."""
    loads, cases = list(options_for(family)), []
    command = [sys.executable, "-m", "tests.golden.device_figures", "--libraries", str(libraries), "--device", device]
    while len(cases) < len(loads):
        done = subprocess.run(
            [*command, "--family", family.name, "--first", str(len(cases))],
            capture_output=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | ({_AS_BUILT: "1"} if as_built else {}),
            timeout=PATIENCE_S,
            check=False,
        )
        cases += [msgspec.json.decode(line, type=DeviceCase) for line in done.stdout.splitlines()]
        if len(cases) < len(loads):
            last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            why = f"The engine ended with {done.returncode}: {last.rsplit('/', 1)[-1]}"
            cases.append(DeviceCase(family=family.name, options=loads[len(cases)], error=why))
    return cases


def _both(libraries: Path, device: str, family: Any) -> Iterator[DeviceCase]:
    pairs = (_ask(libraries, device, family, as_built) for as_built in (True, False))
    for plain, reordered in zip(*pairs, strict=True):
        compute = reordered.device.compute_bytes if reordered.device else None
        yield msgspec.structs.replace(plain, reordered_compute_bytes=compute)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the figures of the first GPU that the libraries see, or of `--device`; 1 when there is none."""
    parser = argparse.ArgumentParser(prog="tests.golden.device_figures", description=__doc__)
    parser.add_argument("--libraries", type=Path, help="folder of llama.cpp libraries; found by itself otherwise")
    parser.add_argument("--device", help='the engine\'s name of it, such as "Vulkan0"')
    parser.add_argument("--family", help="only this one, a case a line on stdout")
    parser.add_argument("--first", type=int, default=0, help="of the family's loads, counted from 0")
    parser.add_argument("--all", action="store_true", help="also families whose figures still stand")
    asked = parser.parse_args(arguments)
    libraries = asked.libraries or _libraries()
    if asked.family:
        _answer_for(libraries, asked.device, asked.family, asked.first)
        return 0
    from relevo.devices.ggml import inspect

    facts = inspect(libraries)
    device = next((card for card in facts.cards if asked.device in (None, card.name)), None)
    if device is None:
        print(f"error: the libraries in {libraries} see no {asked.device or 'GPU'} on this machine.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        digests = {name: digest_of(family.write(Path(folder))) for name, family in FAMILIES.items()}
    empty = DeviceFigures(
        engine=facts.engine, device=device.name, description=device.description, families=digests, cases=()
    )
    kept = {} if asked.all else _still_true(empty)
    cases: list[DeviceCase] = []
    for name, family in FAMILIES.items():
        found = kept.get(name) or list(_both(libraries, device.name, family))
        failed = [case.error for case in found if case.error]
        how = " kept" if name in kept else ""
        print(f"{name}: {len(found)} loads{how}" + "".join(f"\n  {error}" for error in failed), flush=True)
        cases += found
    FIGURES.write_bytes(_laid_out(msgspec.structs.replace(empty, cases=tuple(cases))))
    return 0


def _still_true(now: DeviceFigures) -> dict[str, list[DeviceCase]]:
    """The cases of the fixture, by family, that were taken of the same file and loads, with this engine and device."""
    try:
        old = msgspec.json.decode(FIGURES.read_bytes(), type=DeviceFigures)
    except (OSError, msgspec.MsgspecError):
        return {}
    if (old.engine, old.description) != (now.engine, now.description):
        return {}
    kept = {}
    for name, family in FAMILIES.items():
        cases = [case for case in old.cases if case.family == name]
        same = old.families.get(name) == now.families[name]
        if same and [case.options for case in cases] == list(options_for(family)):
            kept[name] = cases
    return kept


def _laid_out(figures: DeviceFigures) -> bytes:
    """JSON with a case a line, so that changes can be read."""
    head = msgspec.json.encode(msgspec.structs.replace(figures, cases=()))
    lines = b",\n".join(msgspec.json.encode(case) for case in figures.cases)
    return head.replace(b'"cases":[]', b'"cases":[\n' + lines + b"\n]") + b"\n"


def _libraries() -> Path:
    from relevo.setup.libraries import find

    return find()


if __name__ == "__main__":
    sys.exit(main())
