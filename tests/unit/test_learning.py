"""What a failed allocation says of itself, in the words of the engine's backends."""

from __future__ import annotations

import pytest

from relevo.service.learning import asked_bytes


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 194641920", 194_641_920),
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 186.00 MiB on device 0: cudaMalloc failed: "
            "out of memory",
            195_035_136,
        ),
        ("ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 47384000", 47_384_000),
        ("ggml_vulkan: Device memory allocation of size 268435456 failed.", 268_435_456),
    ],
)
def test_the_buffer_that_could_not_be_had_is_read_from_the_engines_words(line: str, asked: int) -> None:
    assert asked_bytes(("load_tensors: a line before", line, "llama_model_load: error loading model")) == asked


def test_words_that_name_no_buffer_teach_nothing() -> None:
    assert asked_bytes(("std::bad_alloc", "failed to allocate compute pp buffers")) is None
