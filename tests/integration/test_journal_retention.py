"""Forgetting: payloads after their time or above the size, rows much later, and the space they took."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relevo.journal import (
    AddEvent,
    BlankPayload,
    ChangeState,
    Journal,
    SaveCheckpoint,
    StateConflict,
    retention,
    writer,
)
from relevo.journal.audit import audit

from .fakes.journal_kit import accept, end, opened

SECRET = "canary-4711"


class Clock:
    """Wall time that the test moves."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETENTION_S", 0.01)
    monkeypatch.setattr(writer, "SLICE_PAUSE_S", 0.001)
    monkeypatch.setattr(writer, "PAUSE_S", 0.01)


async def settled(journal: Journal) -> None:
    """Until two looks in a row found nothing to forget."""
    before = -1
    while before != (before := journal.stats.commits):
        await asyncio.sleep(0.05)


async def fill(journal: Journal, name: str, size: int = 100, **fields: object) -> None:
    await journal.commit(
        accept(name, ask=SECRET.encode() + bytes(size), **fields),
        SaveCheckpoint(id=f"req_{name}", choice=0, tokens=[1], text=SECRET, delivered_bytes=0, at=1001.0),
        AddEvent(id=f"req_{name}", kind="delta", at=1001.0, payload=SECRET.encode()),
    )


@pytest.mark.usefixtures("eager")
def test_payloads_are_blanked_after_their_time_and_the_rest_is_kept(tmp_path: Path) -> None:
    clock = Clock(1010.0)

    async def run() -> None:
        async with opened(tmp_path, clock=clock, retention_s=100.0) as journal:
            body = tmp_path / "payloads" / "large"
            body.parent.mkdir()
            body.write_text(SECRET)
            await fill(journal, "old", idempotency_key="k1", payload_path="payloads/large")
            await fill(journal, "new", idempotency_key="k2")
            await fill(journal, "open", idempotency_key="k3")
            await journal.commit(end("old", at=1002.0, result=SECRET.encode()))
            await journal.commit(end("new", at=1090.0, result=SECRET.encode()))
            await settled(journal)
            old = await journal.get("req_old")
            assert old is not None
            assert old.result is not None
            clock.now = 1103.0
            await settled(journal)
            old = await journal.get("req_old")
            assert old is not None
            assert (old.ask, old.prompt_tokens, old.result, old.checkpoints) == (None, None, None, [])
            assert [(e.kind, e.payload) for e in await journal.events("req_old")] == [("delta", None)]
            assert (old.summary.state, old.summary.blanked) == ("completed", 1103.0)
            assert old.summary.body_digest == "digest old"
            assert len(old.moves) == 2
            assert not body.exists()
            assert await journal.find_by_key("local", "k1") is None  # the key may be used again
            await journal.commit(accept("again", idempotency_key="k1"))
            for name in ("new", "open"):
                record = await journal.get(f"req_{name}")
                assert record is not None
                assert record.ask is not None
                assert record.summary.idempotency_key is not None
            clock.now = 1002.0 + retention.ROWS_KEPT_S
            await settled(journal)
            assert await journal.get("req_old") is None
            assert await journal.get("req_open") is not None
            counts = await journal.counts()
            assert (counts.accepted_in_all, counts.by_state["completed"]) == (4, 2)
        with Journal.open_reader(tmp_path) as reader:
            assert audit(reader) == []

    asyncio.run(run())


@pytest.mark.usefixtures("eager")
def test_above_the_size_the_oldest_go_first_and_open_work_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "SLICE_ROWS", 2)
    clock = Clock(2000.0)

    async def run() -> None:
        async with opened(tmp_path, clock=clock, payload_bytes=1_200_000) as journal:
            await fill(journal, "open", 200_000)
            for n in range(10):
                await fill(journal, str(n), 200_000, idempotency_key=str(n))
                await journal.commit(end(n, at=1100.0 + n))
            await settled(journal)
            kept = []
            for n in range(10):
                record = await journal.get(f"req_{n}")
                assert record is not None
                assert record.summary.idempotency_key == str(n)  # promised for its whole time
                kept.append(record.ask is not None)
            assert kept == sorted(kept)
            assert 1 <= sum(kept) <= 5
            assert (await journal.counts()).used_bytes <= 1_200_000
            record = await journal.get("req_open")
            assert record is not None
            assert record.ask is not None

    asyncio.run(run())


@pytest.mark.usefixtures("eager")
def test_the_file_shrinks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "FREE_PAGES_KEPT", 10)
    clock = Clock(1010.0)

    async def run() -> None:
        async with opened(tmp_path, clock=clock, retention_s=100.0) as journal:
            for n in range(30):
                await fill(journal, str(n), 200_000)
                await journal.commit(end(n))
            await settled(journal)
            before = (tmp_path / "journal.db").stat().st_size
            clock.now = 1200.0
            for _ in range(100):
                await settled(journal)
                if (tmp_path / "journal.db").stat().st_size < before // 4:
                    break
            assert before > 5_000_000
            assert (tmp_path / "journal.db").stat().st_size < before // 4

    asyncio.run(run())


def test_a_payload_is_blanked_on_request_but_only_of_what_ended(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            (tmp_path / "inside").write_text(SECRET)
            outside = tmp_path.parent / "outside"
            outside.write_text("not ours")
            await fill(journal, "a", payload_path="inside")
            await fill(journal, "b", payload_path="../outside")
            with pytest.raises(StateConflict, match="only what ended"):
                await journal.commit(BlankPayload(id="req_a"))
            assert (tmp_path / "inside").exists()
            await journal.commit(end("a"), end("b"), BlankPayload(id="req_a"), BlankPayload(id="req_b"))
            record = await journal.get("req_a")
            assert record is not None
            assert (record.ask, record.result) == (None, None)
            assert not (tmp_path / "inside").exists()
            assert outside.read_text() == "not ours"
            await journal.commit(BlankPayload(id="req_a"))  # harmless again
            with pytest.raises(StateConflict):
                await journal.commit(ChangeState(id="req_a", old="completed", new="queued", at=1.0))

    asyncio.run(run())


def test_what_was_blanked_is_not_left_in_the_file(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            await fill(journal, "a")
            await journal.commit(end("a", result=SECRET.encode()), BlankPayload(id="req_a"))

    asyncio.run(run())
    for file in tmp_path.iterdir():
        assert SECRET.encode() not in file.read_bytes(), file.name
