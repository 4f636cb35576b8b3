"""`relevo plan` with the real model and the real engine: what it predicts, and what a load then takes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relevo.cli import main
from relevo.cli.place import ServicePlace
from relevo.cli.planning.full_load import LoadFailed, load_fully
from relevo.cli.planning.planner import Planner
from relevo.core.events import StartModel
from relevo.core.leases.reading import Reading
from relevo.core.memory.learned import Circumstances, Observation, encode
from relevo.journal import AddMeasurement
from relevo.models.fingerprint import weights_digest
from relevo.models.gguf import read_header
from relevo.models.gguf_split import read_model
from relevo.service.learning import key_of
from tests.golden.header_file import write_header
from tests.unit import gguf_writer as w
from tests.unit.test_cli_plan import llama

from .api_house import open_house
from .fakes.journal_kit import opened
from .gguf_parts import split_model

pytestmark = pytest.mark.usefixtures("own_place")
MIB, GIB = 2**20, 2**30
PRINTED_TO = 0.011 * MIB  # the engine prints hundredths of a MiB


def plan(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *map(str, words), "--json"]) == code
    return dict(json.loads(capsys.readouterr().out))


def rows_of(check: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in check["rows"]}


def test_a_check_loads_the_model_on_both_routes_and_finds_what_was_predicted(
    own_place: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_place / "relevo.toml").write_text(f'[devices.soft]\nkind = "emulated"\ntotal_bytes = {GIB}\n')
    before = children()
    words = (demo_model, "--check", "--context", "256", "--slots", "1", "--batch", "128", "--ubatch", "64")
    found = plan(capsys, *words)
    gpu, cpu = found["check"]
    assert (gpu["route"], gpu["device"], cpu["route"], cpu["device"]) == ("gpu", "soft", "cpu", "host")
    for check in (gpu, cpu):
        assert check["failed"] is None and check["engine"].startswith("llama.cpp")
        assert check["near_full_context"] and check["prompt_tokens"] >= 190
        rows = rows_of(check)
        for name in ("weights", "KV cache", "output"):
            assert rows[name]["engine_bytes"] == pytest.approx(rows[name]["predicted_bytes"], abs=PRINTED_TO), name
        compute = rows["compute buffer"]
        assert compute["engine_bytes"] == pytest.approx(compute["predicted_bytes"], abs=0.35 * MIB)
        whole = rows["the whole process"]
        assert whole["observed_bytes"] == pytest.approx(whole["predicted_bytes"], rel=0.15)
        assert whole["difference_bytes"] == whole["observed_bytes"] - whole["predicted_bytes"]
    assert rows_of(gpu)["its own, as reserved"]["observed_bytes"] <= found["total_bytes"]
    assert found["parts"]["kv_bytes"] == rows_of(gpu)["KV cache"]["predicted_bytes"]
    assert children() == before, "nothing of it is left"


class Card:
    """A card whose driver tells what it is told to; the worker behind it computes on the CPU."""

    emulated = False

    def __init__(self, *, tells_processes: bool) -> None:
        self.tells_processes = tells_processes
        self.used_bytes = 100 * MIB
        self.pids: set[int] = set()

    def held_by(self, pid: int) -> int | None:
        self.pids.add(pid)
        self.used_bytes = 700 * MIB
        return 555 * MIB if self.tells_processes else None

    def read(self) -> Reading:
        return Reading(GIB, GIB - self.used_bytes, read_at=0.0)


@pytest.mark.parametrize(("tells", "expected"), [(True, 555 * MIB), (False, 600 * MIB)])
def test_a_drivers_word_on_the_process_is_better_than_the_rise_of_use(
    libraries: Path, demo_model: Path, tells: bool, expected: int
) -> None:
    card = Card(tells_processes=tells)
    start = StartModel(
        "demo", "gpu", str(demo_model), str(libraries), context_tokens=64, slots=1, batch_tokens=64, ubatch_tokens=64
    )
    load = load_fully(start, card)  # type: ignore[arg-type]
    assert (load.observed.device_bytes, load.observed.by_process) == (expected, tells)
    assert card.pids == {load.ready.pid} and load.near_full
    assert load.observed.resident_bytes is not None and load.observed.resident_bytes > 90 * MIB


def test_a_worker_that_cannot_start_ends_a_check_with_its_reason(libraries: Path, tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(LoadFailed, match=r"no\.gguf"):
        load_fully(StartModel("no", "cpu", str(path), str(libraries), context_tokens=64, batch_tokens=64))


def test_a_check_that_does_not_fit_loads_nothing_and_says_so(
    own_place: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_place / "relevo.toml").write_text(f'[devices.soft]\nkind = "emulated"\ntotal_bytes = {200 * MIB}\n')
    words = (demo_model, "--check", "--context", "64", "--slots", "1")
    gpu, cpu = plan(capsys, *words, code=1)["check"]
    assert "needs" in gpu["failed"] and gpu["rows"] == []
    assert cpu["failed"] is None


def test_a_split_model_is_planned_by_any_part_and_its_first_part_is_loaded(
    own_place: Path, demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = split_model(demo_model, tmp_path, 3)
    whole = plan(capsys, demo_model, "--device", "cpu")
    words = ("--device", "cpu", "--check", "--context", "64", "--slots", "1")
    found = plan(capsys, parts[1], *words)
    assert found["files"] == [str(path) for path in parts] and found["file"] == str(parts[0])
    assert found["name"] == "split"
    assert found["host_parts"]["weights_bytes"] == whole["host_parts"]["weights_bytes"]
    [check] = found["check"]
    assert check["failed"] is None
    weights = rows_of(check)["weights"]
    # Mapped weights are counted from the first to the last tensor of each file, so padding at the seams is printed too.
    assert weights["engine_bytes"] == pytest.approx(weights["predicted_bytes"], abs=0.1 * MIB)
    header = read_header(demo_model)
    assert read_header(parts[2]).tokenizer_digest == header.tokenizer_digest
    assert [t.name for t in read_header(parts[2]).tensors] == [t.name for t in header.tensors]
    assert weights_digest(parts[0]) == weights_digest(parts[2]) != weights_digest(demo_model)
    parts[1].unlink()
    assert main(["plan", str(parts[0])]) == 1
    assert "Part 2 of 3" in capsys.readouterr().err


def test_what_has_no_closed_form_is_asked_of_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recurrent model, header only: the engine's graph is asked for, and nothing is loaded."""
    from tests.golden.families_state import FAMILIES

    mamba = next(family for family in FAMILIES if family.name == "Mamba-130M")
    path = mamba.write(tmp_path)
    asked = plan(capsys, path, "--device", "cpu", "--context", "1024")
    unasked = plan(capsys, path, "--device", "cpu", "--context", "1024", "--no-dry-run")
    assert (asked["tier"], unasked["tier"]) == ("dry run", "closed form")
    assert unasked["host_parts"]["compute_bytes"] is None and unasked["total_bytes"] is None
    assert asked["host_parts"]["compute_bytes"] > 0 and asked["total_bytes"] is not None
    assert asked["fits"][0]["max_context_tokens"] > 0


def test_a_second_plan_of_the_same_file_asks_the_engine_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.golden.families_state import FAMILIES

    path = next(family for family in FAMILIES if family.name == "GLM-4.7-Flash").write(tmp_path)
    words = (path, "--device-memory", "8GiB")
    first = plan(capsys, *words)

    async def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started to ask the engine")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    second = plan(capsys, *words)
    assert (second["tier"], second["parts"]) == (first["tier"], first["parts"])
    assert second["tier"] == "dry run" and second["fits"][0]["verdict"] == first["fits"][0]["verdict"]


def test_a_running_service_tells_what_is_free(
    own_place: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = {
        "name": "gpu0", "kind": "nvidia", "emulated": False, "total_bytes": 8 * GIB, "available_bytes": 700 * MIB,
        "headroom_bytes": 400 * MIB, "leases": [{"holder": "other/gpu", "bytes": 6 * GIB, "state": "settled"}],
    }  # fmt: skip
    dark = {"name": "gpu1", "kind": "vulkan", "total_bytes": None, "available_bytes": None, "reason": "No driver."}
    with open_house() as house:
        status = {**house.service.status(), "devices": [device, dark]}
        monkeypatch.setattr(house.service, "status", lambda: status)
        found = plan(capsys, demo_model, "--url", house.base, "--no-dry-run")
        assert [(row["device"], row["available_bytes"]) for row in found["fits"]][:1] == [("gpu0", 700 * MIB)]
        assert found["fits"][0]["verdict"] in ("offload", "redirect") and "other/gpu" in json.dumps(found["fits"])
        status["devices"] = [{**device, "available_bytes": 6 * GIB, "pressure_stage": "critical"}, dark]
        pressed = plan(capsys, demo_model, "--url", house.base, "--no-dry-run")["fits"][0]
        assert (pressed["verdict"], pressed["pressure"]) == ("redirect", "critical")
        unknown = next(row for row in found["fits"] if row["device"] == "gpu1")
        assert unknown["available_reason"] == "No driver." and unknown["max_context_tokens"] is None
        (own_place / "relevo.toml").write_text(f'[devices.gpu9]\nkind = "emulated"\ntotal_bytes = {GIB}\n')
        served = plan(capsys, demo_model, "--url", house.base, "--no-dry-run", "--device", "gpu9")
        assert served["fits"][0]["device"] == "gpu9", "a device that no model is served on is read here"
        assert main(["plan", str(demo_model), "--url", house.base]) == 0
        assert "the running service's figures" in capsys.readouterr().out


def test_what_earlier_loads_taught_is_in_the_figures_until_the_engine_is_another(
    own_place: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planner = Planner(ServicePlace())
    sizing = planner.plan(str(demo_model), {"context_tokens": 512}, device="cpu").sizing
    reported = {"kv_bytes": 10 * MIB, "compute_bytes": 2 * MIB}

    def seen(engine: str) -> Observation:
        return Observation(
            key=key_of(sizing.cpu, planner.host.name),
            under=Circumstances("llama.cpp host", engine, planner.host.description),
            at=1.0, predicted=reported, reported=reported, loaded_bytes=111 * MIB, peak_bytes=112 * MIB,
        )  # fmt: skip

    async def taught(record: Observation) -> None:
        async with opened(own_place / "state") as journal:
            await journal.commit(
                AddMeasurement(
                    key=record.key.text,
                    engine=record.under.engine_build,
                    driver=record.under.driver,
                    at=1.0,
                    value=encode(record),
                )
            )

    words = (demo_model, "--device", "cpu", "--context", "512")
    asyncio.run(taught(seen("another engine")))
    untaught = plan(capsys, *words)
    assert (untaught["tier"], untaught["host_parts"]["context_bytes"]) == ("closed form", 48 * MIB + 320 * 49_152)
    assert untaught["learned"]["observations"] == 0
    asyncio.run(taught(seen(planner.facts.engine)))
    learned = plan(capsys, *words)
    assert (learned["tier"], learned["learned"]["basis"]) == ("learned", "key")
    assert learned["host_parts"]["context_bytes"] == 99 * MIB
    assert main(["plan", *map(str, words)]) == 0
    assert "from one load seen here" in capsys.readouterr().out
    other = plan(capsys, demo_model, "--device", "cpu", "--context", "1024")
    assert (other["tier"], other["learned"]["basis"]) == ("closed form", "device")


def big_vocabulary(path: Path) -> Path:
    """A header with 152,000 tokens and 151,000 merges."""
    tokens = [f"token{i}" + "x" * (i % 13) for i in range(152_000)]
    merges = [f"{token[:5]} {token[5:]}" for token in tokens[:151_000]]
    arrays = w.array("tokenizer.ggml.tokens", w.STRING, tokens)
    keys = [*w.keys(tokens=arrays), w.array("tokenizer.ggml.merges", w.STRING, merges)]
    path.write_bytes(w.file([*keys, w.array("tokenizer.ggml.token_type", 5, [1] * 152_000)], w.TENSORS))
    return path


def test_a_large_vocabulary_is_walked_in_a_moment_and_kept_by_nobody(tmp_path: Path) -> None:
    path = big_vocabulary(tmp_path / "big.gguf")
    times = []
    for _ in range(5):
        began = time.perf_counter()
        header = read_model(path)
        times.append(time.perf_counter() - began)
    assert header.vocabulary_tokens == 152_000
    assert min(times) < 0.2, "0.05 s on an idle machine of 2023"


def test_the_whole_command_stays_small(own_place: Path, tmp_path: Path) -> None:
    model = llama(tmp_path)
    big = read_header(big_vocabulary(tmp_path / "big.gguf"))
    assert big.header_bytes > 5 * MIB
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(model), str(tmp_path / "big.gguf")],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert int(done.stdout.splitlines()[-1]) < 100 * 1024


_MEASURED = """
import contextlib, io, sys
from relevo.cli import main
from relevo.cli.planning.full_load import LoadFailed, load_fully
from relevo.cli.place import ServicePlace
from relevo.cli.planning.planner import Planner
from relevo.core.events import StartModel
from relevo.core.memory.learned import Circumstances, Observation, encode
from relevo.core.leases.reading import Reading
from relevo.journal import AddMeasurement
from relevo.models.gguf import read_header
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["plan", sys.argv[1], "--device-memory", "1GiB"]) == 0
    read_header(sys.argv[2])
lines = open("/proc/self/status").read().splitlines()  # what getrusage tells is inherited from whoever started us
print(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
"""


def test_a_file_that_is_only_a_header_with_a_hole_is_planned_like_a_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_header(tmp_path / "e.gguf", {"general.architecture": "llama", "llama.block_count": 1}, [])
    assert main(["plan", str(path)]) == 1
    assert "llama.embedding_length" in capsys.readouterr().err


def children() -> set[int]:
    """Living processes that this one started."""
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}
