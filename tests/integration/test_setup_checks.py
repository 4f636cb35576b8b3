"""The doctor's checks on this machine, and on ones where something is wrong."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest

from relevo.config import Config, DeviceConfig, EngineConfig, ModelConfig, ServerConfig
from relevo.setup import checks
from relevo.setup.checks import Check, run_checks
from relevo.setup.machine import Machine


def _one(found: list[Check], name: str) -> Check:
    return next(check for check in found if check.name == name)


def test_everything_is_fine_on_a_machine_that_is_set_up(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    found = run_checks(Config(), tmp_path / "state", port)
    assert [check for check in found if not check.ok] == []
    assert "llama.cpp v0.5.0" in _one(found, "engine layout").found
    assert "SmolLM2" in _one(found, "model").found
    assert not (tmp_path / "state").exists()  # it only looks


def test_each_thing_that_is_wrong_has_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELEVO_CACHE", str(tmp_path / "cache"))
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        config = Config(models={"m": ModelConfig(path=str(tmp_path / "model.gguf"), device=None)})
        found = run_checks(config, state, port)
    wrong = {check.name: check for check in found if not check.ok}
    assert {"libraries", "model m", f"port {port}"} <= set(wrong)
    if sys.platform != "win32":
        assert wrong["state folder"].fix == f"chmod 700 {state}"
    assert all(check.fix for check in wrong.values())
    assert "make setup" in (wrong["libraries"].fix or "")


def test_a_server_open_to_the_network_needs_a_key(tmp_path: Path) -> None:
    assert checks.check_keys("127.0.0.1", tmp_path)[0].ok
    assert checks.check_keys("::1", tmp_path)[0].ok
    assert not checks.check_keys("192.168.1.5", tmp_path)[0].ok
    (tmp_path / "keys.json").write_text('{"version": 1, "keys": [{"id": "a", "revoked": 1.0}]}')
    assert not checks.check_keys("192.168.1.5", tmp_path)[0].ok
    (tmp_path / "keys.json").write_text('{"version": 1, "keys": [{"id": "a", "revoked": null}]}')
    assert checks.check_keys("192.168.1.5", tmp_path)[0].ok


def test_old_programs_are_found_out() -> None:
    assert not checks.check_sqlite("3.51.2")[0].ok and not checks.check_sqlite("3.52.0")[0].ok
    assert checks.check_sqlite("3.51.3")[0].ok and checks.check_sqlite("3.54.1")[0].ok


def test_a_card_without_its_driver_is_found_out() -> None:
    nvidia = Machine("linux", "x86_64", (2, 36), cards=frozenset({"nvidia"}))
    assert not _one(checks.check_card(nvidia), "driver").ok
    old = Machine("linux", "x86_64", (2, 36), nvidia_driver=470, cards=frozenset({"nvidia"}))
    assert "525" in (_one(checks.check_card(old), "driver").fix or "")
    amd = Machine("linux", "x86_64", (2, 36), cards=frozenset({"amd"}))
    assert "Vulkan loader" in (_one(checks.check_card(amd), "driver").fix or "")


def test_a_configured_card_that_the_engine_does_not_see_is_found_out() -> None:
    config = Config(
        devices={"gpu0": DeviceConfig(kind="nvidia")}, models={"m": ModelConfig(path="m.gguf", device="gpu0")}
    )
    found = checks.check_engine(config, Machine("linux", "x86_64", (2, 36)))
    accelerator = _one(found, "accelerator")
    assert not accelerator.ok and "gpu0 is configured" in accelerator.found


def test_libraries_that_cannot_be_loaded_are_a_finding(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").write_bytes(b"no library")
    (tmp_path / "libggml.so").write_bytes(b"no library")
    found = checks.check_engine(Config(engine=EngineConfig(libraries=str(tmp_path))), Machine("linux", "x86_64"))
    assert [check.ok for check in found] == [False] and found[0].fix


def test_a_check_that_hangs_or_breaks_is_a_finding_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECK_TIMEOUT_S", 3.0)
    monkeypatch.setattr(checks, "check_disk", lambda _folder: time.sleep(30))

    def broken() -> list[Check]:
        raise RuntimeError("the disk said no")

    monkeypatch.setattr(checks, "check_sqlite", broken)
    start = time.monotonic()
    found = run_checks(Config(server=ServerConfig(port=0)), tmp_path / "state", 0)
    assert time.monotonic() - start < 10
    assert _one(found, "disk").ok is None and "hangs" in _one(found, "disk").found
    assert "the disk said no" in _one(found, "SQLite").found
