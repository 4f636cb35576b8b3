"""JSON from strangers: bounded in depth and size before anything is built, and read one way only."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any, NoReturn

import msgspec

from relevo.core.errors import BadRequest

NUMBER_LETTERS = 64

# A whole string (or the unclosed rest), a bracket, a comma, or an overlong number. Possessive: linear in the input.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]|,|[-+0-9.eE]{%d,}+' % (NUMBER_LETTERS + 1), re.DOTALL)
_LONG_NUMBER = re.compile(rb"[-+0-9.eE]{%d}" % (NUMBER_LETTERS + 1))
_OPENING = frozenset(b"[{")
_CLOSING = frozenset(b"]}")


def parse_json(data: bytes, *, depth: int, nodes: int) -> Any:
    """Read JSON under limits.

    `depth` counts nested lists and objects; `nodes` their members. Raises BadRequest for: broken UTF-8, bad syntax,
    too deep, too many values, a key given twice in one object, NaN or Infinity, a number over 64 characters or out
    of range, half a surrogate pair.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadRequest(f"The body is not valid UTF-8: byte {e.start} cannot be read.") from None
    _check_shape(data, depth, nodes)
    infinite: list[str] = []

    def read_float(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            infinite.append(literal)
        return value

    try:
        value = json.loads(text, object_pairs_hook=_object, parse_float=read_float, parse_constant=_refuse_constant)
    except json.JSONDecodeError as e:
        raise BadRequest(f"The body is not valid JSON: {e.msg}, at line {e.lineno}, column {e.colno}.") from None
    except RecursionError:
        raise BadRequest(f"The body is nested too deep: at most {depth} levels.") from None
    if infinite:
        param = _find_infinite(value, "")
        raise BadRequest(f"The number {infinite[0][:24]} is out of range. Numbers must fit in 64 bits.", param=param)
    return value


def body_digest(path: str, body: Any) -> str:
    """SHA-256, in hex, of a parsed body and the route it was sent to. Key order and white space do not matter.

    Raises BadRequest for text with half a surrogate pair, which no encoder can write.
    """
    try:
        canonical = msgspec.json.encode(body, order="sorted")
    except UnicodeEncodeError:
        raise BadRequest(
            "The body has a text with half a surrogate pair (\\ud800 to \\udfff alone). Send whole characters."
        ) from None
    return hashlib.sha256(path.encode() + b"\n" + canonical).hexdigest()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = name[:64].encode("utf-8", "replace").decode()
                raise BadRequest(f"The key {shown!r} is given twice in one object. Give it once.", param=shown)
            seen.add(name)
    return value


def _refuse_constant(literal: str) -> NoReturn:
    raise BadRequest(f"{literal} is not a JSON number. Numbers must be finite.")


def _check_shape(data: bytes, depth: int, nodes: int) -> None:
    """Depth, number of values and length of numbers, before a single object is built.

    Counting single bytes is a bound from above and settles almost every body; only where it does not are the
    tokens walked, and that stops at the limit.
    """
    openings = data.count(b"[") + data.count(b"{")
    if openings <= depth and data.count(b",") + openings < nodes and _LONG_NUMBER.search(data) is None:
        return
    level = values = 0
    for match in _TOKEN.finditer(data):
        first = data[match.start()]
        if (
            first == 0x22
        ):  # a string: its commas and brackets are text; with its own comma or bracket it is counted there
            continue
        if first in _CLOSING:
            level -= 1
            continue
        values += 1
        if values >= nodes:
            raise BadRequest(f"The body has too many values: at most {nodes}.")
        if first in _OPENING:
            level += 1
            if level > depth:
                raise BadRequest(f"The body is nested too deep: at most {depth} levels.")
        elif first != 0x2C:
            raise BadRequest(f"The body has a number of more than {NUMBER_LETTERS} characters.")


def _find_infinite(value: Any, path: str) -> str | None:
    """Where the first number out of range is, written as OpenAI writes `param`."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, dict):
        for name, inner in value.items():
            found = _find_infinite(inner, f"{path}.{name}" if path else str(name)[:64])
            if found is not None:
                return found
    if isinstance(value, list):
        for index, inner in enumerate(value):
            found = _find_infinite(inner, f"{path}[{index}]")
            if found is not None:
                return found
    return None
