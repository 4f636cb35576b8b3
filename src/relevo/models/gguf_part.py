"""Reads the header of one file: a whole model, or one part of a split one.

A model file is a stranger's input. Every count, length, offset and size is checked against the file before it is
used, arrays are walked and not kept, and whatever is wrong comes out as ModelFileError with one plain sentence.
Format: docs/gguf.md of ggml, versions 2 and 3, and the checks of llama.cpp v0.5.0's own reader.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from pathlib import Path
from typing import BinaryIO

from relevo.core.errors import ModelFileError
from relevo.core.memory.quantization import NUMBER_TYPES
from relevo.models.gguf_cursor import U32, U64, Cursor
from relevo.models.gguf_header import GgufHeader, LongArray, Part, Scalar, Tensor, Value

MAX_KEYS = 16_384
MAX_TENSORS = 131_072
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 63  # of a tensor; llama.cpp's GGML_MAX_NAME is 64 with the closing zero
MAX_KEY_BYTES = 65_535
MAX_ARRAY_ITEMS = 2**22
MAX_ALIGNMENT_BYTES = 2**20
MAX_KEPT_BYTES = 16 * 2**20  # of strings and small arrays, all together
_ITEM_BYTES = 64  # what keeping any item costs beside its own bytes
KEPT_ARRAY_ITEMS = 4096
"""Longer arrays are walked over and only counted; per-layer arrays are far shorter, vocabularies far longer."""

_ARRAY = 9
_STRING = 8
_BOOL = 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


def read_part(path: Path) -> GgufHeader:
    """Read and check the header of this file alone. Of a later part of a split model the architecture is "".

    Raises ModelFileError for anything that is not one whole, sound GGUF file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():  # opening a pipe would wait for its writer
            raise ModelFileError(f"{path} is not a file; name the .gguf file itself.")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _Reader(path, file, size).header()
    except FileNotFoundError:
        raise ModelFileError(f"There is no model file at {path}.") from None
    except IsADirectoryError:
        raise ModelFileError(f"{path} is a folder; name the .gguf file itself.") from None
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else None
        raise ModelFileError(f"The model file {path} cannot be read: {why or e}.") from None


class _Reader:
    """Reads one header from front to back."""

    def __init__(self, path: Path, file: BinaryIO, size_bytes: int) -> None:
        self._cursor = Cursor(path, file, size_bytes)
        self._path = path
        self._kept_bytes = 0
        self._digests: dict[str, bytes] = {}
        self._metadata: dict[str, Value] = {}

    def header(self) -> GgufHeader:
        cursor = self._cursor
        if cursor.size_bytes < 4 or cursor.take(4, "its first bytes") != b"GGUF":
            raise ModelFileError(f"{self._path} is not a GGUF model file: it does not start with GGUF.")
        version = cursor.number(U32, "its version")
        if version not in (2, 3):
            raise ModelFileError(f"{self._path} has GGUF version {version}; versions 2 and 3 can be read.")
        tensors = cursor.number(U64, "its tensor count")
        keys = cursor.number(U64, "its key count")
        if tensors > MAX_TENSORS:
            raise cursor.wrong(f"it claims {tensors} tensors, more than the {MAX_TENSORS} allowed")
        if keys > MAX_KEYS:
            raise cursor.wrong(f"it claims {keys} keys, more than the {MAX_KEYS} allowed")
        for _ in range(keys):
            self._key()
        architecture = self._architecture()
        table = self._tensors(tensors)
        part = Part(str(self._path), cursor.size_bytes, self._data_offset_bytes)
        return GgufHeader(
            path=str(self._path),
            version=version,
            architecture=architecture,
            metadata=self._metadata,
            tensors=table,
            parts=(part,),
            header_bytes=self._header_bytes,
            file_bytes=cursor.size_bytes,
            tokenizer_digest=self._tokenizer_digest(),
            vocabulary_tokens=self._vocabulary_tokens(architecture),
            context_trained_tokens=self._whole(f"{architecture}.context_length"),
            chat_template=self._chat_template(),
        )

    # ------------------------------------------------------------------ metadata

    def _key(self) -> None:
        cursor = self._cursor
        key = self._name(cursor.string("a key", MAX_KEY_BYTES), "a key")
        if key in self._metadata:
            raise cursor.wrong(f"the key {key!r} occurs twice")
        digest = hashlib.sha256()
        kind = cursor.number(U32, f"the key {key!r}")
        digest.update(U32.pack(kind))
        self._metadata[key] = self._array(key, digest) if kind == _ARRAY else self._scalar(key, kind, digest)
        if key.startswith("tokenizer.") and not key.startswith("tokenizer.chat_template"):
            self._digests[key] = digest.digest()

    def _scalar(self, key: str, kind: int, digest: hashlib._Hash) -> Scalar:
        cursor = self._cursor
        if kind == _STRING:
            raw = cursor.string(f"the key {key!r}")
            digest.update(raw)
            self._keep(len(raw) + _ITEM_BYTES)
            return self._text(key, raw)
        layout = _SCALARS.get(kind)
        if layout is None:
            raise cursor.wrong(f"the key {key!r} has the unknown type {kind}")
        raw = cursor.take(layout.size, f"the key {key!r}")
        digest.update(raw)
        return self._number(layout.unpack(raw)[0], kind)

    def _array(self, key: str, digest: hashlib._Hash) -> Value:
        cursor = self._cursor
        what = f"the array {key!r}"
        kind = cursor.number(U32, what)
        length = cursor.number(U64, what)
        digest.update(U32.pack(kind) + U64.pack(length))
        if length > MAX_ARRAY_ITEMS:
            raise cursor.wrong(f"{what} claims {length} items, more than the {MAX_ARRAY_ITEMS} allowed")
        layout = _SCALARS.get(kind)
        if kind != _STRING and layout is None:
            raise cursor.wrong(f"{what} holds the unsupported type {kind}")
        if length > KEPT_ARRAY_ITEMS:
            if layout is None:
                cursor.skip_strings(length, what, digest)
            else:
                cursor.skip(length * layout.size, what, digest)
            return LongArray(kind, length)
        if layout is None:
            return tuple(self._scalar(key, _STRING, digest) for _ in range(length))
        raw = cursor.take(length * layout.size, what)
        digest.update(raw)
        self._keep(length * _ITEM_BYTES)
        return tuple(self._number(item, kind) for (item,) in layout.iter_unpack(raw))

    @staticmethod
    def _number(value: int | float, kind: int) -> int | float | bool:
        return bool(value) if kind == _BOOL else value

    def _keep(self, count: int) -> None:
        self._kept_bytes += count
        if self._kept_bytes > MAX_KEPT_BYTES:
            raise self._cursor.wrong(f"its metadata is larger than the {MAX_KEPT_BYTES} bytes allowed")

    def _name(self, raw: bytes, what: str) -> str:
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise self._cursor.wrong(f"the name of {what} is not UTF-8") from None
        if not name or not name.isprintable():
            raise self._cursor.wrong(f"the name of {what} is empty or not printable")
        return name

    def _text(self, key: str, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            # A template must be what its author wrote; a licence text may have a broken character.
            if key.startswith("tokenizer.chat_template") or key == "general.architecture":
                raise self._cursor.wrong(f"the key {key!r} is not UTF-8") from None
            return raw.decode(errors="replace")

    def _whole(self, key: str) -> int | None:
        value = self._metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._cursor.wrong(f"the key {key!r} is not a whole number")
        return value

    # ------------------------------------------------------------------- tensors

    def _tensors(self, count: int) -> tuple[Tensor, ...]:
        """The tensor table; each tensor must start where the one before ended, and lie inside the file."""
        cursor = self._cursor
        alignment = self._alignment()
        rows: list[tuple[str, str, tuple[int, ...], int, int]] = []
        names: set[str] = set()
        expected = 0
        for _ in range(count):
            name = self._name(cursor.string("a tensor's name", MAX_NAME_BYTES), "a tensor")
            if name in names:
                raise cursor.wrong(f"the tensor {name!r} occurs twice")
            names.add(name)
            kind, shape, size = self._shape(name)
            offset = cursor.number(U64, f"the tensor {name!r}")
            if offset != expected:
                raise cursor.wrong(f"the tensor {name!r} starts at {offset} of the data and should start at {expected}")
            expected = _padded(offset + size, alignment)
            rows.append((name, kind, shape, offset, size))
        self._header_bytes = cursor.position
        start = _padded(cursor.position, alignment) if rows else cursor.position
        self._data_offset_bytes = start
        for name, _, _, offset, size in rows:
            if start + offset + size > cursor.size_bytes:
                raise ModelFileError(
                    f"The model file {self._path} is incomplete: the tensor {name!r} ends at byte "
                    f"{start + offset + size}, the file at {cursor.size_bytes}. Fetch it again."
                )
        part = self._split_number()
        return tuple(Tensor(name, kind, shape, start + offset, size, part) for name, kind, shape, offset, size in rows)

    def _shape(self, name: str) -> tuple[str, tuple[int, ...], int]:
        cursor = self._cursor
        what = f"the tensor {name!r}"
        dimensions = cursor.number(U32, what)
        if dimensions > MAX_DIMENSIONS:
            raise cursor.wrong(f"{what} has {dimensions} dimensions, more than the {MAX_DIMENSIONS} allowed")
        shape = tuple(cursor.number(U64, what) for _ in range(dimensions)) or (1,)
        number = cursor.number(U32, what)
        kind = NUMBER_TYPES.get(number)
        if kind is None:
            raise ModelFileError(
                f"The model file {self._path} stores {what} as type {number}, which this engine does not know."
            )
        if shape[0] % kind.block_elements:
            raise cursor.wrong(f"{what} has rows of {shape[0]} elements, no multiple of {kind.block_elements}")
        size = kind.row_bytes(shape[0])
        for length in shape[1:]:
            size *= length
            if size >= 2**63:
                break
        if size >= 2**63 or max(shape) >= 2**63:
            raise cursor.wrong(f"{what} claims an impossible size")
        return kind.name, shape, size

    def _alignment(self) -> int:
        value = self._metadata.get("general.alignment", 32)
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or not 0 < value <= MAX_ALIGNMENT_BYTES
            or value & (value - 1)
        ):
            raise self._cursor.wrong("general.alignment is not a power of two")
        return value

    # ----------------------------------------------------------- what it all says

    def _architecture(self) -> str:
        architecture = self._metadata.get("general.architecture")
        if architecture is None and self._split_number():
            return ""  # only the first part of a split model tells
        if not isinstance(architecture, str) or not architecture:
            raise self._cursor.wrong("it does not name its architecture")
        return architecture

    def _split_number(self) -> int:
        """Which part of a split model this is, from 0; 0 for a whole model too."""
        count, number = self._whole("split.count") or 1, self._whole("split.no") or 0
        return number if count > 1 else 0

    def _vocabulary_tokens(self, architecture: str) -> int | None:
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, LongArray):
            return tokens.length
        if isinstance(tokens, tuple):
            return len(tokens)
        return self._whole(f"{architecture}.vocab_size")

    def _chat_template(self) -> str | None:
        template = self._metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise self._cursor.wrong("its chat template is not a text")
        return template or None

    def _tokenizer_digest(self) -> str:
        whole = hashlib.sha256()
        for key in sorted(self._digests):
            whole.update(len(key.encode()).to_bytes(4, "little") + key.encode() + self._digests[key])
        return whole.hexdigest()


def _padded(count: int, alignment: int) -> int:
    return (count + alignment - 1) // alignment * alignment
