"""The command line by itself: what it accepts, how it refuses, what it prints for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relevo.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE, main

pytestmark = pytest.mark.usefixtures("own_place")


def printed_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert "Traceback" not in text and text.count("\n") == 1, text
    return text


@pytest.mark.parametrize("command", ["serve", "doctor", "status", "requests", "models", "keys", "connect"])
def test_help_lists_every_command_and_each_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == EXIT_OK
    assert command in capsys.readouterr().out
    assert main([command, "--help"]) == EXIT_OK
    assert f"relevo {command}" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == EXIT_OK
    assert capsys.readouterr().out.startswith("relevo ")


@pytest.mark.parametrize(
    "words",
    [["nonsense"], ["status", "--nonsense"], ["serve", "--port", "many"], ["keys", "create"],
     ["requests", "list", "--limit", "0"], ["requests", "list", "--only", "asleep"], ["connect", "fax"]],
)  # fmt: skip
def test_wrong_usage_is_one_sentence_and_exit_code_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == EXIT_USAGE
    assert "--help" in complaint(capsys)


def test_serving_without_a_model_says_how_to_add_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == EXIT_FAILED
    assert "relevo models add PATH" in complaint(capsys)


def test_serving_with_a_port_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000"]) == EXIT_FAILED
    assert "70000" in complaint(capsys)


def test_a_named_configuration_that_is_missing_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "/nowhere/relevo.toml"]) == EXIT_FAILED
    assert "/nowhere/relevo.toml" in complaint(capsys)


def test_a_mistake_in_the_configuration_is_named_with_its_path(
    own_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_place / "relevo.toml").write_text("[server]\nport = 'x'\n")
    assert main(["serve"]) == EXIT_FAILED
    assert "server.port" in complaint(capsys)


def test_status_of_a_service_that_does_not_run_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == EXIT_FAILED
    assert "relevo serve" in complaint(capsys)


def test_status_as_json_says_down_in_the_shape_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == EXIT_FAILED
    found = printed_json(capsys)
    assert found["state"] == "down" and found["reason"]
    assert found["devices"] == found["replicas"] == found["lanes"] == []


def test_requests_without_a_service_or_a_journal_say_that_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requests", "list"]) == EXIT_FAILED
    assert "not running" in complaint(capsys)
    assert main(["requests", "cancel", "req_" + "0" * 32]) == EXIT_FAILED
    assert "not running" in complaint(capsys)


def test_what_is_no_request_id_never_becomes_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requests", "cancel", "../status"]) == EXIT_FAILED
    assert "not a request id" in complaint(capsys)


def test_a_key_is_shown_once_and_only_its_hash_is_kept(own_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "create", "desk", "--json"]) == EXIT_OK
    made = printed_json(capsys)
    assert made["name"] == "desk" and made["key"].startswith("rk-")
    assert made["key"] not in (own_place / "state" / "keys.json").read_text()
    assert main(["keys", "list", "--json"]) == EXIT_OK
    listed = printed_json(capsys)
    assert listed["required"] and [key["name"] for key in listed["keys"]] == ["desk"]
    assert made["key"] not in json.dumps(listed)


def test_the_first_key_warns_that_every_client_needs_one_now(capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "create", "desk"])
    assert "every client" in capsys.readouterr().out
    main(["keys", "create", "sofa"])
    assert "every client" not in capsys.readouterr().out


def test_a_revoked_key_is_listed_as_revoked_and_cannot_be_revoked_again(capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "create", "desk"])
    capsys.readouterr()
    assert main(["keys", "revoke", "desk", "--json"]) == EXIT_OK
    assert printed_json(capsys)["revoked"] is not None
    assert main(["keys", "revoke", "desk"]) == EXIT_FAILED
    assert "desk" in complaint(capsys)


def test_a_keys_policy_and_priority_are_set_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "create", "desk", "--policy", "gpu-only", "--priority", "5", "--json"]) == EXIT_OK
    made = printed_json(capsys)
    assert (made["policy"], made["policy_fixed"], made["priority"]) == ("gpu-only", False, 5)
    assert main(["keys", "set", "desk", "--priority", "-5", "--policy-fixed"]) == EXIT_OK
    assert "gpu-only, fixed and the priority -5" in capsys.readouterr().out
    assert main(["keys", "list"]) == EXIT_OK
    assert "gpu-only, fixed" in capsys.readouterr().out
    assert main(["keys", "set", "desk", "--policy", "model", "--no-policy-fixed", "--json"]) == EXIT_OK
    changed = printed_json(capsys)
    assert (changed["policy"], changed["policy_fixed"], changed["priority"]) == (None, False, -5)


@pytest.mark.parametrize("nothing", [[], ["--priority", "101"], ["--policy-fixed"]])
def test_a_key_is_not_set_to_what_cannot_be(nothing: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "create", "desk"])
    capsys.readouterr()
    assert main(["keys", "set", "desk", *nothing]) == EXIT_FAILED
    assert len(complaint(capsys)) > 20


def test_keys_live_in_the_state_folder_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "create", "desk", "--state", str(tmp_path / "other")]) == EXIT_OK
    assert (tmp_path / "other" / "keys.json").exists()
    assert not (tmp_path / "state").exists()
    capsys.readouterr()


def test_models_without_a_service_are_those_of_the_configuration(
    own_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_place / "relevo.toml").write_text("[server]\nport = 1\n[models.mine]\npath = 'm.gguf'\ndevice = ''\n")
    assert main(["models", "list", "--json"]) == EXIT_OK
    found = printed_json(capsys)
    assert found["source"] == "configuration" and [m["id"] for m in found["models"]] == ["mine"]
    assert main(["models", "list"]) == EXIT_OK
    assert "mine" in capsys.readouterr().out


def test_doctor_never_breaks_and_names_a_broken_configuration(
    own_place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from relevo.setup import checks

    def broken(*_: object) -> list[Any]:
        raise RuntimeError("a check fell over")

    monkeypatch.setattr(checks, "run_checks", broken)
    (own_place / "relevo.toml").write_text("[server]\nport = 'x'\n")
    assert main(["doctor", "--json"]) == EXIT_FAILED
    found = printed_json(capsys)
    by_name = {check["name"]: check for check in found["checks"]}
    assert not found["ok"]
    assert "server.port" in by_name["configuration"]["found"] and by_name["configuration"]["fix"]
    assert "a check fell over" in by_name["checks"]["found"]


def test_connecting_open_webui_makes_a_key_and_allows_dockers_names(
    own_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connect", "open-webui", "--json"]) == EXIT_OK
    made = printed_json(capsys)
    assert made["base_url"] == "http://host.docker.internal:1/v1" and made["key"].startswith("rk-")
    assert not made["reaches"] and not made["running"]
    from relevo.config import load_config

    assert load_config(own_place / "relevo.toml").server.allowed_hosts == ["host.docker.internal", "172.17.0.1"]
    assert main(["connect", "open-webui"]) == EXIT_OK
    text = capsys.readouterr().out
    assert made["key"] not in text and 'host = "0.0.0.0"' in text and "Not tested" in text


def test_connecting_on_this_machine_changes_no_configuration(
    own_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (own_place / "relevo.toml").read_text()
    assert main(["connect", "openai", "--json"]) == EXIT_OK
    assert printed_json(capsys)["base_url"] == "http://127.0.0.1:1/v1"
    assert (own_place / "relevo.toml").read_text() == before


def test_a_host_that_is_a_url_is_refused_before_anything_is_made(
    own_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connect", "openai", "--host", "http://x"]) == EXIT_FAILED
    assert "http://x" in complaint(capsys)
    assert not (own_place / "state").exists()


def test_an_interrupt_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import relevo.cli.keys

    def gone(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(relevo.cli.keys, "print_json", gone)
    assert main(["keys", "list", "--json"]) == 130
