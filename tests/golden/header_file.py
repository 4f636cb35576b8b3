"""GGUF files of a header only: every key and the whole tensor table, and a hole where the weights would be.

The engine's dry run and our own reader look at nothing else, so a 40 GB model takes some kilobytes of disk.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from relevo.core.memory.quantization import BY_NAME, NUMBER_TYPES

Scalar = int | float | bool | str
Keys = Mapping[str, Scalar | Sequence[Scalar]]
Tensor = tuple[str, tuple[int, ...], str]
"""Name, shape (row length first), number type by name ("f32", "q4_k")."""

ALIGNMENT_BYTES = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_NUMBERS = {kind.name: number for number, kind in NUMBER_TYPES.items()}


def write_header(path: Path, keys: Keys, tensors: Sequence[Tensor]) -> Path:
    """Write a GGUF v3 file with these keys and tensors, all weights zero and not on the disk; returns `path`.

    Whole numbers are stored as u32 (i32 below zero), fractions as f32. A file without a tokenizer gets the model
    "no_vocab", which is enough for the engine when `ARCHITECTURE.vocab_size` is there.
    """
    keys = {"tokenizer.ggml.model": "no_vocab", **keys}
    table, offset = [], 0
    for name, shape, kind in tensors:
        table.append(_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, _NUMBERS[kind], offset))
        offset += -(-tensor_bytes(shape, kind) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(_string(name) + _value(value) for name, value in keys.items()) + b"".join(table)
    head += bytes(-len(head) % ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + offset)
    return path


def tensor_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor: whole blocks along its rows."""
    size = BY_NAME[kind].row_bytes(shape[0])
    for length in shape[1:]:
        size *= length
    return size


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _kind(value: Scalar) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _UINT32 if value >= 0 else _INT32
    return _FLOAT32 if isinstance(value, float) else _STRING


def _scalar(kind: int, value: Scalar) -> bytes:
    if kind == _STRING:
        return _string(str(value))
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)


def _value(value: Scalar | Sequence[Scalar]) -> bytes:
    if isinstance(value, str | int | float):
        return struct.pack("<I", _kind(value)) + _scalar(_kind(value), value)
    kind = max((_kind(item) for item in value), default=_UINT32)
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(_scalar(kind, item) for item in value)
