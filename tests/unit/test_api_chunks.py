"""The bytes of a stream, event by event."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relevo.api.openai_chat import ChatStream
from relevo.api.openai_completion import CompletionStream
from relevo.core.events import Delta, Ended, TokenLogprob, Usage

RELEVO = {"route": "gpu"}
END = Ended("completed", Usage(3, 2), {"route": "cpu"})


def events(data: bytes) -> list[Any]:
    assert data == b"" or data.endswith(b"\n\n")
    lines = data.split(b"\n\n")[:-1]
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    return [line if line == b"data: [DONE]" else msgspec.json.decode(line[6:]) for line in lines]


def chat(choices: int = 1, usage: bool = False) -> ChatStream:
    return ChatStream("chatcmpl-1", 12.9, 'de"mo', choices=choices, include_usage=usage)


def test_the_opening_has_every_choices_role_and_one_relevo():
    first, second = events(chat(2).opening(RELEVO))
    assert first["relevo"] == RELEVO and "relevo" not in second
    assert [c["choices"][0]["index"] for c in (first, second)] == [0, 1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (first["id"], first["created"], first["model"]) == ("chatcmpl-1", 12, 'de"mo')
    assert first["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("text", ['"', "\n\ndata: x", "\r", "\\", "é漢😀", "\x00\x1f", "\u2028", "[DONE]"])
def test_any_text_is_one_event_that_reads_back(text: str):
    (chunk,) = events(chat().delta(Delta(0, text, [1])))
    assert chunk["choices"] == [{"index": 0, "delta": {"content": text}, "finish_reason": None}]


def test_a_step_that_released_no_text_sends_nothing():
    assert chat().delta(Delta(0, "", [1])) == b""


def test_a_finish_waits_for_the_end_unless_another_choice_still_runs():
    stream = chat(2)
    early = events(stream.delta(Delta(1, "b", [1], "length")))
    assert [c["choices"][0]["finish_reason"] for c in early] == [None, "length"] and "relevo" not in early[1]
    assert events(stream.delta(Delta(0, "", [1], "stop"))) == []
    last, done = events(stream.closing(END))
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}] and last["relevo"] == END.relevo
    assert done == b"data: [DONE]"


def test_usage_is_null_until_the_last_chunk():
    stream = chat(usage=True)
    got = events(stream.opening(RELEVO) + stream.delta(Delta(0, "a", [1], "stop")) + stream.closing(END))
    assert [c["usage"] for c in got[:-2]] == [None] * 3
    assert (
        got[-2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5} and got[-2]["choices"] == []
    )


def test_an_end_without_any_finish_still_finishes_every_choice():
    got = events(chat(3).closing(END))
    assert [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in got[:-1]] == [
        (0, "stop"),
        (1, "stop"),
        (2, "stop"),
    ]
    assert ["relevo" in c for c in got[:-1]] == [False, False, True]


def test_log_probabilities_come_also_with_held_back_text():
    one = TokenLogprob(5, b"\xe2\x82", float("-inf"), [(6, b"a", -0.5)])
    (chunk,) = events(chat().delta(Delta(0, "", [5], None, [one])))
    (content,) = chunk["choices"][0]["logprobs"]["content"]
    assert (content["bytes"], content["logprob"], content["top_logprobs"][0]["token"]) == ([0xE2, 0x82], -9999.0, "a")


def test_a_failure_is_one_event():
    assert events(chat().failure({"message": "x"})) == [{"error": {"message": "x"}}]


def test_a_completion_streams_text_with_echo_and_running_offsets():
    stream = CompletionStream("cmpl-1", 1.0, "demo", choices=1, echo="Say ")
    one = TokenLogprob(1, b"ab", -1.0, [])
    got = events(
        stream.opening(RELEVO)
        + stream.delta(Delta(0, "ab", [1], None, [one]))
        + stream.delta(Delta(0, "cd", [1], "stop", [one]))
    )
    assert [c["choices"][0]["text"] for c in got] == ["Say ", "ab", "cd"]
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in got[1:]] == [[0], [2]]
    assert events(stream.closing(END))[0]["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_a_handover_shows_as_a_chunk_without_text():
    (chunk,) = events(chat().routed({"route": "cpu"}))
    assert chunk["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}] and chunk["relevo"] == {
        "route": "cpu"
    }
