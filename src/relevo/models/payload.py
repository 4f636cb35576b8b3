"""Records too large for a frame, handed over as files in a private folder.

The file holds the whole record as MessagePack; the frame in its place carries the same call number, empty fields
and the path. Whoever made the folder deletes the file: the gateway, in both directions.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from relevo.core.events import MAX_FRAME_BYTES, Render, Rendered, Tokenize

MAX_PAYLOAD_BYTES = 64 * 2**20

Spillable = TypeVar("Spillable", Render, Tokenize, Rendered)
_EMPTY: dict[type, dict[str, Any]] = {
    Render: {"messages": [], "tools": None, "variables": {}},
    Tokenize: {"text": ""},
    Rendered: {"tokens": [], "text": None},
}
_encoder = msgspec.msgpack.Encoder()


class PayloadError(Exception):
    """A payload file is missing, too large, or not what its frame said. The message is one plain sentence."""


def spill(record: Spillable, folder: str | Path | None) -> Spillable:
    """The record itself if it fits in a frame; else a small one in its place, and the whole in a new file.

    Blocks on file writes. Raises PayloadError when it needs a file and there is no folder, it is larger than
    MAX_PAYLOAD_BYTES, or the file cannot be written.
    """
    whole = _encoder.encode(record)
    if len(whole) <= MAX_FRAME_BYTES:
        return record
    if len(whole) > MAX_PAYLOAD_BYTES:
        raise PayloadError(f"This takes {len(whole)} bytes, more than the {MAX_PAYLOAD_BYTES} allowed.")
    if folder is None:
        raise PayloadError(f"This takes {len(whole)} bytes, more than a frame, and there is no folder for it.")
    path = Path(folder) / f"{type(record).__name__.lower()}-{record.call}-{secrets.token_hex(8)}.msgpack"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(whole)
    except OSError as e:
        raise PayloadError(f"The payload file {path} cannot be written: {e.strerror or e}.") from None
    return msgspec.structs.replace(record, payload_path=str(path), **_EMPTY[type(record)])


def whole(record: Spillable, *, delete: bool = False) -> Spillable:
    """The record with its fields, read from its file where it has one. Blocks on the file.

    Raises PayloadError.
    """
    if record.payload_path is None:
        return record
    path = Path(record.payload_path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PAYLOAD_BYTES + 1)
        if delete:
            path.unlink(missing_ok=True)
    except OSError as e:
        raise PayloadError(f"The payload file {path} cannot be read: {e.strerror or e}.") from None
    if len(data) > MAX_PAYLOAD_BYTES:
        raise PayloadError(f"The payload file {path} is larger than {MAX_PAYLOAD_BYTES} bytes.")
    try:
        found = msgspec.msgpack.decode(data, type=type(record))
    except (msgspec.DecodeError, RecursionError) as e:
        raise PayloadError(f"The payload file {path} cannot be understood: {e}.") from None
    if found.call != record.call or found.payload_path is not None:
        raise PayloadError(f"The payload file {path} belongs to another call.")
    return found
