"""The configuration file: defaults, the example that shows them, and mistakes named with their path."""

from __future__ import annotations

import re
import tomllib
import typing
from pathlib import Path

import msgspec
import pytest

from relevo.config import (
    Config,
    DeviceConfig,
    EngineConfig,
    HostConfig,
    JournalConfig,
    LaneConfig,
    LimitsConfig,
    ModelConfig,
    SamplingConfig,
    ServerConfig,
    load_config,
    parse_config,
)
from relevo.core.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "relevo.example.toml"
TABLES: dict[str, type[msgspec.Struct]] = {
    "server": ServerConfig,
    "limits": LimitsConfig,
    "journal": JournalConfig,
    "engine": EngineConfig,
    "host": HostConfig,
    "devices.gpu0": DeviceConfig,
    "models.example": ModelConfig,
    "models.example.sampling": SamplingConfig,
    "models.example.gpu_lane": LaneConfig,
    "models.example.cpu_lane": LaneConfig,
}
TABLE_FIELDS = {"sampling", "gpu_lane", "cpu_lane"}
FIELD = re.compile(r"^(# )?([a-z_]+) = (.+)$")


def example_fields() -> dict[str, dict[str, tuple[bool, str]]]:
    """Every field line of the example: table, field, whether it is set, and the line."""
    found: dict[str, dict[str, tuple[bool, str]]] = {}
    table = ""
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        header = re.match(r"^\[([a-z0-9_.]+)\]", line)
        if header:
            table = header.group(1)
            found[table] = {}
            continue
        match = FIELD.match(line)
        if match and table:
            found[table][match.group(2)] = (match.group(1) is None, match.group(3))
    return found


def mistake(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "relevo.toml")
    return caught.value.message


def test_the_example_names_every_field_of_every_table() -> None:
    shown = example_fields()
    assert set(shown) == set(TABLES)
    for table, kind in TABLES.items():
        assert set(shown[table]) | TABLE_FIELDS == set(kind.__struct_fields__) | TABLE_FIELDS, table
    assert set(typing.get_type_hints(Config)) == {table.split(".")[0] for table in TABLES}


def test_every_field_of_the_example_has_a_comment() -> None:
    for table, fields in example_fields().items():
        for name, (_, rest) in fields.items():
            assert re.search(r"\S\s+# \S.{8,}", rest), f"{table}.{name}"


def test_the_example_agrees_with_the_defaults() -> None:
    config = load_config(EXAMPLE)
    assert msgspec.structs.replace(config, devices={}, models={}) == Config()
    assert config.devices == {"gpu0": DeviceConfig()}
    assert config.models == {"example": ModelConfig(path="/path/to/model.gguf")}


def test_a_field_is_commented_out_in_the_example_exactly_when_its_default_is_none() -> None:
    for table, fields in example_fields().items():
        kind = TABLES[table]
        defaults = {f.name: f.default for f in msgspec.structs.fields(kind)}
        for name, (live, _) in fields.items():
            assert live == (defaults[name] is not None), f"{table}.{name}"


def test_the_values_commented_out_in_the_example_are_valid_ones() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    set_all = re.sub(r"(?m)^# (?=[a-z_]+ = )", "", text.split("\n\n", 1)[1])
    config = parse_config(set_all)
    assert tomllib.loads(set_all)["devices"]["gpu0"]["total_bytes"] == config.devices["gpu0"].total_bytes


def test_an_empty_file_is_all_defaults() -> None:
    assert parse_config("") == Config()
    assert Config().server.host == "127.0.0.1"


def test_an_unknown_field_is_named_with_its_path() -> None:
    message = mistake("[server]\nhots = 'x'")
    assert "relevo.toml" in message and "hots" in message and "server.hots" in message


def test_a_wrong_type_is_named_with_its_path() -> None:
    assert "server.port" in mistake("[server]\nport = 'many'")


def test_a_value_out_of_range_is_named_with_its_path() -> None:
    assert "server.port" in mistake("[server]\nport = 70000")
    assert "limits.choices" in mistake("[limits]\nchoices = 9")
    assert "models.m.slots" in mistake("[devices.gpu0]\n[models.m]\npath='p'\nslots = 0")


def test_broken_toml_is_one_sentence_with_the_line() -> None:
    message = mistake("[server\n")
    assert "not valid TOML" in message and "line 1" in message


def test_a_model_needs_a_device_that_is_described() -> None:
    message = mistake("[models.m]\npath = 'm.gguf'")
    assert "models.m.device" in message and "[devices.gpu0]" in message and 'device = ""' in message


def test_an_empty_device_means_cpu_only() -> None:
    config = parse_config("[models.m]\npath = 'm.gguf'\ndevice = ''")
    assert config.models["m"].device is None


def test_two_models_cannot_share_a_name() -> None:
    text = "[models.a]\npath='a'\ndevice=''\naliases=['x']\n[models.x]\npath='b'\ndevice=''"
    message = mistake(text)
    assert "models.x" in message and "models.a" in message


def test_a_quantized_kv_cache_needs_flash_attention() -> None:
    text = "[models.a]\npath='a'\ndevice=''\nkv_type='q8_0'\nflash_attention=false"
    assert "flash_attention" in mistake(text)


def test_an_emulated_device_needs_a_declared_size() -> None:
    assert "total_bytes" in mistake("[devices.gpu0]\nkind = 'emulated'")


def test_a_model_without_a_device_cannot_be_for_the_gpu_only() -> None:
    assert "models.a.policy" in mistake("[models.a]\npath='a'\ndevice=''\npolicy='gpu-only'")
    assert "models.a.policy" in mistake("[models.a]\npath='a'\ndevice=''\npolicy='fast'")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Path("/nowhere/relevo.toml"))
    assert "/nowhere/relevo.toml" in caught.value.message


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "relevo.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(file) in caught.value.message


@pytest.mark.parametrize("text", ["models = 3", "[models]\nm = 1", "models = []"])
def test_models_that_are_no_tables_are_a_clear_mistake(text: str) -> None:
    assert "models" in mistake(text)
