"""Every wrong value by its name, every hostile body, and starts that cannot succeed: one clear error each.

What callers do is thrown at one service, which must then be as it was: same processes, nothing leased, right answers.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relevo.setup.demo import find as find_demo_model

from .house import House, assert_idle

MODEL = "smollm2-135m"
CHAT = "/v1/chat/completions"
CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
NO_CARD = {"CUDA_VISIBLE_DEVICES": "", "GGML_VK_VISIBLE_DEVICES": "99", "VK_ICD_FILENAMES": "/nonexistent"}
"""A machine without a usable card, also where there is one."""


def body(**more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": CAPITAL, "max_tokens": 16, "temperature": 0, **more}


def error_of(answer: Any, status: int, code: str | None = None) -> dict[str, Any]:
    """The error of a refusal, in the one shape OpenAI's clients read."""
    assert answer.status_code == status, answer.text
    assert re.fullmatch("req_[0-9a-f]{32}", answer.headers["x-request-id"])
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert len(error["message"]) > 10 and "Traceback" not in error["message"]
    assert code is None or error["code"] == code, error
    return error


@pytest.fixture(scope="module", autouse=True)
def answers_correctly_in_the_end(house: House) -> Iterator[None]:
    def processes() -> dict[str, int]:
        assert house.process is not None and house.process.poll() is None
        return {"service": house.process.pid, **{r["name"]: r["pid"] for r in house.status()["replicas"]}}

    before = processes()
    yield
    assert_idle(house)
    answer = house.http.post(CHAT, json=body())
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert answer.headers["x-relevo-route"] == "gpu"
    assert processes() == before, "nothing had to be replaced"


# ---------------------------------------------------------------- parameters

WRONG: list[tuple[str, object]] = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", 1e300), ("temperature", "1"), ("temperature", True),
    ("temperature", [1]), ("top_p", 0), ("top_p", 1.5), ("top_p", -1), ("top_p", {}), ("top_k", -2), ("top_k", 2**80),
    ("top_k", 1.5), ("top_k", "40"), ("min_p", -0.1), ("min_p", 2), ("frequency_penalty", -3),
    ("frequency_penalty", 1e9), ("presence_penalty", 2.5), ("presence_penalty", "0"), ("repeat_penalty", 0),
    ("repeat_penalty", -1), ("repeat_penalty", 3), ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 10**40),
    ("seed", 1.5), ("seed", "7"), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", -(2**63)),
    ("max_tokens", 2**63), ("max_tokens", 1.5), ("max_tokens", "16"), ("max_tokens", True),
    ("max_completion_tokens", 15), ("max_completion_tokens", -5), ("n", 0), ("n", -1), ("n", 9), ("n", 2**31),
    ("n", True), ("n", 1.5), ("stop", ""), ("stop", 5), ("stop", ["x"] * 17), ("stop", ["ok", ""]),
    ("stop", ["x" * 257]), ("stop", [1]), ("logit_bias", []), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 101}), ("logit_bias", {"5": "1"}), ("logit_bias", {str(2**31): 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}), ("logprobs", 3), ("logprobs", "yes"), ("top_logprobs", 5),
    ("stream", "true"), ("stream", 1), ("stream_options", {"include_usage": True}), ("store", "yes"),
    ("messages", []), ("messages", "Hello"), ("messages", {}), ("messages", [1]), ("messages", [None]),
    ("messages", [{}]), ("messages", [{"role": "user"}]), ("messages", [{"role": "wizard", "content": "x"}]),
    ("messages", [{"role": "user", "content": 5}]), ("messages", [{"role": 5, "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
    ("messages", [{"role": "user", "content": "x"}] * 2049), ("model", 5), ("model", ""), ("model", ["x"]),
    ("model", "x" * 5000), ("tools", "all"), ("tools", [{"type": "function"}]),
    ("tools", [{"type": "other", "function": {"name": "x"}}]), ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}), ("response_format", "json"), ("grammar", "root ::= x"),
    ("mirostat", 2), ("xtc_probability", 0.5), ("functions", [{"name": "x"}]), ("modalities", ["audio"]),
    ("chat_template_kwargs", 5), ("best_of", 4),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=[f"{f}={json.dumps(v)[:30]}" for f, v in WRONG])
def test_a_wrong_parameter_is_refused_by_its_name(house: House, field: str, value: object) -> None:
    error = error_of(house.http.post(CHAT, json=body(**{field: value})), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None and re.split(r"[.\[]", error["param"])[0] == field, error


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 5000, "0x10", "1_000"])
def test_a_number_that_is_none_is_refused(house: House, literal: str) -> None:
    text = json.dumps(body()).replace('"temperature": 0', f'"temperature": {literal}')
    assert literal in text
    error_of(house.http.post(CHAT, content=text, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("header", "values"),
    [
        ("x-relevo-policy", ["gpu", "-"]),
        ("x-relevo-handover", ["exact"]),
        ("x-relevo-priority", ["high", "101", "1.5", ""]),
        ("x-relevo-deadline-s", ["0", "-1", "nan", "inf", "1e9", "soon", ""]),
        ("idempotency-key", ["", '""', "x" * 256]),
    ],
)
def test_a_wrong_header_is_refused_by_its_name(house: House, header: str, values: list[str]) -> None:
    for value in values:
        assert error_of(house.http.post(CHAT, json=body(), headers={header: value}), 400)["param"] == header


def test_an_unknown_model_is_answered_with_the_list_whatever_its_name(house: House) -> None:
    for name in ("gpt-9", "../../etc/passwd", "x" * 256, "\x00", f"{MODEL} ", MODEL.upper()):
        error = error_of(house.http.post(CHAT, json=body(model=name)), 404, "model_not_found")
        assert MODEL in error["message"] and len(error["message"]) < 500
    assert MODEL in error_of(house.http.get("/v1/models/gpt-9"), 404, "model_not_found")["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit_the_context_is_refused_with_its_numbers(house: House, stream: bool) -> None:
    def numbers(**more: object) -> list[int]:
        error = error_of(house.http.post(CHAT, json=body(stream=stream, **more)), 400, "context_length_exceeded")
        return [int(number) for number in re.findall(r"\d+", error["message"].replace(",", ""))]

    found = numbers(messages=[{"role": "user", "content": "word " * 20_000}])
    assert 8192 in found and any(number >= 20_000 for number in found), found
    assert {8192, 100_000} <= set(numbers(max_tokens=100_000))


def test_token_ids_outside_the_vocabulary_are_refused(house: House) -> None:
    for prompt in ([2**31 - 1], [49_152], [-1], [1.5], ["a", 1], [True], []):
        ask = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        error = error_of(house.http.post("/v1/completions", json=ask), 400)
        assert str(error["param"]).startswith("prompt"), error
    bias = {"model": MODEL, "prompt": "x", "max_tokens": 1, "logit_bias": {"2000000000": -100}}
    assert error_of(house.http.post("/v1/completions", json=bias), 400)["param"] == "logit_bias"


# ---------------------------------------------------------------- bytes

CHAT_BYTES = json.dumps(body()).encode()
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"model=x",
    "null": b"null",
    "a list": b"[" + CHAT_BYTES + b"]",
    "cut short": CHAT_BYTES[:-3],
    "something after it": CHAT_BYTES + b"{}",
    "broken UTF-8": CHAT_BYTES.replace(b"capital", b"cap\xff\xfeital"),
    "overlong UTF-8": CHAT_BYTES.replace(b"capital", b"\xc0\xaf"),
    "UTF-16": json.dumps(body()).encode("utf-16"),
    "half a surrogate pair": CHAT_BYTES.replace(b"capital", b"\\ud800"),
    "a key twice": CHAT_BYTES.replace(b'"max_tokens": 16', b'"max_tokens": 16, "max_tokens": 1'),
    "deep lists": CHAT_BYTES[:-1] + b', "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": CHAT_BYTES[:-1] + b', "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "too many values": CHAT_BYTES[:-1] + b', "x": [' + b"1," * 200_000 + b"1]}",
    "huge": b'{"model": "' + b"x" * (9 << 20) + b'"}',
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused(house: House, name: str) -> None:
    answer = house.http.post(CHAT, content=BODIES[name], headers={"content-type": "application/json"})
    error_of(answer, *((413, "request_too_large") if name == "huge" else (400,)))


def raw(house: House, head: str, data: bytes = b"") -> tuple[int, dict[str, Any]]:
    """Status and error of a message written byte by byte."""
    with socket.create_connection(("127.0.0.1", house.port), 10) as sock, sock.makefile("rb") as reader:
        sock.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + data)
        whole = reader.read()
    top, _, rest = whole.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(rest)["error"]


@pytest.mark.parametrize(
    ("lines", "status", "code"),
    [
        ("Host: evil.example", 421, "host_not_allowed"),
        ("Host: 0.0.0.0", 421, "host_not_allowed"),
        ("Host: 127.0.0.1.evil.example", 421, "host_not_allowed"),
        ("Host: localhost@evil.example", 400, None),
        ("Host: localhost\nHost: evil.example", 400, None),
        ("X-Nothing: here", 400, None),
        ("Host: localhost\nOrigin: http://evil.example", 403, "origin_not_allowed"),
        ("Host: localhost\nOrigin: null", 403, "origin_not_allowed"),
        ("Host: localhost\nOrigin: http://localhost:1", 403, "origin_not_allowed"),
        ("Host: localhost\nContent-Encoding: gzip", 400, None),
    ],
)
def test_a_foreign_host_or_page_is_turned_away(house: House, lines: str, status: int, code: str | None) -> None:
    head = f"POST {CHAT} HTTP/1.1\n{lines}\nConnection: close\nContent-Length: {len(CHAT_BYTES)}"
    got, error = raw(house, head, CHAT_BYTES)
    assert got == status and (code is None or error["code"] == code), (got, error)


def test_a_refused_request_leaves_no_record_and_no_lease(house: House) -> None:
    before = [r["id"] for r in house.records(limit="1000")]
    error_of(house.http.post(CHAT, json=body(temperature=-1)), 400)
    error_of(house.http.post(CHAT, json=body(max_tokens=100_000)), 400)
    assert [r["id"] for r in house.records(limit="1000")] == before
    assert_idle(house)


def test_control_addresses_refuse_what_they_cannot_mean(house: House) -> None:
    none = f"/relevo/v1/requests/req_{'0' * 32}"
    for path in ("requests/req_x", "requests/../../etc/passwd", "nothing"):
        error_of(house.http.get(f"/relevo/v1/{path}"), 404)
    for method, address in (
        ("GET", none),
        ("POST", f"{none}/cancel"),
        ("POST", f"{none}/resume"),
        ("GET", f"{none}/events"),
    ):
        error_of(house.http.request(method, address), 404, "request_not_found")
    for query in ("limit=-1", "limit=x", "limit=99999", "state=lost", "owner=x", "limit=1&limit=2"):
        error_of(house.http.get(f"/relevo/v1/requests?{query}"), 400)
    error_of(house.http.post("/relevo/v1/devices/none/probe"), 404, "device_not_found")
    error_of(house.http.post("/relevo/v1/devices/none/probe", json=[1]), 400)
    error_of(house.http.get(CHAT), 405, "method_not_allowed")


# ---------------------------------------------------------------- starts that cannot succeed


def start_fails(*arguments: str) -> str:
    """Start a service that cannot start: exit code 1, nothing but one sentence."""
    done = subprocess.run(
        [sys.executable, "-m", "relevo", "serve", "--port", "0", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=45,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **NO_CARD},
    )
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    said = [line for line in done.stderr.splitlines() if not line.startswith("timestamp=")]
    assert len(said) == 1, f"one sentence, not {said}"
    return said[0]


def starts_fail(several: list[list[str]]) -> list[str]:
    """The same for several, side by side."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda arguments: start_fails(*arguments), several))


def config_of(folder: Path, text: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    path = folder / "relevo.toml"
    path.write_text(text)
    return ["--config", str(path), "--state", str(folder / "state")]


def model_text(path: Path | str, more: str = 'device = ""') -> str:
    return f'[models.mine]\npath = "{path}"\n{more}\n'


MISTAKES = [
    ("[server\nport = 1", "line 1"),
    ("[server]\nport = 70000", "server.port"),
    ('[server]\nport = "8377"', "server.port"),
    ("[server]\nprot = 1", "server.prot"),
    ("[limits]\nchoices = 9", "limits.choices"),
    ("[journal]\nretention_s = -1.0", "journal.retention_s"),
    ("[journal]\nretention_s = nan", "journal.retention_s"),
    ("[limits]\nsend_timeout_s = inf", "limits.send_timeout_s"),
    (model_text("x.gguf", 'device = "gpu7"'), "models.mine.device"),
    (model_text("x.gguf", "slots = 0"), "models.mine.slots"),
    (model_text("x.gguf", 'device = ""\ncontext_tokens = -1'), "models.mine.context_tokens"),
    (model_text("x.gguf", 'device = ""\nsampling.top_p = 2'), "models.mine.sampling.top_p"),
    (model_text("x.gguf", 'device = ""\nubatch_tokens = 4096'), "models.mine.ubatch_tokens"),
    ("[models.mine]\nslots = 1", "models.mine.path"),
    ('[devices.gpu0]\nkind = "emulated"', "devices.gpu0"),
    ('[devices.gpu0]\nkind = "toaster"', "devices.gpu0.kind"),
    ("", "models add"),
]


def test_a_mistake_in_the_configuration_is_named_by_its_path(tmp_path: Path) -> None:
    several = [config_of(tmp_path / str(number), text) for number, (text, _) in enumerate(MISTAKES)]
    for (text, names), asked, said in zip(MISTAKES, several, starts_fail(several), strict=True):
        assert names in said and asked[1] in said, (text, said)


def test_a_model_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    whole = find_demo_model()
    noise, empty, header = (tmp_path / f"{name}.gguf" for name in ("noise", "empty", "header"))
    noise.write_bytes(b"GGUF" + os.urandom(65536))
    empty.touch()
    with whole.open("rb") as source:
        header.write_bytes(source.read(1000))
    paths = [tmp_path, noise, empty, header]
    several = [config_of(tmp_path / str(number), model_text(path)) for number, path in enumerate(paths)]
    for path, said in zip(paths, starts_fail(several), strict=True):
        assert str(path) in said, said


def test_a_card_that_is_not_there_is_an_error_and_never_emulated(tmp_path: Path) -> None:
    text = model_text(find_demo_model(), 'device = "gpu0"')
    several = [
        config_of(tmp_path / "nvidia", text + '[devices.gpu0]\nkind = "nvidia"\n'),
        config_of(tmp_path / "auto", text + "[devices.gpu0]\n"),
        ["--demo", *config_of(tmp_path / "demo", '[devices.gpu0]\nkind = "vulkan"\n')],
    ]
    for word, said in zip(("nvidia", "no accelerator", "vulkan"), starts_fail(several), strict=True):
        assert "gpu0" in said and word in said and "doctor" in said, said


def test_files_of_the_state_folder_and_libraries_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    text = model_text(find_demo_model())
    keys = config_of(tmp_path / "keys", text)
    (tmp_path / "keys" / "state").mkdir(mode=0o700)
    (tmp_path / "keys" / "state" / "keys.json").write_text('{"version": 1, "keys": [')
    file = config_of(tmp_path / "file", text)
    (tmp_path / "file" / "state").touch()
    libraries = config_of(tmp_path / "libraries", f'{text}[engine]\nlibraries = "{tmp_path / "lib"}"\n')
    missing = ["--config", str(tmp_path / "none.toml"), "--state", str(tmp_path / "state")]
    said = starts_fail([keys, file, libraries, missing])
    assert str(tmp_path / "keys" / "state" / "keys.json") in said[0] and "damaged" in said[0], said
    assert str(tmp_path / "file" / "state") in said[1], said
    assert str(tmp_path / "lib") in said[2], said
    assert str(tmp_path / "none.toml") in said[3], said


def test_a_damaged_journal_is_an_error_and_is_left_as_it_is(tmp_path: Path) -> None:
    asked = config_of(tmp_path, model_text(tmp_path / "none.gguf"))
    start_fails(*asked)  # makes the journal
    (database,) = (tmp_path / "state").glob("*.db")
    database.write_bytes(b"x" * 8192)
    assert str(database) in start_fails(*asked)
    assert database.read_bytes() == b"x" * 8192


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root writes everywhere")
def test_a_state_folder_that_is_not_writable_is_named(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o555)
    # Somebody else than root, without its right to write everywhere but with its right to read this test's files.
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    other = ["setpriv", "--reuid=65534", "--clear-groups", *rights] if os.geteuid() == 0 else []
    try:
        done = subprocess.run(
            [*other, sys.executable, "-m", "relevo", "serve", "--demo", "--port", "0", "--state", str(state)],
            check=False,
            capture_output=True,
            text=True,
            timeout=45,
        )
    finally:
        state.chmod(0o755)
    assert done.returncode == 1 and f"{state} cannot be written" in done.stderr, (done.returncode, done.stderr)
