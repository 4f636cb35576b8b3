"""Weights that this machine's CPU keeps in another order: predicted from the header, and seen in a real load."""

from __future__ import annotations

from pathlib import Path

import pytest

from relevo.core.events import Ready, StartModel
from relevo.core.memory.demand import DEVICE_START, MIB, load_options, model_demand
from relevo.core.memory.repack import instructions_in, repacked_types
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of
from tests.golden.header_file import Tensor, write_header

from .llama_process import LlamaProcess

PRINTED_TO = 0.011 * MIB
TYPES = ("q4_0", "q4_1", "q5_0", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "f16")
"""One layer of each."""
MATRICES = {"attn_q": (512, 512), "attn_k": (512, 512), "attn_v": (512, 512), "attn_output": (512, 512)}
MATRICES |= {"ffn_gate": (512, 1024), "ffn_up": (512, 1024), "ffn_down": (1024, 512)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with a layer of every number type, and a table of q4_k that is its head too."""
    tensors: list[Tensor] = [("token_embd.weight", (512, 1024), "q4_k"), ("output_norm.weight", (512,), "f32")]
    for at, kind in enumerate(TYPES):
        tensors += [(f"blk.{at}.{name}_norm.weight", (512,), "f32") for name in ("attn", "ffn")]
        tensors += [(f"blk.{at}.{name}.weight", shape, kind) for name, shape in MATRICES.items()]
    keys = {"vocab_size": 1024, "context_length": 512, "embedding_length": 512, "block_count": len(TYPES)}
    keys |= {"feed_forward_length": 1024, "attention.head_count": 8, "attention.head_count_kv": 8}
    keys |= {"rope.dimension_count": 64}
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(f"w{n}" for n in range(765))]
    all_keys = {
        "general.architecture": "llama",
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [0.0] * 1024,
    }
    path = tmp_path_factory.mktemp("repack") / "all-types.gguf"
    return write_header(path, all_keys | {f"llama.{name}": value for name, value in keys.items()}, tensors)


@pytest.mark.parametrize("use_mmap", [True, False])
def test_what_the_cpu_repacks_is_known_before_it_is_loaded(libraries: Path, model: Path, use_mmap: bool) -> None:
    options = {"context_tokens": 256, "slots": 1, "batch_tokens": 64, "ubatch_tokens": 32, "use_mmap": use_mmap}
    with LlamaProcess(libraries, model) as worker:
        ready = worker.start(repack=True, **options)
        assert isinstance(ready, Ready), ready
    start = StartModel("m", "cpu", str(model), str(libraries), **options)  # type: ignore[arg-type]
    here = instructions_in(Path("/proc/cpuinfo").read_text())
    weighed = load_options(start, on_device=False, learned=DEVICE_START["cpu"], repacked_types=repacked_types(here))
    _, host = model_demand(shape_of(read_header(model)), weighed)
    assert ready.repacked_bytes
    loaded = (ready.model_bytes or 0) + ready.repacked_bytes
    if "amx_int8" in here:  # its tiles are padded, and the bound does not tell by how much
        assert host.weights_bytes == pytest.approx(loaded, rel=1 / 8)
        return
    assert host.weights_bytes == pytest.approx(loaded, abs=2 * PRINTED_TO)
    assert host.mapped_bytes == pytest.approx((ready.model_bytes or 0) if use_mmap else 0, abs=PRINTED_TO)
