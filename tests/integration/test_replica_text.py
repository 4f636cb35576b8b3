"""The handle on a text process, with a fake one in a real process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relevo.core.errors import BadRequest, BodyTooLarge, EngineFailed, NothingCanServe
from relevo.core.events import StartText
from relevo.replicas.text import TextProcess, TextSettings

from .fakes.replica_house import open_descriptors, process_exists, under_both_loops

FAKE_TEXT = Path(__file__).parent / "fakes" / "fake_text.py"


@asynccontextmanager
async def text_process(folder: Path, path: str = "/model", **settings: Any) -> AsyncIterator[TextProcess]:
    text = TextProcess(
        "fake",
        plan=lambda: StartText("fake", path, "/libraries"),
        settings=TextSettings(
            command=lambda fd: [sys.executable, "-I", str(FAKE_TEXT), "--fd", str(fd)],
            extra_environment={"FAKE_NOTE": str(folder / "note"), "TMPDIR": str(folder)},
            **settings,
        ),
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(text.run())
        try:
            yield text
        finally:
            await text.stop()
    assert len(asyncio.all_tasks()) == 1


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def payload_files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and p.name != "note"]


def test_text_is_counted_and_chats_are_rendered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with text_process(tmp_path) as text:
            ready = await text.wait_ready(10)
            assert ready.pid == text.pid
            answers = await asyncio.gather(*(text.tokenize(f"{'x' * n} yy") for n in range(1, 30)))
            assert [a.tokens for a in answers] == [[n, 2] for n in range(1, 30)]
            rendered = await text.render([{"role": "user", "content": "hello there"}])
            assert rendered.text == "hello there"
            pid = text.pid
        assert pid is not None and not process_exists(pid)
        with pytest.raises(NothingCanServe, match="stopped"):
            await text.tokenize("too late")

    under_both_loops(scenario)


def test_large_texts_go_by_files_that_are_gone_afterwards(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with text_process(tmp_path) as text:
            large = "word " * 500_000
            answer = await text.tokenize(large)
            assert answer.text == large and len(answer.tokens) == 500_000 and answer.payload_path is None
            [folder] = tmp_path.glob("relevo-text-*")
            assert folder.stat().st_mode & 0o777 == 0o700
            assert payload_files(tmp_path) == []
        assert list(tmp_path.iterdir()) == []

    under_both_loops(scenario)


def test_a_death_under_a_call_is_tried_once_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with text_process(tmp_path) as text:
            assert (await text.tokenize("die once please")).tokens == [3, 4, 6]
            assert text.starts == 2

    asyncio.run(scenario())


def test_a_text_that_kills_twice_is_given_back_and_others_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with text_process(tmp_path) as text:
            bad, good = await asyncio.gather(text.tokenize("die"), text.tokenize("fine"), return_exceptions=True)
            assert isinstance(bad, EngineFailed) and "this text is deadly" in bad.message
            assert not isinstance(good, BaseException) and good.tokens == [4]

    asyncio.run(scenario())


def test_a_text_that_hangs_is_ended_and_blamed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with text_process(tmp_path, call_timeout_s=0.3) as text:
            await text.wait_ready(10)
            pid = text.pid
            with pytest.raises(BadRequest, match="chat template of fake took too long"):
                await text.render([{"content": "hang"}])
            assert (await text.tokenize("fine")).tokens == [4]
            assert text.pid != pid and pid is not None and not process_exists(pid)
            with pytest.raises(BadRequest, match="tokenizer of fake took too long"):
                await text.tokenize("burn processor time")

    asyncio.run(scenario())


def test_a_stopped_process_is_replaced_before_the_call_times_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with text_process(tmp_path, silence_s=0.5) as text:
            await text.wait_ready(10)
            assert text.pid is not None
            os.kill(text.pid, signal.SIGSTOP)
            began = time.perf_counter()
            assert (await text.tokenize("fine")).tokens == [4]
            assert time.perf_counter() - began < 5.0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "error"),
    [("invalid", BadRequest), ("template", BadRequest), ("timeout", BadRequest), ("too_large", BodyTooLarge)],
)
def test_a_refusal_is_the_callers_to_mend(tmp_path: Path, code: str, error: type[Exception]) -> None:
    async def scenario() -> None:
        async with text_process(tmp_path) as text:
            with pytest.raises(error, match=f"Refused for {code}"):
                await text.tokenize(f"refuse {code}")

    asyncio.run(scenario())


def test_a_caller_that_leaves_does_not_mix_up_the_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with text_process(tmp_path) as text:
            await text.wait_ready(10)
            for size in (1, 400_000):
                leaving = asyncio.create_task(text.tokenize("slow " + "w " * size))
                await asyncio.sleep(0.2)
                leaving.cancel()
                assert (await text.tokenize("fine again")).tokens == [4, 5]
                assert text.starts == 1
                assert payload_files(tmp_path) == []

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_is_told_by_its_cause(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with text_process(tmp_path, path="/broken", call_wait_s=0.7) as text:
            began = time.perf_counter()
            answers = await asyncio.gather(*(text.tokenize("hello") for _ in range(20)), return_exceptions=True)
            assert time.perf_counter() - began < 3.0
            for answer in answers:
                assert isinstance(answer, NothingCanServe) and "/broken is damaged" in answer.message
            assert 1 < text.starts < 6

    asyncio.run(scenario())


def test_restarts_leave_no_descriptors_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with text_process(tmp_path) as text:
            await text.tokenize("fine")
            before = open_descriptors()
            for _ in range(4):
                assert text.pid is not None
                os.kill(text.pid, signal.SIGKILL)
                await text.tokenize("fine")
            assert open_descriptors() == before

    under_both_loops(scenario)
