"""Thirty random deaths under a load of every kind of request. The seed is printed; RELEVO_SEED repeats the draw."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.house import ENDED, House

from .calls import Call, Person, assert_empty, assert_sound, body, both_serve, equal_config, leased

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1200)]
KILLS = 30
CLIENTS = 4
KINDS: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({}, {}, "boundary"),
    ({"n": 4}, {}, "boundary"),
    ({"stream": True}, {}, "resumable"),
    ({"stream": True}, {"x-relevo-handover": "continuous"}, "continuous"),
    ({"stream": True}, {"Idempotency-Key": "?"}, "kept"),
    ({}, {"Idempotency-Key": "?"}, "kept"),
    ({}, {"x-relevo-policy": "cpu-only"}, "boundary"),
]
LENGTHS = (5, 24, 64)


class Load:
    """Clients that ask without a pause until told to stop."""

    def __init__(self, house: House, seed: int) -> None:
        self.house = house
        self.over = threading.Event()
        self.calls: list[Call] = []
        self.threads = [
            threading.Thread(target=self.client, args=(random.Random(seed + n), n), daemon=True) for n in range(CLIENTS)
        ]
        for thread in self.threads:
            thread.start()

    def client(self, chance: random.Random, number: int) -> None:
        for turn in range(10_000):
            if self.over.is_set():
                return
            more, headers, _ = chance.choice(KINDS)
            headers = {k: v.replace("?", f"{number}-{turn}") for k, v in headers.items()}
            call = Call(self.house.url, body(chance.choice(LENGTHS), **more), headers)
            self.calls.append(call)
            if chance.random() < 0.1:
                time.sleep(chance.uniform(0.05, 0.8))
                call.leave()
            with contextlib.suppress(AssertionError):
                call.finish(100)
            if call.status is None:
                time.sleep(0.3)  # no gateway at the moment

    def wait_for_an_answer(self, longest_s: float = 8.0) -> None:
        """So that something is done between two deaths, however busy the machine is."""
        before, end = sum(c.done for c in list(self.calls)), time.monotonic() + longest_s
        while sum(c.done for c in list(self.calls)) <= before and time.monotonic() < end:
            time.sleep(0.02)

    def stop(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive(), "a client got no end at all"


def strike(house: House, chance: random.Random) -> str:
    """One death. Returns whose."""
    whose = chance.choices(["gpu", "cpu", "gpu stopped", "both", "gateway", "gateway and gpu"], [9, 5, 4, 3, 4, 2])[0]
    if whose.startswith("gateway"):
        if whose != "gateway":
            with contextlib.suppress(ProcessLookupError, TypeError):
                house.kill_worker("gpu", signal.SIGSTOP)
        house.kill()
        house.start(both_routes=False)
        return whose
    for route in ("gpu", "cpu") if whose == "both" else (whose[:3],):
        pid = house.replica(route)["pid"]
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, signal.SIGSTOP if whose.endswith("stopped") else signal.SIGKILL)
    return whose


def was_accepted(call: Call) -> bool:
    """Whether its id is that of a request; a refusal at the door has an id of its own."""
    return call.error is None or call.error["code"] in ("resumable", "cancelled")


def test_thirty_random_deaths_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("RELEVO_SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {seed}")
    chance = random.Random(seed)
    house = House(tmp_path / "state", "--host", "127.0.0.1", config=equal_config()).start()
    right = {(t, n): Call(house.url, body(t, n=n)).finish().texts for t in LENGTHS for n in (1, 4)}
    loaded = leased(house)
    person = Person(house)
    load = Load(house, seed)
    try:
        deaths: Counter[str] = Counter()
        for _ in range(KILLS):
            load.wait_for_an_answer()
            time.sleep(chance.uniform(0.0, 1.5))
            deaths[strike(house, chance)] += 1
        both_serve(house)
        load.stop()
        person.leave()
        judge(house, load.calls, right, deaths)
        both_serve(house)
        assert_empty(house, loaded)
        assert_sound(house, {c.request_id for c in load.calls if c.request_id and was_accepted(c)})
    finally:
        load.over.set()
        person.leave()
        house.close()


def judge(house: House, calls: list[Call], right: dict[tuple[int, int], dict[int, str]], deaths: Counter[str]) -> None:
    """Every id is accounted for, every text is the right one or a beginning of it."""
    rows = house.records(limit="1000")
    by_id = {c.request_id: c for c in calls if c.request_id}
    states: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    for row in rows:
        record = house.wait_state(row["id"], *ENDED, "resumable", timeout_s=90)
        states[record["state"]] += 1
        assert record["state"] != "failed", record
        texts = {c["index"]: c["text"] for c in record["result"]["choices"]} if record["result"] else {}
        wanted = next(
            (w for w in right.values() if texts and all(w.get(i, "").startswith(t) for i, t in texts.items())), None
        )
        assert wanted is not None or not any(texts.values()), f"no beginning of any right answer: {record}"
        if record["state"] == "completed":
            assert texts in right.values(), f"not the right answer: {record}"
    for call in calls:
        if call.error is not None:
            errors[call.error["code"]] += 1
        wanted = right[call.ask["max_tokens"], call.ask.get("n", 1)]
        for i, text in call.texts.items():
            assert wanted[i].startswith(text), "a client was told something else"
        if call.done:
            assert call.texts == wanted, "an answer was told to be whole and is not"
    assert set(errors) <= {"resumable", "draining", "server_is_overloaded", "queue_full", "policy_refused"}, errors
    done = sum(c.done for c in calls)
    print(f"deaths {dict(deaths)}; {len(rows)} accepted: {dict(states)}")
    print(f"{len(calls)} calls: {done} whole, errors {dict(errors)}")
    assert done >= 20 and states["completed"] >= 20 and len(by_id) >= 20, "too little was done to prove anything"
