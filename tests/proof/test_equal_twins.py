"""With equal arithmetic on both routes, an answer that was handed over in the middle is the one nobody interrupted."""

from __future__ import annotations

import json

import pytest

from relevo.setup import demo
from tests.acceptance.house import House, stream_lines, wait_for

CONFIG = """
[devices.gpu0]
kind = "emulated"
total_bytes = 2147483648
equal_arithmetic = {equal}

[models.m]
path = "{path}"
context_tokens = 2048
slots = 2
profile = "strict"
handover = "continuous"
"""
ASK = {
    "model": "m",
    "messages": [{"role": "user", "content": "Tell me a long story about a lighthouse."}],
    "max_tokens": 160,
    "ignore_eos": True,
    "temperature": 0.8,
    "seed": 11,
    "stream": True,
}


def text_of(house: House, *, kill_after: int | None) -> tuple[str, list[dict]]:
    """The whole text of a stream; the GPU worker is killed after so many chunks."""
    text, relevo = "", []
    with house.http.stream("POST", "/v1/chat/completions", json=ASK) as answer:
        for n, line in enumerate(stream_lines(answer)):
            if line == "[DONE]":
                return text, relevo
            chunk = json.loads(line)
            assert "error" not in chunk, chunk
            if "relevo" in chunk:
                relevo.append(chunk["relevo"])
            if chunk["choices"]:
                text += chunk["choices"][0]["delta"].get("content") or ""
            if n == kill_after:
                house.kill_worker("gpu")
    raise AssertionError("the stream ended without [DONE]")


@pytest.mark.proof
@pytest.mark.timeout(180)
def test_a_seeded_story_is_the_same_whether_its_worker_was_killed_or_not(tmp_path) -> None:
    house = House(
        tmp_path / "state", "--host", "127.0.0.1", config=CONFIG.format(path=demo.find(), equal="true")
    ).start()
    try:
        whole, _ = text_of(house, kill_after=None)
        for kill_after in (3, 40, 110):
            wait_for("the GPU worker to be back", lambda: house.replica("gpu")["state"] == "serving")
            again, relevo = text_of(house, kill_after=kill_after)
            assert again == whole, f"killed after {kill_after} chunks"
            handover = relevo[-1]["handovers"][-1]
            assert (handover["from"], handover["to"], handover["grade"]) == ("gpu", "cpu", "continuous")
            print(f"killed after {kill_after} chunks: gap {handover['gap_ms']} ms at token {handover['at_token']}")
    finally:
        house.close()
