"""Opening: the lock and its holder, private files, migrations, and each reason to refuse in one sentence."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import apsw
import apsw.ext
import pytest

from relevo.core.errors import StateFolderBusy, StateFolderError
from relevo.journal import Journal, database, read_holder
from relevo.journal.database import check_sqlite, migrate
from relevo.journal.statements import migrations, parse_statements, schema, statements

from .fakes.journal_kit import accept, end, open_journal, opened


def filled(state: Path, names: int = 3) -> None:
    async def run() -> None:
        async with opened(state) as journal:
            for n in range(names):
                await journal.commit(accept(n))

    asyncio.run(run())


def test_a_second_instance_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    try:
        journal.announce("http://127.0.0.1:8377")
        code = (
            "import sys; from pathlib import Path; from relevo.journal import Journal\n"
            "try: Journal.open(Path(sys.argv[1]), reserve_bytes=1, retention_s=1, payload_bytes=1)\n"
            "except Exception as e: print(type(e).__name__, e.detail['pid'], e)"
        )
        out = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=30, check=True
        ).stdout
        assert out.startswith(
            f"StateFolderBusy {os.getpid()} Another Relevo (process {os.getpid()}, http://127.0.0.1:8377)"
        )
        holder = read_holder(tmp_path)
        assert holder is not None
        assert (holder.pid, holder.address) == (os.getpid(), "http://127.0.0.1:8377")
        with pytest.raises(StateFolderBusy):
            Journal.open_reader(tmp_path)
    finally:
        journal.close_blocking()
    assert read_holder(tmp_path) is None
    open_journal(tmp_path).close_blocking()


def test_a_child_process_does_not_inherit_the_lock(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        journal.close_blocking()
        open_journal(tmp_path).close_blocking()
    finally:
        child.communicate(b"\n", timeout=10)


def test_everything_is_private_to_its_owner(tmp_path: Path) -> None:
    state = tmp_path / "new" / "state"
    before = os.umask(0)
    try:
        journal = open_journal(state)
        try:
            assert state.stat().st_mode & 0o777 == 0o700
            modes = {file.name: file.stat().st_mode & 0o777 for file in state.iterdir()}
        finally:
            journal.close_blocking()
    finally:
        os.umask(before)
    assert set(modes) >= {"journal.db", "journal.db-wal", "relevo.lock", "reserve", "high_water"}
    assert set(modes.values()) == {0o600}


def test_the_settings_that_durability_rests_on_are_really_set(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            pragma = journal._writer._connection.pragma

            def read(_reads: object) -> list[object]:
                names = (
                    "journal_mode",
                    "synchronous",
                    "locking_mode",
                    "mmap_size",
                    "foreign_keys",
                    "wal_autocheckpoint",
                )
                return [pragma(name) for name in names]

            assert await journal._ask(read) == ["wal", 2, "exclusive", 0, 1, 0]

    asyncio.run(run())
    db = apsw.Connection(str(tmp_path / "journal.db"))
    tables = db.execute("SELECT name, strict FROM pragma_table_list WHERE schema = 'main'").fetchall()
    db.close()
    assert {name for name, strict in tables if not strict} <= {"sqlite_schema", "sqlite_sequence"}
    assert len(tables) > 8


def test_a_reader_reads_what_a_killed_service_left_and_changes_nothing(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys; from pathlib import Path\n"
        "from tests.integration.fakes.journal_kit import accept, open_journal\n"
        "async def run():\n"
        "    journal = open_journal(Path(sys.argv[1]), vfs=None)\n"
        "    await journal.commit(accept('a'))\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(run())"
    )
    root = Path(__file__).parents[2]
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, timeout=30, check=False)
    assert child.returncode == -9
    before = (tmp_path / "journal.db").read_bytes(), (tmp_path / "journal.db-wal").read_bytes()
    assert before[1]
    with Journal.open_reader(tmp_path) as one, Journal.open_reader(tmp_path) as other:
        for reader in (one, other):
            assert [r.summary.id for r in reader.open_requests()] == ["req_a"]
        with pytest.raises(apsw.ReadOnlyError):
            one.connection.execute("DELETE FROM facts")
        with pytest.raises(StateFolderBusy):
            open_journal(tmp_path)
    assert before == ((tmp_path / "journal.db").read_bytes(), (tmp_path / "journal.db-wal").read_bytes())
    filled(tmp_path)
    with Journal.open_reader(tmp_path) as reader:
        assert reader.counts().accepted_in_all == 4


def test_a_reader_needs_a_journal(tmp_path: Path) -> None:
    with pytest.raises(StateFolderError, match="no state folder"):
        Journal.open_reader(tmp_path / "nowhere")
    with pytest.raises(StateFolderError, match="There is no journal"):
        Journal.open_reader(tmp_path)


def test_a_file_in_place_of_the_folder_is_one_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StateFolderError, match="cannot be made"):
        open_journal(tmp_path / "file")
    with pytest.raises(StateFolderError, match="cannot be made"):
        open_journal(tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable_is_one_clear_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StateFolderError, match="cannot be written"):
        open_journal(tmp_path)


@pytest.mark.parametrize("where", [0, 4096 + 8])
def test_a_damaged_file_is_refused_and_kept(tmp_path: Path, where: int) -> None:
    filled(tmp_path, 200)
    path = tmp_path / "journal.db"
    data = bytearray(path.read_bytes())
    data[where : where + 64] = b"\xa5" * 64
    path.write_bytes(data)
    with pytest.raises(StateFolderError, match="damaged"):
        open_journal(tmp_path)
    assert path.read_bytes() == data
    assert read_holder(tmp_path) is None


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    db = apsw.Connection(str(tmp_path / "journal.db"))
    db.execute("CREATE TABLE theirs (x)")
    db.close()
    with pytest.raises(StateFolderError, match="another program"):
        open_journal(tmp_path)


def test_a_newer_schema_is_refused_by_older_code(tmp_path: Path) -> None:
    filled(tmp_path)
    db = apsw.Connection(str(tmp_path / "journal.db"))
    db.execute("PRAGMA user_version = 99")
    db.close()
    for opening in (open_journal, Journal.open_reader):
        with pytest.raises(StateFolderError, match="newer Relevo"):
            opening(tmp_path)


def test_a_file_that_another_program_has_open_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    code = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('BEGIN IMMEDIATE'); print('held', flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "journal.db")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    try:
        with pytest.raises(StateFolderError, match=r"Another program has the journal .* open"):
            open_journal(tmp_path)
    finally:
        child.communicate(b"\n", timeout=10)
    open_journal(tmp_path).close_blocking()


@pytest.mark.parametrize(
    ("version", "good"), [("3.40.1", False), ("3.51.2", False), ("3.51.3", True), ("3.52.0", False), ("3.54.1", True)]
)
def test_an_sqlite_that_can_lose_commits_is_refused(version: str, good: bool) -> None:
    if good:
        check_sqlite(version)
    else:
        with pytest.raises(StateFolderError, match="or newer is needed"):
            check_sqlite(version)


def shape(db: apsw.Connection) -> list[tuple[object, ...]]:
    rows = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name").fetchall()
    contents = db.execute("SELECT state, requests FROM totals ORDER BY state").fetchall()
    return [(kind, name, table, " ".join(str(sql).split())) for kind, name, table, sql in rows] + contents


def test_the_migrations_and_the_schema_end_equal() -> None:
    one, other = apsw.Connection(":memory:"), apsw.Connection(":memory:")
    migrate(one)
    other.execute(schema())
    assert shape(one) == shape(other)
    assert one.pragma("user_version") == len(migrations())
    migrate(one)  # again: nothing to do
    assert shape(one) == shape(other)


def test_a_migration_brings_up_a_filled_file_or_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    ours = migrations()
    later = (len(ours) + 1, "ALTER TABLE facts ADD COLUMN note TEXT; CREATE TABLE extra (x INTEGER) STRICT;")
    broken = (len(ours) + 1, "CREATE TABLE extra (x INTEGER) STRICT; INSERT INTO nowhere VALUES (1);")

    monkeypatch.setattr(database, "migrations", lambda: (*ours, broken))
    with pytest.raises(StateFolderError, match="cannot be used"):
        open_journal(tmp_path)
    monkeypatch.setattr(database, "migrations", lambda: ours)
    filled_again = Journal.open_reader(tmp_path)  # old code still reads what the failed migration left
    assert filled_again.counts().accepted_in_all == 3
    filled_again.close()

    monkeypatch.setattr(database, "migrations", lambda: (*ours, later))
    with pytest.raises(StateFolderError, match="another version"):
        Journal.open_reader(tmp_path)

    async def run() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(accept("new"), end("new"))
            assert (await journal.counts()).accepted_in_all == 4

    asyncio.run(run())
    with Journal.open_reader(tmp_path) as reader:
        assert reader.connection.pragma("user_version") == len(ours) + 1
        assert reader.connection.execute("SELECT count(*) FROM extra").fetchone() == (0,)


def test_every_statement_of_the_page_is_valid_sql_and_named_once() -> None:
    db = apsw.Connection(":memory:")
    migrate(db)
    for sql in statements().values():
        assert apsw.ext.query_info(db, sql, explain=True).explain
    with pytest.raises(ValueError, match="named twice"):
        parse_statements("-- name: a\nSELECT 1;\n-- name: a\nSELECT 2;")
    with pytest.raises(ValueError, match="empty"):
        parse_statements("-- name: a\n")


def test_a_mark_ahead_of_the_file_is_announced_and_its_numbers_are_not_used_again(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    older = (tmp_path / "journal.db").read_bytes()
    filled_more(tmp_path)
    (tmp_path / "journal.db").write_bytes(older)  # as a disk would that lied, or a backup put back

    async def run() -> None:
        async with opened(tmp_path) as journal:
            gap = journal.missing_after_crash
            assert gap is not None
            assert (gap.numbers_from, gap.numbers_to) == (3, 5)
            assert "requests number 3 to 5 are lost" in gap.sentence()
            await journal.commit(accept("later"))
            record = await journal.get("req_later")
            assert record is not None
            assert record.summary.number == 6
        async with opened(tmp_path) as journal:
            assert journal.missing_after_crash is None
            assert len(await journal.gaps()) == 1

    asyncio.run(run())


def filled_more(state: Path) -> None:
    async def run() -> None:
        async with opened(state) as journal:
            for n in ("x", "y", "z"):
                await journal.commit(accept(n))

    asyncio.run(run())


def test_a_replaced_journal_is_announced(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    for name in ("journal.db", "journal.db-wal"):
        (tmp_path / name).unlink(missing_ok=True)
    journal = open_journal(tmp_path)
    journal.close_blocking()
    gap = journal.missing_after_crash
    assert gap is not None
    assert (gap.numbers_from, gap.numbers_to) == (1, 2)


def test_a_torn_mark_is_no_mark(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    (tmp_path / "high_water").write_bytes(b"\x00" * 96)
    journal = open_journal(tmp_path)
    journal.close_blocking()
    assert journal.missing_after_crash is None
