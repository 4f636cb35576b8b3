"""Reading a header of a large vocabulary: ours, the gguf package's, and what estimators make of it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.golden.families_attention import family
from tests.golden.header_file import write_header

from bench.cases.memory_node import Node
from bench.figures import Report, number, pairs_ratio, spread

TOKENS = 151_936
MERGES = 151_387
"""As Qwen3's: the largest vocabulary that many people have on the disk."""
ROOT = Path(__file__).parents[2]
NAMES = {
    "relevo": "**Relevo**: header, shape and demand by part",
    "plan": "**Relevo**: the whole command `relevo plan`",
    "gguf": "gguf package: GGUFReader, no estimate",
    "xllamacpp": "xllamacpp's estimator (on the gguf package)",
    "modelinfo": "modelinfo-cli: header and estimate",
}
MEGABYTE = 1e6


def write_large(folder: Path) -> Path:
    """Qwen3-4B's keys and tensors with a vocabulary of its size, weights as holes."""
    model = family("Qwen3-4B")
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [f"to{at:x}" for at in range(TOKENS)],
        "tokenizer.ggml.merges": [f"t{at % 997} m{at}" for at in range(MERGES)],
    }
    return write_header(folder / "large.gguf", {**model.keys, **vocabulary}, model.tensors)


def run(report: Report, *, quick: bool, node: Node | None) -> None:
    """Each reader in a fresh process, in turn."""
    repeats = 1 if quick else 5
    seen: dict[str, list[dict[str, float]]] = defaultdict(list)
    said: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench_memory_") as folder:
        file = write_large(Path(folder))
        on_disk = file.stat().st_blocks * 512
        compiled = Path(folder) / "compiled"
        _probe("plan", file, compiled)  # compiles the modules, as a second run on anybody's machine finds them
        for turn in range(repeats):
            order = list(NAMES)
            for reader in order if turn % 2 == 0 else reversed(order):
                answer = _probe(reader, file, compiled)
                if isinstance(answer, str):
                    said[reader] = answer
                else:
                    seen[reader].append(answer)
            if node is not None:
                began = time.perf_counter()
                answer = node.read(file)
                seen["node"].append({"whole_s": time.perf_counter() - began, **answer})
    report.say(
        f"### Reading a header of {TOKENS:,} tokens and {MERGES:,} merges\n\n"
        f"Qwen3-4B's header ({on_disk / MEGABYTE:.1f} MB, weights as a hole), each reader in a fresh process, "
        f"{repeats} times in turn; file cache warm, Python's modules compiled. *Work* is without start and "
        "imports (of the command without the start of Python alone). Goal of the command: 0.2 s and 100 MB.\n"
    )
    rows = []
    ours = [one["work_s"] for one in seen["relevo"]]
    for reader in (*NAMES, *(["node"] if node is not None else [])):
        name = NAMES.get(reader) or f"node-llama-cpp {node.version if node else ''}: header, then its engine's dry run"
        if not seen[reader]:
            rows.append([name, said.get(reader, "-"), "-", "-", "-", "-"])
            continue
        work, cpu, whole, peak = (
            [one[key] for one in seen[reader]] for key in ("work_s", "cpu_s", "whole_s", "peak_bytes")
        )
        ratio = "-" if reader == "relevo" else pairs_ratio(work, ours)
        peak_mb = number(statistics.median(peak) / MEGABYTE)
        rows.append([name, spread(work), ratio, spread(whole), spread(cpu), peak_mb])
        report.keep("memory reading", reader=reader, work_s=work, whole_s=whole, cpu_s=cpu, peak_bytes=peak)
    head = ["reader", "work s", "times Relevo's work", "whole process s", "of it CPU s", "peak RSS MB"]
    report.table(head, rows)


def _probe(reader: str, file: Path, compiled: Path) -> dict[str, float] | str:
    """Its figures, or why there are none."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(compiled)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bench.cases.memory_probe", reader, str(file)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    whole_s = time.perf_counter() - began
    if done.returncode:
        words = done.stderr.strip().splitlines()
        return (
            "not installed" if "ModuleNotFoundError" in done.stderr else f"failed: {words[-1][:80] if words else '?'}"
        )
    return {"whole_s": whole_s, **json.loads(done.stdout.splitlines()[-1])}
