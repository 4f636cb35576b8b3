"""Two keys on one lane that runs one request at a time: who goes first, what a key allows, what the record says."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from relevo.api.keys import KeyRing
from relevo.core.grant import Grant
from relevo.setup.demo import find as find_demo_model

from .house import House, assert_idle, first_line, wait_for

CHAT = "/v1/chat/completions"
CONFIG = f"""
[models.m]
path = "{find_demo_model()}"
device = ""
context_tokens = 8192
policy = "cpu-only"
[models.m.cpu_lane]
concurrency = 1
queue = 16
"""


def body(tokens: int, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}


class Street:
    """A service on the CPU alone, one key that is dear to it and one that is not."""

    def __init__(self, house: House) -> None:
        self.house = house
        house.state.mkdir(mode=0o700)
        self.ring = KeyRing(house.state / "keys.json")
        self.dear = self.ring.create("dear", Grant(priority=20))[1]
        self.cheap = self.ring.create("cheap", Grant(priority=-20))[1]
        house.start(both_routes=False)
        house.http.headers["authorization"] = f"Bearer {(house.state / 'operator.key').read_text()}"

    def ask(self, key: str, *, priority: str | None = None, policy: str | None = None) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"}
        headers |= {} if priority is None else {"x-relevo-priority": priority}
        headers |= {} if policy is None else {"x-relevo-policy": policy}
        return httpx2.post(f"{self.house.url}{CHAT}", json=body(2), headers=headers, timeout=50)

    def leave_in_line(self, key: str, pool: concurrent.futures.Executor, name: str) -> None:
        """Ask for something that is kept under this name, and do not wait for the answer."""
        headers = {"authorization": f"Bearer {key}", "idempotency-key": name}
        waiting = self.queued()
        pool.submit(httpx2.post, f"{self.house.url}{CHAT}", json=body(2), headers=headers, timeout=50)
        wait_for("it to wait in line", lambda: self.queued() > waiting, 10)

    def queued(self) -> int:
        return int(self.house.status()["lanes"][0]["queued"])

    def started(self, answer: httpx2.Response) -> float:
        assert answer.status_code == 200, answer.text
        return started_at(self.house.record(answer.headers["x-request-id"]))


def started_at(record: dict[str, Any]) -> float:
    return float(next(e["at"] for e in record["events"] if e["kind"] == "attempt"))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    house = House(tmp_path_factory.mktemp("street") / "state", "--host", "127.0.0.1", config=CONFIG)
    yield Street(house)
    house.close()


@pytest.fixture
def street(opened: Street) -> Iterator[Street]:
    yield opened
    assert_idle(opened.house)


def test_the_dear_keys_requests_start_before_the_cheap_ones_that_came_earlier(street: Street) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        headers = {"authorization": f"Bearer {street.cheap}"}
        with street.house.http.stream("POST", CHAT, json=body(7000, stream=True), headers=headers) as running:
            first_line(running)
            calls = []
            for key, priority in ((street.cheap, None), (street.dear, "-5"), (street.cheap, None), (street.dear, None)):
                calls.append(pool.submit(street.ask, key, priority=priority))
                wait_for(
                    f"{len(calls)} to wait in line, not {street.queued()}", lambda: street.queued() == len(calls), 10
                )
        cheap, lowered, cheap_later, dear = (call.result(50) for call in calls)
    starts = [street.started(answer) for answer in (dear, lowered, cheap, cheap_later)]
    assert starts == sorted(starts)
    weighed = street.house.record(dear.headers["x-request-id"])["weighed"]
    assert (weighed["priority"], weighed["policy"], weighed["position"]) == (20, "cpu-only", 1)
    assert street.house.record(lowered.headers["x-request-id"])["weighed"]["position"] == 1


def refused(answer: httpx2.Response, param: str) -> dict[str, Any]:
    assert answer.status_code == 403, answer.text
    error = dict(answer.json()["error"])
    assert (error["code"], error["param"]) == ("not_granted", param)
    assert answer.headers["x-should-retry"] == "false"
    return error


def test_a_key_bounds_what_its_requests_may_ask_for_and_is_changed_while_it_is_used(street: Street) -> None:
    assert "at most -20" in refused(street.ask(street.cheap, priority="0"), "x-relevo-priority")["message"]
    assert street.ask(street.cheap, policy="gpu-only").status_code == 503, "no such route"
    change = ["keys", "set", "cheap", "--priority", "0", "--policy", "cpu-only", "--policy-fixed"]
    environment = {**os.environ, "RELEVO_STATE": str(street.house.state)}
    subprocess.run([sys.executable, "-m", "relevo", *change], check=True, env=environment, capture_output=True)
    try:
        assert street.ask(street.cheap, priority="0").status_code == 200
        assert "cpu-only" in refused(street.ask(street.cheap, policy="gpu-only"), "x-relevo-policy")["message"]
    finally:
        street.ring.regrant("cheap", priority=-20, policy=None, policy_fixed=False)


def test_a_persons_view_of_a_request_names_its_policy_and_priority(street: Street) -> None:
    request_id = street.ask(street.dear, priority="7").headers["x-request-id"]
    record = street.house.record(request_id)
    assert (record["policy"], record["priority"]) == ("cpu-only", 7)
    key = (street.house.state / "operator.key").read_text()
    shown = subprocess.run(
        [sys.executable, "-m", "relevo", "requests", "show", request_id, "--url", street.house.url, "--key", key],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    lines = dict(line.split(None, 1) for line in shown.splitlines() if len(line.split(None, 1)) == 2)
    assert (lines["policy"], lines["priority"]) == ("cpu-only", "7")


def test_after_a_crash_the_line_still_goes_by_priority(street: Street) -> None:
    house = street.house
    with concurrent.futures.ThreadPoolExecutor() as pool:
        headers = {"authorization": f"Bearer {street.cheap}"}
        with house.http.stream("POST", CHAT, json=body(7000, stream=True), headers=headers) as running:
            first_line(running)
            street.leave_in_line(street.cheap, pool, "cheap")
            street.leave_in_line(street.dear, pool, "dear")
            house.kill()
    house.start(both_routes=False)
    house.http.headers["authorization"] = f"Bearer {(house.state / 'operator.key').read_text()}"
    ids = [house.records(idempotency_key=name)[0]["id"] for name in ("dear", "cheap")]
    dear, cheap = (house.wait_state(request_id, "completed") for request_id in ids)
    assert (dear["priority"], cheap["priority"]) == (20, -20)
    assert started_at(dear) < started_at(cheap)
