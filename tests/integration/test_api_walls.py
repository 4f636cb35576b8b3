"""Who may do what: every route with every identity, and every trick with raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relevo.api.app import all_routes
from relevo.api.front import Front
from relevo.api.keys import KeyRing
from relevo.api.operator import OperatorKey, read_operator_key
from relevo.api.route import Access, GuardedRoute
from relevo.api.server import bind
from relevo.api.sse import Pace
from relevo.config import Config, LimitsConfig, ServerConfig
from relevo.core.errors import JournalUnavailable, StartupError
from relevo.core.events import Delta, Routed
from tests.integration.api_house import House, open_house, post, read_all, read_answer, read_until, split_answer
from tests.integration.fakes.fake_service import FakeService, completed, plain_answer, relevo_object, resumable

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
LIMITS = LimitsConfig(body_bytes=200_000, body_timeout_s=0.6)
OPEN = {"/health", "/ready"}
OPERATOR = {"/relevo/v1/devices/{name}/probe"}


@pytest.fixture(scope="module")
def house():
    with open_house(config=Config(limits=LIMITS), headers_timeout_s=0.5) as opened:
        yield opened


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory):
    state = tmp_path_factory.mktemp("state")
    with open_house(keys=state / "keys.json") as opened:
        opened.keys.operator = OperatorKey(state)
        opened.operator = read_operator_key(state)  # type: ignore[attr-defined]
        opened.mine = opened.keys.create("mine")[1]  # type: ignore[attr-defined]
        opened.others = opened.keys.create("others")[1]  # type: ignore[attr-defined]
        opened.revoked = opened.keys.create("revoked")[1]  # type: ignore[attr-defined]
        opened.keys.revoke("revoked")
        opened.service.statuses = asyncio.Queue()
        yield opened


def routes() -> list[GuardedRoute]:
    return all_routes(Front(FakeService(), Config(), KeyRing(None), Pace()))


def table() -> list[tuple[str, str]]:
    return [(next(iter(route.methods - {"HEAD"})), route.path) for route in routes()]  # type: ignore[operator]


def address(path: str, request_id: str) -> str:
    return path.replace("{id:path}", "demo").replace("{id}", request_id).replace("{name}", "gpu0")


def refused(answer: tuple[int, dict[str, str], bytes], status: int, code: str | None = None) -> dict[str, Any]:
    """The error of a refusal, which has one shape wherever it comes from."""
    got, headers, body = answer
    assert got == status, (got, body)
    error = msgspec.json.decode(body)["error"]
    assert {"message", "type", "param", "code"} <= set(error) and isinstance(error["message"], str)
    assert re.fullmatch("req_[0-9a-f]{32}", headers["x-request-id"])
    assert headers["content-type"] == "application/json"
    assert code is None or error["code"] == code
    return error


# ---------------------------------------------------------------- routes and identities


def test_only_the_health_checks_are_open():
    assert {route.path for route in routes() if route.access is Access.OPEN} == OPEN
    assert {route.path for route in routes() if route.access is Access.OPERATOR} == OPERATOR
    assert len(table()) == len(set(table())) == 16


def locked_request(locked: House) -> str:
    """A running request of the owner `mine`."""
    locked.service.script = plain_answer
    status, headers, _ = locked.ask("POST", "/v1/chat/completions", CHAT, authorization=f"Bearer {locked.mine}")  # type: ignore[attr-defined]
    assert status == 200
    return headers["x-request-id"]


@pytest.mark.parametrize(("method", "path"), table())
def test_every_route_knows_whom_it_serves(locked: House, method: str, path: str):
    request_id = locked_request(locked)
    here = address(path, request_id)
    body = {**CHAT, "prompt": "x"} if method == "POST" and path.startswith("/v1") else {} if method == "POST" else None
    endless = path == "/relevo/v1/events"
    for bad in (None, "wrong", locked.revoked, "rk-" + "A" * 40, locked.mine[:-1], locked.mine + "A"):  # type: ignore[attr-defined]
        more = {} if bad is None else {"authorization": f"Bearer {bad}"}
        answer = locked.ask(method, here, body, **more)
        if path in OPEN:
            assert answer[0] == 200
        else:
            refused(answer, 401, "invalid_api_key")
            assert answer[1]["www-authenticate"] == "Bearer"
    if not endless:
        other = locked.ask(method, here, body, authorization=f"Bearer {locked.others}")  # type: ignore[attr-defined]
        if "{id}" in path:
            refused(other, 404, "request_not_found")
        right = locked.ask(method, here, body, authorization=f"Bearer {locked.mine}")  # type: ignore[attr-defined]
        if path in OPERATOR:
            refused(right, 403, "operator_only")
            right = locked.ask(method, here, body, authorization=f"Bearer {locked.operator}")  # type: ignore[attr-defined]
        assert right[0] == (409 if path.endswith("/resume") else 200), right
    for wrong in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - {method}:
        error = locked.ask(wrong, here, b"", authorization=f"Bearer {locked.mine}")  # type: ignore[attr-defined]
        assert method in error[1]["allow"]
        refused(error, 405, "method_not_allowed")


def test_a_caller_lists_own_requests_only(locked: House):
    request_id = locked_request(locked)
    listed = msgspec.json.decode(locked.ask("GET", "/relevo/v1/requests", authorization=f"Bearer {locked.mine}")[2])  # type: ignore[attr-defined]
    assert request_id in [record["id"] for record in listed["data"]]
    other = msgspec.json.decode(locked.ask("GET", "/relevo/v1/requests", authorization=f"Bearer {locked.others}")[2])  # type: ignore[attr-defined]
    assert request_id not in [record["id"] for record in other["data"]]


# ---------------------------------------------------------------- control


def test_requests_are_found_by_key_state_and_limit(house: House):
    house.service.__init__()  # type: ignore[misc]
    for key in ("k1", "k2"):
        house.ask("POST", "/v1/chat/completions", CHAT, idempotency_key=key)
    found = msgspec.json.decode(house.ask("GET", "/relevo/v1/requests?idempotency_key=k1&state=completed&limit=5")[2])[
        "data"
    ]
    assert [record["id"] for record in found] == [house.service.tickets[0].request_id]
    for bad, param in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("limit=1001", "limit"),
        ("state=lost", "state"),
        ("owner=x", "owner"),
        ("limit=1&limit=2", "limit"),
    ):
        assert refused(house.ask("GET", f"/relevo/v1/requests?{bad}"), 400)["param"] == param


def test_an_id_of_another_form_is_not_looked_up(house: House):
    for bad in ("x", "req_", "req_" + "G" * 32, "req_" + "a" * 33, "..", "%2e%2e", "req_" + "a" * 31 + "%0a"):
        assert house.ask("GET", f"/relevo/v1/requests/{bad}")[0] == 404


def test_a_requests_events_are_numbered_and_go_on_after_the_last_one_seen(house: House):
    house.service.__init__()  # type: ignore[misc]
    request_id = house.ask("POST", "/v1/chat/completions", CHAT)[1]["x-request-id"]
    path = f"/relevo/v1/requests/{request_id}/events"
    status, headers, body = house.ask("GET", path)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert re.findall(rb"id: (\d+)\nevent: (\w+)", body) == [
        (b"1", b"routed"), (b"2", b"delta"), (b"3", b"delta"), (b"4", b"delta"), (b"5", b"ended"),
    ]  # fmt: skip
    rest = house.ask("GET", path, last_event_id="3")[2]
    assert re.findall(rb"id: (\d+)", rest) == [b"4", b"5"]
    assert refused(house.ask("GET", path, last_event_id="-1"), 400)["param"] == "last-event-id"


def test_a_feed_that_breaks_says_so(house: House):
    house.service.__init__()  # type: ignore[misc]
    request_id = house.ask("POST", "/v1/chat/completions", CHAT)[1]["x-request-id"]
    house.service.refusal = JournalUnavailable()
    body = house.ask("GET", f"/relevo/v1/requests/{request_id}/events", last_event_id="4")[2]
    house.service.refusal = None
    last = body.split(b"\n\n")[-2]
    assert last.startswith(b"event: error\ndata: ") and b'"code":"journal_unavailable"' in last


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_resumable_request_is_resumed_whole_or_streamed_in_its_dialect(house: House, path: str):
    house.service.__init__(lambda ask: [Routed(relevo_object()), Delta(0, "Hel", [1]), resumable()])  # type: ignore[misc]
    for stream in (False, True):
        ended = house.ask("POST", path, {**CHAT, "prompt": "x"})
        request_id = ended[1]["x-request-id"]
        assert refused(ended, 503, "resumable")["checkpoint"] == "cp_1"
        status, headers, body = house.ask("POST", f"/relevo/v1/requests/{request_id}/resume", {"stream": stream})
        assert (status, headers["x-request-id"]) == (200, request_id)
        if stream:
            assert (b"chat.completion.chunk" in body) == (path == "/v1/chat/completions") and body.endswith(
                b"[DONE]\n\n"
            )
        else:
            record = msgspec.json.decode(body)
            assert record["id"] == request_id
            choice = record["answer"]["choices"][0]
            assert choice.get("text", choice.get("message", {}).get("content")) == "and on"
    assert (
        refused(house.ask("POST", f"/relevo/v1/requests/{request_id}/resume", {"stream": 1}), 400)["param"] == "stream"
    )


def test_cancelling_needs_no_body_and_twice_is_harmless(house: House):
    house.service.__init__()  # type: ignore[misc]
    request_id = house.ask("POST", "/v1/chat/completions", CHAT)[1]["x-request-id"]
    for body in (None, {}):
        assert house.ask("POST", f"/relevo/v1/requests/{request_id}/cancel", body)[0] == 200


def test_status_changes_are_told_and_the_watcher_may_leave(house: House):
    house.service.__init__()  # type: ignore[misc]
    with house.connect(b"GET /relevo/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n") as sock:
        assert b'"state":"ok"' in read_until(sock, b'"ok"')
        house.loop.call_soon_threadsafe(house.service.statuses.put_nowait, {"state": "degraded"})
        read_until(sock, b'event: status\ndata: {"state":"degraded"}\n\n')
        read_until(sock, b": running")
        assert house.service.watchers == 1
    deadline = time.monotonic() + 3
    while house.service.watchers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert house.service.watchers == 0
    assert house.ask("GET", "/health")[0] == 200


def test_readiness_metrics_and_the_root(house: House):
    assert house.ask("GET", "/ready")[::2] == (200, b'{"status":"degraded"}')
    house.service.serves = False
    assert house.ask("GET", "/ready")[0] == 503
    house.service.serves = True
    assert house.ask("GET", "/metrics")[2] == b"relevo_up 1\n"
    root = house.ask("GET", "/")
    assert root[0] == 200 and b"/v1" in root[2] and b"State: ok" in root[2]
    head = house.ask("HEAD", "/health")
    assert head[0] == 200 and head[2] == b""


def test_an_unknown_address_helps(house: House):
    error = refused(house.ask("POST", "/chat/completions", CHAT), 404, "not_found")
    assert "/v1" in error["message"]
    for path in ("/v1/", "/v1/chat/completions/", "//v1/models", "/v1/../v1/models", "/V1/models", "/health%00"):
        assert house.ask("GET", path)[0] in (404, 405), path


# ---------------------------------------------------------------- raw bytes

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = (HEAD + "Transfer-Encoding: chunked\r\n\r\n").encode()
RAW: dict[str, tuple[bytes, set[int]]] = {
    "no HTTP": (b"hello\r\n\r\n", {400}),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 405}),
    "HTTP/0.9": (b"GET /health\r\n\r\n", {400}),
    "odd version": (b"GET /health HTTP/1.9\r\nHost: localhost\r\n\r\n", {400}),
    "both lengths": ((HEAD + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n").encode(), {400}),
    "both lengths, other order": (
        (HEAD + "Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n").encode(),
        {400},
    ),
    "two lengths": ((HEAD + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x").encode(), {400}),
    "negative length": ((HEAD + "Content-Length: -1\r\n\r\n").encode(), {400}),
    "hex length": ((HEAD + "Content-Length: 0x2\r\n\r\n{}").encode(), {400}),
    "endless length": ((HEAD + "Content-Length: 99999999999999999999999\r\n\r\n").encode(), {400}),
    "chunked twice": ((HEAD + "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n").encode(), {400}),
    "unknown encoding": ((HEAD + "Transfer-Encoding: gzip\r\n\r\n").encode(), {400}),
    "bad chunk size": ((HEAD + "Transfer-Encoding: chunked\r\n\r\nzz\r\n").encode(), {400}),
    "huge chunk size": ((HEAD + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n").encode(), {400}),
    "folded header": ((HEAD + "X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}").encode(), {400}),
    "space before colon": (b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n", {400}),
    "NUL in a header": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n", {400}),
    "NUL in the address": (b"GET /hea\x00lth HTTP/1.1\r\nHost: localhost\r\n\r\n", {400}),
    "letters in the address": ("GET /é HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), {400}),
    "bare line feeds": (b"GET /health HTTP/1.1\nHost: localhost\n\n", {400, 200}),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", {400}),
    "two hosts": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", {400}),
    "host with a path": (b"GET /relevo/v1/status HTTP/1.1\r\nHost: localhost/health?\r\n\r\n", {400}),
    "foreign host": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", {421}),
    "foreign origin": ((HEAD + "Origin: http://evil.example\r\nContent-Length: 2\r\n\r\n{}").encode(), {403}),
    "connect": (b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404, 405}),
    "many fields": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 70 + b"\r\n", {431}),
    "one large field": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 17_000 + b"\r\n\r\n", {431}),
    "a field without end": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 400_000, {431}),
    "fields without end": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 60_000, {431}),
    "a long address": (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", {431}),
    "an address without end": (b"GET /" + b"a" * 400_000, {431}),
    "compressed": ((HEAD + "Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x1f").encode(), {400}),
    "declared too large": ((HEAD + "Content-Length: 200001\r\n\r\n").encode(), {413}),
    "chunked too large": (CHUNKED + b"30d41\r\n" + b" " * 200_001, {413}),
    "no body": ((HEAD + "Content-Length: 0\r\n\r\n").encode(), {400}),
    "body cut short": ((HEAD + "Content-Length: 10\r\n\r\n{").encode(), {408}),
    "a websocket": (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        {200},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_raw_bytes_get_a_clear_refusal_in_one_shape(house: House, name: str):
    data, allowed = RAW[name]
    with house.connect() as sock:
        with contextlib.suppress(ConnectionError):  # the server may close before it was told everything
            sock.sendall(data)
        answer = split_answer(read_answer(sock, 2.5))
    assert answer[0] in allowed, answer
    if answer[0] >= 400:
        refused(answer, answer[0])
    assert house.service.asks == [] or house.service.asks[-1].model == "demo"
    assert house.ask("GET", "/health")[0] == 200


BODIES: list[bytes] = [
    b"", b"null", b"[]", b"1", b'"x"', b"{", b"{}", b'{"model": NaN}', b"\xff\xfe{}",
    b'{"model":"demo","model":"demo"}',
    b"[" * 100_000, b'{"a":' * 30_000, b'{"model":"demo","messages":[' + b"[]," * 60_000 + b"1]}",
    b'{"model":"demo","messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"model":"demo\\u0000","messages":[{"role":"user","content":"x"}]}',
    b'{"model":"demo","messages":[{"role":"user","content":"x"}],"max_tokens":-1}',
    b'{"model":"demo","messages":[{"role":"user","content":"x"}],"temperature":1e400}',
    b'{"model":"demo","messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 60 + b"}",
    b'{"model":"demo","messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 6000 + b"}",
    b'{"model":"demo","messages":[{"role":"user","content":"x"}],"n":true}',
    b'{"model":{"$ne":1},"messages":[{"role":"user","content":"x"}]}',
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=[body[:24].decode("latin-1") + f" {len(body)}" for body in BODIES])
def test_a_hostile_body_is_a_client_error_and_reaches_nobody(house: House, body: bytes):
    before = len(house.service.asks)
    for path in ("/v1/chat/completions", "/v1/completions"):
        answer = house.ask("POST", path, body)
        refused(answer, answer[0])
        assert answer[0] in (400, 404)
    assert len(house.service.asks) == before


def test_a_slow_body_is_given_up_in_time(house: House):
    started = time.monotonic()
    with house.connect(
        post("/v1/chat/completions", b"", house.port).replace(b"Content-Length: 0", b"Content-Length: 999")
    ) as sock:
        for _ in range(4):
            sock.sendall(b"{")
            time.sleep(0.1)
        refused(split_answer(read_all(sock)), 408, "request_timeout")
    assert time.monotonic() - started < 3


def test_headers_that_never_end_are_given_up_in_time(house: House):
    for beginning in (b"", b"GET /health HTTP/1.1\r\nHost: loc"):
        started = time.monotonic()
        with house.connect(beginning) as sock:
            assert read_all(sock, 3) == b""
        assert time.monotonic() - started < 2


def test_a_large_answer_nobody_reads_is_thrown_away_in_time():
    text = "x" * 30_000_000
    service = FakeService(lambda ask: [Routed(relevo_object()), Delta(0, text, [1], "stop"), completed()])
    asked = msgspec.json.encode(CHAT)
    with (
        open_house(service, send_timeout_s=0.3) as opened,
        opened.connect(post("/v1/chat/completions", asked, opened.port, "Connection: close")) as sock,
    ):
        read_until(sock, b"chat.completion")
        time.sleep(0.6)
        assert len(read_all(sock)) < len(text) / 2


def test_headers_of_a_second_request_are_bounded_in_time_too(house: House):
    with house.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as sock:
        read_until(sock, b'"ok"}')
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        started = time.monotonic()
        assert read_all(sock, 3) == b""
    assert time.monotonic() - started < 2


def test_trailers_after_a_body_are_no_headers(house: House):
    house.service.__init__()  # type: ignore[misc]
    body = msgspec.json.encode(CHAT)
    data = HEAD.encode() + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (
        len(body),
        body,
    )
    answer = split_answer(house.raw(data + b"Idempotency-Key: smuggled\r\nx-relevo-policy: cpu-only\r\n\r\n"))
    assert answer[0] == 200
    assert (house.service.asks[0].idempotency_key, house.service.asks[0].policy) == (None, None)


def test_an_offer_of_http2_beside_a_body_is_passed_over(house: House):
    house.service.__init__()  # type: ignore[misc]
    offer = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"]
    with house.connect(post("/v1/chat/completions", msgspec.json.encode(CHAT), house.port, *offer)) as sock:
        assert split_answer(read_answer(sock))[0] == 200


def test_pipelined_requests_are_answered_in_order(house: House):
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = house.raw(one + one + last)
    assert answer.count(b'{"status":"ok"}') == 2 and answer.endswith(b"relevo_up 1\n")


def test_a_large_refused_body_still_gets_its_answer(house: House):
    with house.connect(post("/v1/chat/completions", b" " * 3_000_000, house.port)) as sock:
        refused(split_answer(read_all(sock)), 413, "request_too_large")


def test_a_configured_origin_may_call_from_a_browser():
    config = Config(server=ServerConfig(allowed_origins=["https://ui.example"]))
    with open_house(config=config) as opened:
        before = opened.ask(
            "OPTIONS", "/v1/chat/completions", origin="https://ui.example", access_control_request_method="POST"
        )
        assert before[0] == 204 and before[1]["access-control-allow-origin"] == "https://ui.example"
        answer = opened.ask("POST", "/v1/chat/completions", CHAT, origin="https://ui.example")
        assert answer[0] == 200 and "x-relevo-route" in answer[1]["access-control-expose-headers"]
        refused(opened.ask("POST", "/v1/chat/completions", CHAT, origin="https://evil.example"), 403)


# ---------------------------------------------------------------- the socket


def test_a_taken_port_is_a_clear_error():
    with bind("127.0.0.1", 0, KeyRing(None)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"Port {port} on 127.0.0.1 is taken.*--port"):
            bind("127.0.0.1", port, KeyRing(None))


def test_an_open_address_without_keys_is_refused_and_with_keys_allowed(tmp_path: Path):
    ring = KeyRing(tmp_path / "keys.json")
    with pytest.raises(StartupError, match="relevo keys create"):
        bind("0.0.0.0", 0, ring)
    ring.create("one")
    bind("0.0.0.0", 0, ring).close()


def test_an_address_of_no_machine_is_a_clear_error():
    for host in ("no such host", "127.0.0.1.example.invalid"):
        with pytest.raises(StartupError, match="cannot be used"):
            bind(host, 0, KeyRing(None))


def test_the_end_is_as_told(house: House):
    house.service.__init__(
        lambda ask: [Routed(relevo_object("cpu")), Delta(0, "x", [1], "length"), completed(route="cpu")]
    )  # type: ignore[misc]
    status, headers, body = house.ask("POST", "/v1/chat/completions", CHAT)
    assert (status, headers["x-relevo-degraded"], headers["x-relevo-standby"]) == (200, "true", "none")
    assert msgspec.json.decode(body)["choices"][0]["finish_reason"] == "length"
