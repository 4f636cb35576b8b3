"""Token ids as bytes: 4 each, little endian, signed as in the engine."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

_CODE = "i" if array("i").itemsize == 4 else "l"


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Raises OverflowError or TypeError for what is not a token id."""
    packed = array(_CODE, tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Raises ValueError when the length is not a multiple of four."""
    packed = array(_CODE)
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
