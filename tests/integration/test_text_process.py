"""The text process with the real vocabulary, driven frame by frame."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relevo.core.events import (
    MAX_FRAME_BYTES,
    FromText,
    Heartbeat,
    Render,
    Rendered,
    Shutdown,
    StartFailed,
    StartText,
    TextReady,
    TextRefused,
    Tokenize,
)
from relevo.models.payload import spill, whole
from relevo.workers.frames import FrameSocket

PATIENCE_S = 40
HELLO = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Say <|im_end|> or é€😀."}]


class Text:
    """One process and our end of its socket."""

    def __init__(self, libraries: Path, model: Path, *options: str) -> None:
        self._start = {"model": "demo", "path": str(model), "libraries": str(libraries)}
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PATIENCE_S, 0))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-m", "relevo.workers.text", "--fd", str(theirs.fileno()), *options],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
            )
        self.socket = ours
        self.frames = FrameSocket(ours)
        self.heartbeats: list[Heartbeat] = []

    def start(self, **changes: Any) -> Any:
        self.frames.send(StartText(**{**self._start, **changes}))
        return self.receive()

    def receive(self) -> Any:
        while isinstance(frame := self.frames.receive(FromText), Heartbeat):
            self.heartbeats.append(frame)
        return frame

    def ask(self, call: Render | Tokenize) -> Any:
        self.frames.send(call)
        return self.receive()

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)


@contextmanager
def text_process(libraries: Path, model: Path, *options: str) -> Iterator[Text]:
    text = Text(libraries, model, *options)
    try:
        yield text
    finally:
        text.socket.close()
        if text.process.poll() is None:
            text.process.kill()
        text.process.wait()
        assert text.process.stderr is not None
        text.process.stderr.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("payloads")


@pytest.fixture(scope="module")
def text(libraries: Path, demo_model: Path, folder: Path) -> Iterator[Text]:
    """One process for all tests that leave it as they found it."""
    with text_process(libraries, demo_model) as process:
        ready = process.start(folder=str(folder))
        assert isinstance(ready, TextReady)
        assert (ready.has_template, ready.vocabulary_tokens, ready.context_trained_tokens) == (True, 49152, 8192)
        assert len(ready.template_digest or "") == len(ready.tokenizer_digest or "") == 64
        yield process


def test_a_chat_is_rendered_by_the_files_own_template_and_counted(text: Text) -> None:
    answer = text.ask(Render(1, [HELLO[0], {"role": "user", "content": "What is the capital of France?"}]))
    assert answer.text == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    system, user, assistant = [9690, 198], [4093, 198], [520, 9531, 198]
    assert answer.tokens == [
        *(1, *system, 2683, 359, 5356, 30, 2, 198),
        *(1, *user, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198),
        *(1, *assistant),
    ]


def test_plain_text_is_counted_with_special_tokens_only_where_asked(text: Text) -> None:
    as_text = text.ask(Tokenize(1, "a<|im_end|>"))
    as_token = text.ask(Tokenize(2, "a<|im_end|>", special=True))
    assert (as_token.call, as_token.tokens) == (2, [81, 2])
    assert len(as_text.tokens) > 2
    assert text.ask(Tokenize(3, "")).tokens == []


def test_calls_are_answered_in_their_order(text: Text) -> None:
    for number in range(50):
        text.frames.send(Tokenize(number, "word " * number) if number % 2 else Render(number, HELLO))
    assert [text.receive().call for _ in range(50)] == list(range(50))


def test_a_bad_chat_is_refused_and_the_next_one_served(text: Text) -> None:
    for number, (messages, code, word) in enumerate(
        [
            ([], "invalid", "at least one"),
            ([{"role": "user"}], "invalid", "messages[0].content"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "invalid", "projector"),
        ]
    ):
        answer = text.ask(Render(number, messages))
        assert isinstance(answer, TextRefused)
        assert (answer.call, answer.code) == (number, code)
        assert word in answer.message
    refused = text.ask(Render(7, HELLO, variables={"messages": 1}))
    assert (refused.code, "messages" in refused.message) == ("invalid", True)
    assert isinstance(text.ask(Render(8, HELLO)), Rendered)


def test_a_prompt_larger_than_a_frame_goes_by_a_file_both_ways(text: Text, folder: Path, tmp_path: Path) -> None:
    story = "One two three four. " * 52_400
    call = spill(Render(5, [{"role": "user", "content": story, "name": "n" * 2000}]), tmp_path)
    assert call.payload_path is not None
    answer = text.ask(call)
    assert isinstance(answer, Rendered)
    assert (answer.tokens, answer.text) == ([], None)
    assert Path(answer.payload_path or "").parent == folder
    full = whole(answer, delete=True)
    assert story in (full.text or "")
    assert len(full.tokens) > 200_000
    assert list(folder.iterdir()) == []
    assert Path(call.payload_path).exists()  # who made it deletes it


def test_a_prompt_no_context_could_hold_is_refused(text: Text, tmp_path: Path) -> None:
    answer = text.ask(spill(Tokenize(1, "x" * (MAX_FRAME_BYTES + 1)), tmp_path))
    assert (answer.code, "8192" in answer.message) == ("too_large", True)
    gone = text.ask(Tokenize(2, "", payload_path=str(tmp_path / "gone")))
    assert (gone.code, "cannot be read" in gone.message) == ("too_large", True)


def test_heartbeats_tell_that_it_lives_and_what_it_holds(text: Text) -> None:
    text.ask(Render(1, HELLO))
    beat = text.frames.receive(FromText)
    assert isinstance(beat, Heartbeat)
    assert (beat.steps > 0, beat.running) == (True, 0)
    assert 10 * 2**20 < beat.rss_bytes < 500 * 2**20


def test_it_ends_when_told_and_when_left_alone(libraries: Path, demo_model: Path) -> None:
    with text_process(libraries, demo_model) as told:
        told.start()
        told.frames.send(Shutdown())
        assert told.wait() == 0
    with text_process(libraries, demo_model) as alone:
        alone.socket.close()
        assert alone.wait() == 0


def test_what_is_no_frame_ends_it_with_a_sentence(libraries: Path, demo_model: Path) -> None:
    with text_process(libraries, demo_model) as text:
        text.start()
        text.socket.sendall(b"\xff\xff\xff\xffGET / HTTP/1.1")
        assert text.wait() == 2
        assert text.process.stderr is not None
        assert b"at most" in text.process.stderr.read()


# ------------------------------------------------------- strangers' templates and files

TRAPS = """{%- set word = messages[-1].content -%}
{%- if word == 'loop' -%}
  {%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif word == 'memory' -%}
  {{ word.ljust(3000000000) }}
{%- elif word == 'surrogate' -%}{{ '\\ud800' }}
{%- elif word == 'complain' -%}{{ raise_exception('Not this word') }}
{%- endif -%}
{{ bos_token }}{{ word }}{{ eos_token }}"""


def test_a_hostile_template_harms_only_its_own_call(libraries: Path, demo_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "traps.jinja"
    path.write_text(TRAPS)
    with text_process(libraries, demo_model, "--render-s", "0.4") as text:
        ready = text.start(chat_template=str(path))
        assert isinstance(ready, TextReady)
        for word, code, said in [
            ("loop", "timeout", "0.4 s"),
            ("memory", "too_large", "memory"),
            ("surrogate", "invalid", "surrogate"),
            ("complain", "template", "Not this word"),
        ]:
            answer = text.ask(Render(1, [{"role": "user", "content": "x"}, {"role": "user", "content": word}]))
            assert isinstance(answer, TextRefused), word
            assert answer.code == code
            assert said in answer.message
        fine = text.ask(Render(2, [{"role": "user", "content": "hello"}]))
        assert fine.text == "<|im_start|>hello<|im_end|>"
        assert fine.tokens[0] == 1
        assert fine.tokens[-1] == 2


def test_a_template_that_cannot_start_says_so(libraries: Path, demo_model: Path, tmp_path: Path) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for template, said in [("{% for %}", "not valid Jinja"), (str(tmp_path / "none"), "none"), (endless, "too long")]:
        with text_process(libraries, demo_model, "--render-s", "0.3") as text:
            failed = text.start(chat_template=template)
            assert isinstance(failed, StartFailed)
            assert failed.code == "model_file"
            assert said in failed.message
            assert text.wait() == 1


def test_a_model_or_library_that_is_not_there_says_so(libraries: Path, demo_model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    with demo_model.open("rb") as whole_file:
        short.write_bytes(whole_file.read(2_000_000))
    for change, code, said in [
        ({"path": str(tmp_path / "none.gguf")}, "model_file", "no model file"),
        ({"path": str(short)}, "model_file", "incomplete"),
        ({"libraries": str(tmp_path)}, "library", "library"),
    ]:
        with text_process(libraries, demo_model) as text:
            failed = text.start(**change)
            assert isinstance(failed, StartFailed)
            assert failed.code == code
            assert said in failed.message


def test_code_that_cannot_be_interrupted_is_ended_with_its_process() -> None:
    endless = (
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "from relevo.workers.text.guard import Guard\n"
        "with Guard().limit(0.1, 0.2): sum(iter(int, 1))\n"  # one native call that never returns
    )
    ended = subprocess.run([sys.executable, "-I", "-c", endless], timeout=PATIENCE_S, check=False)
    assert ended.returncode == -signal.SIGXCPU
