"""Keys, host names, origins, and how a refusal looks."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relevo.api.auth import identify
from relevo.api.call import Call, header_value
from relevo.api.errors import BY_CODE, EndedUnfinished, error_body, error_headers, error_object
from relevo.api.hosts import HostWall, split_host
from relevo.api.keys import KeyRing
from relevo.config import ServerConfig, is_loopback
from relevo.core.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    Draining,
    HostNotAllowed,
    NotFound,
    OriginNotAllowed,
    QueueFull,
    RelevoError,
    StartupError,
    Unauthorized,
)
from relevo.core.events import Ended, Usage


async def _nothing(*_: Any) -> Any:
    raise AssertionError("no bytes move here")


def call(*headers: tuple[str, str], method: str = "POST", server: str = "127.0.0.1") -> Call:
    fields = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "headers": fields, "query_string": b"", "method": method, "server": (server, 8377)}
    made = Call(scope, _nothing, _nothing)
    made.read_headers()
    return made


# ------------------------------------------------------------------------- keys


def test_a_key_is_shown_once_and_only_its_hash_is_stored(tmp_path: Path):
    ring = KeyRing(tmp_path / "keys.json")
    assert not ring.required
    key, plain = ring.create("laptop")
    assert len(plain) == 43 and plain.startswith("rk-") and plain[3:].isalnum()
    assert plain not in (tmp_path / "keys.json").read_text()
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
    assert ring.required and ring.find(plain) == key
    assert list(tmp_path.iterdir()) == [tmp_path / "keys.json"]


def test_another_ring_on_the_same_file_sees_changes(tmp_path: Path):
    writer, reader = KeyRing(tmp_path / "keys.json"), KeyRing(tmp_path / "keys.json")
    key, plain = writer.create("phone")
    assert reader.find(plain) == key
    writer.revoke("phone")
    assert reader.find(plain) is None and reader.required


def test_revoking_the_last_key_does_not_open_the_server(tmp_path: Path):
    ring = KeyRing(tmp_path / "keys.json")
    _, plain = ring.create("only")
    ring.revoke("only")
    assert ring.required and ring.find(plain) is None
    assert [key.name for key in ring.list()] == ["only"]


def test_losing_or_damaging_the_file_does_not_open_the_server(tmp_path: Path):
    path = tmp_path / "keys.json"
    ring = KeyRing(path)
    key, plain = ring.create("only")
    for spoil in (lambda: path.write_text("{"), lambda: path.write_text('{"version":1,"keys":[]}'), path.unlink):
        spoil()
        assert ring.required and ring.find(plain) == key


def test_a_damaged_file_at_the_start_is_an_error(tmp_path: Path):
    path = tmp_path / "keys.json"
    for content in (b"", b"{", b"\xff", b'{"version":1,"keys":[{"id":5}]}'):
        path.write_bytes(content)
        with pytest.raises(StartupError, match="damaged"):
            KeyRing(path)


def test_a_key_is_revoked_by_name_id_or_the_beginning_of_an_id(tmp_path: Path):
    ring = KeyRing(tmp_path / "keys.json")
    keys = [ring.create(name)[0] for name in ("a", "b", "c")]
    assert ring.revoke("a").id == keys[0].id
    assert ring.revoke(keys[1].id).id == keys[1].id
    assert ring.revoke(keys[2].id[:12]).id == keys[2].id
    for unknown in ("a", "nobody", "key", ""):
        with pytest.raises(NotFound):
            ring.revoke(unknown)
    assert ring.create("a")[0].id != keys[0].id, "a revoked key's name is free again"


def test_names_are_checked_and_unique(tmp_path: Path):
    ring = KeyRing(tmp_path / "keys.json")
    ring.create("one")
    with pytest.raises(Conflict):
        ring.create("one")
    for bad in ("", " x", "x" * 65, "a/b", "a\nb", "é"):
        with pytest.raises(BadRequest):
            ring.create(bad)


def test_a_failed_write_leaves_the_old_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ring = KeyRing(tmp_path / "keys.json")
    _, plain = ring.create("one")

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        ring.create("two")
    assert [key.name for key in KeyRing(tmp_path / "keys.json").list()] == ["one"]
    assert list(tmp_path.iterdir()) == [tmp_path / "keys.json"] and ring.find(plain)


BEARERS = ["", "Bearer", "Bearer ", "Basic rk-x", "bearer wrong", "Bearer " + "x" * 600, "Bearer é", "rk-x"]


@pytest.mark.parametrize("value", BEARERS)
def test_without_keys_any_authorization_is_everybodys(value: str):
    made = call(("authorization", value))
    identify(made, KeyRing(None), needs_key=True)
    assert (made.owner, made.sees) == ("local", None)


@pytest.mark.parametrize("value", BEARERS)
def test_with_keys_anything_but_a_key_is_refused(tmp_path: Path, value: str):
    ring = KeyRing(tmp_path / "keys.json")
    key, plain = ring.create("one")
    for bad in (
        call(("authorization", value)),
        call(("authorization", f"Bearer {plain}"), ("authorization", value)),
        call(),
    ):
        with pytest.raises(Unauthorized):
            identify(bad, ring, needs_key=True)
    good = call(("authorization", f"bearer {plain}"))
    identify(good, ring, needs_key=True)
    assert (good.owner, good.sees) == (key.id, key.id)


# ------------------------------------------------------------------------- hosts

MALFORMED = [
    "", " ", "localhost/", "localhost/v1", "localhost?x", "localhost#x", "a@localhost", "localhost:", "localhost:x",
    "localhost:80:80", "localhost:99999", "localhost:8377/health?", "local host", "localhost,evil", "[::1", "::1",
    "[::1]x", "[zz]", "[1.2.3]", "localhost\\evil", "localhost%2f", "localhost;x", "http://localhost", "*",
    ".localhost",
    "é", "localhost\x7f", "[::1]:8377:1", "a" * 300, "localhost:8377#@evil", "127.0.0.1/../", "[::1%lo]",
]  # fmt: skip
FOREIGN = ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "128.0.0.1", "0.0.0.0", "[::2]", "192.168.1.9"]
OWN = [
    "localhost", "localhost:8377", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:8377",
    "[0:0:0:0:0:0:0:1]", "box.local", "BOX.local:99", "nas",
]  # fmt: skip


def wall(address: str = "127.0.0.1") -> HostWall:
    return HostWall(
        ServerConfig(allowed_hosts=["box.local", "nas:8377"], allowed_origins=["https://ui.example"]), address
    )


@pytest.mark.parametrize("host", MALFORMED)
def test_a_malformed_host_is_a_bad_request(host: str):
    with pytest.raises(BadRequest):
        wall().check(call(("host", host)))


@pytest.mark.parametrize("host", FOREIGN)
def test_a_host_that_is_not_on_the_list_is_misdirected(host: str):
    with pytest.raises(HostNotAllowed) as caught:
        wall().check(call(("host", host)))
    assert caught.value.status == 421


@pytest.mark.parametrize("host", OWN)
def test_loopback_and_configured_hosts_are_served(host: str):
    wall().check(call(("host", host)))


def test_one_host_header_is_needed_and_no_more():
    for made in (call(), call(("host", "localhost"), ("host", "localhost"))):
        with pytest.raises(BadRequest):
            wall().check(made)


def test_the_address_of_the_connection_is_a_host_but_a_name_like_it_is_not():
    wall("0.0.0.0").check(call(("host", "192.168.1.9:8377"), server="192.168.1.9"))
    with pytest.raises(HostNotAllowed):
        wall("0.0.0.0").check(call(("host", "192.168.1.10"), server="192.168.1.9"))
    for host, server in (("evil", "evil"), ("0.0.0.0", "192.168.1.9"), ("[::]", "192.168.1.9")):
        with pytest.raises(HostNotAllowed):
            wall("0.0.0.0").check(call(("host", host), server=server))


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "", "http://localhost:1", "file://", "http://localhost:8377.evil"]
)
def test_another_origin_may_change_nothing(origin: str):
    for method in ("POST", "DELETE", "OPTIONS"):
        with pytest.raises(OriginNotAllowed):
            wall().check(call(("host", "localhost:8377"), ("origin", origin), method=method))
    reading = call(("host", "localhost:8377"), ("origin", origin), method="GET")
    wall().check(reading)
    assert reading.extra_headers == [], "the browser itself keeps the answer from the page"


def test_the_own_and_the_configured_origins_may_call():
    own = call(("host", "localhost:8377"), ("origin", "http://localhost:8377"))
    wall().check(own)
    assert own.extra_headers == [] and wall().preflight(own) is None
    listed = call(
        ("host", "localhost"),
        ("origin", "https://ui.example"),
        ("access-control-request-method", "POST"),
        method="OPTIONS",
    )
    wall().check(listed)
    assert (b"access-control-allow-origin", b"https://ui.example") in listed.extra_headers
    assert wall().preflight(listed)


def test_hosts_are_split_and_loopback_is_known():
    assert split_host(b"[::0001]:80") == ("::1", 80)
    assert [is_loopback(h) for h in ("localhost", "::1", "127.3.2.1", "0.0.0.0", "::", "example")] == [True] * 3 + [
        False
    ] * 3


# ------------------------------------------------------------------------- refusals


def test_every_error_of_the_family_renders():
    for kind in BY_CODE.values():
        shown = error_object(kind())
        assert shown["message"] and shown["type"] and shown["code"] == kind.code and "param" in shown
        headers = dict(error_headers(kind()))
        assert (b"x-should-retry" in headers) == (kind.retry is not None)
        if kind.retry and kind.status in (429, 503):
            assert headers[b"retry-after"] == b"1"


def test_retry_times_are_whole_seconds_rounded_up_and_exact_milliseconds():
    headers = dict(error_headers(QueueFull(retry_after_s=2.0001)))
    assert (headers[b"retry-after"], headers[b"retry-after-ms"], headers[b"x-should-retry"]) == (b"3", b"2001", b"true")
    assert dict(error_headers(QueueFull(retry_after_s=-5)))[b"retry-after"] == b"0"
    assert dict(error_headers(Draining()))[b"connection"] == b"close"


def test_detail_and_param_are_told():
    shown = msgspec.json.decode(error_body(RelevoError("No.", param="n", detail={"need_bytes": 5})))["error"]
    assert shown == {
        "message": "No.", "type": "server_error", "param": "n", "code": "internal_error", "detail": {"need_bytes": 5},
    }  # fmt: skip


def test_text_that_cannot_be_encoded_does_not_break_the_refusal():
    assert "message" in msgspec.json.decode(error_body(BadRequest("half \ud800")))["error"]


def test_an_ended_request_keeps_its_own_words_and_is_never_retried_blindly():
    ended = Ended("failed", Usage(1, 0), {"route": None}, "why", {"message": "Gone.", "code": "draining", "spare": 1})
    error = EndedUnfinished(ended)
    assert (error.status, error.message, error.type) == (503, "Gone.", "service_unavailable_error")
    assert error_object(error)["spare"] == 1 and error_object(error)["relevo"] == {"route": None}
    bare = EndedUnfinished(Ended("cancelled", Usage(1, 0), {}))
    assert (bare.status, bare.code, bare.message) == (409, "cancelled", Cancelled.__doc__)
    assert dict(error_headers(bare))[b"x-should-retry"] == b"false"
    assert RelevoError.status == 500 and Cancelled.retry is False, "the class is untouched"


def test_header_values_are_plain_ascii():
    assert header_value("gpu\r\nx: 1") == b"gpu??x: 1" and header_value("é") == b"?"
