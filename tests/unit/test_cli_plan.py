"""`relevo plan` by itself: what it reads, refuses, reckons and prints, from header-only files."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace as replace_load
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from relevo.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE, main
from relevo.cli.planning.check import Row, card_rows
from relevo.cli.planning.full_load import FullLoad, Observed
from relevo.cli.planning.places import read_bytes
from relevo.cli.planning.read_rate import memory_rate, storage_rate
from relevo.cli.planning.sizing import model_config, name_from, parse_size, read_model, size_up
from relevo.cli.planning.targets import Target, choose_target, imagined
from relevo.cli.planning.weighing import Weighing
from relevo.core.errors import ConfigError, ModelFileError, RelevoError
from relevo.core.events import Ready
from relevo.core.memory.demand import PARTS, Demand
from relevo.core.memory.dry_run import DryCache, DryRunFigures
from relevo.core.memory.load import LoadOptions
from relevo.core.memory.shape import LayerShape, ModelShape
from tests.golden.families_attention import family
from tests.golden.header_file import Keys, Tensor, write_header

pytestmark = pytest.mark.usefixtures("own_place")
MIB, GIB = 2**20, 2**30


def llama(
    folder: Path,
    *,
    architecture: str = "llama",
    layers: int = 16,
    name: str = "Plain-1B-Q8_0",
    odd: dict[str, Any] | None = None,
) -> Path:
    """A dense model of about a GiB, header only. `odd`: keys with other values than they should have."""
    keys: Keys = {
        "general.architecture": architecture,
        "general.name": "Plain 1B",
        **{
            f"{architecture}.{key}": value
            for key, value in {
                "block_count": layers,
                "context_length": 32768,
                "embedding_length": 2048,
                "feed_forward_length": 8192,
                "attention.head_count": 32,
                "attention.head_count_kv": 8,
                "attention.layer_norm_rms_epsilon": 1e-5,
                "rope.dimension_count": 64,
                "vocab_size": 32000,
                **(odd or {}),
            }.items()
        },
    }
    rows: list[Tensor] = [("token_embd.weight", (2048, 32000), "q8_0")]
    for layer in range(layers):
        widths = {"attn_q": 2048, "attn_k": 512, "attn_v": 512, "attn_output": 2048, "ffn_gate": 8192, "ffn_up": 8192}
        rows += [(f"blk.{layer}.{part}.weight", (2048, width), "q8_0") for part, width in widths.items()]
        rows += [(f"blk.{layer}.ffn_down.weight", (8192, 2048), "q8_0")]
        rows += [(f"blk.{layer}.{norm}.weight", (2048,), "f32") for norm in ("attn_norm", "ffn_norm")]
    rows += [("output_norm.weight", (2048,), "f32"), ("output.weight", (2048, 32000), "q8_0")]
    return write_header(folder / f"{name}.gguf", keys, rows)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return llama(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main(["plan", *map(str, words), "--json"]) == EXIT_OK
    return dict(json.loads(capsys.readouterr().out))


def page(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["plan", *map(str, words)]) == EXIT_OK
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = EXIT_FAILED) -> str:
    assert main(["plan", *map(str, words)]) == code
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "Traceback" not in said.err and said.out == ""
    return said.err


# ------------------------------------------------------------------ the plan itself


def test_the_json_has_every_figure_of_the_contract_in_bytes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, model, "--device-memory", "8GiB", "--context", "8192", "--slots", "1")
    assert (found["file"], found["architecture"], found["tier"]) == (str(model), "llama", "closed form")
    assert set(found["parts"]) == set(found["host_parts"]) == set(PARTS)
    assert found["total_bytes"] == sum(found["parts"].values())
    assert found["options"]["context_tokens"] == 8192 and found["options"]["slots"] == 1
    assert found["parts"]["kv_bytes"] == 16 * 2 * 8 * 64 * 2 * (8192 + 256), "and the cells of the probe"
    first = found["fits"][0]
    assert (first["verdict"], first["here"], first["total_bytes"]) == ("admit", False, 8 * GIB)
    assert {"device", "verdict", "max_context_tokens"} <= set(first)
    assert found["standby"]["route"] == "cpu" and found["standby"]["total_bytes"] > found["standby"]["mapped_bytes"]
    assert found["choice"]["verdict"] == "admit" and found["choice"]["changes"] == []


def test_no_weights_are_counted_twice_or_lost(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, model, "--device-memory", "8GiB")
    tensors = sum(tensor.size_bytes for tensor in read_model(model)[0].tensors)
    assert found["parts"]["weights_bytes"] + found["host_parts"]["weights_bytes"] == tensors
    some = plan(capsys, model, "--device-memory", "8GiB", "--gpu-layers", "5")
    assert some["parts"]["weights_bytes"] + some["host_parts"]["weights_bytes"] == tensors
    assert 0 < some["parts"]["weights_bytes"] < found["parts"]["weights_bytes"]
    assert some["options"]["route"] == "hybrid"


def test_planned_for_the_cpu_nothing_is_on_a_device(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, model, "--device", "cpu")
    assert set(found["parts"].values()) == {0} and found["standby"] is None
    assert found["total_bytes"] == found["host_total_bytes"] == sum(found["host_parts"].values())
    assert [row["device"] for row in found["fits"]] == ["host"]


def test_the_largest_context_fits_and_the_next_one_does_not(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = ("--device-memory", "3GiB")
    largest = plan(capsys, model, *memory)["fits"][0]["max_context_tokens"]
    assert 8192 < largest < 32768
    assert plan(capsys, model, *memory, "--context", str(largest))["fits"][0]["verdict"] == "admit"
    assert plan(capsys, model, *memory, "--context", str(largest + 256))["fits"][0]["verdict"] != "admit"


def test_less_is_taken_step_by_step_and_the_steps_add_up(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (model, "--device-memory", "3GiB", "--context", "32768")
    found = plan(capsys, *words)
    choice = found["choice"]
    assert choice["verdict"] == "reduce" and choice["changes"]
    freed = sum(change["frees_bytes"] for change in choice["changes"])
    assert found["total_bytes"] - freed == choice["total_bytes"] <= found["fits"][0]["available_bytes"]
    text = page(capsys, *words)
    assert "Relevo would reduce it:" in text and "  1. " in text


def test_a_model_larger_than_the_device_says_what_each_place_costs(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (model, "--device-memory", "2GiB", "--context", "8192")
    found = plan(capsys, *words)
    assert found["choice"]["verdict"] == "offload" and found["choice"]["options"]["route"] == "hybrid"
    places = {place["place"]: place for place in found["places"]}
    assert places["gpu"]["token_s"] is None and "not measured" in places["gpu"]["how"]
    assert places["ram"]["token_s"] > 0
    assert places["gpu"]["weights_bytes"] == found["choice"]["parts"]["weights_bytes"]
    assert "What one token reads of the weights" in page(capsys, *words)


def test_a_token_reads_the_experts_it_uses_and_one_row_of_the_table() -> None:
    layer = LayerShape(weights_bytes=1000, expert_bytes=800)
    shape = ModelShape(
        architecture="a", embedding=1, vocabulary_tokens=1, context_trained_tokens=1, layers=(layer,) * 4,
        input_weights_bytes=500, output_weights_bytes=300, experts=8, experts_used=2,
    )  # fmt: skip
    cpu = LoadOptions(on_device=False)
    assert read_bytes(shape, cpu) == (0, 4 * (200 + 200) + 300)
    assert read_bytes(shape, replace(cpu, on_device=True)) == (4 * (200 + 200) + 300, 0)
    hybrid = replace(cpu, on_device=True, gpu_layers=3)
    assert read_bytes(shape, hybrid) == (2 * 400 + 300, 2 * 400)
    experts = replace(cpu, on_device=True, host_expert_layers=3)
    assert read_bytes(shape, experts) == (3 * 200 + 400 + 300, 3 * 200)
    tied = replace(shape, tied_table_bytes=500, output_weights_bytes=0)
    assert read_bytes(tied, cpu) == (0, 4 * 400 + 500), "a table that is the head too is read whole"
    assert read_bytes(tied, replace(cpu, on_device=True)) == (4 * 400 + 500, 0)


def test_what_fits_nowhere_says_what_is_missing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, model, "--device-memory", "256MiB")
    assert found["fits"][0]["verdict"] == "redirect" and found["fits"][0]["max_context_tokens"] == 0
    assert found["choice"]["options"]["route"] == "cpu"


def test_a_part_that_is_not_known_says_why_and_makes_no_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = llama(tmp_path, architecture="unheard-of", name="odd")
    words = (odd, "--no-dry-run", "--device-memory", "8GiB")
    found = plan(capsys, *words)
    assert found["parts"]["compute_bytes"] is None and found["total_bytes"] is None
    assert found["reasons"]["parts"]["compute_bytes"] and "--no-dry-run" in found["tier_reason"]
    assert found["at_least_bytes"] > found["parts"]["weights_bytes"]
    assert found["fits"][0]["max_context_tokens"] is None and found["fits"][0]["max_context_reason"]
    text = page(capsys, *words)
    assert "unknown" in text and "Unknown: compute buffer." in text and "over " in text


def test_without_a_device_the_page_says_how_to_ask_about_one(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, model)
    assert "--device-memory 8GiB" in text
    assert [row["device"] for row in plan(capsys, model)["fits"]] == ["host"]


def test_the_page_is_plain_text_where_it_is_no_terminal(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, model, "--device-memory", "8GiB")
    assert "\x1b" not in text
    for word in ("weights", "KV cache", "compute buffer", "margin", "total", "CPU twin", "free to lease", "Standby:"):
        assert word in text
    assert re.search(r"Figures: closed form: .*nothing was loaded", text)


def test_a_configured_model_is_planned_by_its_name_or_alias(
    own_place: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_place / "relevo.toml").write_text(
        f'[devices.gpu0]\nkind = "emulated"\ntotal_bytes = {6 * GIB}\n'
        f'[models.mine]\npath = "{model}"\naliases = ["other"]\ncontext_tokens = 4096\nslots = 3\nkv_type = "q8_0"\n'
    )
    found = plan(capsys, "other")
    assert (found["name"], found["device"]) == ("mine", "gpu0")
    assert found["options"]["context_tokens"] == 4096 and found["options"]["kv_type"] == "q8_0"
    assert {row["device"]: row["emulated"] for row in found["fits"]} == {"gpu0": True, "host": False}
    assert plan(capsys, "mine", "--context", "1024")["options"]["context_tokens"] == 1024
    assert "(known: mine)" in refusal(capsys, "yours")


def test_the_example_in_the_readme_is_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("    $ relevo plan ")[2].partition("\n\nWeights, KV")[0].splitlines()
    file, *words = shown[0].split()
    printed = page(capsys, family("Llama-3.1-8B").write(tmp_path), *words).splitlines()
    assert file == "Llama-3.1-8B.gguf" and len(shown) > 20
    for line in shown[1:]:
        assert line.removeprefix("    ").rstrip() in [said.rstrip() for said in printed], line


# ------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--context", "32769"), "32768 tokens at most"),
        (("--cpu-context", "40000"), "--cpu-context 40000"),
        (("--context", "0"), "at least 64"),
        (("--slots", "0"), "1 to 255"),
        (("--slots", "256"), "1 to 255"),
        (("--batch", "16"), "32 to 8192"),
        (("--ubatch", "5000"), "32 to 4096"),
        (("--batch", "64", "--ubatch", "128"), "larger than --batch"),
        (("--context", "256", "--batch", "512"), "larger than the context of 256"),
        (("--batch", "32", "--slots", "32"), "more than the 32 slots"),
        (("--gpu-layers", "-1"), "--gpu-layers -1"),
        (("--kv-type", "q8_0", "--no-flash-attention"), "needs flash attention"),
        (("--device", "gpu7"), "neither a device here nor a kind"),
        (("--device-memory", "much"), "is not a size"),
        (("--device-memory", "8"), "is not a size"),
    ],
)
def test_what_is_not_possible_is_refused_with_what_would_be(
    model: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, model, *words)


def test_wrong_usage_has_its_own_exit_code(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--help" in refusal(capsys, model, "--kv-type", "q4_0", code=EXIT_USAGE)
    assert "--help" in refusal(capsys, model, "--context", "many", code=EXIT_USAGE)
    assert "--help" in refusal(capsys, code=EXIT_USAGE)


def test_a_damaged_a_missing_and_a_foreign_file_are_told_apart(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.gguf"
    with model.open("rb") as whole:
        cut.write_bytes(whole.read(3000))
    assert "damaged" in refusal(capsys, cut)
    assert "no model file" in refusal(capsys, tmp_path / "none.gguf")
    cut.write_bytes(b"PK\x03\x04" * 1000)
    assert "does not start with GGUF" in refusal(capsys, cut)
    projector = write_header(tmp_path / "p.gguf", {"general.architecture": "clip"}, [("v.weight", (32,), "f32")])
    assert "projector" in refusal(capsys, projector)
    boastful = llama(tmp_path, layers=2, name="boastful")
    with boastful.open("r+b") as file:
        head = file.read(2000)
        at = head.index(b"llama.block_count") + len(b"llama.block_count") + 4
        file.seek(at)
        file.write((4000).to_bytes(4, "little"))
    assert "claims 4000 layers and holds tensors of 2" in refusal(capsys, boastful)
    layerless = write_header(tmp_path / "l.gguf", {"general.architecture": "llama"}, [("a.weight", (32,), "f32")])
    assert "llama.block_count" in refusal(capsys, layerless)


KEYS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window",
    "attention.sliding_window_pattern", "rope.dimension_count", "vocab_size", "expert_count", "expert_used_count",
    "ssm.state_size", "ssm.inner_size", "nextn_predict_layers", "full_attention_interval",
)  # fmt: skip
NONSENSE = st.one_of(
    st.sampled_from([0, 1, 2, 3, 5, 7, 17, 100, 65535, 2**31 - 1, 2**32 - 1]),
    st.sampled_from([-1, 0.5, "many", True, [], [1, 2, 3], [0] * 16, [2**32 - 1] * 16]),
)


@given(st.dictionaries(st.sampled_from(KEYS), NONSENSE, min_size=1, max_size=3))
@settings(max_examples=60, deadline=2000)
def test_nonsense_in_a_header_is_a_plan_or_the_one_error(odd: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = llama(Path(folder), odd=odd)
        try:
            header, shape = read_model(path)
            sizing = size_up("odd", header, shape, model_config(header, None), GPU)
            scales = Weighing(shape, "nvidia")
            for start in (sizing.start, sizing.cpu):
                for demand in scales.weigh(start):
                    assert all(value is None or value >= 0 for value in demand.parts().values())
        except RelevoError as error:
            assert error.message.count("\n") == 0


# ---------------------------------------------------------------------- its parts


def test_a_step_is_no_larger_than_the_context(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = plan(capsys, model, "--context", "64")["options"]
    assert (options["batch_tokens"], options["ubatch_tokens"]) == (64, 64)
    options = plan(capsys, model, "--ubatch", "1024")["options"]
    assert (options["batch_tokens"], options["ubatch_tokens"]) == (1024, 1024)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * GIB), ("8 gib", 8 * GIB), ("8g", 8 * GIB), ("8GB", 8 * 10**9), ("1.5GiB", 3 * GIB // 2),
     ("512MiB", 512 * MIB), ("8589934592", 8 * GIB), ("1TiB", 1 << 40), ("1048576 B", MIB)],
)  # fmt: skip
def test_sizes_are_read_as_they_are_written(text: str, size: int) -> None:
    assert parse_size(text, "--device-memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "-8GiB", "8 PiB", "1e9", "8GiBs", "0", "9999999999TiB", "8,5GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text, "--device-memory")


def test_a_name_is_made_without_the_part_and_the_format() -> None:
    assert name_from("Big-Model-Q4_K_M-00002-of-00003") == "big-model"


HOST = Target(name="host", kind="host", engine_device="cpu", total_bytes=16 * GIB, available_bytes=12 * GIB)
GPU = Target(name="gpu0", kind="nvidia", engine_device="CUDA0", total_bytes=8 * GIB, available_bytes=7 * GIB)
SOFT = Target(name="soft", kind="emulated", engine_device="cpu", total_bytes=GIB, available_bytes=GIB)


def test_the_device_that_is_named_or_preferred_is_chosen() -> None:
    targets = [HOST, GPU, SOFT]
    assert choose_target(targets, None, "soft", None) is SOFT
    assert choose_target(targets, None, None, None) is GPU
    assert choose_target(targets, "gpu0", "soft", None) is GPU
    assert choose_target(targets, "emulated", "gpu0", None) is SOFT
    assert choose_target(targets, "cpu", "gpu0", None) is HOST
    amd = choose_target(targets, "amd", None, None)
    assert (amd.kind, amd.here, amd.available_bytes) == ("amd", False, None)
    other = choose_target(targets, "gpu0", None, 24 * GIB)
    assert (other.kind, other.here, other.total_bytes) == ("nvidia", False, 24 * GIB)
    assert other.available_bytes == 24 * GIB - 512 * MIB
    assert choose_target([HOST], None, None, None).kind == "nvidia"


def figures(start: Any, compute: int) -> tuple[Any, DryRunFigures]:
    cache = DryCache(cells=1, device_bytes=0, host_bytes=0, layers={})
    return start, DryRunFigures(
        engine="e", device=start.device, compute_bytes=0, host_compute_bytes=compute, output_bytes=1, caches=(cache,),
        state_bytes=0, host_state_bytes=0, expert_layers=(), repacks=False, took_ms=1.0,
    )  # fmt: skip


def test_between_two_dry_runs_a_buffer_is_bounded_by_the_line_and_beyond_them_unknown(tmp_path: Path) -> None:
    header, shape = read_model(llama(tmp_path, architecture="unheard-of", name="odd"))
    start = size_up("odd", header, shape, model_config(header, None), HOST).cpu
    scales = Weighing(shape, "host")
    assert not scales.knows(start) and "compute_bytes" in scales.weigh(start)[0].reasons

    def context(tokens: int, **more: Any) -> Any:
        return replace(start, context_tokens=tokens, **more)

    scales.learn(*figures(context(1024), 100 * MIB))
    scales.learn(*figures(context(3072), 200 * MIB))

    def compute(asked: Any) -> int | None:
        return scales.weigh(asked)[0].compute_bytes

    assert compute(context(1024)) == 100 * MIB and compute(context(3072)) == 200 * MIB
    assert compute(context(2048)) == 150 * MIB
    assert compute(context(512)) == 100 * MIB, "less of everything takes no more"
    assert compute(context(1024, ubatch_tokens=64, slots=1)) == 100 * MIB
    assert compute(context(4096)) is None and compute(context(1024, kv_type="q8_0")) is None
    assert compute(context(1024, ubatch_tokens=512)) is None


def test_on_an_emulated_device_all_of_the_worker_is_the_devices(model: Path) -> None:
    header, shape = read_model(model)
    sizing = size_up("m", header, shape, model_config(header, None), SOFT)
    assert sizing.gpu is not None and not sizing.gpu.use_mmap
    device, host = Weighing(shape, "emulated").weigh(sizing.gpu)
    assert host.known_bytes == 0 and device.mapped_bytes == 0
    assert (device.weights_bytes or 0) >= sum(t.size_bytes for t in header.tensors)


def test_an_imagined_device_keeps_headroom_too() -> None:
    assert imagined("amd", GIB).available_bytes == GIB - GIB // 20


def test_a_difference_is_against_the_surest_witness() -> None:
    row = Row("weights", 1000, 1010, 1100, "kernel")
    assert (row.difference_bytes, row.difference_percent) == (100, 10.0)
    assert Row("weights", 1000, 1010).difference_bytes == 10
    assert Row("weights", None, 1010).difference_bytes is None
    assert Row("state", 0, 0).view()["difference_percent"] is None


def test_of_a_card_the_driver_and_the_engine_are_told_apart() -> None:
    ready = Ready(
        pid=1, engine="e", library="CUDA", device="CUDA0", device_description="", cells=1, slots=1, vocabulary_tokens=1,
        context_trained_tokens=1, load_ms=1.0, probe_tokens=[], model_bytes=1000, kv_bytes=200, state_bytes=30,
        compute_bytes=4, output_bytes=5, host_compute_bytes=6,
    )  # fmt: skip
    demand = Demand(
        weights_bytes=1000, kv_bytes=200, state_bytes=30, compute_bytes=5, context_bytes=300, pool_bytes=50,
        fragmentation_bytes=10, margin_bytes=999,
    )  # fmt: skip
    beside = Demand(weights_bytes=70, compute_bytes=6, margin_bytes=99)
    seen = Observed(resident_bytes=80, device_bytes=1634, by_process=True)
    load = FullLoad(ready, 1.0, 10, 1.0, near_full=True, observed=seen)
    rows = {row.name: row for row in card_rows(demand, beside, load)}
    assert (
        rows["driver, pool, fragmentation"].predicted_bytes,
        rows["driver, pool, fragmentation"].observed_bytes,
    ) == (
        360,
        400,
    )
    assert rows["all on the card"].difference_bytes == 1634 - 1595
    assert rows["compute buffer"].difference_bytes == -1 and rows["state"].difference_bytes == 0
    assert rows["the whole process"].difference_bytes == 4
    assert "of the process" in (rows["all on the card"].observed_by or "")
    silent = {row.name: row for row in card_rows(demand, beside, replace_load(load, observed=Observed()))}
    assert silent["all on the card"].observed_by == "the driver does not tell it"
    assert silent["all on the card"].difference_bytes is None


def test_rates_are_measured_or_not_claimed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    assert storage_rate(path) is None and storage_rate(tmp_path / "none") is None
    path.write_bytes(bytes(9 * MIB))
    rate = storage_rate(path)
    assert rate is not None and rate.bytes_a_s > 0 and rate.read_bytes == 8 * MIB
    assert rate.surely_storage == ("past" in rate.how)
    assert memory_rate() > 0


def test_another_kind_of_file_is_refused_before_anything_is_weighed(tmp_path: Path) -> None:
    path = write_header(tmp_path / "a.gguf", {"general.architecture": "llama", "general.type": "adapter"}, [])
    with pytest.raises(ModelFileError, match="an adapter"):
        read_model(path)
