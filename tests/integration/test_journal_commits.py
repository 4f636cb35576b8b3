"""Writing and reading: what is acknowledged, in what order, and what is refused alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relevo.core.errors import JournalUnavailable, RequestNotFound
from relevo.journal import (
    AddEvent,
    BadOperation,
    BlankPayload,
    Condition,
    EndAttempt,
    Journal,
    KeyTaken,
    PutFact,
    SaveCheckpoint,
    StartAttempt,
    StateConflict,
    WorkerGone,
    WorkerStarted,
)
from relevo.journal import journal as journal_module

from .fakes.journal_kit import Disk, accept, end, move, open_journal, opened


def start(name: object, attempt: int) -> StartAttempt:
    return StartAttempt(id=f"req_{name}", attempt=attempt, route="gpu", device="gpu0", replica_pid=42, at=1001.0)


def test_concurrent_commits_share_a_sync(tmp_path: Path) -> None:
    disk = Disk("shared sync")

    async def run() -> None:
        async with opened(tmp_path, vfs=disk.name) as journal:
            await journal.commit(accept("first"))
            before = disk.syncs
            await asyncio.gather(*(journal.commit(accept(n)) for n in range(500)))
            assert journal.stats.submissions == 501
            assert journal.stats.largest_commit > 50
            assert disk.syncs - before < 20
            assert disk.syncs - before >= journal.stats.commits - 1

    asyncio.run(run())


def test_each_acknowledged_commit_was_synced_first(tmp_path: Path) -> None:
    disk = Disk("synced first")

    async def run() -> None:
        async with opened(tmp_path, vfs=disk.name) as journal:
            for n in range(5):
                before = disk.syncs
                await journal.commit(accept(n))
                assert disk.syncs > before
                assert not disk.images["journal.db-wal"].pending

    asyncio.run(run())


def test_operations_are_written_in_the_order_of_submission(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            futures = [journal.submit(accept(n)) for n in range(50)]
            futures += [
                journal.submit(AddEvent(id="req_7", kind="step", at=float(n), payload=b"%d" % n)) for n in range(300)
            ]
            await asyncio.gather(*futures)
            events = await journal.events("req_7")
            assert [(e.seq, e.payload) for e in events] == [(n + 1, b"%d" % n) for n in range(300)]
            assert [e.seq for e in await journal.events("req_7", after_seq=297)] == [298, 299, 300]
            assert [r.summary.id for r in await journal.open_requests()] == [f"req_{n}" for n in range(50)]

    asyncio.run(run())


def test_a_read_sees_what_was_submitted_before_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            for n in range(20):
                journal.submit(accept(n))
                assert await journal.get(f"req_{n}") is not None

    asyncio.run(run())


def test_a_refused_submission_is_undone_alone(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            results = await asyncio.gather(
                journal.commit(accept("a")),
                journal.commit(accept("b"), move("b", "running", "queued")),  # it is accepted, not running
                journal.commit(accept("c")),
                return_exceptions=True,
            )
            assert results[0] is None
            assert results[2] is None
            assert isinstance(results[1], StateConflict)
            assert "accepted, not running" in str(results[1])
            assert await journal.get("req_b") is None
            assert (await journal.counts()).accepted_in_all == 2
            assert journal.stats.refused == 1

    asyncio.run(run())


def test_a_whole_life_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(
                accept(
                    "a", kept=True, idempotency_key="k", seed=2**64 - 1, deadline_at=5000.0, standby=b'{"route":"cpu"}'
                )
            )
            tokens = [1, 2]
            saved = journal.submit(
                move("a", "accepted", "running"),
                start("a", 1),
                SaveCheckpoint(id="req_a", choice=0, tokens=tokens, text="ho", delivered_bytes=1, at=1001.5),
            )
            tokens.append(3)  # the caller's list grows on; what was submitted does not
            await saved
            record = await journal.get("req_a")
            assert record is not None
            assert record.summary.state == "running"
            assert record.summary.seed == 2**64 - 1
            assert record.summary.kept is True
            assert record.prompt_tokens == [1, 2, 3]
            assert record.standby == b'{"route":"cpu"}'
            assert [(c.tokens, c.text, c.delivered_bytes) for c in record.checkpoints] == [([1, 2], "ho", 1)]
            assert record.attempts[0].ended is None
            assert [r.summary.id for r in await journal.open_requests()] == ["req_a"]
            await journal.commit(
                EndAttempt(id="req_a", attempt=1, outcome="completed", at=1002.0),
                end("a", reason="stop", completion_tokens=2),
            )
            record = await journal.find_by_key("local", "k")
            assert record is not None
            assert record.result == b'{"text": "hello"}'
            assert (record.summary.ended, record.summary.completion_tokens) == (1002.0, 2)
            assert [(m.old, m.new) for m in record.moves] == [
                (None, "accepted"),
                ("accepted", "running"),
                ("running", "completed"),
            ]
            assert await journal.open_requests() == []

    asyncio.run(run())


@pytest.mark.parametrize("state", ["completed", "cancelled", "failed"])
def test_an_ended_request_never_changes(tmp_path: Path, state: str) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(accept("a"), start("a", 1), end("a", state))
            before = await journal.get("req_a")
            for operation in (
                end("a", "failed"),
                end("a", state),
                move("a", state, "queued"),
                start("a", 2),
                SaveCheckpoint(id="req_a", choice=0, tokens=[1], text="late", delivered_bytes=0, at=1.0),
            ):
                with pytest.raises(StateConflict):
                    await journal.commit(operation)
            assert await journal.get("req_a") == before
            # its worker may report later than its end: the attempt is closed, the request is not touched
            await journal.commit(EndAttempt(id="req_a", attempt=1, outcome="cancelled", at=1003.0))
            with pytest.raises(StateConflict):
                await journal.commit(EndAttempt(id="req_a", attempt=1, outcome="completed", at=1004.0))

    asyncio.run(run())


def test_attempts_are_numbered_without_gaps(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(accept("a"))
            for wrong in (0, 2):
                with pytest.raises(StateConflict):
                    await journal.commit(start("a", wrong))
            await journal.commit(start("a", 1))
            with pytest.raises(StateConflict, match="numbered without gaps"):
                await journal.commit(start("a", 1))
            await journal.commit(start("a", 2))

    asyncio.run(run())


def test_a_key_belongs_to_one_request_of_its_owner(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(accept("a", owner="ana", idempotency_key="k"))
            await journal.commit(accept("b", owner="bea", idempotency_key="k"))
            with pytest.raises(KeyTaken):
                await journal.commit(accept("c", owner="ana", idempotency_key="k"))
            assert await journal.find_by_key("carl", "k") is None
            found = await journal.find_by_key("ana", "k")
            assert found is not None
            assert found.summary.id == "req_a"
            assert [s.id for s in await journal.list(None, idempotency_key="k")] == ["req_b", "req_a"]
            assert [s.id for s in await journal.list("bea", idempotency_key="k")] == ["req_b"]

    asyncio.run(run())


def test_lists_are_newest_first_and_filtered(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            for n in range(6):
                await journal.commit(accept(n, owner=("ana", "bea")[n % 2], created=1000.0 + n, body_digest="same"))
            await journal.commit(end(2))
            assert [s.id for s in await journal.list(None, limit=2)] == ["req_5", "req_4"]
            assert [s.id for s in await journal.list("ana")] == ["req_4", "req_2", "req_0"]
            assert [s.id for s in await journal.list("ana", state="accepted")] == ["req_4", "req_0"]
            assert [s.id for s in await journal.list(None, state="completed")] == ["req_2"]
            found = await journal.find_recent_by_digest("bea", "same", since=1003.0)
            assert found is not None
            assert found.summary.id == "req_5"
            assert await journal.find_recent_by_digest("bea", "same", since=1006.0) is None
            counts = await journal.counts()
            assert (counts.accepted_in_all, counts.open) == (6, 5)

    asyncio.run(run())


HOSTILE = [
    "'; DROP TABLE requests; --",
    "nul \x00 inside",
    "\U0001f9ff\u202e right to left",
    "%s%n ?1 :id @x $y",
    "x" * 100_000,
    "",
]


def test_hostile_strings_are_only_strings(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            for n, text in enumerate(HOSTILE):
                await journal.commit(accept(n, owner=text, model=text, idempotency_key=text, body_digest=text))
                await journal.commit(
                    SaveCheckpoint(id=f"req_{n}", choice=0, tokens=[-1], text=text, delivered_bytes=0, at=1.0),
                    AddEvent(id=f"req_{n}", kind=text, at=1.0, payload=text.encode()),
                    PutFact(key=text, value=text.encode()),
                )
                found = await journal.find_by_key(text, text)
                assert found is not None
                assert (found.summary.owner, found.summary.model, found.checkpoints[0].text) == (text, text, text)
                assert (await journal.events(f"req_{n}"))[0].kind == text
                assert await journal.fact(text) == text.encode()
            assert (await journal.counts()).accepted_in_all == len(HOSTILE)

    asyncio.run(run())


@pytest.mark.parametrize(
    "wrong",
    [
        accept("a", owner="half a surrogate \udc00"),
        accept("a", seed=2**64),
        accept("a", seed=-1),
        accept("a", prompt_tokens=[2**31]),
        accept("a", prompt_tokens=["one"]),
        accept("a", ask="text, not bytes"),
        accept("a", created="noon"),
        accept("a", deadline_at=b"noon"),
        move("b", "accepted", "completed"),
        move("b", "accepted", "nowhere"),
        end("b", "running"),
        AddEvent(id="req_b", kind="x", at=1.0, payload="text"),  # type: ignore[arg-type]
        AddEvent(id="req_b", kind="x", at=1.0, payload=5),  # type: ignore[arg-type]
        "not an operation",
    ],
)
def test_what_cannot_be_recorded_is_refused_and_stops_nobody(tmp_path: Path, wrong: object) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(accept("b"))
            results = await asyncio.gather(
                journal.commit(wrong),  # type: ignore[arg-type]
                journal.commit(accept("c")),
                return_exceptions=True,
            )
            assert isinstance(results[0], BadOperation)
            assert results[1] is None
            assert journal.condition is Condition.WORKING
            assert await journal.get("req_a") is None

    asyncio.run(run())


def test_an_unknown_request_is_named_as_such(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            for operation in (end("x"), move("x", "accepted", "queued"), start("x", 1)):
                with pytest.raises(RequestNotFound):
                    await journal.commit(operation)
            assert await journal.get("req_x") is None
            assert await journal.events("req_x") == []

    asyncio.run(run())


def test_workers_and_facts_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerStarted(pid=10, start_time=99, model="demo", route="gpu", device="gpu0", at=1.0)

    async def first() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(worker, PutFact(key="probe/demo", value=b"[1]"), PutFact(key="other", value=b"2"))
            await journal.commit(PutFact(key="probe/demo", value=b"[2]"))

    async def another_boot() -> None:
        async with opened(tmp_path) as journal:
            assert await journal.workers() == []  # pids of another boot mean nothing

    async def second() -> None:
        async with opened(tmp_path) as journal:
            assert [(w.pid, w.start_time) for w in await journal.workers()] == [(10, 99)]
            assert await journal.facts("probe/") == {"probe/demo": b"[2]"}
            await journal.commit(WorkerGone(pid=10, start_time=99))
            assert await journal.workers() == []
            await journal.commit(worker)

    asyncio.run(first())
    asyncio.run(second())
    monkeypatch.setattr(journal_module, "_boot", lambda: "another boot")
    asyncio.run(another_boot())


def test_a_large_body_is_a_synced_file_that_lives_as_long_as_its_request(tmp_path: Path) -> None:
    body = bytes(range(256)) * 2000

    async def run() -> None:
        async with opened(tmp_path) as journal:
            path = await journal.store_body("req_a", body)
            await journal.commit(accept("a", payload_path=path))
            await journal.store_body("req_never_accepted", body)
            for bad in ("../a", "", "a/b", "x" * 200):
                with pytest.raises(ValueError, match="request id"):
                    await journal.store_body(bad, body)
        assert (tmp_path / "bodies").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / path).stat().st_mode & 0o777 == 0o600
        async with opened(tmp_path) as journal:
            record = await journal.get("req_a")
            assert record is not None
            assert record.payload_path == path
            assert await journal.load_body(path) == body
            assert await journal.load_body("bodies/req_never_accepted") is None
            assert await journal.load_body("../journal.db") is None
            await journal.commit(end("a"), BlankPayload(id="req_a"))
            assert await journal.load_body(path) is None

    asyncio.run(run())


def test_resumable_requests_are_due_when_their_time_is_over(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(accept("a"), move("a", "accepted", "resumable", kept_until=2000.0))
            await journal.commit(accept("b"), move("b", "accepted", "resumable", kept_until=1500.0))
            assert await journal.expire_due(1499.0) == []
            assert await journal.expire_due(2000.0) == ["req_b", "req_a"]
            await journal.commit(move("b", "resumable", "running"))
            assert await journal.expire_due(2000.0) == ["req_a"]

    asyncio.run(run())


def test_closing_writes_what_is_queued_and_refuses_what_comes_later(tmp_path: Path) -> None:
    async def run() -> Journal:
        journal = open_journal(tmp_path)
        futures = [journal.submit(accept(n)) for n in range(200)]
        await journal.close()
        await asyncio.gather(*futures)
        with pytest.raises(JournalUnavailable, match="closed"):
            await journal.commit(end(1))
        with pytest.raises(JournalUnavailable, match="closed"):
            await journal.get("req_1")
        await journal.close()
        return journal

    journal = asyncio.run(run())
    assert journal.condition is Condition.CLOSED

    async def again() -> None:
        async with opened(tmp_path) as reopened:
            assert (await reopened.counts()).accepted_in_all == 200
            assert reopened.missing_after_crash is None

    asyncio.run(again())


def test_a_caller_that_stops_waiting_does_not_undo_the_write(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            waiting = asyncio.ensure_future(journal.commit(accept("a")))
            await asyncio.sleep(0)
            waiting.cancel()
            await journal.commit(accept("b"))
            assert await journal.get("req_a") is not None

    asyncio.run(run())


def test_a_writer_that_dies_fails_everybody_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        journal = open_journal(tmp_path)
        changed = asyncio.Event()
        journal.watch(changed.set)
        await journal.commit(accept("a"))

        def fault(*_: object, **__: object) -> None:
            raise MemoryError("no more")

        monkeypatch.setattr(journal._writer, "_transaction", fault)
        with pytest.raises(JournalUnavailable, match=r"writer died \(MemoryError"):
            await journal.commit(accept("b"))
        await changed.wait()
        assert journal.condition is Condition.BROKEN
        assert not journal.accepting
        with pytest.raises(JournalUnavailable):
            await journal.commit(accept("c"))
        await journal.close(5)

    asyncio.run(run())
