"""The last resort: the engine's libraries built from source on this machine.

The source is that of a pinned release of llama-cpp-python, which carries llama.cpp with the same public structs as
the prebuilt sets. Only its libraries are taken; its Python code is not used.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Final

from relevo.setup.cache import ensure_entry, find_entry
from relevo.setup.packages import FetchError, run_tool, unpack_zip
from relevo.setup.progress import Progress

NAME: Final = "llama-cpp-python"
VERSION: Final = "0.3.36"
SHA256: Final = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
BUILD_TIMEOUT_S: Final = 4 * 3600.0
_KEY: Final = f"libraries/own-build-{VERSION}"


def find_own_build() -> Path | None:
    """The folder of libraries built here, or None."""
    return find_entry(_KEY)


def compile_from_source(progress: Progress, jobs: int | None = None) -> Path:
    """Build the libraries (about ten minutes of processor time) unless that was done. Raises FetchError, CacheError.

    CMAKE_ARGS is passed on: `CMAKE_ARGS=-DGGML_CUDA=on` builds for CUDA, where its tools are installed.
    `jobs`: compilers at once; None: one a core.
    """

    def fill(into: Path) -> None:
        _build(into, progress, jobs or os.cpu_count() or 1)

    return ensure_entry(_KEY, fill, lambda: progress.say("Another run is building the libraries; waiting for it ..."))


def _build(into: Path, progress: Progress, jobs: int) -> None:
    with tempfile.TemporaryDirectory(prefix="relevo-build-") as name, progress.step("Building llama.cpp") as news:
        folder = Path(name)
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{NAME}=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")

        def tell(line: str) -> None:
            step = re.search(r"\[(\d+)/(\d+)\]", line)
            if step:
                news(f"{step.group(1)} of {step.group(2)} files")

        run_tool(
            [
                *(sys.executable, "-m", "pip", "wheel", "--verbose", "--disable-pip-version-check", "--no-input"),
                *("--no-deps", "--no-binary", NAME, "--require-hashes"),
                *("-w", str(folder / "out"), "-r", str(requirements)),
            ],
            what=f"llama.cpp could not be built from {NAME} {VERSION} (a C++ compiler is needed)",
            environment={**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)},
            timeout_s=BUILD_TIMEOUT_S,
            on_line=tell,
        )
        wheels = list((folder / "out").glob("*.whl"))
        if len(wheels) != 1:
            raise FetchError(f"Building {NAME} {VERSION} gave {len(wheels)} wheels; one was expected.")
        unpack_zip(wheels[0], into, ("llama_cpp/lib/lib*",), f"the built {NAME} {VERSION}")
