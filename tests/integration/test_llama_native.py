"""The binding proves the library before it trusts it; vocabularies; what a folder of libraries sees."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest

from relevo.core.errors import LibraryError, ModelFileError
from relevo.core.events import StartModel
from relevo.workers.llama import native as binding
from relevo.workers.llama.footprint import OwnFootprint
from relevo.workers.llama.landing import what_did_not_land
from relevo.workers.llama.native import LayoutMismatch, cpu_variants, find_library, load_native
from relevo.workers.llama.native_log import MIB, NativeLog, reported_bytes
from relevo.workers.llama.vocabulary import Vocabulary
from tests.golden.header_file import write_header


@pytest.fixture(scope="module")
def native(libraries):
    return load_native(libraries, backends=False)


@pytest.fixture(scope="module")
def vocabulary(native, demo_model):
    vocabulary = Vocabulary.load(native, demo_model)
    yield vocabulary
    vocabulary.close()
    vocabulary.close()


@pytest.mark.parametrize(
    "name",
    [
        "libllama.so",
        "libllama.v0.5.0.so",
        "libllama.vulkan.v0.5.0.so",
        "libllama.so.0.5.0",
        "libllama.0.dylib",
        "llama.dll",
    ],
)
def test_a_library_is_found_under_any_name_builds_give_it(tmp_path, name):
    for other in ("libllama-common.so", "libggml-llama.so", "libllama.txt", "llama-addon.node"):
        (tmp_path / other).touch()
    with pytest.raises(LibraryError, match="There is no llama library"):
        find_library(tmp_path, "llama")
    (tmp_path / name).touch()
    assert find_library(tmp_path, "llama") == tmp_path / name


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(LibraryError, match="cannot be read"):
        find_library(tmp_path / "none", "llama")


def test_the_release_is_told(native):
    assert native.engine.startswith("llama.cpp v0.5.0 (ggml 0.25.")


@pytest.mark.parametrize(
    ("table", "field"),
    [("MODEL_DEFAULTS", "n_gpu_layers"), ("CONTEXT_DEFAULTS", "yarn_ext_factor"), ("CONTEXT_DEFAULTS", "kv_unified")],
)
def test_a_library_with_another_layout_is_refused_in_one_sentence(native, monkeypatch, table, field):
    monkeypatch.setitem(getattr(binding, table), field, 77)
    with pytest.raises(LayoutMismatch, match=f"parameter {field} is .* where release v0.5.0 has 77"):
        binding._prove_defaults(native.ffi, native.call)


def test_another_release_is_refused(native, monkeypatch):
    monkeypatch.setattr(binding, "RELEASE", "0.6.0")
    with pytest.raises(LayoutMismatch, match=r"Relevo needs llama.cpp 0\.6\.0"):
        binding._prove_versions(native.ffi, native.call)


def test_every_declared_default_is_compared(native):
    for made, table in (
        (native.call.llama_model_default_params(), binding.MODEL_DEFAULTS),
        (native.call.llama_context_default_params(), binding.CONTEXT_DEFAULTS),
    ):
        assert [name for name, _ in native.ffi.typeof(made).fields] == list(table)


def test_cpu_libraries_are_scored_best_first(libraries):
    variants = cpu_variants(libraries)
    scores = [v.score for v in variants]
    assert scores == sorted(scores, reverse=True)
    assert {"haswell", "x64"} <= {v.name for v in variants}


def test_text_goes_to_tokens_and_back(vocabulary):
    text = "Grüße, 世界! 🙂 <|im_end|>"
    tokens = vocabulary.tokenize(text)
    assert b"".join(vocabulary.piece(token) for token in tokens).decode() == text
    special = vocabulary.tokenize(text, parse_special=True)
    assert special[-1] == vocabulary.eos == 2
    assert vocabulary.piece(2) == b""
    assert vocabulary.piece(2, special=True) == b"<|im_end|>"
    assert vocabulary.tokenize("") == []


def test_a_vocabulary_knows_its_ends_and_its_metadata(vocabulary):
    assert vocabulary.n_vocab == 49152
    assert vocabulary.n_ctx_train == 8192
    assert 2 in vocabulary.eog_tokens()
    assert all(vocabulary.is_eog(token) for token in vocabulary.eog_tokens())
    assert vocabulary.bos == 1
    assert vocabulary.meta("general.architecture") == "llama"
    assert vocabulary.meta("no.such.key") is None
    assert "im_start" in vocabulary.chat_template


@pytest.mark.parametrize("token", [-1, 49152, 1 << 40])
def test_tokens_out_of_range_never_reach_native_code(vocabulary, token):
    with pytest.raises(ValueError, match="There is no token"):
        vocabulary.piece(token)
    with pytest.raises(ValueError, match="There is no token"):
        vocabulary.is_eog(token)


def test_a_file_without_a_vocabulary_is_refused(native, tmp_path):
    with pytest.raises(ModelFileError, match="There is no model file"):
        Vocabulary.load(native, tmp_path / "none.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelFileError, match="cannot be read"):
        Vocabulary.load(native, broken)


def test_the_log_adds_up_buffer_lines_and_joins_fragments(capsys):
    log = NativeLog()
    log.add(2, "load_tensors:   CPU_Mapped model buffer size =    92.10 MiB\nload_tensors:      Vulkan0 model")
    log.add(5, " buffer size =     8.00 MiB\n")
    log.add(4, "it broke\n")
    assert log.buffer_bytes("model") == round(92.10 * MIB) + 8 * MIB
    assert log.buffer_bytes("model", "Vulkan0") == 8 * MIB
    assert log.host_bytes("model", "Vulkan0") == round(92.10 * MIB)
    assert log.buffer_bytes("KV") is None
    assert list(log.errors) == ["it broke"]
    assert capsys.readouterr().err == "it broke\n"


SPLIT_LOAD = """\
print_info: n_embd_k_gqa          = [256, 128]
print_info: n_embd_v_gqa          = 128
load_tensors:   CPU_Mapped model buffer size =    90.00 MiB
load_tensors:   CPU_REPACK model buffer size =     7.50 MiB
load_tensors:      Vulkan0 model buffer size =    50.00 MiB
llama_context: Vulkan_Host  output buffer size =     1.50 MiB
llama_kv_cache:        CPU KV buffer size =    20.00 MiB
llama_kv_cache:    Vulkan0 KV buffer size =    10.00 MiB
llama_kv_cache: size =   30.00 MiB (  1280 cells,  30 layers,  9/1 seqs), K (f16):   14.00 MiB, V (f16):   16.00 MiB
llama_memory_recurrent:    Vulkan0 RS buffer size =     3.00 MiB
llama_memory_recurrent:        CPU RS buffer size =     2.00 MiB
sched_reserve:    Vulkan0 compute buffer size =     9.00 MiB
sched_reserve: Vulkan_Host compute buffer size =     0.25 MiB
sched_reserve:    Vulkan0 compute buffer size =     4.00 MiB
"""


def test_what_a_gpu_route_takes_is_told_by_part_and_by_place():
    log = NativeLog()
    log.add(2, SPLIT_LOAD)
    assert reported_bytes(log, "Vulkan0") == {
        "model_bytes": 50 * MIB,
        "kv_bytes": 10 * MIB,
        "state_bytes": 3 * MIB,
        "compute_bytes": 4 * MIB,  # planned anew: the newest line counts
        "output_bytes": 3 * MIB // 2,
        "repacked_bytes": 15 * MIB // 2,
        "host_model_bytes": 90 * MIB,
        "host_kv_bytes": 20 * MIB,
        "host_state_bytes": 2 * MIB,
        "host_compute_bytes": MIB // 4,
    }


def test_a_cpu_route_says_everything_once_and_repacked_weights_apart():
    log = NativeLog()
    log.add(2, SPLIT_LOAD.replace("Vulkan0", "CPU").replace("Vulkan_Host", "CPU_Other"))
    told = reported_bytes(log, None)
    assert (told["model_bytes"], told["repacked_bytes"]) == (140 * MIB, 15 * MIB // 2)
    assert (told["kv_bytes"], told["state_bytes"]) == (30 * MIB, 5 * MIB)
    assert told["compute_bytes"] == 17 * MIB // 4
    assert not any(name.startswith("host_") for name in told)


def test_facts_of_layers_are_read_from_debug_lines_that_are_not_kept():
    log = NativeLog()
    log.add(2, SPLIT_LOAD.splitlines()[0] + "\n")
    for layer, device in enumerate(("CPU", "Vulkan0")):
        log.add(1, f"load_tensors: layer {layer:3d} assigned to device {device}, is_swa = 0\n")
    log.add(1, "tensor blk.1.ffn_up_exps.weight (3 MiB q8_0) buffer type overridden to CPU\n")
    log.add(1, "llama_kv_cache: layer   0: filtered\nllama_kv_cache: layer   1: dev = Vulkan0\n")
    log.add(2, SPLIT_LOAD.splitlines()[8] + "\n")
    log.add(1, "llama_kv_cache: layer   0: dev = CPU\n")
    log.add(2, SPLIT_LOAD.splitlines()[8] + "\n")
    for _ in range(3000):
        log.add(1, "llama_graph_n_input_tensors: one of thousands\n")
    assert log.facts.placed == {0: "CPU", 1: "Vulkan0"}
    assert log.facts.overridden == ["blk.1.ffn_up_exps.weight"]
    assert [cache.layers for cache in log.facts.caches] == [{1: "Vulkan0"}, {0: "CPU"}]
    assert log.facts.caches[0].cells == 1280
    assert (log.facts.caches[0].key_bytes, log.facts.caches[0].value_bytes) == (14 * MIB, 16 * MIB)
    assert log.facts.key_widths == (256, 128)
    assert len(log.lines) == 3
    log.begin_load()
    assert log.facts.placed == {}
    assert reported_bytes(log, "Vulkan0")["model_bytes"] is None


class Placing:
    """Stands for an engine that placed a model of four layers, the last two and the head on Vulkan0."""

    def __init__(self, landed_mib: float, left_back: tuple[int, ...] = ()) -> None:
        self.log = NativeLog()
        self.call = SimpleNamespace(llama_model_n_layer=lambda _: 4)
        for layer in range(5):
            device = "CPU" if layer < 2 else "Vulkan0"
            self.log.add(1, f"load_tensors: layer {layer:3d} assigned to device {device}, is_swa = 0\n")
        for layer in left_back:
            self.log.add(1, f"tensor blk.{layer}.ffn_up_exps.weight (8 MiB f32) buffer type overridden to CPU\n")
        self.log.add(2, "load_tensors: offloaded 3/5 layers to GPU\n")
        if landed_mib:
            self.log.add(2, f"load_tensors:      Vulkan0 model buffer size = {landed_mib:8.2f} MiB\n")


@pytest.mark.parametrize(
    ("placing", "options", "complaint"),
    [
        (Placing(20), {}, None),
        (Placing(18.5), {}, None),  # some small tensors a backend leaves to the CPU
        (Placing(4), {}, "Only 4.0 MiB of 20.0 MiB of weights landed on Vulkan0"),
        (Placing(0), {}, "Only 0 B of 20.0 MiB of weights landed on Vulkan0"),
        (Placing(12, left_back=(2,)), {"host_expert_layers": 1}, None),
        (Placing(4, left_back=(2,)), {"host_expert_layers": 1}, "Only 4.0 MiB of 12.0 MiB"),
        (Placing(20), {"gpu_layers": 99}, "Only 3 of 5 layers of the model landed on Vulkan0."),
        (Placing(20), {"gpu_layers": -1}, "Only 3 of 5 layers"),
        (Placing(20), {"device": "Vulkan1"}, "Only 0 of 3 layers of the model landed on Vulkan1."),
        (Placing(0), {"gpu_layers": 0}, None),
    ],
)
def test_weights_that_went_elsewhere_are_noticed(tmp_path, placing, options, complaint):
    path = write_header(
        tmp_path / "four.gguf",
        {"general.architecture": "llama", "llama.block_count": 4},
        [
            ("token_embd.weight", (1024, 1024), "f32"),
            *(
                (f"blk.{layer}.{name}.weight", shape, "f32")
                for layer in range(4)
                for name, shape in (("ffn_up_exps", (1024, 1024, 2)), ("attn_q", (1024, 512)))
            ),
        ],
    )
    settings = {"model": "m", "route": "gpu", "libraries": "", "device": "Vulkan0", "gpu_layers": 3}
    start = StartModel(path=str(path), **(settings | options))
    found = what_did_not_land(placing, None, start, dry=False)
    assert (found or "").startswith(complaint or "")
    assert (found is None) == (complaint is None)


def test_a_dry_run_counts_layers_and_no_bytes(tmp_path):
    start = StartModel("m", "gpu", str(tmp_path / "none.gguf"), "", device="Vulkan0", gpu_layers=3)
    assert what_did_not_land(Placing(0), None, start, dry=True) is None
    assert what_did_not_land(Placing(0), None, msgspec.structs.replace(start, gpu_layers=4), dry=True) is not None


def test_a_worker_knows_what_it_holds_and_held():
    memory = OwnFootprint()
    before = memory.read()
    block = bytearray(64 * MIB)
    full = memory.read()
    del block
    after = memory.read()
    assert full.rss_bytes >= before.rss_bytes + 60 * MIB
    assert full.data_bytes is not None
    assert before.data_bytes is not None
    assert full.data_bytes >= before.data_bytes + 60 * MIB
    assert after.peak_rss_bytes is not None
    assert after.peak_rss_bytes > full.rss_bytes - MIB  # the kernel counts pages in batches, a processor each
    assert after.rss_bytes < full.rss_bytes - 60 * MIB


def test_inspect_prints_devices_versions_and_the_chosen_cpu_library(libraries):
    command = [sys.executable, "-m", "relevo.workers.llama.inspect", "--libraries", str(libraries)]
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
    assert found["engine"].startswith("llama.cpp v0.5.0")
    assert found["cpu_library"] == found["cpu_variants"][0]["file"]
    cpu = next(d for d in found["devices"] if d["kind"] == "cpu")
    assert cpu["memory_total_bytes"] >= cpu["memory_free_bytes"] > 0
    assert b"CPU library" in subprocess.run(command, capture_output=True, check=True).stdout


def test_inspect_says_what_is_wrong_with_a_folder(tmp_path):
    command = [sys.executable, "-m", "relevo.workers.llama.inspect", "--libraries", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["code"] == "library"
