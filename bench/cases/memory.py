"""What memory figures are worth: headers read, totals predicted, real loads observed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from bench.cases import memory_golden, memory_loads, memory_reading
from bench.cases.memory_node import Node
from bench.figures import Report


def run(report: Report, *, quick: bool, node: Path | None = None) -> None:
    """The case. `node`: a folder with node-llama-cpp."""
    report.start(
        "Memory",
        "Relevo's header reader and closed form beside the gguf package's reader and the estimators that can be "
        f"installed: {', '.join(_versions())}. Nothing is tuned to a case: the models are the golden set of the tests.",
    )
    memory_reading.run(report, quick=quick, node=Node(node) if node is not None else None)
    memory_golden.run(report, quick=quick)
    memory_loads.run(report, quick=quick)
    report.end()


def _versions() -> list[str]:
    found = []
    for name in ("gguf", "xllamacpp", "modelinfo-cli"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return found
