"""Bad input, bad callers and bad surroundings: each gets one clear error, and the service goes on."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx2
import pytest

from relevo.setup import demo

from .house import House

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello."}]
NOBODY = 65534


def ask(
    house: House, body: Any = None, *, raw: bytes | None = None, path: str = CHAT, **headers: str
) -> httpx2.Response:
    content = (
        raw if raw is not None else json.dumps({"model": "demo", "messages": MESSAGES, "max_tokens": 2} | body).encode()
    )
    headers = {k.replace("_", "-"): v for k, v in headers.items()}
    return house.http.post(path, content=content, headers={"content-type": "application/json", **headers})


def refused(answer: httpx2.Response, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """One error in OpenAI's shape: a sentence, a type, a code."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "code", "param"}
    assert len(error["message"]) > 10 and error["message"].endswith((".", "`")) and "Traceback" not in error["message"]
    assert answer.headers["x-request-id"]
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param
    return dict(error)


@pytest.fixture(autouse=True)
def still_answers(request: pytest.FixtureRequest) -> Any:
    """Whatever a test did to the shared service: it answers the next one, and holds nothing."""
    yield
    if "house" in request.fixturenames:
        house: House = request.getfixturevalue("house")
        assert ask(house, {}).status_code == 200
        assert all(lane["running"] == lane["queued"] == 0 for lane in house.status()["lanes"])


WRONG: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 1e308),
    ("temperature", "warm"),
    ("top_p", 0),
    ("top_p", -0.5),
    ("top_k", -7),
    ("top_k", 2**70),
    ("min_p", 2),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 10**30),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("n", 0),
    ("n", 9),
    ("n", -1),
    ("seed", 2**80),
    ("seed", "x"),
    ("presence_penalty", 3),
    ("frequency_penalty", -1e9),
    ("logit_bias", {"0": 1e6}),
    ("logit_bias", {"999999999": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", [1]),
    ("stop", [""]),
    ("stop", ["a"] * 99),
    ("stop", 7),
    ("stop", "x" * 10_000),
    ("stream", "yes"),
    ("messages", []),
    ("messages", "Hello"),
    ("messages", [{"role": "king", "content": "x"}]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [None]),
    ("model", ""),
    ("model", 5),
    ("top_logprobs", 10**6),
    ("tools", "hammer"),
    ("mirostat", 2),
]


def test_parameters_that_are_negative_huge_or_of_the_wrong_type_are_named(house: House) -> None:
    for name, value in WRONG:
        more = {"logprobs": True} if name == "top_logprobs" else {}
        error = refused(ask(house, {name: value, **more}), 400)
        assert str(error["param"]).split(".")[0].split("[")[0] == name, (name, value, error)


def test_numbers_that_json_does_not_have_are_refused(house: House) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "0x10", "01", "+1"):
        raw = b'{"model":"demo","messages":[{"role":"user","content":"x"}],"temperature":%s}' % number.encode()
        refused(ask(house, raw=raw), 400)


def test_an_unknown_model_is_404_with_the_list(house: House) -> None:
    error = refused(ask(house, {"model": "gpt-9"}), 404, "model_not_found", "model")
    assert "smollm2-135m" in error["message"] and "gpt-9" in error["message"]
    assert len(refused(ask(house, {"model": "x" * 200}), 404)["message"]) < 400


def test_a_prompt_that_is_too_long_is_refused_with_numbers(house: House) -> None:
    long = [{"role": "user", "content": "word " * 9000}]
    error = refused(ask(house, {"messages": long}), 400, "context_length_exceeded")
    assert any(part.strip(".,").isdigit() and int(part.strip(".,")) > 8192 for part in error["message"].split())


NO_JSON = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\x00",
    b"\xff\xfe{\x00",
    b'{"model":"demo","messages":[{"role":"user","content":"\xc3\x28"}]}',
    b'{"model":"demo","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
    b'{"model":"demo","model":"demo","messages":[]}',
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b"[" * 100_000,
    b'{"model":"demo","messages":[' + b"1," * 200_000 + b"1]}",
]


def test_a_body_that_is_no_proper_json_is_refused(house: House) -> None:
    for raw in NO_JSON:
        refused(ask(house, raw=raw), 400)


def test_half_of_a_letter_in_an_escape_is_refused_or_answered_but_never_breaks_the_text_process(house: House) -> None:
    raw = b'{"model":"demo","max_tokens":2,"messages":[{"role":"user","content":"\\ud800 x \\u0000"}]}'
    answer = ask(house, raw=raw)
    if answer.status_code != 200:
        refused(answer, 400)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(house: House) -> None:
    refused(ask(house, raw=b"x" * (9 * 2**20)), 413, "request_too_large")
    with socket.create_connection(("127.0.0.1", house.port), timeout=10) as s:
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{")
        assert b" 413 " in s.recv(4096).split(b"\r\n")[0]


def test_a_foreign_host_and_a_foreign_origin_are_refused(house: House) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example"):
        answer = ask(house, {}, host=host)
        assert answer.status_code in (400, 421), (host, answer.status_code)
    refused(ask(house, {}, host="evil.example"), 421, "host_not_allowed")
    for origin in ("https://evil.example", "null", "http://localhost.evil.example"):
        refused(ask(house, {}, origin=origin), 403, "origin_not_allowed")


def test_wrong_addresses_methods_and_headers_have_the_same_shape(house: House) -> None:
    refused(house.http.get("/v1/none"), 404)
    refused(house.http.get(CHAT), 405)
    refused(house.http.get("/relevo/v1/requests/../../etc/passwd"), 404)
    refused(house.http.get("/relevo/v1/requests/req_" + "0" * 32), 404, "request_not_found")
    refused(house.http.get("/relevo/v1/requests?limit=-1"), 400)
    refused(ask(house, {}, x_relevo_policy="sometimes"), 400)
    refused(ask(house, {}, x_relevo_deadline_s="-3"), 400)
    refused(ask(house, {}, x_relevo_deadline_s="nan"), 400)
    refused(ask(house, {}, idempotency_key="x" * 5000), 400)
    refused(ask(house, {}, x_filler="x" * 20_000), 431)


# ------------------------------------------------------------------ what keeps it from starting


def fails(*arguments: str, state: Path, config: str | None = None, user: int | None = None, port: int = 0) -> str:
    """`relevo serve` that must not start: exit 1, one sentence. Returns the sentence."""
    command = [sys.executable, "-m", "relevo", "serve", "--state", str(state), "--port", str(port), *arguments]
    if config is not None:
        path = state.parent / "relevo.toml"
        path.write_text(config)
        command += ["--config", str(path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=40, user=user, stdin=subprocess.DEVNULL, check=False
    )
    assert ended.returncode == 1, (ended.returncode, ended.stdout, ended.stderr)
    assert "Traceback" not in ended.stderr
    said = [line for line in ended.stderr.splitlines() if line and not line.startswith("timestamp=")]
    assert said and said[-1].endswith(".") and len(said) == 1, ended.stderr
    return said[0]


def model(path: Path | str) -> str:
    return f'[devices.gpu0]\nkind = "emulated"\ntotal_bytes = 1000000000\n[models.m]\npath = "{path}"\n'


def test_a_second_service_on_the_same_state_folder_names_the_holder(house: House) -> None:
    assert house.process is not None
    assert str(house.process.pid) in fails("--demo", state=house.state)


def test_a_port_that_is_taken_is_said(house: House, tmp_path: Path) -> None:
    assert str(house.port) in fails("--demo", port=house.port, state=tmp_path / "state")


def test_an_open_address_needs_keys(tmp_path: Path) -> None:
    assert "keys create" in fails("--demo", "--host", "0.0.0.0", state=tmp_path / "state")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ("[server\n", "TOML"),
        ("[server]\nport = 99999\n", "server.port"),
        ("[servr]\nport = 1\n", "servr"),
        ('[models.m]\npath = "x"\ndevice = "gpu7"\n', "gpu7"),
    ],
)
def test_a_wrong_configuration_names_its_mistake(tmp_path: Path, config: str, word: str) -> None:
    assert word in fails(state=tmp_path / "state", config=config)


def test_a_model_file_that_is_missing_damaged_or_cut_short_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.gguf"
    assert str(missing) in fails(state=tmp_path / "state", config=model(missing))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(os.urandom(100_000))
    assert str(damaged) in fails(state=tmp_path / "state", config=model(damaged))
    cut = tmp_path / "cut.gguf"
    shutil.copyfile(demo.find(), cut)
    with cut.open("r+b") as file:
        file.truncate(40_000_000)
    assert str(cut) in fails(state=tmp_path / "state", config=model(cut))


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that nobody at all can write to")
def test_a_state_folder_that_cannot_be_made_is_said() -> None:
    assert "/sys/kernel/relevo" in fails("--demo", state=Path("/sys/kernel/relevo"))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to become somebody without rights")
def test_a_state_folder_that_cannot_be_written_is_said() -> None:
    # Outside pytest's own folder, which nobody else may enter.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        state = Path(folder) / "state"
        state.mkdir(mode=0o755)
        try:
            said = fails("--config", str(readable_config(Path(folder))), state=state, user=NOBODY)
        except PermissionError:
            pytest.skip("another user cannot enter this project's folder")
        assert str(state) in said


def readable_config(folder: Path) -> Path:
    """A configuration that everybody may read, with a model that everybody may read."""
    path = folder / "everybodys.toml"
    copy = folder / "model.gguf"
    shutil.copyfile(demo.find(), copy)
    path.write_text(model(copy))
    for p in (path, copy):
        p.chmod(0o644)
    return path
