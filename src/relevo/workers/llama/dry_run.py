"""`python -m relevo.workers.llama.dry_run --libraries DIR`: what loads would allocate, without allocating it.

Reads one StartModel as JSON, or a list of them, on stdin; prints a DryRunFigures or DryRunRefused as a line of JSON for
each, in their order, as soon as it is known. All of them use the libraries and the CPU library of the first.

Its own process, because a file that the engine does not expect may abort it. Two things are really allocated: the
state of recurrent layers and the rows of logits; and on a GPU the driver makes a context for as long as this runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from relevo.core.errors import LibraryError
from relevo.core.events import StartModel
from relevo.core.memory.dry_run import STAND_INS, DryCache, DryRunAnswer, DryRunFigures, DryRunRefused
from relevo.workers.llama.model import StartFailure, check, find_device, load_weights, make_context
from relevo.workers.llama.native import Native, load_native
from relevo.workers.llama.native_log import Cache, LoadFacts
from relevo.workers.llama.stand_in import register

DATA_LIMIT_BYTES: Final = 4 << 30
_INPUT_BYTES_MAX: Final = 4 << 20
_LAYER_OF: Final = re.compile(r"blk\.(\d+)\.")


def dry_run(native: Native, start: StartModel) -> DryRunFigures:
    """Plan this load with the parameters of a real one. Raises StartFailure."""
    began = time.monotonic()
    check(start)
    device = find_device(native, start)
    weights = load_weights(native, start, device, dry=True)
    try:
        context = make_context(native, weights, start)
        try:
            took_ms = (time.monotonic() - began) * 1000
            return _figures(native, start, took_ms)
        finally:
            native.call.llama_free(context)
    finally:
        native.call.llama_model_free(weights.handle)


def _figures(native: Native, start: StartModel, took_ms: float) -> DryRunFigures:
    log = native.log
    device = start.device if start.device != "cpu" else None

    def there(kind: str) -> int:
        return log.buffer_bytes(kind, device) or 0 if device else 0

    planned = log.host_bytes("compute", device)
    output = log.buffer_bytes("output")
    if output is None or (planned is None and not there("compute")):
        raise StartFailure("layout", "The engine does not say what it would allocate; it is another release.")
    flash = start.flash_attention or start.profile == "strict"
    return DryRunFigures(
        engine=native.engine,
        device=start.device,
        compute_bytes=there("compute"),
        host_compute_bytes=planned or 0,
        output_bytes=output,
        caches=tuple(_cache(cache, log.facts, device, flash) for cache in log.facts.caches),
        state_bytes=there("RS"),
        host_state_bytes=log.host_bytes("RS", device) or 0,
        expert_layers=tuple(sorted({int(n) for name in log.facts.overridden for n in _LAYER_OF.findall(name)})),
        repacks=log.repacked_bytes() is not None,
        took_ms=round(took_ms, 3),
    )


def _cache(cache: Cache, facts: LoadFacts, device: str | None, flash: bool) -> DryCache:
    """A cache by place. It is printed as a whole, so it is divided by the widths of its layers' keys and values.

    Without flash attention all layers' values are as wide as the widest (llama-kv-cache.cpp).
    """
    keys = _share(cache.layers, facts.key_widths, device)
    values = _share(cache.layers, facts.value_widths if flash else (), device)
    there = round(cache.key_bytes * keys + cache.value_bytes * values)
    return DryCache(
        cells=cache.cells,
        device_bytes=there,
        host_bytes=cache.key_bytes + cache.value_bytes - there,
        layers=cache.layers,
    )


def _share(layers: dict[int, str], widths: tuple[int, ...], device: str | None) -> float:
    sizes = {layer: widths[layer] if layer < len(widths) > 1 else 1 for layer in layers}
    whole = sum(sizes.values())
    return sum(sizes[layer] for layer, where in layers.items() if where == device) / whole if whole else 0.0


def answers(libraries: Path, starts: list[StartModel]) -> Iterator[DryRunAnswer]:
    """One answer for each start, in their order."""
    if not starts:
        return
    variant = starts[0].cpu_variant
    try:
        real = any(start.device != "cpu" and start.device not in STAND_INS for start in starts)
        native = load_native(libraries, variant, gpu=real)  # a driver is left alone where no card is asked about
    except LibraryError as e:
        yield from (DryRunRefused(e.code, e.message) for _ in starts)
        return
    for start in starts:
        if start.cpu_variant != variant:
            yield DryRunRefused("internal", "One process has one CPU library; ask for another in another process.")
            continue
        try:
            if start.device in STAND_INS:
                register(native, start.device)
            yield dry_run(native, start)
        except StartFailure as e:
            yield DryRunRefused(e.code, e.message)
        except MemoryError:
            yield DryRunRefused("allocation", "The dry run needs more memory than it may have.")


def _own_stdout() -> BinaryIO:
    """stdout for our answers alone: what native code prints there goes to stderr."""
    ours = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return ours


def _limit_memory(data_bytes: int) -> None:
    for kind, wanted in ((resource.RLIMIT_DATA, data_bytes), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        with contextlib.suppress(OSError, ValueError):  # systems without it, or a lower limit that stands already
            resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def main() -> int:
    """Answer everything on stdin; 0, or 2 with a sentence on stderr when stdin is not what it should be."""
    parser = argparse.ArgumentParser(prog="relevo.workers.llama.dry_run", description=__doc__)
    parser.add_argument("--libraries", type=Path, required=True)
    parser.add_argument(
        "--data-limit-bytes", type=int, default=DATA_LIMIT_BYTES, help="of private memory (RLIMIT_DATA)"
    )
    arguments = parser.parse_args()
    out = _own_stdout()
    _limit_memory(arguments.data_limit_bytes)
    try:
        asked = msgspec.json.decode(sys.stdin.buffer.read(_INPUT_BYTES_MAX), type=StartModel | list[StartModel])
    except msgspec.MsgspecError as e:
        print(f"stdin must be a StartModel as JSON, or a list of them: {e}", file=sys.stderr)
        return 2
    for answer in answers(arguments.libraries, [asked] if isinstance(asked, StartModel) else asked):
        out.write(msgspec.json.encode(answer) + b"\n")
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
