"""Processes are killed, stopped and left alone; every accepted request is accounted for."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Iterator

import httpx2
import psutil
import pytest

from .house import House, all_accounted, assert_idle, process_of, stream_lines, wait_for

MODEL = "smollm2-135m"


def body(tokens: int = 200, **more: object) -> dict[str, object]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a long story about a lighthouse."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        **more,
    }


def ask_in_thread(
    house: House, pool: concurrent.futures.Executor, tokens: int = 200
) -> concurrent.futures.Future[httpx2.Response]:
    def call() -> httpx2.Response:
        with httpx2.Client(base_url=house.url, timeout=90) as http:
            return http.post("/v1/chat/completions", json=body(tokens))

    return pool.submit(call)


def running_id(house: House) -> str:
    return str(wait_for("a request to run", lambda: [r["id"] for r in house.records(state="running")])[0])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A service whose workers are left alone."""
    yield from services(tmp_path_factory, "calm")


@pytest.fixture(scope="module")
def stricken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A service whose GPU worker falls a few times: a worker that dies six times in ten minutes is given up."""
    yield from services(tmp_path_factory, "stricken")


@pytest.fixture(scope="module")
def beheaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A service whose gateway falls too."""
    yield from services(tmp_path_factory, "beheaded")


def services(folders: pytest.TempPathFactory, name: str) -> Iterator[House]:
    house = House(folders.mktemp(name) / "state").start()
    yield house
    house.close()


def whole(house: House) -> House:
    """The service of a group of tests once what the test before did to it is healed: the GPU takes new work again."""
    wait_for("both routes to serve", lambda: all(r["state"] == "serving" for r in house.status()["replicas"]), 30)

    def on_gpu() -> bool:
        return house.http.post("/v1/chat/completions", json=body(1)).headers["x-relevo-route"] == "gpu"

    wait_for("new work to go to the GPU", on_gpu, 30)
    assert_idle(house)
    return house


# ---------------------------------------------------------------- the GPU worker falls


def test_a_request_without_delivered_output_is_completed_by_the_twin_under_the_same_id(stricken: House) -> None:
    house = whole(stricken)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = ask_in_thread(house, pool)
        request_id = running_id(house)
        house.kill_worker("gpu")
        response = answer.result(60)
    assert response.status_code == 200, response.text
    relevo = response.json()["relevo"]
    assert relevo["request_id"] == request_id
    assert response.headers["x-relevo-route"] == "cpu" and response.headers["x-relevo-degraded"] == "true"
    assert response.headers["x-relevo-standby"] == "none", "the standby is used up"
    assert response.json()["usage"]["completion_tokens"] == 200
    handover = relevo["handovers"][0]
    assert (handover["from"], handover["to"], handover["grade"]) == ("gpu", "cpu", "boundary")
    assert handover["gap_ms"] < 5000
    assert house.record(request_id)["attempts"] == 2
    wait_for("the GPU worker to come back", lambda: house.replica("gpu")["state"] == "serving")
    again = house.http.post("/v1/chat/completions", json=body(4))
    assert again.headers["x-relevo-route"] == "gpu", "new work goes back first"
    assert_idle(house)


def test_a_stream_that_delivered_output_becomes_resumable_and_is_resumed(stricken: House) -> None:
    house = whole(stricken)
    with house.http.stream("POST", "/v1/chat/completions", json=body(300, stream=True)) as answer:
        lines = stream_lines(answer)
        seen = [json.loads(next(lines)) for _ in range(6)]
        house.kill_worker("gpu")
        rest = list(lines)
    assert "[DONE]" not in rest
    error = json.loads(rest[-1])["error"]
    assert error["code"] == "resumable" and error["checkpoint"] and error["resume"]
    request_id = answer.headers["x-request-id"]
    text = "".join(
        c["choices"][0]["delta"].get("content", "") for c in [*seen, *map(json.loads, rest[:-1])] if c.get("choices")
    )
    record = house.record(request_id)
    assert record["state"] == "resumable"
    assert record["result"]["choices"][0]["text"].startswith(text)
    resumed = house.http.post(error["resume"], json={})
    assert resumed.status_code == 200, resumed.text
    record = house.wait_state(request_id, "completed")
    assert record["result"]["choices"][0]["text"].startswith(text)
    assert record["result"]["usage"]["completion_tokens"] == 300
    assert_idle(house)


def test_a_stopped_worker_is_fenced_and_its_work_goes_on_elsewhere(stricken: House) -> None:
    house = whole(stricken)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = ask_in_thread(house, pool)
        running_id(house)
        pid = house.kill_worker("gpu", signal.SIGSTOP)
        response = answer.result(60)
    assert response.status_code == 200 and response.headers["x-relevo-route"] == "cpu"
    wait_for(
        "the stopped worker to be gone", lambda: (p := process_of(pid)) is None or p.status() == psutil.STATUS_ZOMBIE
    )
    wait_for("the GPU worker to come back", lambda: house.replica("gpu")["state"] == "serving")


# ---------------------------------------------------------------- the gateway falls, then both workers


def test_after_a_kill_of_the_gateway_every_accepted_request_is_completed_or_resumable(beheaded: House) -> None:
    house = whole(beheaded)
    before = {r["id"] for r in house.records(limit="50")}
    ids: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        plain = [ask_in_thread(house, pool, 80) for _ in range(10)]
        stream = house.http.stream("POST", "/v1/chat/completions", json=body(200, stream=True))
        answer = stream.__enter__()
        lines = stream_lines(answer)
        [next(lines) for _ in range(4)]
        wait_for("all requests to be accepted", lambda: len(house.records(limit="50")) >= len(before) + 11)
        ids = [i for r in house.records(limit="50") if (i := r["id"]) not in before]
        left = house.kill()
        for call in plain:
            with pytest.raises(httpx2.HTTPError):
                call.result(30).raise_for_status()
    wait_for("the workers to end with their gateway", lambda: not any(alive(pid) for pid in left), 10)
    house.start()
    records = all_accounted(house, ids)
    states = sorted(r["state"] for r in records.values())
    assert states == ["completed"] * 10 + ["resumable"], states
    assert records[answer.headers["x-request-id"]]["state"] == "resumable"
    assert all(r["result"]["usage"]["completion_tokens"] == 80 for r in records.values() if r["state"] == "completed")
    assert_idle(house)


def alive(pid: int) -> bool:
    p = process_of(pid)
    return p is not None and p.status() != psutil.STATUS_ZOMBIE


def test_gateway_and_workers_killed_together_lose_nothing(beheaded: House) -> None:
    house = whole(beheaded)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        call = ask_in_thread(house, pool, 150)
        request_id = running_id(house)
        for pid in house.worker_pids():
            os.kill(pid, signal.SIGSTOP)  # leftovers that cannot notice that their gateway is gone
        left = house.kill()
        with pytest.raises(httpx2.HTTPError):
            call.result(30)
    house.start()
    assert not any(alive(pid) for pid in left), "leftover workers are killed before anything is admitted"
    assert house.wait_state(request_id, "completed")["result"]["usage"]["completion_tokens"] == 150


def test_queued_requests_survive_the_worker(beheaded: House) -> None:
    house = whole(beheaded)
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        answers = [ask_in_thread(house, pool, 60) for _ in range(12)]
        running_id(house)
        house.kill_worker("gpu")
        responses = [a.result(90) for a in answers]
    assert [r.status_code for r in responses] == [200] * 12
    assert_idle(house)


def test_both_workers_die_and_the_request_is_still_answered(beheaded: House) -> None:
    house = whole(beheaded)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = ask_in_thread(house, pool)
        request_id = running_id(house)
        house.kill_worker("cpu")
        house.kill_worker("gpu")
        response = answer.result(60)
    assert response.status_code == 200, response.text
    assert response.json()["relevo"]["request_id"] == request_id


# ---------------------------------------------------------------- clients leave and change their mind


def test_a_client_that_leaves_frees_its_place_at_once(calm: House) -> None:
    house = whole(calm)
    with (
        httpx2.Client(base_url=house.url, timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=body(2000, stream=True)) as answer,
    ):
        lines = stream_lines(answer)
        next(lines), next(lines)
        request_id = answer.headers["x-request-id"]
    assert house.wait_state(request_id, "cancelled", timeout_s=5)["reason"]
    assert_idle(house)


def cancelled_since(house: House, before: set[str]) -> list[str]:
    return [r["id"] for r in house.records(state="cancelled", limit="50") if r["id"] not in before]


def test_a_queued_client_that_leaves_never_runs(calm: House) -> None:
    house = whole(calm)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        before = {r["id"] for r in house.records(state="cancelled", limit="50")}
        busy = [ask_in_thread(house, pool, 80) for _ in range(8)]
        wait_for("the slots to be taken", lambda: len(house.records(state="running", limit="50")) >= 8)
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(
                f"{house.url}/v1/chat/completions", json=body(120), headers={"x-relevo-policy": "gpu-only"}, timeout=0.3
            )
        left = wait_for("the ninth to be cancelled", lambda: cancelled_since(house, before), 5)
        assert [house.record(i)["attempts"] for i in left] == [0]
        assert all(b.result(90).status_code == 200 for b in busy)


def test_cancel_ends_a_running_request_within_a_step(calm: House) -> None:
    house = whole(calm)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = ask_in_thread(house, pool, 2000)
        request_id = running_id(house)
        began = time.monotonic()
        assert house.http.post(f"/relevo/v1/requests/{request_id}/cancel").status_code == 200
        response = answer.result(10)
    assert response.status_code == 409 and response.json()["error"]["code"] == "cancelled"
    assert time.monotonic() - began < 2
    assert house.http.post(f"/relevo/v1/requests/{request_id}/cancel").status_code == 200, (
        "cancelling twice is harmless"
    )
    assert_idle(house)


def test_a_clean_stop_leaves_no_process_and_ends_with_zero(calm: House) -> None:
    house = whole(calm)
    assert house.worker_pids()
    assert house.stop() == 0
