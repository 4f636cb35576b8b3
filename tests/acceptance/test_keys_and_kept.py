"""Keys keep people apart, retries find the work that runs, and what is kept outlives its client."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from relevo.cli import main

from .house import House, first_line, stream_lines, wait_for

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Guarded:
    """A service with keys, and two people who have one each."""

    house: House
    ada: str
    bob: str
    operator: str

    def ask(self, key: str | None, method: str, path: str, body: object = None, **headers: str) -> httpx2.Response:
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        with httpx2.Client(base_url=self.house.url, timeout=50) as http:
            return http.request(method, path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def record(self, key: str, request_id: str) -> dict[str, Any]:
        answer = self.ask(key, "GET", f"/relevo/v1/requests/{request_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def wait_state(self, request_id: str, *states: str) -> dict[str, Any]:
        return dict(
            wait_for(
                f"{request_id} to be {states}",
                lambda: (r := self.record(self.operator, request_id))["state"] in states and r,
            )
        )

    def wait_serving(self) -> None:
        def serving() -> bool:
            replicas = self.ask(self.operator, "GET", "/relevo/v1/status").json()["replicas"]
            return all(r["state"] == "serving" for r in replicas)

        wait_for("both routes", serving, 30)

    def kill_gpu(self) -> None:
        replicas = self.ask(self.operator, "GET", "/relevo/v1/status").json()["replicas"]
        os.kill(next(r["pid"] for r in replicas if r["route"] == "gpu"), signal.SIGKILL)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    house = House(tmp_path_factory.mktemp("guarded") / "state")
    keys = [made_key(house, name) for name in ("ada", "bob")]
    house.start(both_routes=False)
    mine = Guarded(house, keys[0], keys[1], (house.state / "operator.key").read_text().strip())
    mine.wait_serving()
    yield mine
    house.close()


def made_key(house: House, name: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["keys", "create", name, "--state", str(house.state), "--json"]) == 0
    return str(json.loads(out.getvalue())["key"])


def chat(tokens: int = 60, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "Tell me a long story."}]
    return {"model": "demo", "messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0} | more


def test_health_is_open_and_everything_else_needs_a_key(guarded: Guarded) -> None:
    assert guarded.ask(None, "GET", "/health").status_code == 200
    assert guarded.ask(None, "GET", "/ready").status_code == 200
    for key in (None, "wrong", guarded.ada[:-1]):
        for method, path in (
            ("GET", "/metrics"),
            ("GET", "/v1/models"),
            ("GET", "/relevo/v1/requests"),
            ("POST", CHAT),
        ):
            answer = guarded.ask(key, method, path, chat() if method == "POST" else None)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key", path
    assert guarded.ask(guarded.ada, "GET", "/metrics").status_code == 200
    refused = guarded.ask(guarded.ada, "POST", "/relevo/v1/devices/gpu0/probe")
    assert refused.status_code == 403, "devices are the operator's"


def test_anothers_request_is_not_there(guarded: Guarded) -> None:
    answer = guarded.ask(guarded.ada, "POST", CHAT, chat(3), idempotency_key="adas")
    request_id = answer.headers["x-request-id"]
    one = f"/relevo/v1/requests/{request_id}"
    for method, path in (("GET", one), ("POST", one + "/cancel"), ("POST", one + "/resume"), ("GET", one + "/events")):
        other = guarded.ask(guarded.bob, method, path)
        assert other.status_code == 404 and other.json()["error"]["code"] == "request_not_found", path
    assert guarded.ask(guarded.bob, "GET", "/relevo/v1/requests?idempotency_key=adas").json()["data"] == []
    bobs = guarded.ask(guarded.bob, "POST", CHAT, chat(3), idempotency_key="adas")
    assert bobs.headers["x-request-id"] != request_id, "a key of one's own, even with the same name"
    assert guarded.record(guarded.ada, request_id)["state"] == "completed"


def test_a_running_and_a_resting_request_are_out_of_anothers_reach(guarded: Guarded) -> None:
    with httpx2.Client(
        base_url=guarded.house.url, timeout=50, headers={"authorization": f"Bearer {guarded.ada}"}
    ) as http:
        with http.stream("POST", CHAT, json=chat(200, stream=True)) as answer:
            lines = stream_lines(answer)
            request_id = answer.headers["x-request-id"]
            seen = [next(lines) for _ in range(4)]
            one = f"/relevo/v1/requests/{request_id}"
            assert guarded.ask(guarded.bob, "POST", one + "/cancel").status_code == 404
            guarded.kill_gpu()
            seen += list(lines)
        assert json.loads(seen[-1])["error"]["code"] == "resumable"
        assert guarded.ask(guarded.bob, "POST", one + "/resume", {}).status_code == 404
        assert guarded.record(guarded.ada, request_id)["state"] == "resumable"
        assert http.post(one + "/resume", json={}).status_code == 200
    assert guarded.record(guarded.ada, request_id)["result"]["usage"]["completion_tokens"] == 200
    guarded.wait_serving()


def test_the_clients_own_retry_attaches_to_the_running_request(guarded: Guarded) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(guarded.ask, guarded.ada, "POST", CHAT, chat(150, seed=1), x_stainless_retry_count="0")
        wait_for("it to run", lambda: running(guarded))
        retries = [
            pool.submit(guarded.ask, guarded.ada, "POST", CHAT, chat(150, seed=1), x_stainless_retry_count=str(n))
            for n in (1, 2)
        ]
        answers = [f.result(50) for f in (first, *retries)]
    assert [a.status_code for a in answers] == [200] * 3
    assert len({a.headers["x-request-id"] for a in answers}) == 1
    assert len({a.json()["choices"][0]["message"]["content"] for a in answers}) == 1
    assert guarded.record(guarded.ada, answers[0].headers["x-request-id"])["attempts"] == 1
    fresh = guarded.ask(guarded.ada, "POST", CHAT, chat(3, seed=1), x_stainless_retry_count="1")
    assert fresh.headers["x-request-id"] != answers[0].headers["x-request-id"], "another body is another request"


def running(guarded: Guarded) -> list[Any]:
    return list(guarded.ask(guarded.operator, "GET", "/relevo/v1/requests?state=running").json()["data"])


def test_an_impatient_client_that_tries_again_by_itself_gets_one_execution(guarded: Guarded) -> None:
    """The official client times out, closes its connection and repeats: what was running is not wanted twice."""
    before = len(listed(guarded, guarded.bob))
    with OpenAI(base_url=f"{guarded.house.url}/v1", api_key=guarded.bob, timeout=0.4, max_retries=8) as hasty:
        body = chat(120)
        ignore = body.pop("ignore_eos")
        got = hasty.chat.completions.create(
            **body, extra_body={"ignore_eos": ignore}, extra_headers={"Idempotency-Key": "impatient"}
        )
    assert got.usage is not None and got.usage.completion_tokens == 120
    assert len(listed(guarded, guarded.bob)) == before + 1


def listed(guarded: Guarded, key: str) -> list[Any]:
    return list(guarded.ask(key, "GET", "/relevo/v1/requests?limit=1000").json()["data"])


def test_duplicates_with_one_key_at_the_same_moment_execute_once(guarded: Guarded) -> None:
    before = len(listed(guarded, guarded.ada))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(guarded.ask, guarded.ada, "POST", CHAT, chat(40, temperature=1), idempotency_key="eight")
            for _ in range(8)
        ]
        answers = [c.result(50) for c in calls]
    assert [a.status_code for a in answers] == [200] * 8
    assert len({a.headers["x-request-id"] for a in answers}) == 1
    assert len({a.json()["choices"][0]["message"]["content"] for a in answers}) == 1
    assert len(listed(guarded, guarded.ada)) == before + 1
    other = guarded.ask(guarded.ada, "POST", CHAT, chat(41), idempotency_key="eight")
    assert other.status_code == 422 and other.json()["error"]["code"] == "idempotency_key_reused"


def test_a_retry_with_the_same_key_resumes_what_rests(guarded: Guarded) -> None:
    body = chat(200, stream=True)
    headers = {"authorization": f"Bearer {guarded.ada}", "idempotency-key": "resting"}
    with httpx2.Client(base_url=guarded.house.url, timeout=50, headers=headers) as http:
        with http.stream("POST", CHAT, json=body) as answer:
            lines = stream_lines(answer)
            seen = [next(lines) for _ in range(6)]
            guarded.kill_gpu()
            seen += list(lines)
        assert json.loads(seen[-1])["error"]["code"] == "resumable"
        with http.stream("POST", CHAT, json=body) as again:
            rest = list(stream_lines(again))
    assert again.headers["x-request-id"] == answer.headers["x-request-id"] and rest[-1] == "[DONE]"
    assert text_of(rest[:-1]).startswith(text_of(seen[:-1]))
    record = guarded.wait_state(answer.headers["x-request-id"], "completed")
    assert record["result"]["usage"]["completion_tokens"] == 200 and record["attempts"] == 2
    assert record["result"]["choices"][0]["text"] == text_of(rest[:-1])
    guarded.wait_serving()


def text_of(lines: list[str]) -> str:
    chunks = [json.loads(line) for line in lines]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c.get("choices"))


def test_a_kept_request_goes_on_without_its_client(guarded: Guarded) -> None:
    headers = {"authorization": f"Bearer {guarded.ada}", "idempotency-key": "left"}
    with (
        httpx2.Client(base_url=guarded.house.url, timeout=50, headers=headers) as http,
        http.stream("POST", CHAT, json=chat(100, stream=True)) as answer,
    ):
        first_line(answer)
        request_id = answer.headers["x-request-id"]
    assert guarded.wait_state(request_id, "completed")["result"]["usage"]["completion_tokens"] == 100
    again = guarded.ask(guarded.ada, "POST", CHAT, chat(100, stream=True), idempotency_key="left")
    assert again.headers["x-request-id"] == request_id and again.text.rstrip().endswith("[DONE]")


def test_several_answers_are_one_request_under_one_key(guarded: Guarded) -> None:
    answer = guarded.ask(guarded.ada, "POST", CHAT, chat(20, n=3, temperature=1), idempotency_key="three")
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 3
    assert answer.json()["usage"]["completion_tokens"] == 60
    again = guarded.ask(guarded.ada, "POST", CHAT, chat(20, n=3, temperature=1), idempotency_key="three")
    assert again.json()["choices"] == answer.json()["choices"]


def test_a_revoked_key_opens_nothing_any_more(guarded: Guarded) -> None:
    key = made_key(guarded.house, "guest")
    wait_for("the new key to open", lambda: guarded.ask(key, "GET", "/v1/models").status_code == 200, 5)
    assert main(["keys", "revoke", "guest", "--state", str(guarded.house.state), "--json"]) == 0
    wait_for("the revoked key to be refused", lambda: guarded.ask(key, "GET", "/v1/models").status_code == 401, 5)
