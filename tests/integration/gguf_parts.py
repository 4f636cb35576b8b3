"""Splits a real model file as llama.cpp's gguf-split does, knowing the format and nothing of the reader's code."""

from __future__ import annotations

import struct
from pathlib import Path

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT = 32


class _Walk:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 24

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def string(self) -> bytes:
        length = self.number("Q")
        self.at += length
        return self.data[self.at - length : self.at]

    def value(self, kind: int) -> None:
        if kind == 8:
            self.string()
        elif kind == 9:
            inner, count = self.number("I"), self.number("Q")
            for _ in range(count):
                self.value(inner)
        else:
            self.at += _SIZES[kind]


def split_model(whole: Path, folder: Path, count: int) -> list[Path]:
    """Write the model as `count` parts with about as many tensors each."""
    walk = _Walk(whole.read_bytes())
    tensors, keys = struct.unpack_from("<QQ", walk.data, 8)
    for _ in range(keys):
        walk.string()
        walk.value(walk.number("I"))
    metadata = walk.data[24 : walk.at]
    table = []
    for _ in range(tensors):
        name = walk.string()
        shape = [walk.number("Q") for _ in range(walk.number("I"))]
        table.append((name, shape, walk.number("I"), walk.number("Q")))
    start = -(-walk.at // _ALIGNMENT) * _ALIGNMENT
    ends = [offset for *_, offset in table[1:]] + [len(walk.data) - start]
    paths = []
    for number in range(count):
        chosen = range(len(table) * number // count, len(table) * (number + 1) // count)
        rows, data, at = b"", [], 0
        for index in chosen:
            name, shape, kind, offset = table[index]
            rows += struct.pack("<Q", len(name)) + name
            rows += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at)
            data.append(walk.data[start + offset : start + ends[index]])
            data.append(bytes(-len(data[-1]) % _ALIGNMENT))
            at += len(data[-2]) + len(data[-1])
        own = [("split.no", 2, "H", number), ("split.count", 2, "H", count), ("split.tensors.count", 5, "i", tensors)]
        extra = b"".join(
            struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I" + form, kind, value)
            for key, kind, form, value in own
        )
        key_count = len(own) + (keys if number == 0 else 0)
        head = b"GGUF" + struct.pack("<IQQ", 3, len(chosen), key_count) + (metadata if number == 0 else b"") + extra
        head += rows
        head += bytes(-len(head) % _ALIGNMENT)
        path = folder / f"split-{number + 1:05}-of-{count:05}.gguf"
        path.write_bytes(b"".join((head, *data)))
        paths.append(path)
    return paths
