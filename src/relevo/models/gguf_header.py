"""What the header of a GGUF model says, as records."""

from __future__ import annotations

import msgspec


class LongArray(msgspec.Struct, frozen=True):
    """An array that was counted and not kept. `kind` is the format's number of its items' type."""

    kind: int
    length: int


Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...] | LongArray


class Tensor(msgspec.Struct, frozen=True):
    """One tensor: its numbers' type by name, its shape (row length first), where it lies and how long it is."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset_bytes: int  # from the start of its file
    size_bytes: int
    part: int = 0
    """Which of the model's files it lies in, counted from 0."""


class Part(msgspec.Struct, frozen=True):
    """One file of a model; most models have one."""

    path: str
    file_bytes: int
    data_offset_bytes: int
    """Where its tensors begin."""


class GgufHeader(msgspec.Struct, frozen=True):
    """All that can be known of a model without reading its weights. None where the file does not say."""

    path: str
    """The model's file; of a split model its first part, whichever was named: the engine finds the others by it."""
    version: int
    architecture: str
    metadata: dict[str, Value]
    tensors: tuple[Tensor, ...]
    """Of all parts."""
    parts: tuple[Part, ...]
    header_bytes: int
    """Of the first part."""
    file_bytes: int
    """Of all parts together."""
    tokenizer_digest: str
    """sha256 over every `tokenizer.` key but the chat templates, whatever their order in the file."""
    vocabulary_tokens: int | None
    context_trained_tokens: int | None
    chat_template: str | None

    @property
    def data_offset_bytes(self) -> int:
        """Where the tensors of the first part begin."""
        return self.parts[0].data_offset_bytes

    @property
    def name(self) -> str | None:
        """The model's name in its own words."""
        return self.text("general.name")

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, padding not counted."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def quantization(self) -> str:
        """The number type that holds most of the weights, by bytes; "none" for a file without tensors."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.size_bytes
        return max(sizes, key=lambda kind: sizes[kind], default="none")

    def text(self, key: str) -> str | None:
        """The string under `key`; None where it is missing or something else."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def count(self, key: str) -> int | None:
        """The whole number (zero or more) under `key`; None where it is missing or something else."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def of_model(self, key: str) -> Value | None:
        """The value under `{architecture}.{key}`."""
        return self.metadata.get(f"{self.architecture}.{key}")
