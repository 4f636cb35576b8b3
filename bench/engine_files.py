"""Where the measured model files are, text of a given length in tokens, and the requantized file."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from pathlib import Path

from relevo.setup import demo, libraries
from relevo.setup.cache import ensure_entry
from relevo.workers.llama.native import find_library, load_native
from relevo.workers.llama.vocabulary import Vocabulary

Q4_K_M = 15  # llama.h: LLAMA_FTYPE_MOSTLY_Q4_K_M
WORDS = (  # noqa: SIM905 - words read better as a text
    "river stone lamp garden window paper engine copper winter ladder market silver forest button harbor candle "
    "mirror bridge pocket thunder meadow anchor barrel cotton desert island kettle marble needle orchard"
).split()


class _QuantizeParams(ctypes.Structure):
    """llama_model_quantize_params of the pinned release."""

    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int32),
        ("output_tensor_type", ctypes.c_int32),
        ("token_embedding_type", ctypes.c_int32),
        ("allow_requantize", ctypes.c_bool),
        ("quantize_output_tensor", ctypes.c_bool),
        ("only_copy", ctypes.c_bool),
        ("pure", ctypes.c_bool),
        ("keep_split", ctypes.c_bool),
        ("dry_run", ctypes.c_bool),
        ("imatrix", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("tt_overrides", ctypes.c_void_p),
        ("prune_layers", ctypes.c_void_p),
    )


def shipped() -> Path:
    """The demo model as it ships: Q4_1."""
    return demo.find()


def requantized() -> Path:
    """The demo model requantized to Q4_K_M with the engine's own function: right for speed, not for quality."""
    name = "SmolLM2-135M-Instruct.requantized-Q4_K_M.gguf"

    def fill(folder: Path) -> None:
        # in a process of its own: the engine prints a line about every tensor that cannot be Q4_K
        command = [sys.executable, "-m", "bench.engine_files", str(shipped()), str(folder / name)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    return ensure_entry("bench/smollm2-135m-instruct-requantized-q4_k_m", fill) / name


def _quantize(source: Path, target: Path) -> None:
    native = load_native(libraries.find())
    library = ctypes.CDLL(str(find_library(native.folder, "llama")))
    library.llama_model_quantize_default_params.restype = _QuantizeParams
    parameters = library.llama_model_quantize_default_params()
    assert parameters.ftype > 0 and not parameters.dry_run and parameters.quantize_output_tensor, "another layout"
    parameters.nthread = 1
    parameters.ftype = Q4_K_M
    parameters.allow_requantize = True
    library.llama_model_quantize.restype = ctypes.c_uint32
    code = library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    if code != 0 or not target.exists():
        raise RuntimeError(f"llama_model_quantize answered {code}.")


class Prompts:
    """Prompts of an exact number of tokens, each different, the same to every contender."""

    def __init__(self) -> None:
        native = load_native(libraries.find(), backends=False)
        self._vocabulary = Vocabulary.load(native, shipped())

    def tokens(self, count: int, seed: int) -> list[int]:
        """Token ids of random words."""
        pick = random.Random(seed)
        text = f"Story {seed}: " + " ".join(pick.choice(WORDS) for _ in range(count + 8))
        return self._vocabulary.tokenize(text)[:count]


if __name__ == "__main__":
    _quantize(Path(sys.argv[1]), Path(sys.argv[2]))
