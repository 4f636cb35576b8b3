"""The gateway is killed with requests in every state, alone and together with its workers."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import time
from typing import Any

import httpx2
import pytest

from tests.acceptance.house import House, wait_for

from .callers import CONTINUOUS, FOUR, KEPT, LONG_PROMPT, PLAIN, STREAM, Call, Kind, accepted_id, call, known_ids
from .reckoning import Log, alive, assert_accounted, assert_clean_after
from .test_worker_falls import all_serving, go_on, start_at

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]


def kill_all(house: House, *, workers: str) -> None:
    """The gateway dies; its workers notice, die with it, or are stopped so that they cannot notice."""
    pids = house.worker_pids()
    for pid in pids:
        if workers == "stopped":
            os.kill(pid, signal.SIGSTOP)
    house.kill()
    if workers == "killed":
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
    if workers == "left":
        wait_for("the workers to end with their gateway", lambda: not any(alive(pid) for pid in pids), 10)
    house.start()
    assert not any(alive(pid) for pid in pids), "a worker of the killed gateway is still there"


def after_restart(kind: Kind, moment: str) -> set[str]:
    """What a request may be after the gateway came back: output that may have been seen is never done again."""
    if not kind.stream:
        return {"completed"}
    return {
        "queued": {"completed"},
        # Of a kept stream nothing leaves before it is recorded: nothing recorded is nothing delivered.
        "prefill": {"completed"} if kind.kept else {"resumable"},
        "decode": {"resumable"},
        "end": {"resumable", "completed"},  # the last commit may have been in time
    }[moment]


@pytest.mark.parametrize("workers", ["left", "killed", "stopped"])
@pytest.mark.parametrize("kind", [PLAIN, STREAM, KEPT, FOUR, CONTINUOUS], ids=lambda k: k.name)
def test_a_gateway_that_dies_at_any_moment_loses_nothing(build, kind: Kind, workers: str) -> None:
    house: House = build().start()
    log = Log(f"gateway killed, workers {workers}, {kind.name}")
    calls: list[Call] = []
    moments = ("queued", "decode", "end", "prefill") if workers == "left" else ("queued", "decode")
    for moment in moments:
        all_serving(house)
        c, request_id, full = start_at(house, kind, moment)
        began = time.monotonic()
        kill_all(house, workers=workers)
        up_ms = round((time.monotonic() - began) * 1000)
        for other in [c, *full]:
            other.end(20)
        assert c.broken or c.done or c.answer, "a dead gateway cannot have said a proper end"
        for row in house.records(limit="100"):
            if full and row["id"] != request_id and row["state"] in ("queued", "running"):
                house.http.post(f"/relevo/v1/requests/{row['id']}/cancel")
        record = house.wait_state(request_id, "completed", "resumable", timeout_s=120)
        assert record["state"] in after_restart(kind, moment), (moment, record["state"], record["reason"])
        state = record["state"]
        if state == "resumable" or kind.kept:
            go_on(house, c, request_id)
        log.say(moment, up_ms=up_ms, state=state, attempts=record["attempts"], seen=c.seen)
        calls += [c, *full]
    assert_accounted(house, calls)
    log.say("ended", **assert_clean_after(house))


@pytest.mark.parametrize("workers", ["left", "stopped"])
def test_requests_in_all_states_at_once_survive_the_gateway(build, workers: str) -> None:
    house: House = build().start()
    log = Log(f"gateway killed with everything in it, workers {workers}")
    ended = call(house, KEPT, 20).end()
    resting = call(house, STREAM, 300)
    wait_for("output", lambda: resting.seen > 10, 30)
    house.kill_worker("gpu")
    resting.end()
    assert resting.error is not None and resting.error["code"] == "resumable"
    all_serving(house)
    known = known_ids(house)
    cancelled = call(house, PLAIN, 900)
    cancelled_id = accepted_id(house, known)
    house.http.post(f"/relevo/v1/requests/{cancelled_id}/cancel")
    cancelled.end()
    known = known_ids(house)
    running = [call(house, kind, 500) for kind in (PLAIN, STREAM, KEPT)]
    wait_for("three to be accepted", lambda: len(known_ids(house) - known) == 3)
    wait_for("output", lambda: running[1].seen > 3 and running[2].seen > 3, 60)
    just_ended = call(house, PLAIN, 1).end()
    reading = call(house, PLAIN, 16, LONG_PROMPT)
    waiting = [call(house, Kind("eight", choices=8), 20) for _ in range(3)]
    wait_for("all to be accepted", lambda: len(known_ids(house) - known) == 8)
    before = {r["id"]: r["state"] for r in house.records(limit="100")}
    kill_all(house, workers=workers)
    calls = [ended, resting, cancelled, *running, reading, *waiting, just_ended]
    records = assert_accounted(house, calls)
    assert set(before) <= set(records)
    for request_id, state in before.items():
        if state in ("completed", "cancelled", "resumable"):
            assert records[request_id]["state"] == state, "what had ended, or rested, is as it was"
    assert records[just_ended.request_id]["state"] == "completed"
    again = Call(house, KEPT, 20, key=ended.key).start().end()
    assert again.texts == ended.texts and again.request_id == ended.request_id
    for c in (resting, running[1], running[2]):
        assert records[str(c.request_id)]["state"] == "resumable", "it delivered output, and was cut off"
        go_on(house, c, str(c.request_id))
    records = assert_accounted(house, calls)
    states = sorted(r["state"] for r in records.values())
    assert states == ["cancelled"] + ["completed"] * (len(records) - 1), states
    log.say("ended", before=sorted(before.values()), **assert_clean_after(house))


def test_what_was_delivered_before_a_restart_is_kept_when_the_resumed_worker_falls_too(build) -> None:
    house: House = build().start()
    c = call(house, STREAM, 300)
    wait_for("output", lambda: c.seen > 60, 60)
    kill_all(house, workers="left")
    c.end(20)
    request_id = str(c.request_id)
    kept = house.wait_state(request_id, "resumable")["result"]["choices"][0]["text"]
    assert kept and c.texts[0].startswith(kept), "what is kept was delivered"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(resume, house, request_id)
        house.wait_state(request_id, "running")
        house.kill_worker("gpu")
        first.result(60)
    record = house.wait_state(request_id, "resumable", "completed")
    if record["state"] == "resumable":
        resume(house, request_id)
        record = house.wait_state(request_id, "completed")
    assert record["result"]["choices"][0]["text"].startswith(kept), "a restart took back what a client had seen"
    assert record["result"]["usage"]["completion_tokens"] == 300
    assert_clean_after(house)


def resume(house: House, request_id: str) -> int:
    """Take it up, however that ends."""
    with httpx2.Client(base_url=house.url, timeout=90) as http:
        return http.post(f"/relevo/v1/requests/{request_id}/resume", json={}).status_code


@pytest.mark.parametrize("seed", range(3))
def test_a_gateway_that_dies_while_it_accepts_never_forgets_an_id_it_gave_out(build, seed: int) -> None:
    house: House = build().start()
    dice = random.Random(seed)
    log = Log(f"gateway killed while accepting, seed {seed}")
    calls: list[Call] = []
    for _ in range(3):
        calls += [call(house, dice.choice([PLAIN, STREAM, KEPT]), 12) for _ in range(14)]
        time.sleep(dice.uniform(0.005, 0.4))
        kill_all(house, workers="left")
    for c in calls:
        c.end(30)
    records = assert_accounted(house, calls)
    told = [c for c in calls if c.request_id is not None]
    keys = {r["idempotency_key"]: r["id"] for r in house.records(limit="1000") if r["idempotency_key"]}
    for c in told:
        if c.kind.kept:
            assert keys[c.key] == c.request_id
    # The same keys again: nothing is done twice.
    for c in [c for c in calls if c.kind.kept]:
        again = Call(house, c.kind, c.tokens, key=c.key).start().end()
        assert again.ok, (again.status, again.error, again.broken)
        assert c.request_id in (None, again.request_id)
        assert again.texts[0].startswith(c.texts.get(0, ""))
    assert records
    facts: dict[str, Any] = assert_clean_after(house)
    log.say("ended", calls=len(calls), told=len(told), recorded=len(records), **facts)
