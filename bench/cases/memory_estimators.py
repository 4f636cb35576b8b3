"""What estimators say a load takes in all: weights, KV, state and compute; each as it is, nothing mended.

What they add for the driver (xllamacpp 512 MiB, modelinfo-cli 600 MiB) is left out, because the engine's dry run does
not have it either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relevo.core.memory.load import LoadOptions

PLENTY_BYTES = 1 << 50
Keys = Mapping[str, Any]
Estimate = Callable[[LoadOptions], float]
"""Bytes for a load. Raises where the estimator has no answer."""


def file_and_full_kv(file: Path, keys: Keys) -> Estimate:
    """The common rule: the file's size, and 2 bytes for each key and value of every layer and token.

    As other projects check before a load: a head is embedding / heads wide, of varying heads the fewest count.
    """
    prefix = f"{keys['general.architecture']}."
    heads = _most(keys.get(f"{prefix}attention.head_count", 0))
    kv_heads = _least(keys.get(f"{prefix}attention.head_count_kv", heads))
    width = keys[f"{prefix}embedding_length"] / heads if heads else 0
    a_token = 2 * 2 * keys[f"{prefix}block_count"] * kv_heads * width
    return lambda options: file.stat().st_size + a_token * options.context_tokens


def xllamacpp(file: Path, keys: Keys) -> Estimate:
    """xllamacpp.memory, all on one card without end, and without the 512 MiB it adds for the driver.

    The header is parsed once. The files here carry no tokens, of which it takes the count: that is put in.
    """
    from gguf import GGUFReader
    from xllamacpp import memory

    data = memory.dump_metadata_json(GGUFReader(file), str(file))
    tokens = range(keys[f"{keys['general.architecture']}.vocab_size"])
    data["metadata"].setdefault("tokenizer.ggml.tokens", {"value": tokens})

    def estimate(options: LoadOptions) -> float:
        parsed = memory._import_gguf, memory.dump_metadata_json
        memory._import_gguf = lambda: (lambda *_: None, None)
        memory.dump_metadata_json = lambda *_: data
        try:
            card = {"name": "CUDA", "memory_free": PLENTY_BYTES, "memory_min": 0}
            said = memory.estimate_gpu_layers(
                [card],
                str(file),
                [],
                context_length=options.context_tokens,
                batch_size=options.ubatch_tokens,
                num_parallel=options.sequences,
                kv_cache_type=options.kv_type,
            )
        finally:
            memory._import_gguf, memory.dump_metadata_json = parsed
        return float(said.total_size)

    return estimate


def modelinfo(file: Path, _keys: Keys) -> Estimate:
    """modelinfo-cli, without the 600 MiB it adds for the driver and all else."""
    from modelinfo.calculator import calculate_footprint
    from modelinfo.parsers.gguf import parse_gguf_header

    header = parse_gguf_header(str(file))

    def estimate(options: LoadOptions) -> float:
        said = calculate_footprint(header, options.context_tokens)
        return float(said["base_memory_bytes"] + said["kv_cache_bytes"])

    return estimate


ESTIMATORS: dict[str, Callable[[Path, Keys], Estimate]] = {
    "file size + full KV": file_and_full_kv,
    "xllamacpp": xllamacpp,
    "modelinfo-cli": modelinfo,
}


def estimates(name: str, file: Path, keys: Keys, loads: list[LoadOptions]) -> list[float | str]:
    """Bytes for every load, or why there is no answer. Raises ImportError where the estimator is not installed."""
    try:
        estimate = ESTIMATORS[name](file, keys)
    except ImportError:
        raise
    except Exception as error:  # whatever a peer raises is its answer
        return [f"{type(error).__name__}: {error}"] * len(loads)
    found: list[float | str] = []
    for options in loads:
        try:
            found.append(estimate(options))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _most(value: Any) -> int:
    return max(value) if isinstance(value, list | tuple) else int(value)


def _least(value: Any) -> int:
    return min(value) if isinstance(value, list | tuple) else int(value)
