"""The offline auditor finds each kind of damage that the journal itself would never write."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest

from relevo.journal import AddEvent, EndAttempt, Journal, StartAttempt
from relevo.journal.audit import audit

from .fakes.journal_kit import accept, end, move, opened


@pytest.fixture
def state(tmp_path: Path) -> Path:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            for name in ("a", "b", "c"):
                await journal.commit(
                    accept(name),
                    move(name, "accepted", "running"),
                    AddEvent(id=f"req_{name}", kind="x", at=1.0, payload=b"1"),
                    AddEvent(id=f"req_{name}", kind="x", at=1.0, payload=b"2"),
                )
                for attempt in (1, 2):
                    await journal.commit(
                        StartAttempt(
                            id=f"req_{name}", attempt=attempt, route="cpu", device="host", replica_pid=1, at=1.0
                        ),
                        EndAttempt(id=f"req_{name}", attempt=attempt, outcome="completed", at=2.0),
                    )
            await journal.commit(end("a"), end("b", "failed"))

    asyncio.run(run())
    return tmp_path


DAMAGE = [
    ("I1", None, "DELETE FROM requests WHERE id = 'req_c'"),
    ("I1", None, "UPDATE totals SET requests = 0 WHERE state = 'failed'"),
    ("I3", "req_a", "INSERT INTO moves VALUES (1, 4, 9.0, 'completed', 'running', NULL)"),
    ("I3", "req_a", "DELETE FROM moves WHERE request = 1 AND seq = 1"),
    ("I3", "req_b", "DELETE FROM moves WHERE request = 2 AND seq = 2"),
    ("I3", "req_b", "UPDATE requests SET state = 'completed' WHERE id = 'req_b'"),
    ("attempts", "req_c", "DELETE FROM attempts WHERE request = 3 AND attempt = 1"),
    ("attempts", "req_c", "UPDATE attempts SET ended = NULL, outcome = NULL WHERE request = 3 AND attempt = 1"),
    ("I5", "req_c", "DELETE FROM events WHERE request = 3 AND seq = 1"),
    ("orphans", None, "UPDATE events SET request = 99 WHERE request = 3"),
    ("payload", "req_c", "DELETE FROM payloads WHERE request = 3"),
    ("missing", None, "INSERT INTO gaps VALUES (1.0, 5, 9, NULL, NULL)"),
]


def test_a_sound_journal_has_no_findings(state: Path) -> None:
    with Journal.open_reader(state) as reader:
        assert audit(reader) == []


@pytest.mark.parametrize(("rule", "request_id", "sql"), DAMAGE)
def test_each_kind_of_damage_is_found(state: Path, rule: str, request_id: str | None, sql: str) -> None:
    db = apsw.Connection(str(state / "journal.db"))
    db.execute("PRAGMA foreign_keys = OFF")
    for (trigger,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
        db.execute(f"DROP TRIGGER {trigger}")
    db.execute(sql)
    db.close()
    with Journal.open_reader(state) as reader:
        found = audit(reader)
    assert (rule, request_id) in {(f.rule, f.request) for f in found}
    assert all(f.message.endswith(".") for f in found)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE requests SET state = 'running', ended = NULL WHERE id = 'req_a'",
        "UPDATE requests SET reason = 'other' WHERE id = 'req_a'",
        "DELETE FROM requests WHERE id = 'req_c'",
        "DELETE FROM payloads WHERE request = 3",
        "UPDATE payloads SET ask = x'00'",
        "UPDATE results SET result = x'00'",
        "UPDATE events SET payload = x'00'",
        "UPDATE events SET seq = 9 WHERE seq = 2",
        "UPDATE moves SET new = 'failed'",
        "INSERT INTO attempts (request, attempt, route, device, started) VALUES (3, 9, 'cpu', 'host', 1.0)",
        "UPDATE attempts SET outcome = 'failed'",
        "UPDATE requests SET state = 'gone' WHERE id = 'req_c'",
        "UPDATE requests SET state = 'failed' WHERE id = 'req_c'",
    ],
)
def test_the_database_itself_refuses_what_must_never_happen(state: Path, sql: str) -> None:
    db = apsw.Connection(str(state / "journal.db"))
    db.execute("PRAGMA foreign_keys = ON")
    with pytest.raises(apsw.ConstraintError):
        db.execute(sql)
    db.close()
