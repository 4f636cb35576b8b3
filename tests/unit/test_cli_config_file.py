"""Changing the configuration file: comments stay, mistakes change nothing, the old file is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relevo.cli.config_file import edit_config, put
from relevo.cli.demo import DEMO_MODEL, demo_config
from relevo.cli.planning.sizing import name_from
from relevo.config import Config, DeviceConfig, ModelConfig, load_config
from relevo.core.errors import ConfigError
from relevo.service.paths import find_paths
from relevo.setup.machine import Machine

NO_CARD = Machine(system="linux", processor="x86_64")
WITH_CARD = Machine(system="linux", processor="x86_64", cards=frozenset({"amd"}))


def add_model(document: Any) -> None:
    put(document, ("devices", "gpu0"), {"kind": "auto"})
    put(document, ("models", "mine"), {"path": "/m.gguf", "device": "gpu0"})


def test_a_file_that_is_not_there_is_made_private_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "relevo.toml"
    assert edit_config(path, add_model) is None
    assert load_config(path).models["mine"].path == "/m.gguf"
    assert path.stat().st_mode & 0o077 == 0
    assert sorted(p.name for p in path.parent.iterdir()) == ["relevo.toml"]


def test_comments_and_order_stay_and_the_old_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "relevo.toml"
    old = "# my house\n[server]\nport = 9000  # the other is taken\n\n[models.first]\npath = 'a'\ndevice = ''\n"
    path.write_text(old)
    path.chmod(0o640)
    kept = edit_config(path, add_model)
    assert kept is not None and kept.read_text() == old
    new = path.read_text()
    assert new.startswith(old.rstrip("\n")) and set(load_config(path).models) == {"first", "mine"}
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_name_with_dots_and_slashes_survives(tmp_path: Path) -> None:
    path = tmp_path / "relevo.toml"
    edit_config(path, lambda document: put(document, ("models", "org/m.v1:q4"), {"path": "p", "device": ""}))
    assert set(load_config(path).models) == {"org/m.v1:q4"}


def test_inline_tables_are_extended_too(tmp_path: Path) -> None:
    path = tmp_path / "relevo.toml"
    path.write_text("server = { port = 9000 }\n")
    edit_config(path, lambda document: put(document, ("server",), {"allowed_hosts": ["a.lan"]}))
    assert load_config(path).server.allowed_hosts == ["a.lan"] and load_config(path).server.port == 9000


def test_a_change_that_would_be_invalid_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "relevo.toml"
    path.write_text("[server]\nport = 9000\n")
    with pytest.raises(ConfigError):
        edit_config(path, lambda document: put(document, ("models", "m"), {"path": "p", "slots": 0}))
    assert path.read_text() == "[server]\nport = 9000\n"
    assert [p.name for p in tmp_path.iterdir()] == ["relevo.toml"]


def test_a_broken_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "relevo.toml"
    path.write_text("[server\n")
    with pytest.raises(ConfigError):
        edit_config(path, add_model)
    assert path.read_text() == "[server\n"


def test_a_change_that_changes_nothing_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "relevo.toml"
    path.write_text("[server]\nport = 9000\n")
    assert edit_config(path, lambda document: put(document, ("server",), {"port": 9000})) is None
    assert [p.name for p in tmp_path.iterdir()] == ["relevo.toml"]


def test_a_linked_configuration_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real.toml"
    real.write_text("[server]\nport = 9000\n")
    link = tmp_path / "relevo.toml"
    link.symlink_to(real)
    edit_config(link, add_model)
    assert link.is_symlink() and "mine" in load_config(real).models


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen2.5-Coder-0.5B-Instruct-Q4_K_M", "qwen2.5-coder-0.5b-instruct"),
        ("SmolLM2.Q4_1", "smollm2"),
        ("iq-test", "iq-test"),
        ("  ??  ", "model"),
        ("Ünï/x", "n-x"),
    ],
)
def test_a_name_is_made_that_can_be_typed(text: str, name: str) -> None:
    assert name_from(text) == name


def test_the_command_line_wins_over_the_environment_and_that_over_the_default(tmp_path: Path) -> None:
    environment = {"RELEVO_STATE": "/s", "RELEVO_CONFIG": "/c.toml"}
    assert find_paths(environment=environment).state == Path("/s")
    named = find_paths(state=tmp_path, config=None, environment=environment)
    assert (named.state, named.config, named.config_named) == (tmp_path, Path("/c.toml"), True)
    default = find_paths(environment={})
    assert default.state.is_absolute() and not default.config_named and default.config.name == "relevo.toml"


@pytest.fixture
def demo_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relevo.setup.demo.find", lambda: Path("/demo.gguf"))


@pytest.mark.usefixtures("demo_file")
def test_the_demo_is_emulated_only_where_there_is_no_card() -> None:
    assert demo_config(Config(), NO_CARD).devices["gpu0"].kind == "emulated"
    assert demo_config(Config(), WITH_CARD).devices["gpu0"].kind == "auto"


@pytest.mark.usefixtures("demo_file")
def test_the_demo_uses_the_device_that_the_file_describes() -> None:
    own = DeviceConfig(kind="emulated", total_bytes=123456789)
    assert demo_config(Config(devices={"gpu0": own}), WITH_CARD).devices == {"gpu0": own}


@pytest.mark.usefixtures("demo_file")
def test_the_demo_keeps_the_models_of_the_file_and_their_names() -> None:
    base = Config(models={"mine": ModelConfig(path="m", device=None, aliases=["demo"])})
    made = demo_config(base, NO_CARD)
    assert set(made.models) == {"mine", DEMO_MODEL} and made.models[DEMO_MODEL].aliases == []
