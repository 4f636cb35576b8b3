"""kill -9, again and again: every id that was acknowledged on standard output is there afterwards."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relevo.journal import Journal
from relevo.journal.audit import audit

from .fakes.journal_kit import opened

ROOT = Path(__file__).parents[2]

CHILD = """
import asyncio, os, sys
from pathlib import Path
from tests.integration.fakes.journal_kit import accept, end, move, open_journal

async def client(journal, name):
    n = 0
    while True:
        n += 1
        one = f"{name}_{n}"
        await journal.commit(accept(one))
        os.write(1, f"accepted req_{one}\\n".encode())
        await journal.commit(move(one, "accepted", "running"))
        await journal.commit(end(one))
        os.write(1, f"completed req_{one}\\n".encode())

async def run():
    journal = open_journal(Path(sys.argv[1]), vfs=None)
    assert journal.missing_after_crash is None, journal.missing_after_crash
    await asyncio.gather(*(client(journal, f"{os.getpid()}_{n}") for n in range(16)))

asyncio.run(run())
"""


def run_and_kill(state: Path, after_s: float) -> dict[str, str]:
    """Start a busy child, kill it when it has worked a while, and return what it acknowledged."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(state)], cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout is not None
    first = child.stdout.readline()
    time.sleep(after_s)
    child.kill()
    rest, _ = child.communicate(timeout=30)
    lines = (first + rest).decode().splitlines()
    return {name: state for state, name in (line.split() for line in lines if line.count(" ") == 1)}


def check(state: Path, acknowledged: dict[str, str]) -> None:
    async def run() -> None:
        async with opened(state) as journal:
            assert journal.missing_after_crash is None
            for name, known in acknowledged.items():
                record = await journal.get(name)
                assert record is not None, name
                assert known == "accepted" or record.summary.state == "completed", name

    asyncio.run(run())
    with Journal.open_reader(state) as reader:
        assert audit(reader) == []


def test_kill_9_loses_no_acknowledged_request(tmp_path: Path) -> None:
    dice = random.Random(1)
    acknowledged: dict[str, str] = {}
    for _ in range(4):
        acknowledged |= run_and_kill(tmp_path, dice.uniform(0.02, 0.3))
        assert acknowledged
    assert len(acknowledged) > 50
    check(tmp_path, acknowledged)


TWENTY = """
import asyncio, os, sys
from pathlib import Path
from tests.integration.fakes.journal_kit import accept, open_journal

async def run():
    journal = open_journal(Path(sys.argv[1]), vfs=None)
    for n in range(20):
        await journal.commit(accept(n))
    os.kill(os.getpid(), 9)

asyncio.run(run())
"""


def test_a_flipped_bit_in_the_log_is_announced_and_not_swallowed(tmp_path: Path) -> None:
    """SQLite drops the log from a bad frame on, without a word. The mark beside the file knows better."""
    child = subprocess.run([sys.executable, "-c", TWENTY, str(tmp_path)], cwd=ROOT, timeout=30, check=False)
    assert child.returncode == -9
    log = tmp_path / "journal.db-wal"
    data = bytearray(log.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    log.write_bytes(data)

    async def run() -> None:
        async with opened(tmp_path) as journal:
            gap = journal.missing_after_crash
            assert gap is not None
            kept = (await journal.counts()).accepted_in_all
            assert 1 < kept < 20
            assert (gap.numbers_from, gap.numbers_to) == (kept + 1, 20)

    asyncio.run(run())
    with Journal.open_reader(tmp_path) as reader:
        assert [f.rule for f in audit(reader)] == ["missing"]


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_kill_9_loses_no_acknowledged_request_in_many_kills(tmp_path: Path) -> None:
    dice = random.Random(2)
    acknowledged: dict[str, str] = {}
    for _ in range(60):
        fresh = run_and_kill(tmp_path, dice.uniform(0.0, 1.0))
        check(tmp_path, fresh)
        acknowledged |= fresh
    assert len(acknowledged) > 5000
    check(tmp_path, acknowledged)
