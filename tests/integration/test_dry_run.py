"""What a load would take, asked of the real engine without loading; and everything that can go wrong with asking."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relevo.core.events import Ready, StartModel
from relevo.core.memory.demand import DEVICE_START, load_options, model_demand
from relevo.core.memory.dry_run import (
    PRINTED_TO_BYTES,
    STAND_IN,
    DryRunFigures,
    DryRunRefused,
    wants_dry_run,
    with_dry_run,
)
from relevo.core.memory.tier import Tier
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of
from relevo.replicas.dry_run import DryRuns, dry_run, dry_run_now
from relevo.replicas.dry_run_cache import DryRunCache, EngineIdentity
from tests.golden.device_figures import FAMILIES
from tests.golden.header_file import Tensor, write_header

from .llama_process import LlamaProcess

KV_CELL_BYTES = 2 * 2 * 192  # of one layer of the demo model, f16
EMBEDDING, EXPERT_WIDTH, EXPERTS = 256, 128, 8


@pytest.fixture
def start(libraries: Path, demo_model: Path) -> Any:
    def make(**changes: Any) -> StartModel:
        paths = {"path": str(demo_model), "libraries": str(libraries)}
        settings = {"model": "demo", "route": "cpu", "context_tokens": 1024, "slots": 4}
        return StartModel(**(paths | settings | changes))

    return make


def fake(body: str) -> list[str]:
    """A program in the place of the real one; `line` is a sound answer."""
    figures = DryRunFigures(
        engine="e",
        device="cpu",
        compute_bytes=0,
        host_compute_bytes=1,
        output_bytes=2,
        caches=(),
        state_bytes=0,
        host_state_bytes=0,
        expert_layers=(),
        repacks=False,
        took_ms=1.0,
    )
    line = msgspec.json.encode(figures).decode()
    return [sys.executable, "-c", f"import os, sys, time, signal\nline = {line!r}\n{body}"]


def ask(runs: DryRuns, *starts: StartModel, timeout_s: float = 30.0) -> list[Any]:
    return asyncio.run(runs.run(starts, timeout_s=timeout_s))


def small_model(path: Path, kv_heads: list[int], experts: int = 0, vocabulary: int = 1000, **more: Any) -> Path:
    """A header-only model of small layers with these KV heads each, of experts if there are any."""
    architecture, e = "qwen3moe" if experts else "deci", EMBEDDING
    own: dict[str, Any] = {
        "block_count": len(kv_heads),
        "context_length": 4096,
        "embedding_length": e,
        "feed_forward_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": kv_heads if len(set(kv_heads)) > 1 else kv_heads[0],
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 64,
        "vocab_size": vocabulary,
    } | more
    if experts:
        own |= {"expert_count": experts, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_WIDTH}
    tensors: list[Tensor] = [(name, (e, vocabulary), "q8_0") for name in ("token_embd.weight", "output.weight")]
    tensors.append(("output_norm.weight", (e,), "f32"))
    for layer, heads in enumerate(kv_heads):
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (e,),
            "attn_q": (e, 256),
            "attn_k": (e, heads * 64),
            "attn_v": (e, heads * 64),
            "attn_output": (256, e),
            "ffn_norm": (e,),
        }
        if experts:
            shapes |= {"attn_q_norm": (64,), "attn_k_norm": (64,), "ffn_gate_inp": (e, experts)}
            shapes |= {f"ffn_{part}_exps": (e, EXPERT_WIDTH, experts) for part in ("gate", "up")}
            shapes["ffn_down_exps"] = (EXPERT_WIDTH, e, experts)
        else:
            shapes |= {"ffn_gate": (e, 512), "ffn_up": (e, 512), "ffn_down": (512, e)}
        for name, shape in shapes.items():
            kind = "f32" if len(shape) == 1 or name == "ffn_gate_inp" else "q8_0"
            tensors.append((f"blk.{layer}.{name}.weight", shape, kind))
    keys = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in own.items()}
    return write_header(path, keys, tensors)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_type": "q8_0", "ubatch_tokens": 64},
        {"flash_attention": False, "context_tokens": 2000},
        {"profile": "strict", "context_tokens": 256},
    ],
)
def test_a_dry_run_tells_what_a_real_load_then_takes(start, libraries, demo_model, options):
    with LlamaProcess(libraries, demo_model) as worker:
        ready = worker.start(
            context_tokens=options.get("context_tokens", 1024),
            slots=4,
            batch_tokens=512,
            **{key: value for key, value in options.items() if key != "context_tokens"},
        )
        assert isinstance(ready, Ready)
    [told] = dry_run_now([start(**options)])
    assert isinstance(told, DryRunFigures)
    assert told.engine == ready.engine
    assert told.host_compute_bytes == ready.compute_bytes
    assert told.host_kv_bytes == pytest.approx(ready.kv_bytes, abs=11_000)  # keys and values are rounded apart
    assert told.output_bytes == ready.output_bytes
    assert told.host_state_bytes == ready.state_bytes == 0
    assert (told.compute_bytes, told.kv_bytes, told.state_bytes) == (0, 0, 0)
    assert told.took_ms > 0
    beat = worker.heartbeats[-1]
    assert beat.peak_rss_bytes is not None
    assert beat.data_bytes is not None
    assert beat.peak_rss_bytes > beat.rss_bytes - (1 << 20) > 0


@pytest.mark.parametrize("family", ["Mamba-130M", "Mamba-2-370M", "OpenELM-270M"])
def test_what_has_no_closed_form_is_known_after_a_dry_run_and_is_what_a_real_load_takes(start, tmp_path, family):
    path = FAMILIES[family].write(tmp_path)
    order = start(path=str(path), context_tokens=512, repack=False)
    loader = [sys.executable, str(Path(__file__).parent / "fakes" / "load_for_real.py")]
    loaded = subprocess.run(loader, input=msgspec.json.encode(order), capture_output=True, check=True, timeout=30)
    taken = msgspec.json.decode(loaded.stdout, type=dict[str, int])
    before = model_demand(
        shape_of(read_header(path)), load_options(order, on_device=False, learned=DEVICE_START["cpu"])
    )
    assert wants_dry_run(*before)
    [told] = dry_run_now([order])
    weighed = with_dry_run(*before, told)
    assert not wants_dry_run(weighed.device, weighed.host)
    assert weighed.tier is Tier.DRY_RUN
    assert weighed.host.total_bytes is not None
    for part in ("kv_bytes", "state_bytes", "compute_bytes", "output_bytes"):
        assert getattr(weighed.host, part) == pytest.approx(taken[part], abs=3 * PRINTED_TO_BYTES), part


def test_several_loads_take_one_process_and_each_gets_its_answer(start):
    small, large, missing = dry_run_now(
        [start(), start(context_tokens=4096), start(path="/nowhere/model.gguf")], timeout_s=20
    )
    assert large.host_kv_bytes == pytest.approx(small.host_kv_bytes * (4096 + 256) / (1024 + 256), rel=0.001)
    assert missing == DryRunRefused("model_file", missing.message)
    assert "cannot be read" in missing.message


def test_layers_left_to_the_host_keep_their_cache_there(start):
    runs = DryRuns()
    whole, part, none = ask(runs, *(start(device=STAND_IN, gpu_layers=layers) for layers in (999, 12, 0)))
    cells = 1280
    assert whole.host_kv_bytes == 0
    assert whole.kv_bytes == pytest.approx(30 * cells * KV_CELL_BYTES, abs=11_000)
    assert part.kv_bytes == pytest.approx(11 * cells * KV_CELL_BYTES, abs=11_000)  # the output head is the twelfth
    assert part.host_kv_bytes == pytest.approx(19 * cells * KV_CELL_BYTES, abs=11_000)
    [cache] = part.caches
    assert [layer for layer, device in cache.layers.items() if device == STAND_IN] == list(range(19, 30))
    assert none.kv_bytes == 0
    assert none.compute_bytes > 0  # products of many rows are shipped to it all the same
    assert 0 < whole.host_compute_bytes < whole.compute_bytes


def test_a_cache_of_unequal_layers_is_divided_by_their_widths(start, tmp_path):
    path = small_model(tmp_path / "unequal.gguf", [1, 2, 4])
    [told] = ask(DryRuns(), start(path=str(path), device=STAND_IN, gpu_layers=2))
    assert told.kv_bytes == pytest.approx(1280 * 2 * 2 * 64 * 4, abs=11_000)
    assert told.host_kv_bytes == pytest.approx(1280 * 2 * 2 * 64 * 3, abs=11_000)


def test_experts_of_the_first_layers_on_the_device_stay_in_host_ram(start, tmp_path):
    path = small_model(tmp_path / "experts.gguf", [2, 2, 2, 2], EXPERTS)
    asked = [(999, 0), (999, 2), (3, 1), (3, 9), (-1, 4)]
    told = ask(
        DryRuns(),
        *(
            start(path=str(path), device=STAND_IN, gpu_layers=layers, host_expert_layers=experts)
            for layers, experts in asked
        ),
    )
    assert [figures.expert_layers for figures in told] == [(), (0, 1), (2,), (2, 3), (0, 1, 2, 3)]
    none, some = told[:2]
    assert some.kv_bytes == none.kv_bytes  # only the experts leave
    assert some.compute_bytes > none.compute_bytes  # a long prompt has them copied to the device, a part at a time


def test_on_the_cpu_experts_are_where_they_are(start, tmp_path):
    path = small_model(tmp_path / "experts.gguf", [2, 2], EXPERTS)
    without, with_ = dry_run_now([start(path=str(path), host_expert_layers=n) for n in (0, 2)])
    assert with_.expert_layers == ()
    assert with_.host_compute_bytes == without.host_compute_bytes


def test_a_damaged_file_is_refused_with_its_reason(start, demo_model, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(demo_model.read_bytes()[:10_000_000])
    other = tmp_path / "other.gguf"
    other.write_bytes(b"no model at all")
    first, second = dry_run_now([start(path=str(cut)), start(path=str(other))])
    assert first.code == second.code == "model_file"
    assert "cannot be loaded" in first.message
    assert "not a GGUF model" in second.message


def test_a_file_that_aborts_the_engine_is_blamed_and_the_others_are_answered(start, tmp_path):
    path = small_model(tmp_path / "none.gguf", [2], block_count=0)
    before, blamed, after = dry_run_now([start(), start(path=str(path)), start(slots=2)])
    assert blamed.code == "died"
    assert str(path) in blamed.message
    assert "SIGABRT" in blamed.message
    assert before.host_kv_bytes == after.host_kv_bytes > 0
    assert before.output_bytes > after.output_bytes


def test_a_folder_without_libraries_is_refused(start, tmp_path):
    [told] = dry_run_now([start(libraries=str(tmp_path))])
    assert told.code == "library"
    assert str(tmp_path) in told.message


def test_a_device_that_is_not_there_is_refused(start):
    [told] = dry_run_now([start(device="CUDA7", gpu_layers=99)])
    assert told.code == "device"
    assert "no device CUDA7" in told.message


def test_more_than_the_memory_bound_is_refused(start, tmp_path):
    path = small_model(tmp_path / "wide.gguf", [2], vocabulary=500_000)
    wide = start(path=str(path), slots=255)
    roomy, tight = ask(DryRuns(), wide), ask(DryRuns(data_limit_bytes=400 << 20), wide)
    assert roomy[0].output_bytes == pytest.approx(256 * 4 * 500_000, abs=6000)  # rows of logits are really allocated
    assert tight[0].code == "allocation"


def test_a_program_that_says_nothing_is_killed_when_the_time_is_up(start, tmp_path):
    note = tmp_path / "pid"
    runs = DryRuns(
        command=fake(f"open({str(note)!r}, 'w').write(str(os.getpid()))\nprint(line, flush=True)\ntime.sleep(60)")
    )
    began = time.monotonic()
    first, second = ask(runs, start(), start(slots=2), timeout_s=1.0)
    assert time.monotonic() - began < 8
    assert isinstance(first, DryRunFigures)  # what it said before the time was up stands
    assert second.code == "timeout"
    assert "within 1 s" in second.message
    assert not running(int(note.read_text()))


def test_a_cancelled_dry_run_leaves_no_process(start, tmp_path):
    note = tmp_path / "pid"
    runs = DryRuns(command=fake(f"open({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"))

    async def scenario() -> None:
        task = asyncio.ensure_future(runs.run([start()], timeout_s=30))
        while not note.exists() or not note.read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(scenario())
    assert not running(int(note.read_text()))


def test_a_killed_program_is_told_from_a_silent_one(start):
    killed = ask(DryRuns(command=fake("os.kill(os.getpid(), signal.SIGKILL)")), start())
    assert killed == [DryRunRefused("died", killed[0].message)]
    assert "SIGKILL" in killed[0].message
    ended = ask(DryRuns(command=fake("print('no luck', file=sys.stderr); sys.exit(3)")), start())
    assert "exit code 3: no luck" in ended[0].message


@pytest.mark.parametrize(
    "body",
    [
        "print('hello')",
        "print(line); print(line)",
        "print('x' * 10_000_000)",
        "while True: print(line)",
        "sys.stderr.write('y' * 10_000_000); print('{}')",
    ],
)
def test_words_that_are_no_answer_are_refused_however_many(start, body):
    [told] = ask(DryRuns(command=fake(body)), start())
    assert told.code == "protocol"


def test_a_program_that_does_not_start_is_refused(start):
    [told] = ask(DryRuns(command=["/nowhere/python"]), start())
    assert told.code == "internal"
    assert "does not start" in told.message


def test_dry_runs_go_one_at_a_time(start, tmp_path):
    log = tmp_path / "log"
    body = f"f = open({str(log)!r}, 'a', 1)\nf.write('in ')\ntime.sleep(0.1)\nf.write('out ')\nprint(line)"
    runs = DryRuns(command=fake(body))

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(runs.run([start()], timeout_s=20) for _ in range(3)))

    assert all(isinstance(answer, DryRunFigures) for [answer] in asyncio.run(scenario()))
    assert log.read_text() == "in out in out in out "


def test_nothing_asked_nothing_started():
    assert asyncio.run(dry_run([])) == []


class Counting:
    """Dry runs with a cache in `folder`, by a program that counts how often it was asked."""

    def __init__(
        self, folder: Path, engine: str = "e 1", device: str = "card, driver 5", entries_max: int = 512
    ) -> None:
        self.count = folder / "count"
        self.folder = folder / "cache"
        body = f"open({str(self.count)!r}, 'a').write('x')\n"
        body += "for _ in range(sys.stdin.read().count('StartModel')): print(line)"
        self.cache = DryRunCache(self.folder, EngineIdentity(engine, {"cpu": device}), entries_max)
        self.runs = DryRuns(self.cache, fake(body))

    def ask(self, *starts: StartModel) -> int:
        """Ask, and return how many processes that took."""
        before = self._asked()
        assert all(isinstance(answer, DryRunFigures) for answer in ask(self.runs, *starts))
        return self._asked() - before

    def _asked(self) -> int:
        return self.count.stat().st_size if self.count.exists() else 0


def test_figures_are_kept_until_something_that_decides_them_changes(start, libraries, demo_model, tmp_path):
    own = tmp_path / "own.gguf"
    own.write_bytes(demo_model.read_bytes())
    kept = Counting(tmp_path)
    assert kept.ask(start(path=str(own))) == 1
    assert kept.ask(start(path=str(own))) == 0
    assert kept.ask(start(path=str(own), threads=2, route="backup", prefill_chunk_tokens=8)) == 0
    assert kept.ask(start(path=str(own)), start(path=str(own), context_tokens=2048)) == 1
    for change in ({"ubatch_tokens": 64}, {"slots": 2}, {"kv_type": "q8_0"}, {"gpu_layers": 3}, {"repack": False}):
        assert kept.ask(start(path=str(own), **change)) == 1
    assert Counting(tmp_path, engine="e 2").ask(start(path=str(own))) == 1
    assert Counting(tmp_path, device="driver 6").ask(start(path=str(own))) == 1
    os.utime(own, ns=(1, 1))
    assert kept.ask(start(path=str(own))) == 1
    assert kept.ask(start(path=str(own))) == 0


def test_a_library_that_was_replaced_is_asked_anew(start, libraries, tmp_path):
    folder = tmp_path / "libraries"
    folder.mkdir()
    (folder / "libllama.so").write_bytes(b"one")
    kept = Counting(tmp_path)
    assert [kept.ask(start(libraries=str(folder))) for _ in range(2)] == [1, 0]
    (folder / "libllama.so").write_bytes(b"another")
    assert kept.ask(start(libraries=str(folder))) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": {}, "figures": {"type": "DryRunFigures"}}', b"\x00" * 400_000])
def test_a_damaged_entry_is_ignored_and_written_anew(start, tmp_path, damage):
    kept = Counting(tmp_path)
    kept.ask(start())
    [entry] = kept.folder.iterdir()
    sound = entry.read_bytes()
    entry.write_bytes(damage)
    assert kept.ask(start()) == 1
    assert entry.read_bytes() == sound
    assert kept.ask(start()) == 0


def test_an_entry_under_a_foreign_name_is_not_believed(start, tmp_path):
    kept = Counting(tmp_path)
    kept.ask(start())
    [first] = kept.folder.iterdir()
    kept.ask(start(slots=2))
    [second] = [entry for entry in kept.folder.iterdir() if entry != first]
    second.write_bytes(first.read_bytes())
    assert kept.ask(start(slots=2)) == 1


def test_the_cache_is_bounded_and_what_was_asked_for_stays(start, tmp_path):
    kept = Counting(tmp_path, entries_max=3)
    for slots in (1, 2, 3):
        kept.ask(start(slots=slots))
        for age, entry in enumerate(sorted(kept.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(entry, ns=(age + 1, age + 1))
    assert kept.ask(start(slots=1)) == 0
    kept.ask(start(slots=4))
    assert len(list(kept.folder.iterdir())) == 3
    assert [kept.ask(start(slots=slots)) for slots in (1, 3, 4)] == [0, 0, 0]
    assert kept.ask(start(slots=2)) == 1


def test_a_folder_that_cannot_be_written_costs_only_the_next_dry_run(start, tmp_path):
    (tmp_path / "cache").write_bytes(b"a file where the folder should be")
    kept = Counting(tmp_path)
    assert [kept.ask(start()) for _ in range(2)] == [1, 1]


def test_a_refusal_is_not_kept(start, tmp_path):
    cache = DryRunCache(tmp_path / "cache", EngineIdentity("e"))
    [told] = ask(DryRuns(cache, fake("sys.exit(1)")), start())
    assert told.code == "died"
    assert not (tmp_path / "cache").exists()


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[-1]
