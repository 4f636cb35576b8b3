"""The disk fails: full, a sync that says EIO, any single call that fails, and a power cut at any moment."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from relevo.core.errors import JournalUnavailable, StateFolderError
from relevo.journal import Condition, Journal, database, writer
from relevo.journal.audit import audit

from .fakes.journal_kit import Disk, accept, end, move, open_journal, opened, sync_error

_names = (f"disk {n}" for n in itertools.count())


@pytest.fixture
def disk() -> Iterator[Disk]:
    yield Disk(next(_names))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETRY_S", 0.02)
    monkeypatch.setattr(writer, "RECHECK_S", 0.02)


async def until(journal: Journal, condition: Condition) -> None:
    changed = asyncio.Event()
    journal.watch(changed.set)
    while journal.condition is not condition:
        changed.clear()
        await asyncio.wait_for(changed.wait(), 10)


@pytest.mark.usefixtures("quick")
def test_a_full_disk_stops_acceptance_lets_accepted_work_end_and_comes_back(tmp_path: Path, disk: Disk) -> None:
    async def run() -> None:
        async with opened(tmp_path, vfs=disk.name, reserve_bytes=400_000) as journal:
            disk.reserve = tmp_path / "reserve"
            disk.capacity_bytes = 3_000_000
            accepted = []
            with pytest.raises(JournalUnavailable, match="disk is full"):
                for n in range(10_000):
                    await journal.commit(accept(n, ask=bytes(4000)))
                    accepted.append(n)
            assert 20 < len(accepted) < 500
            assert journal.condition is Condition.FULL
            assert not journal.accepting
            assert journal.trouble is not None
            with pytest.raises(JournalUnavailable, match="disk is full"):
                await journal.commit(accept("more"))
            await asyncio.gather(*(journal.commit(end(n)) for n in accepted))
            assert (await journal.counts()).open == 0
            disk.capacity_bytes = None
            await until(journal, Condition.WORKING)
            assert disk.reserve.stat().st_size == 400_000
            await journal.commit(accept("later"))
        with Journal.open_reader(tmp_path) as reader:
            assert reader.counts().by_state["completed"] == len(accepted)
            assert audit(reader) == []

    asyncio.run(run())


@pytest.mark.usefixtures("quick")
def test_an_end_that_finds_no_space_at_all_waits_for_it(tmp_path: Path, disk: Disk) -> None:
    async def run() -> None:
        async with opened(tmp_path, vfs=disk.name) as journal:
            await journal.commit(accept("a"))

            def nothing_fits(kind: str, _file: str, _call: int) -> None:
                if kind == "write":
                    raise apsw.FullError("no space")

            disk.before = nothing_fits
            waiting = journal.submit(end("a"))
            behind = journal.submit(move("a", "accepted", "queued"))
            await until(journal, Condition.FULL)
            await asyncio.sleep(0.1)
            assert not waiting.done()
            record = await journal.get("req_a")  # reading goes on
            assert record is not None
            assert record.summary.state == "accepted"
            disk.before = lambda *_: None
            await asyncio.wait_for(waiting, 10)
            with pytest.raises(Exception, match="completed, not accepted"):  # order was kept
                await behind
            await until(journal, Condition.WORKING)

    asyncio.run(run())


@pytest.mark.usefixtures("quick")
def test_closing_on_a_full_disk_does_not_hang(tmp_path: Path, disk: Disk) -> None:
    async def run() -> None:
        journal = open_journal(tmp_path, vfs=disk.name)
        await journal.commit(accept("a"))
        disk.capacity_bytes = 0
        disk.before = lambda kind, _file, _call: (
            (_ for _ in ()).throw(apsw.FullError("no space")) if kind == "write" else None
        )
        waiting = journal.submit(end("a"))
        await until(journal, Condition.FULL)
        await journal.close(5)
        with pytest.raises(JournalUnavailable):
            await waiting

    asyncio.run(run())


def test_a_new_journal_on_a_full_disk_is_one_clear_sentence(tmp_path: Path, disk: Disk) -> None:
    disk.capacity_bytes = 10_000
    with pytest.raises(StateFolderError, match="full"):
        open_journal(tmp_path, vfs=disk.name)


def test_an_old_journal_opens_without_a_reserve_so_that_accepted_work_can_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(accept("a"))
        async with opened(tmp_path, reserve_bytes=2**60) as journal:
            assert not journal.accepting
            await journal.commit(end("a"))
            with pytest.raises(JournalUnavailable, match="disk is full"):
                await journal.commit(accept("b"))

    asyncio.run(run())


def test_after_a_failed_sync_nothing_more_is_acknowledged_until_reopened(tmp_path: Path, disk: Disk) -> None:
    async def run() -> None:
        journal = open_journal(tmp_path, vfs=disk.name)
        await journal.commit(accept("a"))
        disk.before = lambda kind, file, call: sync_error() if kind == "sync" else None
        with pytest.raises(JournalUnavailable, match="cannot be written"):
            await journal.commit(accept("b"))
        disk.before = lambda *_: None  # the disk says all is well again: it is not believed
        assert journal.condition is Condition.BROKEN
        for operation in (accept("c"), end("a")):
            with pytest.raises(JournalUnavailable):
                await journal.commit(operation)
        record = await journal.get("req_a")  # what was acknowledged can be read
        assert record is not None
        assert await journal.get("req_b") is None
        await journal.close(5)
        assert journal.condition is Condition.BROKEN
        async with opened(tmp_path) as again:
            assert again.accepting
            assert await again.get("req_a") is not None
            await again.commit(end("a"))

    asyncio.run(run())


def test_a_checkpoint_that_cannot_sync_keeps_the_log(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WAL_PAGES", 20)

    async def run() -> None:
        journal = open_journal(tmp_path, vfs=disk.name)

        def file_fails(kind: str, file: str, _call: int) -> None:
            if kind == "sync" and file == "journal.db":
                sync_error()

        disk.before = file_fails
        acknowledged = []
        with pytest.raises(JournalUnavailable):
            for n in range(100):
                await journal.commit(accept(n))
                acknowledged.append(f"req_{n}")
        assert acknowledged
        assert journal.condition is Condition.BROKEN
        await journal.close(5)
        # the machine restarts: the file has what was synced to it, which is nothing of the checkpoint
        power_cut = disk.cut_power(random.Random(0), keep=0.0)
        copy = tmp_path / "after"
        restore(copy, power_cut)
        async with opened(copy) as again:
            assert [r.summary.id for r in await again.open_requests()][: len(acknowledged)] == acknowledged

    asyncio.run(run())


def restore(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(mode=0o700)
    for name, data in files.items():
        if name.startswith("journal.db"):
            (folder / name).write_bytes(data)


def survivors(folder: Path) -> set[str] | None:
    """Ids in a journal that is opened again; None when not even that works."""
    try:
        journal = open_journal(folder)
    except StateFolderError:
        return None

    async def run() -> set[str]:
        try:
            return {s.id for s in await journal.list(None, limit=100_000)}
        finally:
            await journal.close(10)

    found = asyncio.run(run())
    with Journal.open_reader(folder) as reader:
        assert audit(reader) == []
    return found


def lost_to_power_cuts(tmp_path: Path, disk: Disk, seed: int, cuts: int, keep: float) -> tuple[int, int]:
    """Cut the power at random calls of a busy journal. Returns (acknowledged and lost, acknowledged), over all cuts."""
    dice = random.Random(seed)
    moments = set(dice.sample(range(1, cuts * 15), cuts))
    first = 0
    acknowledged: set[str] = set()
    taken: list[tuple[set[str], dict[str, bytes]]] = []

    def maybe_cut(_kind: str, _file: str, call: int) -> None:
        if call - first in moments:
            # acknowledged is read first: what is added while we copy is not held against the disk
            taken.append((set(acknowledged), disk.cut_power(dice, keep)))

    async def client(journal: Journal, name: int) -> None:
        for n in itertools.count():
            if len(taken) >= cuts:
                return
            await journal.commit(accept(f"{name}_{n}", ask=bytes(dice.randrange(3000))))
            acknowledged.add(f"req_{name}_{n}")
            await journal.commit(move(f"{name}_{n}", "accepted", "running"))

    async def run() -> None:
        nonlocal first
        async with opened(tmp_path / "live", vfs=disk.name) as journal:
            first = disk.calls
            disk.before = maybe_cut
            await asyncio.wait_for(asyncio.gather(*(client(journal, name) for name in range(4))), 300)
            disk.before = lambda *_: None

    asyncio.run(run())
    lost = total = 0
    for n, (known, files) in enumerate(taken):
        folder = tmp_path / f"cut {n}"
        restore(folder, files)
        found = survivors(folder) or set()
        lost += len(known - found)
        total += len(known)
        shutil.rmtree(folder)
    return lost, total


@pytest.mark.parametrize("keep", [0.0, 0.9])
def test_no_acknowledged_request_is_lost_to_a_power_cut(
    tmp_path: Path, disk: Disk, keep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WAL_PAGES", 60)  # so that cuts fall into checkpoints too
    lost, total = lost_to_power_cuts(tmp_path, disk, seed=int(keep * 10), cuts=40, keep=keep)
    assert total > 500
    assert lost == 0


def test_without_syncs_the_same_cuts_lose_requests(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the harness can see a loss."""
    off = tuple(p.replace("synchronous = FULL", "synchronous = OFF") for p in database.WRITER_PRAGMAS)
    assert off != database.WRITER_PRAGMAS
    monkeypatch.setattr(database, "WRITER_PRAGMAS", off)
    lost, total = lost_to_power_cuts(tmp_path, disk, seed=1, cuts=12, keep=0.5)
    assert total > 50
    assert lost > total // 2


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20))
def test_no_acknowledged_request_is_lost_to_many_power_cuts(
    tmp_path: Path, disk: Disk, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WAL_PAGES", (30, 120, 1000)[seed % 3])
    lost, total = lost_to_power_cuts(tmp_path, disk, seed=seed, cuts=40, keep=(0.0, 0.5, 0.9)[seed % 3])
    assert total > 500
    assert lost == 0


def fail_one_call(folder: Path, disk: Disk, call: int, error: type[apsw.Error]) -> bool:
    """Let one call of a small life fail, then reopen. Returns whether that call was reached."""
    first = disk.calls
    reached = False

    def fail(kind: str, _file: str, number: int) -> None:
        nonlocal reached
        if number - first == call:
            reached = True
            if error is apsw.FullError:
                raise apsw.FullError("no space")
            sync_error()

    acknowledged: dict[str, str] = {}

    async def run(journal: Journal) -> None:
        try:
            for n in range(6):
                await journal.commit(accept(n, ask=bytes(2000)))
                acknowledged[f"req_{n}"] = "accepted"
                await journal.commit(move(n, "accepted", "running"))
                acknowledged[f"req_{n}"] = "running"
                await journal.commit(end(n))
                acknowledged[f"req_{n}"] = "completed"
        except JournalUnavailable:
            pass
        await journal.close(10)

    disk.before = fail
    try:
        journal = open_journal(folder, vfs=disk.name)
    except StateFolderError:
        journal = None
    if journal is not None:
        asyncio.run(run(journal))
    disk.before = lambda *_: None
    order = ["accepted", "running", "completed"]
    again = open_journal(folder)

    async def check() -> None:
        try:
            for name, state in acknowledged.items():
                record = await again.get(name)
                assert record is not None, (call, name)
                assert order.index(record.summary.state) >= order.index(state), (call, name)
        finally:
            await again.close(10)

    asyncio.run(check())
    with Journal.open_reader(folder) as reader:
        assert audit(reader) == []
    return reached


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [apsw.FullError, apsw.IOError])
@pytest.mark.parametrize("part", [0, 1])
def test_whichever_call_fails_nothing_acknowledged_is_lost(
    tmp_path: Path, disk: Disk, error: type[apsw.Error], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WAL_PAGES", 40)
    step = 9  # every call is tried by the long version
    reached = [fail_one_call(tmp_path / str(c), disk, c, error) for c in range(1 + part * 4, 160, step)]
    assert sum(reached) >= 10


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [apsw.FullError, apsw.IOError])
def test_whichever_call_fails_nothing_acknowledged_is_lost_all_of_them(
    tmp_path: Path, disk: Disk, error: type[apsw.Error], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WAL_PAGES", 40)
    for call in itertools.count(1):
        if not fail_one_call(tmp_path / str(call), disk, call, error):
            assert call > 100
            return


@pytest.mark.proof
@pytest.mark.usefixtures("quick")
def test_a_real_small_file_system_runs_full_and_comes_back(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:

        async def run() -> None:
            async with opened(tmp_path / "state", reserve_bytes=1_000_000) as journal:
                accepted = []
                with pytest.raises(JournalUnavailable, match="disk is full"):
                    for n in range(10_000):
                        await journal.commit(accept(n, ask=bytes(4000)))
                        accepted.append(n)
                assert len(accepted) > 50
                await asyncio.gather(*(journal.commit(end(n)) for n in accepted))
                assert (await journal.counts()).open == 0
                subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path)], check=True)
                await until(journal, Condition.WORKING)
                await journal.commit(accept("later"))

        asyncio.run(run())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=False)
