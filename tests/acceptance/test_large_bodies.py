"""A body too large for a journal row lies in a synced file, and survives the gateway like any other."""

from __future__ import annotations

import concurrent.futures

import httpx2
import pytest

from .house import House, wait_for


def test_a_large_body_is_kept_in_a_file_and_done_after_a_kill_of_the_gateway(build) -> None:
    house: House = build().start(both_routes=False)
    tool = {"type": "function", "function": {"name": "look", "description": "x" * 4000, "parameters": {}}}
    ask = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "tools": [tool] * 100,
        "max_tokens": 250,
        "ignore_eos": True,
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        call = pool.submit(lambda: httpx2.post(f"{house.url}/v1/chat/completions", json=ask, timeout=60))
        request_id = wait_for("the request to run", lambda: [r["id"] for r in house.records(state="running")])[0]
        assert [f for f in (house.state / "bodies").iterdir() if f.stat().st_size > 400_000]
        house.kill()
        with pytest.raises(httpx2.HTTPError):
            call.result(30)
    house.start(both_routes=False)
    record = house.wait_state(request_id, "completed")
    assert record["result"]["usage"]["completion_tokens"] == 250
