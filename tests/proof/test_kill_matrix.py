"""Every process is killed or stopped at every state of a request, in every way of asking; nothing is lost or doubled.

Both routes compute bit-equal here, so the one right text of each answer is known beforehand: a token that is missing,
doubled or drawn again differently is seen, whoever was killed.
"""

from __future__ import annotations

import itertools
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.acceptance.house import House, process_of, stream_lines, wait_for

from .calls import (
    LONG_STORY,
    LONGER_STORY,
    STORY,
    Call,
    Person,
    assert_empty,
    assert_sound,
    body,
    both_serve,
    equal_config,
    id_of,
    leased,
    tokens_of,
)

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1800)]

TOKENS = 64
PHASES = ("queued", "prefill", "decode", "end")
MODES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "plain": ({}, {}),
    "stream": ({"stream": True}, {}),
    "kept": ({"stream": True}, {"Idempotency-Key": "?"}),
    "four": ({"n": 4}, {}),
    "continuous": ({"stream": True}, {"x-relevo-handover": "continuous"}),
}
numbers = itertools.count()


class Street:
    """A service whose workers are killed again and again, with the right answers learned from it while nobody was."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.ids: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        self.gaps_ms: list[float] = []
        self.right: dict[tuple[str, int], dict[int, str]] = {}
        for prompt, n in ((STORY, 1), (STORY, 4), (LONG_STORY, 1), (LONG_STORY, 4)):
            call = Call(house.url, body(TOKENS, prompt=prompt, n=n)).finish()
            assert call.status == 200, call.answer
            self.right[prompt, n] = call.texts
        self.prompt_tokens = call.answer["usage"]["prompt_tokens"] if call.answer else 0
        self.loaded = leased(house)
        self.person = Person(house)

    def call(self, mode: str, prompt: str = STORY, tokens: int = TOKENS) -> Call:
        more, headers = MODES[mode]
        headers = {k: v.replace("?", f"key-{next(numbers)}") for k, v in headers.items()}
        return Call(self.house.url, body(tokens, prompt=prompt, **more), headers)

    def reach(self, phase: str, mode: str) -> tuple[Call, str, list[Call]]:
        """A request in the phase, and those that fill the slots before it."""
        known = {r["id"] for r in self.house.records(limit="1000")}
        fillers: list[Call] = []
        if phase == "queued":
            fillers = [
                Call(self.house.url, body(40, n=4), {"x-relevo-policy": policy}) for policy in ("gpu-only", "cpu-only")
            ]
            wait_for("the slots to be full", lambda: len(self.house.records(state="running")) == 2)
            known |= {r["id"] for r in self.house.records(limit="1000")}
        call = self.call(mode, LONG_STORY if phase == "prefill" else STORY)
        request_id = id_of(self.house, call, known)
        states = ("queued",) if phase == "queued" else ("running",)
        self.house.wait_state(request_id, *states)
        if phase == "prefill":
            time.sleep(0.3)
            assert tokens_of(self.house, request_id) == 0, "the prompt was read too fast for this proof"
        else:
            wanted = {"queued": 0, "decode": TOKENS // 3, "end": TOKENS - 4}[phase] * call.ask.get("n", 1)
            wait_for("its tokens", lambda: tokens_of(self.house, request_id) >= wanted, 90, 0.002)
        return call, request_id, fillers

    def settle(self, call: Call, request_id: str, mode: str) -> str:
        """Its end, resumed if it rests. Every text is compared with the one right one. Returns how it came there."""
        call.finish()
        n = call.ask.get("n", 1)
        right = self.right[call.ask["messages"][0]["content"], n]
        record = self.house.wait_state(request_id, "completed", "resumable", timeout_s=60)
        way = "completed" if not call.handovers else "handed over"
        if record["state"] == "resumable":
            way = "resumed"
            assert mode in ("stream", "kept"), f"a request of the kind {mode} must be completed: {record['reason']}"
            assert call.error is not None and call.error["code"] == "resumable" and not call.done
            seen = call.texts.get(0, "")
            assert seen and right[0].startswith(seen), "what was delivered is no prefix of the answer"
            assert record["result"]["choices"][0]["text"] == seen, "the record and the client differ"
            if mode == "kept":
                again = Call(self.house.url, call.ask, call.headers).finish()
                assert again.request_id == request_id and again.done and again.texts == right
            else:
                with self.house.http.stream("POST", call.error["resume"], json={"stream": True}) as answer:
                    rest = Call.__new__(Call)
                    rest.texts, rest.chunks, rest.done, rest.error, rest.handovers = {}, 0, False, None, []
                    for line in stream_lines(answer):
                        rest.take_line("data: " + line)
                assert rest.done and seen + rest.texts.get(0, "") == right[0], "the resumed rest does not fit"
        else:
            assert call.status == 200 and call.done, (call.status, call.error, call.broken)
            assert call.texts == right, f"{mode}: another text than nobody's kill gives"
        record = self.house.wait_state(request_id, "completed")
        assert [c["text"] for c in record["result"]["choices"]] == [right[i] for i in range(n)]
        assert record["result"]["usage"]["completion_tokens"] == TOKENS * n
        self.gaps_ms += [h["gap_ms"] for h in record["relevo"]["handovers"] if h["gap_ms"] is not None]
        self.ids.add(request_id)
        self.outcomes[way] += 1
        return way


@pytest.fixture(scope="module")
def street(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    house = House(tmp_path_factory.mktemp("street") / "state", "--host", "127.0.0.1", config=equal_config()).start()
    made = None
    try:
        made = Street(house)
        yield made
    finally:
        if made is not None:
            made.person.leave()
        house.close()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("phase", PHASES)
def test_the_gpu_worker_is_lost_at_every_state_of_every_kind_of_request(
    street: Street, phase: str, sig: signal.Signals
) -> None:
    house = street.house
    for mode in MODES:
        call, request_id, fillers = street.reach(phase, mode)
        route = house.record(request_id)["relevo"]["route"]
        pid = house.kill_worker("gpu", sig)
        began = time.monotonic()
        way = street.settle(call, request_id, mode)
        for filler in fillers:
            assert filler.finish().status == 200 and filler.texts, filler.error
        if mode == "continuous" and phase == "decode":
            handover = house.record(request_id)["relevo"]["handovers"][-1]
            assert (handover["to"], handover["grade"]) == ("cpu", "continuous") and handover["at_token"] > 0
        both_serve(house, pid)
        assert_empty(house, street.loaded)
        assert process_of(pid) is None or process_of(pid).status() == psutil.STATUS_ZOMBIE  # type: ignore[union-attr]
        print(f"{phase:8} {mode:10} {sig.name}: on {route}, {way}, whole after {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_gpu_worker_is_lost_while_it_reads_a_prompt_of_3000_tokens(tmp_path: Path, sig: signal.Signals) -> None:
    house = House(tmp_path / "state", "--demo").start()
    ids: set[str] = set()
    person = Person(house)
    try:
        loaded = leased(house)
        for mode, (more, headers) in MODES.items():
            named = {k: v.replace("?", f"key-{mode}") for k, v in headers.items()}
            call = Call(house.url, body(24, prompt=LONGER_STORY, model="demo", **more), named)
            request_id = id_of(house, call, ids)
            house.wait_state(request_id, "running")
            time.sleep(0.5)
            assert tokens_of(house, request_id) == 0, "the prompt was read too fast for this proof"
            pid = house.kill_worker("gpu", sig)
            began = time.monotonic()
            call.finish()
            assert call.status == 200 and call.done and call.handovers, (call.status, call.error, call.broken)
            result = house.wait_state(request_id, "completed")["result"]
            assert {c["index"]: c["text"] for c in result["choices"]} == call.texts
            assert result["usage"]["completion_tokens"] == 24 * len(call.texts) and len(call.texts) == more.get("n", 1)
            ids.add(request_id)
            both_serve(house, pid)
            assert_empty(house, loaded)
            took_s, read = time.monotonic() - began, result["usage"]["prompt_tokens"]
            print(f"{read} tokens, {mode:10} {sig.name}: whole after {took_s:.1f} s")
        person.leave()
        assert_sound(house, ids)
    finally:
        person.leave()
        house.close()


def let_the_twin_work(house: House, request_id: str) -> None:
    """Until some tokens came from the twin."""
    wait_for("the twin to have it", lambda: house.record(request_id)["relevo"]["route"] == "cpu", 60, 0.005)
    before = tokens_of(house, request_id)
    wait_for("the twin to go on", lambda: tokens_of(house, request_id) >= before + 3, 60, 0.005)


def test_the_twin_is_killed_while_it_holds_handed_over_work(street: Street) -> None:
    house = street.house
    for mode in ("plain", "continuous", "four"):
        call, request_id, _ = street.reach("decode", mode)
        gpu = house.kill_worker("gpu")
        let_the_twin_work(house, request_id)
        cpu = house.kill_worker("cpu")
        street.settle(call, request_id, mode)
        assert house.record(request_id)["attempts"] >= 3
        both_serve(house, gpu, cpu)
        assert_empty(house, street.loaded)


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_leaves_at_every_state(street: Street, phase: str) -> None:
    house = street.house
    for mode in ("plain", "stream", "kept"):
        call, request_id, fillers = street.reach(phase, mode)
        cut(call)
        record = house.wait_state(request_id, "completed", "cancelled")
        if mode == "kept":
            assert record["state"] == "completed", "a kept request goes on without its client"
            again = Call(house.url, call.ask, call.headers).finish()
            assert again.request_id == request_id and again.done
        elif phase != "end":
            assert record["state"] == "cancelled", "nobody wants its answer"
        for filler in fillers:
            assert filler.finish().status == 200
        street.ids.add(request_id)
        street.outcomes[record["state"]] += 1
        assert_empty(house, street.loaded)


def cut(call: Call) -> None:
    """Its connection breaks, as when the client's process ends."""
    mine = [
        c
        for c in psutil.Process().net_connections("tcp")
        if c.raddr and c.raddr.port == int(call.url.rsplit(":", 1)[1])
    ]
    pool = call.http._transport._pool  # type: ignore[attr-defined]  # no public way to break a connection in use
    for connection in pool.connections:
        stream = connection._connection._network_stream
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    assert mine


def test_the_street_is_as_it_was_after_all_of_it(street: Street) -> None:
    assert_empty(street.house, street.loaded)
    street.person.leave()
    assert_sound(street.house, street.ids)
    gaps = sorted(street.gaps_ms)
    print(f"prompt in prefill {street.prompt_tokens} tokens; {dict(street.outcomes)}; {len(gaps)} gaps in ms:")
    print(f"  median {gaps[len(gaps) // 2]:.0f}, longest {gaps[-1]:.0f}" if gaps else "  none")
    assert street.outcomes.total() >= 40 and street.outcomes["handed over"] >= 10 and street.outcomes["resumed"] >= 4
