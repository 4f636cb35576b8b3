"""The GGUF reader: right about sound files, and one plain error for every other."""

from __future__ import annotations

import struct
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relevo.core.errors import ModelFileError
from relevo.models.gguf import GgufHeader, LongArray, read_header

from . import gguf_writer as w


def read(data: bytes, tmp_path: Path) -> GgufHeader:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_header(path)


def refusal(data: bytes, tmp_path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read(data, tmp_path)
    return caught.value.message


def test_a_sound_file_tells_all_it_holds(tmp_path: Path) -> None:
    data = w.tiny()
    header = read(data, tmp_path)
    assert (header.architecture, header.name, header.version) == ("llama", "Tiny", 3)
    assert (header.vocabulary_tokens, header.context_trained_tokens) == (6, 128)
    assert header.chat_template == "{{ messages[0].content }}"
    assert header.of_model("attention.head_count_kv") == 2
    assert header.file_bytes == len(data)
    assert header.quantization == "q4_1"
    assert header.tensor_bytes == 6 * 68 + 64 * 40 + 256 + 256
    embedding = header.tensors[0]
    assert (embedding.name, embedding.type, embedding.shape, embedding.size_bytes) == (
        "token_embd.weight",
        "q8_0",
        (64, 6),
        408,
    )
    assert embedding.offset_bytes == header.data_offset_bytes
    assert header.tensors[1].offset_bytes == header.data_offset_bytes + 416  # padded to 32


def test_a_vocabulary_without_weights_is_a_sound_file(tmp_path: Path) -> None:
    assert read(w.file(w.keys(), []), tmp_path).quantization == "none"


def test_version_2_is_read_and_others_are_named(tmp_path: Path) -> None:
    assert read(w.file(w.keys(), w.TENSORS, version=2), tmp_path).version == 2
    assert "version 1" in refusal(w.file(w.keys(), w.TENSORS, version=1), tmp_path)
    assert "version 4" in refusal(w.file(w.keys(), w.TENSORS, version=4), tmp_path)


def test_another_alignment_moves_the_data(tmp_path: Path) -> None:
    keys = [*w.keys(), w.key("general.alignment", 4, 128)]
    assert read(w.file(keys, w.TENSORS, alignment=128), tmp_path).data_offset_bytes % 128 == 0
    for wrong in (0, 3, 2**31):
        assert "alignment" in refusal(w.file([*w.keys(), w.key("general.alignment", 4, wrong)], w.TENSORS), tmp_path)


def test_a_long_vocabulary_is_counted_and_not_kept(tmp_path: Path) -> None:
    tokens = [f"token{i}" * (i % 7) for i in range(20_000)]
    header = read(w.file(w.keys(tokens=w.array("tokenizer.ggml.tokens", w.STRING, tokens)), []), tmp_path)
    assert header.vocabulary_tokens == 20_000
    assert header.metadata["tokenizer.ggml.tokens"] == LongArray(8, 20_000)


def test_strings_that_cross_the_read_window_are_walked_right(tmp_path: Path) -> None:
    tokens = ["x" * 1_500_000, *["y" * 300] * 5000, "z" * 2_000_000]
    header = read(w.file(w.keys(tokens=w.array("tokenizer.ggml.tokens", w.STRING, tokens)), w.TENSORS), tmp_path)
    assert header.vocabulary_tokens == 5002
    assert header.tensors[-1].name == "output_norm.weight"


def test_the_tokenizer_digest_sees_each_token_and_ignores_order_and_template(tmp_path: Path) -> None:
    digest = read(w.tiny(), tmp_path).tokenizer_digest
    assert read(w.file(w.keys()[::-1], w.TENSORS), tmp_path).tokenizer_digest == digest
    assert read(w.file(w.keys(template=None), w.TENSORS), tmp_path).tokenizer_digest == digest
    other = w.array("tokenizer.ggml.tokens", w.STRING, ["<unk>", "<s>", "</s>", "a", "B", "é"])
    assert read(w.file(w.keys(tokens=other), w.TENSORS), tmp_path).tokenizer_digest != digest
    many = [str(i) for i in range(5000)]
    long = read(w.file(w.keys(tokens=w.array("tokenizer.ggml.tokens", 8, many)), []), tmp_path).tokenizer_digest
    many[4321] = "other"
    assert read(w.file(w.keys(tokens=w.array("tokenizer.ggml.tokens", 8, many)), []), tmp_path).tokenizer_digest != long


def test_a_short_file_is_called_incomplete(tmp_path: Path) -> None:
    assert "incomplete" in refusal(w.tiny()[:-300], tmp_path)
    assert "incomplete" in refusal(w.file(w.keys(), w.TENSORS, data=False), tmp_path)


def test_a_missing_file_a_folder_and_a_stranger_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no model file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="folder"):
        read_header(tmp_path)
    with pytest.raises(ModelFileError, match="not a file"):
        read_header("/dev/zero")
    assert "does not start with GGUF" in refusal(b"PK\x03\x04 something else", tmp_path)
    assert "does not start with GGUF" in refusal(b"", tmp_path)


HEAD = b"GGUF" + struct.pack("<I", 3)
HUGE = 2**63 - 1
HOSTILE = {
    "a key count": HEAD + struct.pack("<QQ", 0, HUGE),
    "a tensor count": HEAD + struct.pack("<QQ", HUGE, 0),
    "the length of a key's name": HEAD + struct.pack("<QQQ", 0, 1, HUGE),
    "the length of a string": HEAD + struct.pack("<QQ", 0, 1) + w.string("k") + struct.pack("<IQ", 8, HUGE),
    "an array of numbers": HEAD + struct.pack("<QQ", 0, 1) + w.string("k") + struct.pack("<IIQ", 9, 4, HUGE),
    "an array of strings": HEAD + struct.pack("<QQ", 0, 1) + w.string("k") + struct.pack("<IIQ", 9, 8, 2**21),
    "an array in an array": HEAD + struct.pack("<QQ", 0, 1) + w.string("k") + struct.pack("<IIQ", 9, 9, 1) * 50,
    "an unknown type": HEAD + struct.pack("<QQ", 0, 1) + w.string("k") + struct.pack("<I", 77),
    "a key twice": w.file([*w.keys(), w.key("general.name", 8, "again")], []),
    "a name that is not UTF-8": w.file([*w.keys(), w.key(b"\xff\xfe", 8, "x")], []),
    "a name with control characters": w.file([*w.keys(), w.key("a\x1b[31m", 8, "x")], []),
    "no architecture": w.file(w.keys(general__architecture=None), []),
    "an architecture that is a number": w.file(w.keys(general__architecture=w.key("general.architecture", 4, 1)), []),
    "a template that is a number": w.file(w.keys(template=w.key("tokenizer.chat_template", 4, 1)), []),
    "a template that is not UTF-8": w.file(w.keys(template=w.key("tokenizer.chat_template", 8, b"\xff")), []),
    "a context length that is a text": w.file(w.keys(context_length=w.key("llama.context_length", 8, "long")), []),
    "a negative context length": w.file(w.keys(context_length=w.key("llama.context_length", 5, -1)), []),
    "an alignment that is a text": w.file([*w.keys(), w.key("general.alignment", 8, "32")], []),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_claim_is_refused_in_a_sentence(what: str, tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(HOSTILE[what], tmp_path)


def with_tensor(row: bytes) -> bytes:
    keys = w.keys()
    return HEAD + struct.pack("<QQ", 1, len(keys)) + b"".join(keys) + row + bytes(4096)


HOSTILE_TENSORS = {
    "five dimensions": w.tensor("t", (1, 1, 1, 1, 1), 0, 0),
    "a size beyond 63 bits": w.tensor("t", (2**40, 2**40), 0, 0),
    "a size that wraps around to something small": w.tensor("t", (2**32, 2**32 + 1), 0, 0),
    "a size beyond the file": w.tensor("t", (2**30,), 0, 0),
    "an offset beyond the file": w.tensor("t", (4,), 0, 2**62),
    "an offset that wraps around": w.tensor("t", (4,), 0, 2**64 - 32),
    "an unknown number type": w.tensor("t", (32,), 4, 0),
    "half a block": w.tensor("t", (33,), 8, 0),
    "a name that is too long": w.tensor("t" * 64, (4,), 0, 0),
    "no name": w.tensor("", (4,), 0, 0),
}


@pytest.mark.parametrize("what", HOSTILE_TENSORS)
def test_a_hostile_tensor_is_refused(what: str, tmp_path: Path) -> None:
    refusal(with_tensor(HOSTILE_TENSORS[what]), tmp_path)


def test_tensors_may_not_overlap_or_share_a_name(tmp_path: Path) -> None:
    keys = w.keys()
    head = HEAD + struct.pack("<QQ", 2, len(keys)) + b"".join(keys)
    assert "should start at 32" in refusal(
        head + w.tensor("a", (4,), 0, 0) + w.tensor("b", (4,), 0, 0) + bytes(999), tmp_path
    )
    assert "twice" in refusal(head + w.tensor("a", (4,), 0, 0) + w.tensor("a", (4,), 0, 32) + bytes(999), tmp_path)


def test_many_small_arrays_cannot_fill_the_memory(tmp_path: Path) -> None:
    full = w.array("k000", w.STRING, [""] * 4096)
    arrays = [full.replace(b"k000", f"k{i:03}".encode()) for i in range(200)]
    assert "metadata is larger" in refusal(w.file([*w.keys(), *arrays], []), tmp_path)


MEMORY_KEYS = {
    "block_count": 48, "feed_forward_length": [96, 0, 96], "vocab_size": 6, "expert_count": 8, "expert_used_count": 2,
    "expert_feed_forward_length": 32, "expert_shared_count": 1, "expert_shared_feed_forward_length": 32,
    "leading_dense_block_count": 1, "nextn_predict_layers": 1, "full_attention_interval": 4,
    "attention.head_count": [4, 0, 4], "attention.head_count_kv": [2, 0, 1], "attention.key_length": 64,
    "attention.value_length": 64, "attention.key_length_swa": 32, "attention.value_length_swa": 32,
    "attention.key_length_mla": 192, "attention.value_length_mla": 128, "attention.kv_lora_rank": 512,
    "attention.q_lora_rank": 1536, "attention.sliding_window": 1024, "attention.shared_kv_layers": 10,
    "attention.indexer.key_length": 128, "attention.causal": False, "pooling_type": 1, "rope.dimension_count": 64,
    "attention.sliding_window_pattern": [True, False, True], "ssm.conv_kernel": 4, "ssm.inner_size": 64,
    "ssm.state_size": 16, "ssm.time_step_rank": 4, "ssm.group_count": 1, "kda.head_dim": 32, "wkv.head_size": 64,
    "token_shift_count": 2, "shortconv.l_cache": 3,
}  # fmt: skip


def kind_of(value: object) -> int:
    return 7 if isinstance(value, bool) else 4


def test_every_key_that_memory_follows_from_can_be_reached_per_layer_too(tmp_path: Path) -> None:
    keys = [w.key("general.architecture", 8, "odd"), w.key("general.type", 8, "model")]
    for name, value in MEMORY_KEYS.items():
        if isinstance(value, list):
            keys.append(w.array(f"odd.{name}", kind_of(value[0]), value))
        else:
            keys.append(w.key(f"odd.{name}", kind_of(value), value))
    header = read(w.file(keys, w.TENSORS), tmp_path)
    for name, value in MEMORY_KEYS.items():
        assert header.of_model(name) == (tuple(value) if isinstance(value, list) else value), name
    assert header.text("general.type") == "model" and header.vocabulary_tokens == 6


def only_the_one_error(data: bytes) -> GgufHeader | None:
    """Read it, in bounded memory; whatever it holds, it is a header or a ModelFileError."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        tracemalloc.start()
        try:
            header = read_header(file.name)
        except ModelFileError as e:
            assert e.message.count("\n") == 0
            return None
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 8 * 2**20
    assert header.architecture
    assert all(t.offset_bytes + t.size_bytes <= header.file_bytes for t in header.tensors)
    assert all(t.part < len(header.parts) for t in header.tensors)
    return header


SOUND = w.tiny()
EVERY_KIND = w.file(
    [
        *w.keys(),
        *(w.key(f"k.{kind}", kind, 0) for kind in w.FORMATS),
        *(w.array(f"a.{kind}", kind, [1, 0, 1]) for kind in w.FORMATS),
        w.key("split.no", 2, 0),
        w.key("split.count", 2, 1),
        w.key("split.tensors.count", 5, len(w.TENSORS)),
    ],
    w.TENSORS,
)
HEADER_BYTES = len(EVERY_KIND) - len(SOUND) + 1100
EXTREMES = [0, 1, 8, 9, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def test_a_file_of_every_kind_of_value_is_sound() -> None:
    assert only_the_one_error(EVERY_KIND) is not None


def test_a_file_cut_anywhere_is_refused_in_a_sentence() -> None:
    end = len(SOUND) - sum(w.tensor_bytes(shape, kind) for _, shape, kind in w.TENSORS)  # where weights begin, about
    for length in [*range(end), *range(end, len(SOUND), 61), len(SOUND) - 1]:
        assert only_the_one_error(SOUND[:length]) is None, length


def test_an_extreme_number_anywhere_is_a_header_or_the_one_error() -> None:
    for place in range(4, 1100):
        number = (2**32 - 1, 2**63 - 1, 2**64 - 1)[place % 3]
        only_the_one_error(SOUND[:place] + struct.pack("<Q", number) + SOUND[place + 8 :])


@given(
    flips=st.lists(st.tuples(st.integers(0, HEADER_BYTES), st.integers(0, 255)), max_size=8),
    numbers=st.lists(st.tuples(st.integers(0, HEADER_BYTES), st.sampled_from(EXTREMES)), max_size=3),
    moved=st.tuples(st.integers(0, HEADER_BYTES), st.integers(0, 64), st.binary(max_size=64)),
    cut=st.integers(0, 3 * len(EVERY_KIND)),
)
@settings(max_examples=300, deadline=2000)
def test_whatever_is_done_to_a_file_only_the_one_error_comes_out(
    flips: list[tuple[int, int]], numbers: list[tuple[int, int]], moved: tuple[int, int, bytes], cut: int
) -> None:
    data = bytearray(EVERY_KIND)
    for place, value in flips:
        data[place] = value
    for place, number in numbers:
        data[place : place + 8] = struct.pack("<Q", number)
    place, gone, put = moved
    data[place : place + gone] = put
    only_the_one_error(bytes(data[:cut]))


@given(st.binary(max_size=400), st.sampled_from([2, 3]), st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=200, deadline=2000)
def test_noise_behind_a_sound_beginning_is_refused(noise: bytes, version: int, tensors: int, keys: int) -> None:
    only_the_one_error(b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + noise)
