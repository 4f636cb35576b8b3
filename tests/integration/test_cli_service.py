"""Commands that ask a running service, over real HTTP, and the journal where none runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relevo.cli import main
from relevo.config import Config, ServerConfig
from relevo.journal import StartAttempt

from .api_house import open_house
from .fakes.fake_service import FakeService, completed, plain_answer
from .fakes.journal_kit import accept, end, move, open_journal, opened

pytestmark = pytest.mark.usefixtures("own_place")


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_status_shows_the_running_service(capsys: pytest.CaptureFixture[str]) -> None:
    with open_house() as house:
        assert main(["status", "--url", house.base, "--json"]) == 0
        assert printed(capsys)["state"] == "ok"
        assert main(["status", "--url", house.base]) == 0
        assert "Relevo ok" in capsys.readouterr().out


def test_the_holder_of_the_state_folder_tells_where_it_answers(
    own_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = open_journal(own_place / "state")
    try:
        assert main(["status"]) == 1
        assert f"process {os.getpid()}" in capsys.readouterr().err
        assert main(["requests", "list"]) == 1
        assert "is starting" in capsys.readouterr().err
        with open_house() as house:
            journal.announce(house.base)
            assert main(["status", "--json"]) == 0
            assert printed(capsys)["version"] == "test"
    finally:
        journal.close_blocking()
    assert main(["status", "--json"]) == 1
    assert printed(capsys)["state"] == "down"


def test_requests_are_listed_shown_and_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    with open_house() as house:
        house.service.script = plain_answer
        house.ask("POST", "/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "hi"}]})
        request_id = house.service.tickets[-1].request_id
        url = ["--url", house.base]
        assert main(["requests", "list", *url, "--json"]) == 0
        listed = printed(capsys)
        assert listed["source"] == "service" and [r["id"] for r in listed["requests"]] == [request_id]
        assert main(["requests", "list", *url]) == 0
        assert request_id in capsys.readouterr().out
        assert main(["requests", "show", request_id[:12], *url, "--json"]) == 0
        assert printed(capsys)["state"] == "completed"
        assert main(["requests", "cancel", request_id, *url]) == 0
        assert "is cancelled" in capsys.readouterr().out
        assert main(["requests", "resume", request_id, *url]) == 1
        assert capsys.readouterr().err == "Only a resumable request can be resumed.\n"


def test_a_keyed_server_asks_for_the_key_and_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "state" / "keys.json"
    assert main(["keys", "create", "desk", "--json"]) == 0
    secret = printed(capsys)["key"]
    with open_house(keys=keys) as house:
        assert main(["status", "--url", house.base]) == 1
        assert "RELEVO_KEY" in capsys.readouterr().err
        monkeypatch.setenv("RELEVO_KEY", secret)
        assert main(["status", "--url", house.base]) == 0


def test_connecting_tests_the_connection_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "state" / "keys.json"
    config = Config(server=ServerConfig(allowed_hosts=["house.lan"]))
    with open_house(FakeService(lambda _: [*plain_answer(_, ("Hi",))[:-1], completed(1, 1)]), config, keys) as house:
        assert main(["connect", "openai", "--url", house.base, "--json"]) == 0
        made = printed(capsys)
        assert made["tested"] and made["problem"] is None and made["models"] == ["demo", "org/other"]
        assert house.service.asks[-1].max_output_tokens == 1
        assert main(["connect", "open-webui", "--url", house.base, "--host", "other.lan", "--json"]) == 1
        made = printed(capsys)
        assert "restart" in made["problem"] and "other.lan" in made["hosts_added"]
        (tmp_path / "state" / "keys.json").read_text()
        assert main(["keys", "revoke", "openai"]) == 0
        capsys.readouterr()
        assert main(["connect", "openai", "--url", house.base, "--host", "house.lan", "--json"]) == 0
        made = printed(capsys)
        assert made["problem"] is None and "under the name house.lan" in made["tested"]


def test_without_a_service_the_journal_is_read_and_said_so(own_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def fill() -> None:
        async with opened(own_place / "state") as journal:
            await journal.commit(accept("a" * 32), accept("b" * 32))
            await journal.commit(move("a" * 32, "accepted", "running"))
            await journal.commit(
                StartAttempt(id="req_" + "a" * 32, attempt=1, route="gpu", device="gpu0", replica_pid=1, at=1.0)
            )
            await journal.commit(
                end("a" * 32, result=b'{"choices": [{"index": 0, "text": "Paris.", "finish_reason": "stop"}]}')
            )

    asyncio.run(fill())
    assert main(["requests", "list", "--json"]) == 0
    listed = printed(capsys)
    assert listed["source"] == "journal" and [r["state"] for r in listed["requests"]] == ["accepted", "completed"]
    assert main(["requests", "show", "req_aaaa", "--json"]) == 0
    shown = printed(capsys)
    assert shown["result"]["choices"][0]["text"] == "Paris." and shown["attempts"] == 1
    assert main(["requests", "show", "req_aaaa"]) == 0
    out, err = capsys.readouterr()
    assert "Paris." in out and "read from the journal" in err
    assert main(["requests", "cancel", "req_" + "b" * 32]) == 1
    assert "not running" in capsys.readouterr().err


def test_what_answers_but_is_not_relevo_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    import http.server
    import threading

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert main(["status", "--url", f"http://127.0.0.1:{server.server_port}"]) == 1
        thread.join(5)
    assert "is not Relevo" in capsys.readouterr().err


def test_help_loads_no_engine_no_database_and_no_server() -> None:
    code = (
        "import sys; from relevo.cli import main; main(['--help']); "
        "print(sorted({'apsw', 'uvicorn', 'starlette', 'httpx2', 'numpy', 'cffi', 'psutil'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True).stdout
    assert out.strip().endswith("[]")


def test_output_into_a_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "relevo", "keys", "list", "--json"],
            stdout=writer, stderr=subprocess.PIPE, text=True, timeout=30, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
