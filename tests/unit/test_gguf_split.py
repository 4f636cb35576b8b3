"""Models in several files, and headers that are read once: any part opens the whole, and a wrong part is named."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from relevo.core.errors import ModelFileError
from relevo.models.fingerprint import weights_digest
from relevo.models.gguf import read_header
from relevo.models.gguf_split import may_be_part
from relevo.models.header_cache import HeaderCache

from . import gguf_writer as w

OTHERS = [
    [("token_embd.weight", (64, 6), 8), ("blk.0.attn_q.weight", (64, 64), 3)],
    [("blk.0.attn_norm.weight", (64,), 0)],
    [("output_norm.weight", (64,), 0), ("output.weight", (64, 6), 8)],
]
TOTAL = sum(map(len, OTHERS))


def part(number: int, count: int = 3, total: int | None = TOTAL, tensors: list | None = None, **more: bytes) -> bytes:
    keys = w.keys() if number == 0 else []
    keys += [w.key("split.no", 2, number), w.key("split.count", 2, count)]
    keys += [] if total is None else [w.key("split.tensors.count", 5, total)]
    return w.file([*keys, *more.values()], OTHERS[number] if tensors is None else tensors)


def place(folder: Path, number: int, count: int = 3) -> Path:
    return folder / f"big-model-{number + 1:05}-of-{count:05}.gguf"


@pytest.fixture
def split(tmp_path: Path) -> Path:
    for number in range(3):
        place(tmp_path, number).write_bytes(part(number))
    return tmp_path


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert caught.value.message.count("\n") == 0
    return caught.value.message


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_part_opens_the_whole(split: Path, named: int) -> None:
    header = read_header(place(split, named))
    assert header.path == str(place(split, 0)), "the engine is given the first part"
    assert (header.architecture, header.vocabulary_tokens, len(header.parts)) == ("llama", 6, 3)
    assert [t.name for t in header.tensors] == [name for tensors in OTHERS for name, *_ in tensors]
    assert [t.part for t in header.tensors] == [0, 0, 1, 2, 2]
    assert header.file_bytes == sum(place(split, n).stat().st_size for n in range(3))
    assert header.tensor_bytes == sum(w.tensor_bytes(shape, kind) for t in OTHERS for _, shape, kind in t)
    for tensor in header.tensors:
        lies_in = header.parts[tensor.part]
        assert lies_in.data_offset_bytes <= tensor.offset_bytes <= lies_in.file_bytes - tensor.size_bytes


def test_a_first_part_without_tensors_is_sound(tmp_path: Path) -> None:
    tensors = [[], OTHERS[0], [*OTHERS[1], *OTHERS[2]]]
    for number in range(3):
        place(tmp_path, number).write_bytes(part(number, tensors=tensors[number]))
    assert len(read_header(place(tmp_path, 2)).tensors) == TOTAL


def test_one_part_of_one_is_a_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "any name.gguf"
    path.write_bytes(part(0, count=1, total=2))
    assert len(read_header(path).parts) == 1


def test_a_missing_part_is_named(split: Path) -> None:
    place(split, 1).unlink()
    said = refusal(place(split, 2))
    assert "Part 2 of 3" in said and "big-model-00002-of-00003.gguf" in said


def test_a_doubled_part_is_named(split: Path) -> None:
    place(split, 1).write_bytes(part(2))
    assert "holds part 3 where part 2 of 3 belongs" in refusal(place(split, 0))
    assert "holds part 3 of 3, but its name says otherwise" in refusal(place(split, 1))


FOREIGN = {
    "another count of parts": part(1, count=4),
    "another count of tensors": part(1, total=TOTAL + 1),
    "a model of its own": w.file(w.keys(), OTHERS[1]),
    "another architecture": part(1, arch=w.key("general.architecture", 8, "qwen3")),
    "a tensor of another part": part(1, tensors=OTHERS[2]),
    "too many tensors": part(1, tensors=[*OTHERS[1], ("blk.9.attn_norm.weight", (64,), 0)]),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_part_is_refused(split: Path, what: str) -> None:
    place(split, 1).write_bytes(FOREIGN[what])
    said = refusal(place(split, 0))
    assert "Fetch" in said and str(split) in said


def test_a_damaged_part_is_named_with_what_is_wrong(split: Path) -> None:
    whole = part(1)
    place(split, 1).write_bytes(whole[:-40])
    assert "00002-of-00003.gguf is incomplete" in refusal(place(split, 0))
    place(split, 1).write_bytes(whole[:30])
    assert "00002-of-00003.gguf is damaged" in refusal(place(split, 0))


def test_a_part_that_was_renamed_says_what_it_was_called(split: Path) -> None:
    renamed = place(split, 1).rename(split / "part2.gguf")
    assert "does not end in -00002-of-00003.gguf" in refusal(renamed)


def test_impossible_claims_of_a_part_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    for claim, words in (
        (part(0, count=65_535), "65535 parts"),
        (w.file([*w.keys(), w.key("split.no", 2, 3), w.key("split.count", 2, 3)], []), "part 4 of 3"),
        (w.file([*w.keys(), w.key("split.count", 8, "three")], []), "not a whole number"),
        (w.file([*w.keys(), w.key("split.no", 5, -1), w.key("split.count", 2, 3)], []), "not a whole number"),
        (w.file([w.key("split.no", 2, 1)], []), "does not name its architecture"),
    ):
        path.write_bytes(claim)
        assert words in refusal(path)


def test_parts_that_do_not_state_their_tensors_are_refused(split: Path) -> None:
    for number in range(3):
        place(split, number).write_bytes(part(number, total=None))
    assert "does not state how many" in refusal(place(split, 0))


def test_names_of_parts_are_known_as_such() -> None:
    assert may_be_part(Path("m-00001-of-00002.gguf"))
    assert not may_be_part(Path("m-1-of-2.gguf")) and not may_be_part(Path("m.gguf"))


# ------------------------------------------------------------------ read once


def test_an_unchanged_model_is_read_once(split: Path) -> None:
    reads: list[Path] = []
    cache = HeaderCache()

    def read(path: Path):
        reads.append(path)
        return read_header(path)

    first = cache.get(place(split, 0), read)
    assert cache.get(place(split, 0), read) is first and len(reads) == 1
    os.utime(place(split, 2), ns=(1, 1))  # any part
    cache.get(place(split, 0), read)
    assert len(reads) == 2
    place(split, 2).unlink()
    with pytest.raises(ModelFileError):
        cache.get(place(split, 0), read)


def test_another_file_in_the_same_place_is_read_again(tmp_path: Path) -> None:
    path, other = tmp_path / "m.gguf", tmp_path / "other"
    path.write_bytes(w.tiny())
    os.utime(path, ns=(1, 1))
    assert read_header(path).name == "Tiny"
    other.write_bytes(w.tiny().replace(b"Tiny", b"Tidy"))
    os.utime(other, ns=(1, 1))
    other.replace(path)  # same size, same time, another inode
    assert read_header(path).name == "Tidy"


def test_a_file_that_changes_while_it_is_read_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(w.tiny())
    cache = HeaderCache()

    def read(path: Path):
        header = read_header(path)
        os.utime(path, ns=(len(reads) + 5, 5))
        reads.append(path)
        return header

    reads: list[Path] = []
    cache.get(path, read)
    os.utime(path, ns=(77, 77))
    cache.get(path, read)
    assert len(reads) == 2


def test_the_cache_forgets_what_was_used_longest_ago(tmp_path: Path) -> None:
    reads: list[str] = []
    cache = HeaderCache(most=2)

    def read(path: Path):
        reads.append(path.name)
        return read_header(path)

    for name in ("a", "b", "c", "c", "a"):
        (tmp_path / name).write_bytes(w.tiny()) if not (tmp_path / name).exists() else None
        cache.get(tmp_path / name, read)
    assert reads == ["a", "b", "c", "a"]


# ---------------------------------------------------------------- the digest of all parts


def test_the_digest_covers_every_part_and_is_the_same_whichever_is_named(split: Path, tmp_path: Path) -> None:
    digest = weights_digest(place(split, 0), tmp_path)
    each = b"".join(hashlib.sha256(place(split, n).read_bytes()).digest() for n in range(3))
    assert digest == hashlib.sha256(each).hexdigest()
    assert weights_digest(place(split, 2)) == digest
    changed = bytearray(place(split, 2).read_bytes())
    changed[-1] ^= 1
    place(split, 2).write_bytes(changed)
    assert weights_digest(place(split, 0), tmp_path) != digest


def test_progress_runs_through_all_parts(split: Path) -> None:
    seen: list[tuple[int, int]] = []
    weights_digest(place(split, 1), None, lambda done, total: seen.append((done, total)) or True)
    total = sum(place(split, n).stat().st_size for n in range(3))
    assert [t for _, t in seen] == [total] * 3
    assert [d for d, _ in seen] == sorted(d for d, _ in seen) and seen[-1][0] == total
