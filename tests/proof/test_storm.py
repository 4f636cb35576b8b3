"""A storm: random kills of anything under a load of everything, then the reckoning."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter

import httpx2
import pytest

from tests.acceptance.house import House, wait_for

from .callers import KINDS, Call, call
from .reckoning import Log, assert_accounted, assert_clean_after, figures
from .test_worker_falls import all_serving

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]

KILLS = 5
"""Below the number of deaths at which a worker is given up."""
CALLERS = 6
PROMPTS = ("Tell me a long story about a lighthouse.", "List the planets.", " ".join(["Count the waves."] * 60))


class Load:
    """Callers that ask for something else as soon as they are answered, refused or cut off."""

    def __init__(self, house: House, seed: int) -> None:
        self.house = house
        self.calls: list[Call] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(random.Random(seed * 100 + n),), daemon=True)
            for n in range(CALLERS)
        ]

    def start(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def _ask(self, dice: random.Random) -> None:
        while not self._over.is_set():
            kind = dice.choice(KINDS)
            c = call(self.house, kind, dice.choice([8, 30, 80]), dice.choice(PROMPTS))
            self.calls.append(c)
            if dice.random() < 0.08:
                time.sleep(dice.uniform(0.05, 1.0))
                c.leave()
            c.end(150)
            if c.status is None or c.status >= 500:
                self._over.wait(0.5)  # the service is not there, or says to come again

    def end(self) -> list[Call]:
        self._over.set()
        for thread in self._threads:
            thread.join(160)
            assert not thread.is_alive()
        return self.calls


def strike(house: House, dice: random.Random) -> str:
    """One kill. Returns what was hit, and how."""
    target = dice.choice(["gpu", "cpu", "text", "gateway"])
    how = dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    if target == "gateway":
        house.kill()
        time.sleep(dice.uniform(0, 0.5))
        house.start(both_routes=False)
        return "gateway killed"
    if target == "text":
        how = signal.SIGKILL
        pid = text_pid(house)
    else:
        pid = house.replica(target)["pid"]
    if pid is None:
        return f"{target} was down"
    os.kill(pid, how)
    return f"{target} {how.name}"


def text_pid(house: House) -> int | None:
    """The text process: the child of the service that is no replica."""
    import psutil

    assert house.process is not None
    for child in psutil.Process(house.process.pid).children():
        try:
            if "relevo.workers.text" in child.cmdline():
                return int(child.pid)
        except psutil.NoSuchProcess:
            continue
    return None


@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("RELEVO_STORM_SEEDS", "1,2,3").split(",")])
def test_random_kills_under_a_mixed_load_lose_nothing(build, seed: int) -> None:
    house: House = build().start()
    dice = random.Random(seed)
    log = Log(f"storm, seed {seed}")
    load = Load(house, seed).start()
    strikes: list[str] = []
    time.sleep(2)
    for _ in range(KILLS):
        strikes.append(strike(house, dice))
        time.sleep(dice.uniform(3.0, 8.0))
    # The storm is over, and everything works as before: each kind is answered.
    wait_for("every kind to be answered", lambda: all(any(c.ok for c in load.calls if c.kind is k) for k in KINDS), 120)
    calls = load.end()
    log.say("strikes", strikes=strikes)
    all_serving(house, 60)
    records = assert_accounted(house, calls)
    resumed = resume_all(house, records)
    records = assert_accounted(house, calls)
    outcomes = Counter(outcome(c) for c in calls)
    states = Counter(r["state"] for r in records.values())
    log.say("calls", **outcomes)
    log.say("records", resumed=resumed, **states)
    gaps = [h["gap_ms"] for r in records.values() if r["relevo"] for h in r["relevo"]["handovers"] if h["gap_ms"]]
    figures("gaps", gaps)
    reached = [c for c in calls if c.status is not None]
    assert sum(c.ok for c in reached) >= len(reached) // 3, "too little useful work: answers of those who were heard"
    assert states["completed"] >= 15, "too little useful work in all"
    assert sum(c.error is not None and c.error["code"] not in REFUSALS for c in calls) == 0, errors(calls)
    assert states["completed"] + states["cancelled"] == len(records)
    log.say("ended", **assert_clean_after(house))


REFUSALS = ("resumable", "nothing_can_serve", "draining", "queue_full", "cancelled", "text_unavailable")


def errors(calls: list[Call]) -> list[object]:
    """What clients were told, besides what is fine."""
    return [(c.kind.name, c.status, c.error) for c in calls if c.error is not None and c.error["code"] not in REFUSALS]


def outcome(c: Call) -> str:
    """How a call ended, in a word."""
    if c.ok:
        return "answered"
    if c.error is not None:
        return str(c.error["code"])
    return c.broken.split(":")[0] if c.broken else "unknown"


def resume_all(house: House, records: dict[str, dict[str, object]]) -> int:
    """Take up everything that rests."""
    resting = [i for i, r in records.items() if r["state"] == "resumable"]
    for request_id in resting:

        def taken_up(request_id: str = request_id) -> bool:
            answer: httpx2.Response = house.http.post(f"/relevo/v1/requests/{request_id}/resume", json={})
            return answer.status_code == 200

        wait_for(f"{request_id} to be resumed", taken_up, 60, 0.5)
    return len(resting)
