"""Policies of request, key and model, and a key's priority: which counts, what is refused, how key files keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relevo.api.auth import identify
from relevo.api.call import Call
from relevo.api.keys import KeyRing
from relevo.api.openai_ask import read_wishes
from relevo.config import ModelConfig
from relevo.core.errors import BadRequest, NotFound, NotGranted, RelevoError, StartupError
from relevo.core.events import Ask, Sampling
from relevo.core.grant import Grant, PolicyName
from relevo.service.intake import effective_policy
from relevo.service.recovery import StoredAsk


async def _nothing(*_: Any) -> Any:
    raise AssertionError("no bytes move here")


def call(**headers: str) -> Call:
    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    made = Call({"type": "http", "headers": fields, "query_string": b""}, _nothing, _nothing)
    made.read_headers()
    return made


def wishes(grant: Grant, **headers: str) -> dict[str, Any]:
    made = call(**headers)
    made.grant = grant
    return read_wishes(made)


# ------------------------------------------------------------------ precedence


@pytest.mark.parametrize(
    ("asked", "key", "model", "counts"),
    [
        (None, None, "auto", "auto"),
        (None, None, "cpu-only", "cpu-only"),
        (None, "gpu-only", "cpu-only", "gpu-only"),
        (None, "auto", "gpu-only", "auto"),
        ("cpu-only", "gpu-only", "gpu-only", "cpu-only"),
        ("auto", "gpu-only", "cpu-only", "auto"),
        ("gpu-only", None, "cpu-only", "gpu-only"),
    ],
)
def test_the_request_counts_before_its_key_and_the_key_before_the_model(
    asked: PolicyName | None, key: PolicyName | None, model: PolicyName, counts: str
) -> None:
    headers = {} if asked is None else {"x_relevo_policy": asked}
    ask = Ask("key_1", "m", "chat", policy=wishes(Grant(key), **headers)["policy"])
    assert effective_policy(ask, ModelConfig(path="m.gguf", policy=model)) == counts


def test_a_fixed_policy_refuses_another_and_takes_the_same() -> None:
    fixed = Grant("cpu-only", policy_fixed=True)
    assert wishes(fixed)["policy"] == wishes(fixed, x_relevo_policy="CPU-only")["policy"] == "cpu-only"
    for other in ("gpu-only", "auto"):
        with pytest.raises(NotGranted, match="cpu-only for good") as caught:
            wishes(fixed, x_relevo_policy=other)
        assert (caught.value.status, caught.value.param) == (403, "x-relevo-policy")


def test_a_request_may_lower_its_keys_priority_and_never_raise_it() -> None:
    assert wishes(Grant(priority=5))["priority"] == 5
    assert wishes(Grant(priority=5), x_relevo_priority="-7")["priority"] == -7
    assert wishes(Grant(priority=5), x_relevo_priority="+5")["priority"] == 5
    with pytest.raises(NotGranted, match="at most 5") as caught:
        wishes(Grant(priority=5), x_relevo_priority="6")
    assert caught.value.param == "x-relevo-priority"


def test_without_a_key_the_priority_is_at_most_0() -> None:
    assert wishes(Grant())["priority"] == 0
    assert wishes(Grant(), x_relevo_priority="-100")["priority"] == -100
    with pytest.raises(NotGranted, match="0 without one"):
        wishes(Grant(), x_relevo_priority="1")


@pytest.mark.parametrize("value", ["", "high", "1.5", "101", "-101", "1e2", "9" * 5000, "٣", "0x1", "--1"])
def test_a_priority_that_is_no_small_number_is_refused(value: str) -> None:
    with pytest.raises(RelevoError) as caught:
        wishes(Grant(priority=100), x_relevo_priority=value)
    assert (caught.value.status, caught.value.param) == (400, "x-relevo-priority")


# ------------------------------------------------------------------- key files


def test_a_key_carries_its_grant_to_the_call(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys.json")
    _, plain = ring.create("desk", Grant("gpu-only", priority=7))
    made = call(authorization=f"Bearer {plain}")
    identify(made, ring, needs_key=True)
    assert made.grant == Grant("gpu-only", policy_fixed=False, priority=7)


def test_a_changed_key_is_taken_up_while_the_server_runs(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys.json")
    _, plain = ring.create("desk")
    KeyRing(tmp_path / "keys.json").regrant("desk", policy="cpu-only", policy_fixed=True)
    found = ring.find(plain)
    assert found is not None and found.grant == Grant("cpu-only", policy_fixed=True)
    KeyRing(tmp_path / "keys.json").regrant("desk", priority=-3)
    found = ring.find(plain)
    assert found is not None and found.grant == Grant("cpu-only", policy_fixed=True, priority=-3)


OLD_KEY = {"id": "key_00", "name": "old", "sha256": "00", "created": 1.0, "revoked": None}


def test_a_key_file_from_before_still_opens(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"version": 1, "keys": [OLD_KEY]}))
    [key] = KeyRing(file).list()
    assert key.grant == Grant()


def test_a_key_without_anything_special_is_written_as_before(tmp_path: Path) -> None:
    KeyRing(tmp_path / "keys.json").create("desk")
    [key] = json.loads((tmp_path / "keys.json").read_text())["keys"]
    assert key.keys() <= OLD_KEY.keys()


@pytest.mark.parametrize("bad", [{"policy": "fast"}, {"priority": 101}, {"priority": "high"}, {"policy_fixed": 1}])
def test_a_file_with_a_wrong_grant_is_damaged(tmp_path: Path, bad: dict[str, Any]) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"version": 1, "keys": [{**OLD_KEY, **bad}]}))
    with pytest.raises(StartupError, match="damaged"):
        KeyRing(file)


def test_what_cannot_be_granted_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys.json")
    key, _ = ring.create("desk")
    for bad in (Grant(priority=101), Grant(policy_fixed=True)):
        with pytest.raises(BadRequest):
            ring.create("sofa", bad)
    with pytest.raises(BadRequest):
        ring.regrant("desk", priority=-101)
    with pytest.raises(NotFound):
        ring.regrant("sofa", priority=1)
    assert ring.list() == [key]


# ----------------------------------------------------------------- the journal


def test_priority_and_policy_survive_a_restart_and_older_rows_have_none() -> None:
    stored = StoredAsk(Ask("key_1", "m", "chat", policy="gpu-only", priority=-9), Sampling(), [16])
    again = msgspec.msgpack.decode(stored.encoded(), type=StoredAsk).ask
    assert (again.policy, again.priority) == ("gpu-only", -9)
    row = msgspec.msgpack.decode(stored.encoded())
    del row["ask"]["priority"]
    row["ask"]["policy"] = "auto"
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=StoredAsk).ask
    assert (older.policy, older.priority) == ("auto", 0)
