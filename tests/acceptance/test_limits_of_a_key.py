"""What one key may take, how long a request may wait, and what is told when the one route it allows is gone."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from relevo.api.keys import KeyRing
from relevo.setup.demo import find as find_demo_model

from .house import House, assert_idle, first_line, wait_for

CHAT = "/v1/chat/completions"
MOST = 4
SLOTS = 2
CONFIG = f"""
[limits]
running_per_key = {MOST}
[devices.gpu0]
kind = "emulated"
total_bytes = 1500000000
[models.m]
path = "{find_demo_model()}"
context_tokens = 4096
slots = {SLOTS}
"""


def body(tokens: int, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}


class Caller:
    """Somebody with a key."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx2.Client(base_url=url, timeout=55.0, headers={"authorization": f"Bearer {key}"})

    def chat(self, tokens: int, headers: dict[str, str] | None = None, **more: object) -> httpx2.Response:
        return self.http.post(CHAT, json=body(tokens, **more), headers=headers or {})

    def get(self, path: str, **headers: str) -> Any:
        answer = self.http.get(f"/relevo/v1/{path}", headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def running(self) -> list[str]:
        return [r["id"] for r in self.get("requests?state=running")["data"]]

    @contextmanager
    def streaming(self, count: int, policy: str = "gpu-only") -> Iterator[list[str]]:
        """So many long streams that have begun; left at the end, which cancels them."""
        answers = []
        calls = [
            self.http.stream("POST", CHAT, json=body(1500, stream=True), headers={"x-relevo-policy": policy})
            for _ in range(count)
        ]
        try:
            for call in calls:
                answers.append(call.__enter__())
                first_line(answers[-1])
            yield [answer.headers["x-request-id"] for answer in answers]
        finally:
            for call in calls[: len(answers)]:
                call.__exit__(None, None, None)


class Street:
    """The service, its operator, and two people."""

    def __init__(self, house: House, keys: list[str]) -> None:
        self.house = house
        operator = (house.state / "operator.key").read_text()
        house.http.headers["authorization"] = f"Bearer {operator}"
        self.ada, self.bob = (Caller(house.url, key) for key in keys)

    def both_serve(self) -> bool:
        return all(r["state"] == "serving" for r in self.house.status()["replicas"])


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    house = House(tmp_path_factory.mktemp("street") / "state", "--host", "127.0.0.1", config=CONFIG)
    house.state.mkdir(mode=0o700)
    ring = KeyRing(house.state / "keys.json")
    keys = [ring.create(name)[1] for name in ("ada", "bob")]
    house.start(both_routes=False)
    street = Street(house, keys)
    yield street
    street.ada.http.close()
    street.bob.http.close()
    house.close()


@pytest.fixture
def street(opened: Street) -> Iterator[Street]:
    """Both routes serve before a test, and nothing is left running after it."""
    wait_for("both routes to serve", opened.both_serve, 30)
    yield opened
    assert_idle(opened.house)


def error_of(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = dict(answer.json()["error"])
    assert error["code"] == code and len(error["message"]) > 10, error
    return error


# ---------------------------------------------------------------- what one key may take


def test_a_key_has_so_many_requests_under_way_and_another_key_is_not_held_up(street: Street) -> None:
    ada, bob = street.ada, street.bob
    with ada.streaming(SLOTS, "gpu-only"), ada.streaming(SLOTS, "cpu-only") as last:
        refused = ada.chat(4)
        error = error_of(refused, 429, "rate_limit_exceeded")
        assert str(MOST) in error["message"] and float(refused.headers["retry-after"]) > 0
        assert refused.headers["x-should-retry"] == "true"
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answer = pool.submit(bob.chat, 4)
            wait_for("the other key's request to be accepted", lambda: bob.get("requests")["data"], 5)
            street.house.http.post(f"/relevo/v1/requests/{last[0]}/cancel")
            assert answer.result(50).status_code == 200
        assert ada.chat(4).status_code == 200, "one has ended"


def test_a_burst_of_one_key_takes_no_more_than_its_share(street: Street) -> None:
    with concurrent.futures.ThreadPoolExecutor(3 * MOST) as pool:
        calls = [pool.submit(street.ada.chat, 60, seed=number) for number in range(3 * MOST)]
        answers = [call.result(55) for call in calls]
    served = [a for a in answers if a.status_code == 200]
    refused = [a for a in answers if a.status_code == 429]
    assert len(served) + len(refused) == len(answers), [a.text for a in answers if a not in served + refused]
    assert len(served) == MOST, "the share holds also against those that come at the same moment"


def test_a_repetition_takes_no_place_of_its_own(street: Street) -> None:
    with street.ada.streaming(MOST - 1), concurrent.futures.ThreadPoolExecutor() as pool:
        headers = {"Idempotency-Key": "takes-one-place", "x-relevo-policy": "cpu-only"}
        calls = [pool.submit(street.ada.chat, 40, headers) for _ in range(3)]
        answers = [call.result(50) for call in calls]
    assert [a.status_code for a in answers] == [200] * 3, [a.text for a in answers]
    assert len({a.headers["x-request-id"] for a in answers}) == 1


# ---------------------------------------------------------------- who sees what


def test_the_operator_sees_everybodys_requests_and_others_only_their_own(street: Street) -> None:
    ids = [caller.chat(2).headers["x-request-id"] for caller in (street.ada, street.bob)]
    for caller, mine, other in ((street.ada, ids[0], ids[1]), (street.bob, ids[1], ids[0])):
        listed = [r["id"] for r in caller.get("requests?limit=1000")["data"]]
        assert mine in listed and other not in listed
    listed = [r["id"] for r in street.house.records(limit="1000")]
    assert set(ids) <= set(listed)
    assert {street.house.record(i)["state"] for i in ids} == {"completed"}
    wrong = httpx2.get(f"{street.house.url}/relevo/v1/requests", headers={"authorization": "Bearer ro-" + "A" * 43})
    error_of(wrong, 401, "invalid_api_key")


def test_an_automatic_retry_never_attaches_to_another_keys_request(street: Street) -> None:
    retry = {"x-stainless-retry-count": "1"}
    first = street.ada.chat(3, seed=5)
    assert street.ada.chat(3, retry, seed=5).headers["x-request-id"] == first.headers["x-request-id"]
    assert street.bob.chat(3, retry, seed=5).headers["x-request-id"] != first.headers["x-request-id"]
    assert street.ada.chat(3, seed=5).headers["x-request-id"] != first.headers["x-request-id"], (
        "no retry, no repetition"
    )


def test_a_stored_request_outlives_its_client_and_its_retry_finds_it(street: Street) -> None:
    asked = body(80, stream=True, store=True, seed=9)
    with street.ada.http.stream("POST", CHAT, json=asked) as answer:
        first_line(answer)
        request_id = answer.headers["x-request-id"]
    record = wait_for("it to end", lambda: (r := street.ada.get(f"requests/{request_id}"))["ended"] and r)
    assert record["state"] == "completed" and record["result"]["usage"]["completion_tokens"] == 80
    again = street.ada.http.post(CHAT, json=asked, headers={"x-stainless-retry-count": "1"})
    assert again.headers["x-request-id"] == request_id
    chunks = [json.loads(line[6:]) for line in again.text.splitlines() if line.startswith("data: {")]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == record["result"]["choices"][0]["text"]


# ---------------------------------------------------------------- events


def events(caller: Caller, request_id: str, after: int | None = None) -> list[tuple[int, str, dict[str, Any]]]:
    """Number, name and fields of a request's events, to its end."""
    headers = {} if after is None else {"last-event-id": str(after)}
    with caller.http.stream("GET", f"/relevo/v1/requests/{request_id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        blocks = [b for b in "".join(answer.iter_text()).split("\n\n") if b.startswith("id: ")]
    parts = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
    return [(int(p["id"]), p["event"], json.loads(p["data"])) for p in parts]


@pytest.mark.parametrize("stored", [False, True])
def test_a_requests_events_are_replayed_from_any_point(street: Street, stored: bool) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        call = pool.submit(street.ada.chat, 60, store=stored, temperature=1, seed=int(stored) + 20)
        request_id = wait_for("it to run", street.ada.running)[0]
        live = events(street.ada, request_id)
        text = call.result(50).json()["choices"][0]["message"]["content"]
    assert [number for number, _, _ in live] == list(range(1, len(live) + 1))
    assert "".join(fields["text"] for _, name, fields in live if name == "delta") == text
    assert live[-1][1] == "ended" and live[-1][2]["state"] == "completed"
    assert events(street.ada, request_id) == live, "the same again when it has ended"
    middle = len(live) // 2
    assert events(street.ada, request_id, after=middle) == live[middle:]
    assert events(street.ada, request_id, after=len(live)) == []
    assert events(street.ada, request_id, after=10**9) == []


# ---------------------------------------------------------------- waiting in vain


def test_a_deadline_that_cannot_be_met_is_told_in_time(street: Street) -> None:
    with street.ada.streaming(SLOTS):
        began = time.monotonic()
        answer = street.bob.chat(4, {"x-relevo-policy": "gpu-only", "x-relevo-deadline-s": "0.3"})
        assert time.monotonic() - began < 3
        assert answer.status_code in (503, 504), answer.text
        assert answer.json()["error"]["code"] in ("deadline_unreachable", "deadline_passed"), answer.text
        assert answer.headers["x-should-retry"] == "false"
        elsewhere = street.bob.chat(4, {"x-relevo-deadline-s": "30"})
        assert elsewhere.status_code == 200, "without the policy it is planned on the route that can"
    patient = street.bob.chat(4, {"x-relevo-policy": "gpu-only", "x-relevo-deadline-s": "30"})
    assert patient.status_code == 200 and patient.headers["x-relevo-route"] == "gpu"


def with_gpu_gone(street: Street, then: Callable[[], None]) -> None:
    """Kill the GPU worker and do something as soon as its route is known to be gone."""
    os.kill(int(street.house.replica("gpu")["pid"]), signal.SIGKILL)
    wait_for("the GPU route to be gone", lambda: street.house.replica("gpu")["state"] != "serving", 5, 0.005)
    then()


def test_while_the_gpu_is_gone_gpu_only_is_refused_or_waits_and_the_rest_is_served(street: Street) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        calls: list[concurrent.futures.Future[httpx2.Response]] = []

        def ask() -> None:
            calls.append(pool.submit(street.bob.chat, 4, {"x-relevo-policy": "gpu-only", "x-relevo-deadline-s": "0.2"}))
            calls.append(pool.submit(street.bob.chat, 4))

        with_gpu_gone(street, ask)
        only, any_route = (call.result(50) for call in calls)
    assert only.status_code in (503, 504), only.text
    error = only.json()["error"]
    assert error["code"] in ("policy_refused", "deadline_unreachable", "deadline_passed"), error
    assert "gpu" in error["message"].lower(), error
    assert any_route.status_code == 200 and any_route.headers["x-relevo-route"] == "cpu"
    assert any_route.headers["x-relevo-degraded"] == "true" and any_route.json()["relevo"]["reason"]
