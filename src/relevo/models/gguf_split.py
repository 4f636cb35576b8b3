"""A model in several files: found by their names, checked against each other, read as one.

Names and keys are those of llama.cpp's gguf-split: `NAME-00001-of-0000N.gguf`, and in each part `split.no` (from 0),
`split.count` and `split.tensors.count` (of all parts together). Metadata stands in the first part.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from relevo.core.errors import ModelFileError
from relevo.models.gguf_header import GgufHeader
from relevo.models.gguf_part import MAX_TENSORS, read_part

MAX_PARTS = 1024
_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def read_model(path: Path) -> GgufHeader:
    """The header of the whole model that this file is, or is a part of.

    Raises ModelFileError where a part is missing, damaged, or not of this model.
    """
    named = read_part(path)
    count = named.count("split.count") or 1
    if count == 1:
        return named
    number = named.count("split.no") or 0
    paths = _part_paths(path, number, count)
    parts = []
    total = named.count("split.tensors.count")
    for index, place in enumerate(paths):
        part = named if index == number else _read_other(place, index, count)
        _check_part(part, index, count, total)
        parts.append(part)
    return _joined(parts, total)


def may_be_part(path: Path) -> bool:
    """Whether a file has the name of a part."""
    return _NAME.fullmatch(path.name) is not None


def _part_paths(path: Path, number: int, count: int) -> list[Path]:
    """Where all parts should be, by the name of one."""
    if count > MAX_PARTS:
        raise ModelFileError(f"{path} claims to be one of {count} parts, more than the {MAX_PARTS} allowed.")
    if number >= count:
        raise ModelFileError(f"The model file {path} is damaged: it claims to be part {number + 1} of {count}.")
    found = _NAME.fullmatch(path.name)
    ending = f"-{number + 1:05}-of-{count:05}.gguf"
    if found is None:
        raise ModelFileError(
            f"{path} is part {number + 1} of {count} of a split model, but its name does not end in {ending}, "
            "and the other parts are found by it. Give the parts the names they were published with."
        )
    if (int(found["number"]), int(found["count"])) != (number + 1, count):
        raise ModelFileError(
            f"{path} holds part {number + 1} of {count}, but its name says otherwise; it should end in {ending}. "
            "It may be a copy of another part: fetch it again."
        )
    return [path.with_name(f"{found['stem']}-{index + 1:05}-of-{count:05}.gguf") for index in range(count)]


def _read_other(path: Path, index: int, count: int) -> GgufHeader:
    if not path.exists():
        raise ModelFileError(f"Part {index + 1} of {count} of the model is missing: there is no {path}. Fetch it.")
    return read_part(path)


def _check_part(part: GgufHeader, index: int, count: int, total: int | None) -> None:
    """Raises ModelFileError where what lies at this place is another part, or another model's."""
    holds, of = part.count("split.no"), part.count("split.count")
    if of != count or part.count("split.tensors.count") != total:
        raise ModelFileError(
            f"{part.path} is not a part of the same model as the files beside it: they disagree on the number of "
            "parts or tensors. Fetch it again."
        )
    if holds != index:
        which = "no part" if holds is None else f"part {holds + 1}"
        raise ModelFileError(f"{part.path} holds {which} where part {index + 1} of {count} belongs. Fetch it again.")


def _joined(parts: list[GgufHeader], total: int | None) -> GgufHeader:
    first = parts[0]
    seen: dict[str, str] = {}
    for part in parts:
        if part.architecture not in ("", first.architecture):
            raise ModelFileError(
                f"{part.path} is not a part of the same model as {first.path}: it holds {part.architecture!r}, "
                f"the first part {first.architecture!r}. Fetch it again."
            )
        for tensor in part.tensors:
            other = seen.setdefault(tensor.name, part.path)
            if other != part.path:
                raise ModelFileError(
                    f"The tensor {tensor.name!r} is in {other} and in {part.path}: they are no parts of one model. "
                    "Fetch them again."
                )
    if len(seen) > MAX_TENSORS:
        raise ModelFileError(f"The parts of {first.path} claim {len(seen)} tensors; {MAX_TENSORS} are allowed.")
    if total is None or total != len(seen):
        stated = "does not state how many" if total is None else f"states {total}"
        raise ModelFileError(
            f"The parts of {first.path} hold {len(seen)} tensors together, and the first {stated}: a part belongs to "
            "another model, or the split was not finished. Fetch them again."
        )
    return msgspec.structs.replace(
        first,
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
        parts=tuple(file for part in parts for file in part.parts),
        file_bytes=sum(part.file_bytes for part in parts),
    )
