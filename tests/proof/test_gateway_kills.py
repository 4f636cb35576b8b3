"""`kill -9` of the gateway at every state of a request, alone and with its client: nothing is lost or doubled."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.house import ENDED, House, process_of, wait_for

from .calls import Call, assert_accounted, assert_empty, assert_sound, body, equal_config, leased, tokens_of

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]
TOKENS = 64
KEPT = {"Idempotency-Key": "kept"}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    h = House(tmp_path / "state", "--host", "127.0.0.1", config=equal_config()).start()
    yield h
    h.close()


def kill_and_start(house: House, calls: list[Call]) -> set[str]:
    """Kill it, start it again. Returns the ids that clients were told."""
    left = house.kill()
    for call in calls:
        call.finish()
    wait_for(
        "its workers to end with it", lambda: not [p for pid in left if (p := process_of(pid)) and p.is_running()], 15
    )
    house.start()
    return {c.request_id for c in calls if c.request_id}


def right_text(house: House) -> str:
    """The one right answer."""
    return Call(house.url, body(TOKENS)).finish().texts[0]


def ways(house: House, suffix: str) -> list[Call]:
    """A plain call, a stream and a kept stream."""
    kept = {"Idempotency-Key": f"kept-{suffix}"}
    return [
        Call(house.url, body(TOKENS)),
        Call(house.url, body(TOKENS, stream=True)),
        Call(house.url, body(TOKENS, stream=True), kept),
    ]


def settle(house: House, calls: list[Call], right: str) -> Counter[str]:
    """What became of everything: each text is the right one or a beginning of it, and what rests is resumed to it."""
    states: Counter[str] = Counter()
    for found in assert_accounted(house, [r["id"] for r in house.records(limit="1000")]).values():
        record = found
        states[record["state"]] += 1
        if record["state"] == "resumable":
            text = record["result"]["choices"][0]["text"] if record["result"] else ""
            assert right.startswith(text)
            told = next((c.texts.get(0, "") for c in calls if c.request_id == record["id"]), "")
            assert right.startswith(told), "a client was told something else"
            if any(c.request_id == record["id"] and c.headers for c in calls):
                assert text.startswith(told), "what a kept request delivered was durable before it left"
            resumed = house.http.post(f"/relevo/v1/requests/{record['id']}/resume", json={})
            assert resumed.status_code == 200, resumed.text
            record = house.wait_state(record["id"], "completed")
        if record["state"] == "completed":
            assert record["result"]["choices"][0]["text"] == right
            assert record["result"]["usage"]["completion_tokens"] == TOKENS
    return states


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "resumable", "just before the end"])
@pytest.mark.parametrize("client_too", [False, True], ids=["the gateway", "and the client"])
def test_the_gateway_is_killed_at_every_state(house: House, phase: str, client_too: bool) -> None:
    right = right_text(house)
    loaded = leased(house)
    first: list[Call] = []
    if phase == "queued":
        first = [
            Call(house.url, body(TOKENS, n=1), {"x-relevo-policy": p})
            for p in ("gpu-only", "cpu-only")
            for _ in range(4)
        ]
        wait_for("the slots to be full", lambda: len(house.records(state="running")) == 8)
    calls = ways(house, phase)
    wait_for("all to be accepted", lambda: len(house.records(limit="100")) == 1 + len(first) + 3)
    mine = [r["id"] for r in house.records(limit="3")]
    if phase == "queued":
        assert {house.record(i)["state"] for i in mine} == {"queued"}
    elif phase != "prefill":
        wanted = TOKENS - 3 if phase == "just before the end" else TOKENS // 3
        wait_for("tokens", lambda: min(tokens_of(house, i) for i in mine) >= wanted, 90, 0.002)
    if phase == "resumable":
        house.kill_worker("gpu")
        wait_for("streams to rest", lambda: len(house.records(state="resumable")) == 2, 60)
    if client_too:
        for call in calls:
            call.broken = "left"
            call.http.close()
    told = kill_and_start(house, [*first, *calls])
    states = settle(house, calls, right)
    assert_empty(house, loaded)
    print(f"{phase:20} client too: {client_too}: {dict(states)}")
    # A client that left a moment before the kill may have been noticed: then nobody wants its answer.
    assert states["completed"] + (states["cancelled"] if client_too else 0) >= 2
    if phase == "decode" and not client_too:
        assert states["resumable"] >= 1
    if phase == "prefill":
        assert states["resumable"] <= 1, "of the kept one it is known that nothing was delivered"
    assert_sound(house, told)


def test_an_answer_that_nobody_had_read_yet_is_found_again(house: House) -> None:
    right = right_text(house)
    ask = json.dumps(body(TOKENS)).encode()
    with socket.create_connection(("127.0.0.1", house.port)) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Idempotency-Key: unread\r\nContent-Length: %d\r\n\r\n" % len(ask) + ask
        )
        wait_for("it to be completed", lambda: house.records(idempotency_key="unread", state="completed"))
        house.kill()
    house.start()
    again = Call(house.url, body(TOKENS), {"Idempotency-Key": "unread"}).finish()
    assert again.status == 200 and again.texts[0] == right
    assert len(house.records(limit="10")) == 2, "it was done once"
    assert_sound(house, {str(again.request_id)})


def test_the_gateway_is_killed_in_the_middle_of_accepting(house: House) -> None:
    seed = random.SystemRandom().randrange(10**6)
    chance = random.Random(seed)
    told: set[str] = set()
    outcomes: Counter[str] = Counter()
    for round_ in range(8):
        calls = [Call(house.url, body(6, stream=n % 2 == 0), {"Idempotency-Key": f"{round_}-{n}"}) for n in range(12)]
        time.sleep(chance.uniform(0.0, 0.12))
        told |= kill_and_start(house, calls)
        known = [r["id"] for r in house.records(limit="1000")]
        assert told <= set(known), "a client was given an id that is not in the journal"
        assert_accounted(house, known)
        for call in calls:  # everybody tries again with the same key, as a client should
            again = Call(house.url, call.ask, call.headers).finish()
            assert again.done and again.status == 200, (again.status, again.error, again.broken)
            told.add(str(again.request_id))
    for record in (house.record(r["id"]) for r in house.records(limit="1000")):
        assert record["state"] in ENDED and record["result"]["usage"]["completion_tokens"] == 6, record
        outcomes[f"{record['attempts']} attempts"] += 1
    print(f"seed {seed}: {dict(outcomes)}")
    assert outcomes.total() == 96, "each key is one request, however often it was tried"
    assert_sound(house, told)
