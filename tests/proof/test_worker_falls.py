"""The GPU worker is killed and stopped at every state of every kind of request; nothing is lost, doubled or left."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.acceptance.house import House, wait_for

from .callers import CONTINUOUS, FOUR, KEPT, KINDS, LONG_PROMPT, PLAIN, STREAM, Call, Kind, accepted_id, call, known_ids
from .reckoning import Log, alive, assert_accounted, assert_clean_after, figures

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
DETECTED_WITHIN_MS = {"killed": 250.0, "stopped": 3500.0}
"""Death is seen by the socket's end; a silent worker is fenced after 3 s."""
SLACK_MS = 500.0
"""Two cores that other tests share."""
END_TOKENS = 48
DECODE_TOKENS = 120


def all_serving(house: House, timeout_s: float = 60.0) -> None:
    """Every worker serves, and no breaker keeps work from it."""

    def well() -> bool:
        status = house.status()
        return all(r["state"] == "serving" for r in status["replicas"]) and all(
            d["breaker"]["state"] == "closed" for d in status["devices"]
        )

    wait_for("every worker to serve", well, timeout_s)


def blockers(house: House) -> list[Call]:
    """Both routes' slots are all taken, for much longer than a test takes."""
    full = []
    for policy in ("gpu-only", "cpu-only"):
        known = known_ids(house)
        full.append(call(house, Kind("blocker", choices=8), 900, policy=policy))
        house.wait_state(accepted_id(house, known), "running")
    return full


def reach(house: House, c: Call, request_id: str, moment: str) -> None:
    """Wait until the request is at the moment."""
    if moment == "queued":
        house.wait_state(request_id, "queued")
        time.sleep(0.1)
        assert house.record(request_id)["state"] == "queued"
    elif moment == "prefill":
        house.wait_state(request_id, "running")
        time.sleep(0.4)
        assert written(house, request_id) == 0, "it was past its prefill already"
    else:
        share = c.tokens * c.kind.choices
        goal = 12 if moment == "decode" else share - 4 * c.kind.choices
        wait_for(f"{goal} tokens", lambda: written(house, request_id) >= goal, 60, 0.002)


def written(house: House, request_id: str) -> int:
    result = house.record(request_id)["result"]
    return 0 if result is None else int(result["usage"]["completion_tokens"])


def start_at(house: House, kind: Kind, moment: str) -> tuple[Call, str, list[Call]]:
    """A call that has reached the moment, its id, and those who block its way."""
    full = blockers(house) if moment == "queued" else []
    known = known_ids(house)
    tokens = {"queued": 24, "prefill": 16, "decode": DECODE_TOKENS, "end": END_TOKENS}[moment]
    c = call(house, kind, tokens, LONG_PROMPT if moment == "prefill" else "Tell me a long story about a lighthouse.")
    request_id = accepted_id(house, known)
    reach(house, c, request_id, moment)
    return c, request_id, full


def detection_ms(house: House, route: str, at: float) -> float:
    """From the signal to when the death was known."""
    death = wait_for(
        "the death to be known",
        lambda: (d := house.replica(route)["last_death"]) is not None and d["at"] >= at and d,
        10,
        0.01,
    )
    return round((death["at"] - at) * 1000, 1)


def expected_end(kind: Kind, delivered: bool) -> str:
    """Only a stream whose output was delivered, and whose client did not allow going on, comes to rest."""
    return "resumable" if delivered and kind.stream and kind.handover != "continuous" else "completed"


def go_on(house: House, c: Call, request_id: str) -> None:
    """A resting request is taken up: a kept one by its key, another by its address; what was delivered stays."""
    if c.kind.kept:
        again = Call(house, c.kind, c.tokens, c.prompt, key=c.key).start().end()
        assert again.ok, (again.status, again.error, again.broken)
        assert again.request_id == request_id
        assert again.texts[0].startswith(c.texts.get(0, ""))
        return
    resumed = house.http.post(f"/relevo/v1/requests/{request_id}/resume", json={})
    assert resumed.status_code == 200, resumed.text


def cell(house: House, kind: Kind, moment: str, how: str, log: Log) -> list[Call]:
    """One state, one kind, one signal; the house is left as it was found."""
    all_serving(house)
    c, request_id, full = start_at(house, kind, moment)
    seen = c.seen
    at = time.time()
    began = time.monotonic()
    pid = house.kill_worker("gpu", SIGNALS[how])
    noticed_ms = detection_ms(house, "gpu", at)
    for record in house.records(limit="100"):
        if full and record["state"] in ("queued", "running") and record["id"] != request_id:
            house.http.post(f"/relevo/v1/requests/{record['id']}/cancel")
    c.end()
    record = house.wait_state(request_id, "completed", "resumable", timeout_s=120)
    rested = record["state"] == "resumable"
    if rested:
        assert c.error is not None and c.error["code"] == "resumable" and not c.done, (c.error, c.done)
        go_on(house, c, request_id)
    else:
        assert c.ok, (c.status, c.error, c.broken)
    record = house.wait_state(request_id, "completed", timeout_s=120)
    assert record["result"]["usage"]["completion_tokens"] == c.tokens * kind.choices
    all_serving(house)
    recovery_ms = round((time.monotonic() - began) * 1000)
    assert not alive(pid), "a fenced worker is gone"
    handovers = record["relevo"]["handovers"]
    check_path(kind, moment, rested=rested, seen=seen, record=record)
    if kind is CONTINUOUS:
        check_going_on(c, handovers)
    gaps = [h["gap_ms"] for h in handovers if h["gap_ms"] is not None]
    log.say(
        moment, noticed_ms=noticed_ms, gaps_ms=gaps, back_ms=recovery_ms, rested=rested, attempts=record["attempts"]
    )
    assert noticed_ms < DETECTED_WITHIN_MS[how] + SLACK_MS
    NOTICED.setdefault(how, []).append(noticed_ms)
    BACK.setdefault(how, []).append(recovery_ms)
    GAPS.setdefault(how, []).extend(gaps if not rested else [])
    for other in full:
        other.end()
    return [c, *full]


NOTICED: dict[str, list[float]] = {}
BACK: dict[str, list[float]] = {}
GAPS: dict[str, list[float]] = {}


def check_path(kind: Kind, moment: str, *, rested: bool, seen: int, record: dict[str, Any]) -> None:
    """The table of what happens at which moment."""
    if moment == "queued":
        assert not rested and record["attempts"] == 1, "what was queued moves, and has nothing to carry"
    if moment == "prefill":
        assert not rested and record["attempts"] == 2
        assert [h["grade"] for h in record["relevo"]["handovers"]] == ["boundary"]
    if moment == "decode":
        assert record["attempts"] == 2
        assert rested == (expected_end(kind, seen > 0) == "resumable")


def check_going_on(c: Call, handovers: list[dict[str, Any]]) -> None:
    """A stream that went on told at which token, and that is where it stood."""
    for handover in handovers:
        if handover["grade"] == "continuous":
            assert handover["at_token"] in c.counted_at_route, (handover, c.counted_at_route)
            assert (handover["from"], handover["to"]) == ("gpu", "cpu")


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_a_gpu_worker_that_falls_at_any_moment_loses_nothing(build, kind: Kind, how: str) -> None:
    house: House = build().start()
    log = Log(f"gpu {how}, {kind.name}")
    calls: list[Call] = []
    for moment in ("decode", "queued", "end", "prefill"):
        calls += cell(house, kind, moment, how, log)
    assert_accounted(house, calls)
    log.say("ended", **assert_clean_after(house))
    figures(f"detection when {how}", NOTICED[how])
    figures(f"back when {how}", BACK[how])
    figures(f"gaps when {how}", GAPS[how])


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("kind", [PLAIN, FOUR, CONTINUOUS], ids=lambda k: k.name)
def test_a_cpu_twin_that_falls_with_handed_over_work_loses_nothing(build, kind: Kind, how: str) -> None:
    house: House = build().start()
    log = Log(f"gpu killed, then cpu {how}, {kind.name}")
    known = known_ids(house)
    c = call(house, kind, 200)
    request_id = accepted_id(house, known)
    reach(house, c, request_id, "decode")
    house.kill_worker("gpu")
    wait_for("the twin to write", lambda: writes_on(house, request_id, "cpu"), 30, 0.005)
    at = time.time()
    house.kill_worker("cpu", SIGNALS[how])
    noticed_ms = detection_ms(house, "cpu", at)
    c.end()
    assert c.ok, (c.status, c.error, c.broken)
    all_serving(house)
    record = assert_accounted(house, [c])[request_id]
    assert record["attempts"] == 3
    handovers = record["relevo"]["handovers"]
    assert [h["from"] for h in handovers] == ["gpu", "cpu"]
    log.say("ended", noticed_ms=noticed_ms, gaps_ms=[h["gap_ms"] for h in handovers], **assert_clean_after(house))


def writes_on(house: House, request_id: str, route: str) -> bool:
    record = house.record(request_id)
    gap = (record["relevo"]["handovers"] or [{"gap_ms": None}])[-1]["gap_ms"]
    return record["relevo"]["route"] == route and gap is not None


@pytest.mark.parametrize("kind", [PLAIN, STREAM, KEPT, FOUR], ids=lambda k: k.name)
def test_a_client_that_leaves_at_any_moment_ends_its_request_unless_it_is_kept(build, kind: Kind) -> None:
    house: House = build().start()
    log = Log(f"client gone, {kind.name}")
    calls: list[Call] = []
    for moment in ("accepted", "queued", "prefill", "decode", "end"):
        known = known_ids(house)
        if moment == "accepted":
            c, full = call(house, kind, 40), []
            request_id = accepted_id(house, known)
        else:
            c, request_id, full = start_at(house, kind, moment)
        at = time.monotonic()
        c.leave()
        if not kind.kept:
            record = house.wait_state(request_id, "cancelled", "completed", timeout_s=5)
            assert record["state"] == "cancelled" or moment == "end", record
        told_ms = round((time.monotonic() - at) * 1000)
        for other in full:
            other.leave()
        record = house.wait_state(request_id, "cancelled", "completed", timeout_s=90)
        if kind.kept:
            assert record["state"] == "completed", "a kept request goes on without its client"
            go_on(house, c, request_id)
        log.say(moment, state=record["state"], ms=told_ms)
        calls += [c, *full]
    assert_accounted(house, calls)
    log.say("ended", **assert_clean_after(house))


@pytest.mark.parametrize("kind", [PLAIN, STREAM, CONTINUOUS], ids=lambda k: k.name)
def test_a_deadline_that_was_met_does_not_end_a_request_whose_route_is_lost_later(build, kind: Kind) -> None:
    house: House = build().start()
    known = known_ids(house)
    c = call(house, kind, 900, more_headers={"x-relevo-deadline-s": "2"})
    request_id = accepted_id(house, known)
    house.wait_state(request_id, "running")
    time.sleep(2.5)
    assert house.record(request_id)["state"] == "running"
    house.kill_worker("gpu")
    c.end()
    if kind is STREAM:
        go_on(house, c, request_id)
    record = house.wait_state(request_id, "completed", timeout_s=60)
    assert record["result"]["usage"]["completion_tokens"] == 900
    assert_clean_after(house)


def test_a_deaf_worker_process_leaves_no_orphan_when_the_service_stops(build) -> None:
    house: House = build().start()
    pids = house.worker_pids()
    c = call(house, PLAIN, 500)
    accepted_id(house, set())
    os.kill(int(house.replica("gpu")["pid"]), signal.SIGSTOP)
    assert house.stop() == 0
    c.end()
    assert not [pid for pid in pids if alive(pid)]
