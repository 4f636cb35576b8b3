"""`relevo models add` with a real model file, and with what only looks like one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relevo.cli import main
from relevo.config import load_config
from relevo.setup import demo

from .api_house import open_house
from .fakes.journal_kit import open_journal

pytestmark = pytest.mark.usefixtures("own_place")


def refused(place: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run `models add`; it must refuse in one sentence and change nothing."""
    before = {p.name: p.stat().st_mtime_ns for p in place.iterdir()}
    assert main(["models", "add", *words]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Traceback" not in err, err
    assert {p.name: p.stat().st_mtime_ns for p in place.iterdir()} == before
    return err


def test_what_is_no_model_file_changes_nothing(own_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    garbage = own_place / "garbage.gguf"
    garbage.write_bytes(b"not a model" * 100)
    assert "garbage.gguf" in refused(own_place, capsys, str(garbage), "--yes")
    assert "nothing.gguf" in refused(own_place, capsys, str(own_place / "nothing.gguf"), "--yes")
    assert "." in refused(own_place, capsys, str(own_place), "--yes")


def test_a_file_cut_short_changes_nothing(own_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = own_place / "cut.gguf"
    with demo.find().open("rb") as whole:
        cut.write_bytes(whole.read(2_500_000))
    assert "incomplete" in refused(own_place, capsys, str(cut), "--yes")


def test_a_plan_without_a_yes_changes_nothing(own_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--yes" in refused(own_place, capsys, str(demo.find()))
    assert "9000" in refused(own_place, capsys, str(demo.find()), "--yes", "--context", "9000")
    assert "0" in refused(own_place, capsys, str(demo.find()), "--yes", "--slots", "0")


def test_what_a_running_demo_stands_in_with_is_not_written_as_a_device(
    own_place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = {
        "name": "gpu0",
        "kind": "emulated",
        "emulated": True,
        "total_bytes": 1 << 30,
        "available_bytes": 1 << 29,
    }
    journal = open_journal(own_place / "state")
    try:
        with open_house() as house:
            status = {**house.service.status(), "devices": [stand_in]}
            monkeypatch.setattr(house.service, "status", lambda: status)
            journal.announce(house.base)
            assert main(["models", "add", str(demo.find())]) == 1
    finally:
        journal.close_blocking()
    assert "served on the CPU only" in capsys.readouterr().out


def test_a_model_is_tried_and_then_written_with_comments_kept(
    own_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["models", "add", str(demo.find()), "--yes", "--context", "1024", "--slots", "2", "--json"]
    assert main(words) == 0
    said: Any = json.loads(capsys.readouterr().out)
    assert said["name"] == "smollm2-135m-instruct"
    assert "Paris" in said["trial"]["answer"] and said["trial"]["tokens_per_s"] > 0
    assert said["plan"]["host_parts"]["weights_bytes"] > 90_000_000
    text = (own_place / "relevo.toml").read_text()
    assert text.startswith("# mine\n") and (own_place / "relevo.toml.bak").exists()
    model = load_config(own_place / "relevo.toml").models["smollm2-135m-instruct"]
    assert (model.path, model.context_tokens, model.slots) == (str(demo.find()), 1024, 2)
    assert "already" in refused(own_place, capsys, str(demo.find()), "--yes")


def test_a_model_the_engine_does_not_know_is_refused_with_the_engines_reason(
    own_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = demo.find().read_bytes()
    head = whole[:3_000_000].replace(b"llama.", b"zlama.")
    at = head.index(b"llama", head.index(b"general.architecture"))
    odd = own_place / "odd.gguf"
    odd.write_bytes(head[:at] + b"zlama" + head[at + 5 :] + whole[3_000_000:])
    assert "unknown model architecture: 'zlama'" in refused(own_place, capsys, str(odd), "--yes")
