"""Fingerprints: what twins must share, and a digest that is only computed once for an unchanged file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from relevo.core.errors import ModelFileError
from relevo.core.events import StartModel
from relevo.models.fingerprint import (
    AGREEING_FIELDS,
    Fingerprint,
    arithmetic_differs,
    differences,
    fingerprint,
    weights_digest,
)
from relevo.models.gguf import read_header
from relevo.service.identity import placement

from . import gguf_writer as w

CPU = Fingerprint(
    weights="a" * 64,
    tokenizer="b" * 64,
    template="c" * 64,
    quantization="q4_1",
    kv_type="f16",
    flash_attention=True,
    profile="fast",
    engine="llama.cpp v0.5.0",
    library="libggml-cpu-zen4.so",
)


def test_every_field_changes_the_digest() -> None:
    digests = {CPU.digest}
    for name in CPU.__struct_fields__:
        value = getattr(CPU, name)
        digests.add(
            msgspec.structs.replace(CPU, **{name: (not value) if isinstance(value, bool) else value + "x"}).digest
        )
    assert len(digests) == 1 + len(CPU.__struct_fields__)
    assert CPU.short == CPU.digest[:12]


def test_a_gpu_route_can_be_a_twin_of_a_cpu_route_but_not_its_equal() -> None:
    gpu = msgspec.structs.replace(CPU, library="Vulkan0", engine="llama.cpp v0.5.0")
    assert differences(CPU, gpu) == []
    assert arithmetic_differs(CPU, gpu) == ["library"]


@pytest.mark.parametrize("name", AGREEING_FIELDS)
def test_what_twins_must_share_is_named_when_it_differs(name: str) -> None:
    value = getattr(CPU, name)
    other = msgspec.structs.replace(CPU, **{name: (not value) if isinstance(value, bool) else "other"})
    (difference,) = differences(CPU, other)
    assert "other" in difference or "on and off" in difference


def test_it_is_put_together_from_file_configuration_and_worker(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(w.tiny())
    header = read_header(path)
    found = fingerprint(
        header, weights_digest(path), None, kv_type="f16", flash_attention=True, profile="fast", engine="e", library="l"
    )
    assert (found.tokenizer, found.quantization, found.template) == (header.tokenizer_digest, "q4_1", "")
    assert found.weights == hashlib.sha256(w.tiny()).hexdigest()


def test_an_unchanged_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> bool:
        calls.append((done, total))
        return True

    first = weights_digest(path, tmp_path, progress)
    assert weights_digest(path, tmp_path, progress) == first == hashlib.sha256(b"weights").hexdigest()
    assert calls == [(7, 7)]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    first = weights_digest(path, tmp_path)
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(1, 1))
    assert weights_digest(path, tmp_path) != first
    other = tmp_path / "other"
    other.write_bytes(b"weights")
    os.utime(other, ns=(1, 1))
    other.replace(path)  # same size, same time, another inode
    assert weights_digest(path, tmp_path) == first


def test_a_damaged_memory_is_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    for damage in (b"{", b"[]", b'[{"identity": 3}]', b"\xff"):
        (tmp_path / "weights-digests.json").write_bytes(damage)
        assert weights_digest(path, tmp_path) == hashlib.sha256(b"weights").hexdigest()


def test_a_state_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    assert weights_digest(path, tmp_path / "gone") == hashlib.sha256(b"weights").hexdigest()


def test_reading_can_be_ended_and_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    with pytest.raises(ModelFileError, match="ended"):
        weights_digest(path, tmp_path, lambda done, total: False)
    with pytest.raises(ModelFileError, match="no model file"):
        weights_digest(tmp_path / "none")
    with pytest.raises(ModelFileError, match="cannot be read"):
        weights_digest(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")

    def meddle(done: int, total: int) -> bool:
        with path.open("ab") as file:
            file.write(b"more")
        return done < 100

    with pytest.raises(ModelFileError, match=r"changed|ended"):
        weights_digest(path, tmp_path, meddle)


def test_a_part_of_a_model_on_a_device_is_not_taken_for_the_whole_of_it() -> None:
    whole = StartModel(model="m", route="gpu", path="m.gguf", libraries="", context_tokens=512, slots=1, gpu_layers=33)
    part = replace(whole, route="hybrid", gpu_layers=20)
    assert placement(whole) == placement(replace(whole, context_tokens=256))
    others = (part, replace(whole, repack=False), replace(whole, ubatch_tokens=64))
    assert len({placement(start) for start in (whole, *others)}) == 4
