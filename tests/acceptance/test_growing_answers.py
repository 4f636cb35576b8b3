"""Answers whose length nobody knows share a small pool of cells: they grow, wait for each other, and all end whole."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from relevo.setup.demo import find as find_demo_model

from .house import House, all_accounted, assert_idle, stream_lines, wait_for

CELLS, LIMIT, NAMED = 240, 180, 120
GOES_ON = {"0": -100, "2": -100}
"""Without its two tokens of an end, an answer goes on to its limit."""

CONFIG = f"""
[models.m]
path = "{find_demo_model()}"
device = ""
context_tokens = {CELLS}
slots = 4
max_output_tokens = {LIMIT}
threads = 1
"""


@pytest.fixture(scope="module")
def street(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One route with few cells, which knows that answers here are short."""
    house = House(tmp_path_factory.mktemp("street") / "state", "--host", "127.0.0.1", config=CONFIG).start()
    teach(house, 60)
    yield house
    house.close()


def teach(house: House, times: int) -> None:
    """Many short answers, so that a short one is what is expected."""
    for number in range(times):
        short = {"model": "m", "prompt": "Once", "n": 4, "seed": number, "stop": list("\n .,-_aeiourstln")}
        assert house.http.post("/v1/completions", json=short).status_code == 200
    assert lane(house)["expected_output_tokens"] < 8, "it has learned"


def body(**more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
    return {"model": "m", "messages": messages, "temperature": 0, **more}


def lane(house: House) -> dict[str, Any]:
    """Of the route that requests prefer."""
    return dict(house.status()["lanes"][0])


def ask(house: House, pool: concurrent.futures.Executor, **more: object) -> concurrent.futures.Future[httpx2.Response]:
    def call() -> httpx2.Response:
        with httpx2.Client(base_url=house.url, timeout=55) as http:
            return http.post("/v1/chat/completions", json=body(**more))

    return pool.submit(call)


def wait_cells(house: House, live: int) -> dict[str, Any]:
    return dict(wait_for(f"{live} cells to be live", lambda: (seen := lane(house))["cells_live"] >= live and seen, 30))


def wait_running(house: House) -> None:
    wait_for("a request to run", lambda: lane(house)["running"] == 1)


def a_named_limit_then_one_that_grows(
    house: House, pool: concurrent.futures.Executor
) -> tuple[concurrent.futures.Future[httpx2.Response], concurrent.futures.Future[httpx2.Response]]:
    """Together they need more cells than there are, and the second comes to that point first."""
    named = ask(house, pool, max_tokens=NAMED, logit_bias=GOES_ON)
    wait_running(house)
    return named, ask(house, pool, logit_bias=GOES_ON)


def wait_parked(house: House) -> dict[str, Any]:
    def parked() -> dict[str, Any] | None:
        records = [house.record(r["id"]) for r in house.records(state="running")]
        return next((r for r in records if r["relevo"]["parked"]), None)

    return dict(wait_for("a request to be parked", parked, 30, 0.01))


def tokens_of(response: httpx2.Response) -> int:
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["completion_tokens"])


def metric(house: House, name: str) -> float:
    lines = house.http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}_total"))


def alone(house: House, **more: object) -> dict[str, Any]:
    return dict(house.http.post("/v1/chat/completions", json=body(**more)).json())


def test_an_answer_without_a_named_limit_grows_to_its_end_and_its_cells_are_used(street: House) -> None:
    before = metric(street, "relevo_cell_extensions")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = ask(street, pool, logit_bias=GOES_ON)
        seen = wait_cells(street, 130)
        assert seen["cells_live"] <= seen["cells_leased"] <= seen["cells_live"] + 17
        assert seen["cells_total"] == seen["cells_leased"] + seen["cells_set_aside"] + seen["cells_free"] == CELLS
        assert seen["cells_reserved_unused"] < CELLS // 4, "the limit of 180 is not reserved"
        assert tokens_of(answer.result(50)) == LIMIT
    assert metric(street, "relevo_cell_extensions") - before >= LIMIT / 17
    assert_idle(street)


def test_a_named_limit_is_set_aside_whole_and_held_as_it_is_used(street: House) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = ask(street, pool, max_tokens=NAMED, logit_bias=GOES_ON)
        seen = wait_cells(street, 60)
        assert seen["cells_live"] <= seen["cells_leased"] <= seen["cells_live"] + 17
        assert seen["cells_leased"] + seen["cells_set_aside"] >= NAMED
        assert tokens_of(answer.result(50)) == NAMED
    assert_idle(street)


def test_two_long_answers_that_do_not_fit_together_both_end_whole_and_one_waits_parked(street: House) -> None:
    parks = metric(street, "relevo_cell_parks")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        named, grows = a_named_limit_then_one_that_grows(street, pool)
        record = wait_parked(street)
        late = ask(street, pool, max_tokens=1)
        parked = record["relevo"]["parked"]
        assert record["state"] == "running" and parked["choices"] == [0]
        assert f"All {CELLS} cells" in parked["reason"]
        seen = lane(street)
        if seen["parked"]:  # it may go on at any moment
            assert seen["parked_reason"] == parked["reason"]
        assert (tokens_of(named.result(50)), tokens_of(grows.result(50)), tokens_of(late.result(50))) == (
            NAMED,
            LIMIT,
            1,
        )
    grown, other, new = (street.record(a.result().json()["relevo"]["request_id"]) for a in (grows, named, late))
    assert grown["id"] == record["id"], "the one without a named limit waited"
    assert grown["attempts"] == 1, "it kept its cells and its attempt"
    assert metric(street, "relevo_cell_parks") > parks
    assert next(e["at"] for e in new["events"] if e["kind"] == "attempt") >= other["ended"] - 0.01, (
        "nothing new starts while somebody is parked"
    )
    assert_idle(street)


def test_where_everybody_waits_for_everybody_the_newest_gives_way_and_nothing_is_lost(street: House) -> None:
    gave_way = metric(street, "relevo_cell_give_ways")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = ask(street, pool, logit_bias=GOES_ON)
        wait_running(street)
        second = ask(street, pool, logit_bias=GOES_ON)
        answers = [first.result(55), second.result(55)]
    assert [tokens_of(a) for a in answers] == [LIMIT, LIMIT]
    assert metric(street, "relevo_cell_give_ways") == gave_way + 1
    older, newer = (a.json()["relevo"] for a in answers)
    assert (older["attempt"], older["handovers"], newer["attempt"]) == (1, [], 2)
    handover = newer["handovers"][0]
    assert (handover["from"], handover["to"], handover["grade"]) == ("cpu", "cpu", "boundary")
    assert "gave way" in handover["cause"]
    assert not newer["degraded"]
    assert_idle(street)


class Stream:
    """A stream that somebody reads."""

    def __init__(self, house: House, pool: concurrent.futures.Executor, **headers: str) -> None:
        self.house = house
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.usage_tokens: int | None = None
        self.finish: str | None = None
        self.id = ""
        self.read = pool.submit(self._read, headers)

    def _read(self, headers: dict[str, str]) -> None:
        sent = body(stream=True, logit_bias=GOES_ON, stream_options={"include_usage": True})
        with (
            httpx2.Client(base_url=self.house.url, timeout=55) as http,
            http.stream("POST", "/v1/chat/completions", json=sent, headers=headers) as answer,
        ):
            self.id = answer.headers["x-request-id"]
            for line in stream_lines(answer):
                if line != "[DONE]":
                    self._take(json.loads(line))

    def _take(self, said: dict[str, Any]) -> None:
        self.error = said.get("error") or self.error
        if said.get("usage"):
            self.usage_tokens = said["usage"]["completion_tokens"]
        for choice in said.get("choices", []):
            self.text += choice["delta"].get("content") or ""
            self.finish = choice["finish_reason"] or self.finish


def two_streams(house: House, pool: concurrent.futures.Executor, **headers: str) -> tuple[Stream, Stream]:
    first = Stream(house, pool, **headers)
    wait_running(house)
    second = Stream(house, pool, **headers)
    first.read.result(55), second.read.result(55)
    return first, second


def test_a_stream_that_gives_way_rests_as_resumable_and_is_resumed_whole(street: House) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, second = two_streams(street, pool)
    assert (first.usage_tokens, first.finish, first.error) == (LIMIT, "length", None)
    assert second.error is not None and second.error["code"] == "resumable", "never a silent cut"
    assert "gave way" in second.error["message"]
    assert street.record(second.id)["state"] == "resumable"
    assert_idle(street)
    assert street.http.post(second.error["resume"], json={}).status_code == 200
    record = street.wait_state(second.id, "completed")
    assert record["result"]["choices"][0]["text"].startswith(second.text)
    assert record["result"]["usage"]["completion_tokens"] == LIMIT
    assert_idle(street)


def test_a_stream_that_accepts_it_goes_on_by_itself_after_it_gave_way(street: House) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, second = two_streams(street, pool, **{"x-relevo-handover": "continuous"})
    for stream in (first, second):
        assert (stream.usage_tokens, stream.finish, stream.error) == (LIMIT, "length", None)
    record = street.record(second.id)
    assert [h["grade"] for h in record["relevo"]["handovers"]] == ["continuous"]
    assert record["result"]["choices"][0]["text"] == second.text
    assert_idle(street)


def test_cancelling_a_parked_request_frees_its_cells(street: House) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        named, grows = a_named_limit_then_one_that_grows(street, pool)
        record = wait_parked(street)
        assert street.http.post(f"/relevo/v1/requests/{record['id']}/cancel").status_code == 200
        assert grows.result(20).status_code == 409
        seen = lane(street)
        assert (seen["parked"], seen["running"]) == (0, 1) and seen["cells_free"] >= CELLS - NAMED - 50
        assert tokens_of(named.result(50)) == NAMED
    assert_idle(street)


def test_several_answers_of_one_request_grow_and_share_its_prompt(street: House) -> None:
    answer = alone(street, n=3, logit_bias=GOES_ON, temperature=1, seed=5)
    assert [c["finish_reason"] for c in answer["choices"]] == ["length"] * 3
    prompt = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * ((CELLS - prompt) // 3), "the prompt is there once"
    assert_idle(street)


TWINS = f"""
[devices.gpu0]
kind = "emulated"
total_bytes = 1500000000
[models.m]
path = "{find_demo_model()}"
context_tokens = {CELLS}
slots = 4
max_output_tokens = {LIMIT}
threads = 1
"""


def test_kill_of_the_worker_while_one_is_parked_hands_both_over(build: Any) -> None:
    house = build("--host", "127.0.0.1", config=TWINS).start()
    teach(house, 6)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        named, grows = a_named_limit_then_one_that_grows(house, pool)
        parked = wait_parked(house)
        house.kill_worker("gpu")
        assert tokens_of(named.result(55)) == NAMED
        assert tokens_of(grows.result(55)) == LIMIT
    records = all_accounted(house, [r.result().json()["relevo"]["request_id"] for r in (grows, named)])
    assert parked["id"] in records
    for record in records.values():
        assert record["relevo"]["handovers"][0]["from"] == "gpu" and record["relevo"]["parked"] is None
    assert_idle(house)
