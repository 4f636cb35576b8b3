"""A client that leaves, in each phase, and one that stops reading: the ticket is left, and nobody works for nobody."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import Any

import msgspec
import pytest

from relevo.core.errors import QueueFull
from relevo.core.events import Ask, Delta, Ended, Routed
from tests.integration.api_house import House, open_house, post, read_all, read_until, split_answer
from tests.integration.fakes.fake_service import (
    FakeService,
    completed,
    plain_answer,
    queued,
    relevo_object,
    resumable,
)

NEVER = 3600.0


@pytest.fixture(scope="module")
def house():
    with open_house() as opened:
        yield opened


@pytest.fixture(autouse=True)
def fresh(house: House):
    house.service.__init__()  # type: ignore[misc]


def chat(house: House, *, stream: bool, **more: Any) -> bytes:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": stream, **more}
    return post("/v1/chat/completions", msgspec.json.encode(body), house.port, "Connection: close")


PHASES = {
    "queued": lambda ask: [*queued(3), NEVER],
    "routed": lambda ask: [Routed(relevo_object()), NEVER],
    "running": lambda ask: [Routed(relevo_object()), Delta(0, "a", [1]), NEVER],
    "silent": lambda ask: [NEVER],
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_in_any_phase_leaves_its_ticket(house: House, phase: str, stream: bool):
    house.service.script = PHASES[phase]
    with house.connect(chat(house, stream=stream)) as sock:
        house.wait(house.service.submitting)
        if stream and phase in ("routed", "running"):
            read_until(sock, b"assistant")
    assert house.left()
    assert (house.service.tickets[0].times_left, house.service.tickets[0].closed) == (1, 1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_request_is_accepted_leaves_the_ticket_that_comes(house: House, stream: bool):
    gate = house.service.submit_gate = asyncio.Event()
    with house.connect(chat(house, stream=stream)):
        house.wait(house.service.submitting)
    time.sleep(0.1)
    assert house.service.tickets == []
    house.set(gate)
    deadline = time.monotonic() + 3
    while not house.service.tickets and time.monotonic() < deadline:
        time.sleep(0.01)
    assert house.left()


def test_a_client_that_leaves_before_a_refusal_is_no_fault(house: House):
    gate = house.service.submit_gate = asyncio.Event()
    house.service.refusal = QueueFull()
    with house.connect(chat(house, stream=False)):
        house.wait(house.service.submitting)
    house.set(gate)
    house.service.submit_gate, house.service.refusal = None, None
    assert house.ask("GET", "/health")[0] == 200


def test_a_client_that_leaves_after_pending_headers_leaves_its_ticket(house: House):
    house.service.script = PHASES["queued"]
    with house.connect(chat(house, stream=True)) as sock:
        assert b"x-relevo-route: pending" in read_until(sock, b"queued position=3 eta_ms=8000")
    assert house.left()


def test_a_reset_connection_leaves_its_ticket(house: House):
    house.service.script = PHASES["running"]
    sock = house.connect(chat(house, stream=True))
    read_until(sock, b"assistant")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    assert house.left()


def test_a_reader_that_stops_is_given_up_and_its_connection_dropped(house: House):
    piece = "x" * 60_000

    def flood(ask: Ask) -> list[Any]:
        return [Routed(relevo_object()), *[Delta(0, piece, [1])] * 400, completed()]

    house.service.script = flood
    with house.connect(chat(house, stream=True)) as sock:
        read_until(sock, b"assistant")
        assert house.left(timeout_s=5)
        time.sleep(0.1)
        got = read_all(sock)
    assert house.service.tickets[0].closed == 1, "its events are closed, not left to be tidied up"
    assert b"[DONE]" not in got
    assert len(got) < 400 * 60_000


def test_an_ended_request_is_not_left(house: House):
    for stream in (True, False):
        for script in (plain_answer, lambda ask: [Routed(relevo_object()), resumable()]):
            house.service.script = script
            house.raw(chat(house, stream=stream))
    assert [ticket.times_left for ticket in house.service.tickets] == [0, 0, 0, 0]


def test_comments_keep_a_silent_stream_alive(house: House):
    go = asyncio.Event()
    house.service.script = lambda ask: [Routed(relevo_object()), go, Delta(0, "a", [1], "stop"), completed()]
    with house.connect(chat(house, stream=True)) as sock:
        read_until(sock, b": running\n\n")
        house.set(go)
        read_until(sock, b"data: [DONE]")


def test_waiting_comments_repeat_and_change_at_once(house: House):
    go = asyncio.Event()
    house.service.script = lambda ask: [*queued(5), 0.4, *queued(4), go, *plain_answer(ask)]
    with house.connect(chat(house, stream=True)) as sock:
        got = read_until(sock, b"position=5")
        got += read_until(sock, b"position=4")
        got += read_until(sock, b"position=4")
        house.set(go)
        got += read_until(sock, b"[DONE]")
    assert got.count(b"x-relevo-route: pending") == 1


def test_a_refusal_after_pending_headers_is_one_event_without_done(house: House):
    error = {"message": "The deadline passed.", "code": "deadline_passed", "type": "server_error"}
    failed = Ended("failed", completed().usage, relevo_object(None), "deadline", error)
    house.service.script = lambda ask: [*queued(1), 0.5, failed]
    status, headers, body = split_answer(house.raw(chat(house, stream=True)))
    assert (status, headers["x-relevo-route"]) == (200, "pending")
    events = [line for line in body.split(b"\n\n") if line.startswith(b"data: ")]
    assert len(events) == 1 and b"[DONE]" not in body
    told = msgspec.json.decode(events[0].removeprefix(b"data: "))["error"]
    assert (told["code"], told["relevo"]["route"]) == ("deadline_passed", None)


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        ("cancelled", None, 409),
        ("failed", "deadline_passed", 504),
        ("failed", "made_up", 500),
        ("resumable", None, 503),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_an_end_before_any_header_has_its_own_status(
    house: House, state: str, code: str | None, status: int, stream: bool
):
    error = None if code is None else {"message": "It ended.", "code": code}
    house.service.script = lambda ask: [Ended(state, completed().usage, relevo_object(None), "why", error)]
    got, headers, body = split_answer(house.raw(chat(house, stream=stream)))
    assert got == status
    assert headers["x-request-id"] == house.service.tickets[0].request_id
    assert headers["x-should-retry"] == "false"
    assert msgspec.json.decode(body)["error"]["code"] == (code or state)


def test_a_fault_of_ours_in_mid_stream_is_told_and_ends(house: House):
    house.service.script = lambda ask: [Routed(relevo_object()), Delta(0, "a", [1]), QueueFull()]
    body = split_answer(house.raw(chat(house, stream=True)))[2]
    assert body.count(b'"error"') == 1 and b"[DONE]" not in body
    assert house.left()


def test_an_unexpected_fault_in_mid_stream_cuts_the_connection(house: House):
    house.service.script = lambda ask: [Routed(relevo_object()), Delta(0, "a", [1]), ValueError("boom")]
    answer = house.raw(chat(house, stream=True))
    assert b"[DONE]" not in answer and not answer.endswith(b"0\r\n\r\n")
    assert house.left()


def test_an_unexpected_fault_before_headers_is_a_500_in_shape_without_its_words(house: House):
    house.service.script = lambda ask: [ValueError("secret boom")]
    status, headers, body = split_answer(house.raw(chat(house, stream=False)))
    assert status == 500 and b"secret" not in body
    assert msgspec.json.decode(body)["error"]["code"] == "internal_error"
    assert headers["x-request-id"].startswith("req_")


def test_a_server_that_stops_leaves_the_tickets_of_streams_it_cuts():
    service = FakeService(PHASES["running"])
    with open_house(service) as house:
        sock = house.connect(chat(house, stream=True))
        read_until(sock, b"assistant")
    assert service.tickets[0].times_left == 1
    sock.close()
