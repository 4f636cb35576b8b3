"""node-llama-cpp's estimator, where a folder with it is named (`npm install --ignore-scripts node-llama-cpp`)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).with_suffix(".mjs")
PATIENCE_S = 120


class Node:
    """Its header reader, and one estimate as it recommends it: its engine's own dry run, on the CPU.

    Its figures are its engine's, so there is nothing to compare but the time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        found = json.loads((self._folder / "node_modules" / "node-llama-cpp" / "package.json").read_text())
        self.version = str(found["version"])

    def read(self, file: Path) -> dict[str, float]:
        """work_s and peak_bytes of a fresh process. Raises RuntimeError when it fails."""
        done = subprocess.run(
            [shutil.which("node") or "node", str(SCRIPT), str(self._folder), str(file)],
            capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"node-llama-cpp ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))
