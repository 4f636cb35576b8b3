"""One reading of a header in a process of its own: `python -m bench.cases.memory_probe READER FILE`.

Prints a JSON line: seconds of the work itself (imports not counted), CPU seconds of the whole process, and the most
memory that was resident: VmHWM, which begins with the process; getrusage's figure may be its parent's.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

CONTEXT_TOKENS = 8192
PLENTY_BYTES = 1 << 50


def _relevo(file: Path) -> Callable[[], None]:
    from relevo.core.memory.demand import LoadOptions, model_demand
    from relevo.models.gguf import read_header
    from relevo.models.shape import shape_of

    return lambda: _known(model_demand(shape_of(read_header(file)), LoadOptions(on_device=True)))


def _known(found: object) -> None:
    assert found is not None


def _plan(file: Path) -> Callable[[], None]:
    """The command, with its imports: what a person waits for, less the start of Python."""

    def run() -> None:
        with tempfile.TemporaryDirectory(prefix="bench_plan_") as folder:
            config = Path(folder) / "relevo.toml"
            config.write_text("")
            place = ["--config", str(config), "--state", str(Path(folder) / "state")]
            sys.argv = ["relevo", "plan", str(file), "--json", "--context", str(CONTEXT_TOKENS), *place]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                runpy.run_module("relevo", run_name="__main__")

    return run


def _gguf(file: Path) -> Callable[[], None]:
    from gguf import GGUFReader

    return lambda: _known(GGUFReader(file))


def _xllamacpp(file: Path) -> Callable[[], None]:
    import gguf  # noqa: F401 - it imports it late
    from xllamacpp import memory

    card = {"name": "CUDA", "memory_free": PLENTY_BYTES}
    return lambda: _known(memory.estimate_gpu_layers([card], str(file), [], CONTEXT_TOKENS, 512, 1, "f16"))


def _modelinfo(file: Path) -> Callable[[], None]:
    from modelinfo.calculator import calculate_footprint
    from modelinfo.parsers.gguf import parse_gguf_header

    return lambda: _known(calculate_footprint(parse_gguf_header(str(file)), CONTEXT_TOKENS))


READERS = {"relevo": _relevo, "plan": _plan, "gguf": _gguf, "xllamacpp": _xllamacpp, "modelinfo": _modelinfo}


def main() -> None:
    """Read once."""
    work = READERS[sys.argv[1]](Path(sys.argv[2]))
    began = time.perf_counter()
    work()
    took_s = time.perf_counter() - began
    status = Path("/proc/self/status").read_text().splitlines()
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(json.dumps({"work_s": took_s, "cpu_s": time.process_time(), "peak_bytes": peak_kib * 1024}))


if __name__ == "__main__":
    main()
