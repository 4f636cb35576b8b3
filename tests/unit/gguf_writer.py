"""Writes small GGUF files, sound or otherwise, for tests. Knows the format and none of the reader's code."""

from __future__ import annotations

import struct
from typing import Any

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
SIZES = {0: (1, 4), 1: (1, 2), 3: (32, 20), 8: (32, 34), 12: (256, 144), 14: (256, 210)}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: Any) -> bytes:
    return string(value) if kind == STRING else struct.pack("<" + FORMATS[kind], value)


def key(name: str | bytes, kind: int, value: Any) -> bytes:
    return string(name) + struct.pack("<I", kind) + scalar(kind, value)


def array(name: str, kind: int, values: list[Any]) -> bytes:
    body = b"".join(scalar(kind, value) for value in values)
    return string(name) + struct.pack("<IIQ", ARRAY, kind, len(values)) + body


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def tensor_bytes(shape: tuple[int, ...], kind: int) -> int:
    elements, size = SIZES[kind]
    count = 1
    for length in shape:
        count *= length
    return count // elements * size


def file(
    keys: list[bytes],
    tensors: list[tuple[str, tuple[int, ...], int]],
    *,
    version: int = 3,
    alignment: int = 32,
    data: bool = True,
) -> bytes:
    """A whole file; `data=False` leaves the weights out (which no sound reader may accept)."""
    table, offset = [], 0
    for name, shape, kind in tensors:
        table.append(tensor(name, shape, kind, offset))
        offset += -(-tensor_bytes(shape, kind) // alignment) * alignment
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(table)
    if not tensors:
        return head
    head += bytes(-len(head) % alignment)
    return head + (bytes(range(256)) * (offset // 256 + 1))[:offset] if data else head


TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "é"]


def keys(**changes: bytes | None) -> list[bytes]:
    """The metadata of a tiny llama; a change replaces a key by name (dots written as __), None leaves it out."""
    all_keys: dict[str, bytes | None] = {
        "general__architecture": key("general.architecture", STRING, "llama"),
        "general__name": key("general.name", STRING, "Tiny"),
        "block_count": key("llama.block_count", 4, 2),
        "context_length": key("llama.context_length", 4, 128),
        "embedding_length": key("llama.embedding_length", 4, 64),
        "feed_forward_length": key("llama.feed_forward_length", 4, 96),
        "head_count": key("llama.attention.head_count", 4, 4),
        "head_count_kv": key("llama.attention.head_count_kv", 4, 2),
        "vocab_size": key("llama.vocab_size", 4, len(TOKENS)),
        "tokens": array("tokenizer.ggml.tokens", STRING, TOKENS),
        "scores": array("tokenizer.ggml.scores", 6, [0.0] * len(TOKENS)),
        "template": key("tokenizer.chat_template", STRING, "{{ messages[0].content }}"),
    }
    all_keys.update(changes)
    return [value for value in all_keys.values() if value is not None]


TENSORS = [
    ("token_embd.weight", (64, 6), 8),
    ("blk.0.attn_q.weight", (64, 64), 3),
    ("blk.0.attn_norm.weight", (64,), 0),
    ("output_norm.weight", (64,), 0),
]


def tiny() -> bytes:
    return file(keys(), TENSORS)
