"""Offline checks of a journal's invariants. Nothing found means they hold in this snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import apsw

from relevo.journal.reader import JournalReader
from relevo.journal.records import ENDED_STATES, OPEN_STATES


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken invariant. `request` is the id it is about, or None."""

    rule: str
    message: str
    request: str | None = None


def audit(snapshot: JournalReader) -> list[Finding]:
    """Run every check. Costs one pass over each table and the file's own integrity check."""
    return [finding for check in _CHECKS for finding in check(snapshot.connection)]


def _file_is_whole(db: apsw.Connection) -> Iterator[Finding]:
    for row in db.execute("PRAGMA integrity_check(20)"):
        if row[0] != "ok":
            yield Finding("file", f"The file is damaged: {row[0]}.")
    for table, _, parent, _ in db.execute("PRAGMA foreign_key_check"):
        yield Finding("orphans", f"A row of {table} belongs to no row of {parent}.")


def _nothing_is_missing(db: apsw.Connection) -> Iterator[Finding]:
    for _, first, last in db.execute("SELECT at, commits_from, commits_to FROM gaps"):
        yield Finding("missing", f"Commits {first} to {last} were acknowledged and are not in the file.")


def _all_accepted_are_accounted_for(db: apsw.Connection) -> Iterator[Finding]:
    """I1: open requests are never deleted, so their totals are exact; ended ones may have been deleted by age."""
    rows = dict(db.execute("SELECT state, count(*) FROM requests GROUP BY state"))
    for state, total in db.execute("SELECT state, requests FROM totals"):
        found = rows.get(state, 0)
        if state in OPEN_STATES and found != total:
            yield Finding("I1", f"{total} requests should be {state}, {found} are.")
        if state in ENDED_STATES and found > total:
            yield Finding("I1", f"At most {total} requests should be {state}, {found} are.")


def _each_ends_once(db: apsw.Connection) -> Iterator[Finding]:
    """I3: moves are numbered, each begins where the last ended, from the acceptance to at most one end."""
    known = dict(db.execute("SELECT number, id FROM requests"))
    states = dict(db.execute("SELECT number, state FROM requests"))
    last: dict[int, tuple[int, str]] = {}
    for request, seq, old, new in db.execute("SELECT request, seq, old, new FROM moves ORDER BY request, seq"):
        before = last.get(request)
        name = known.get(request)
        if before is None and (seq != 1 or old is not None or new != "accepted"):
            yield Finding("I3", "Its first move is not its acceptance.", name)
        if before is not None and (seq != before[0] + 1 or old != before[1]):
            yield Finding("I3", f"Move {seq} does not begin where move {before[0]} ended.", name)
        if before is not None and before[1] in ENDED_STATES:
            yield Finding("I3", f"It went on after its end: {before[1]} to {new}.", name)
        last[request] = (seq, new)
    for number, state in states.items():
        if last.get(number, (0, ""))[1] != state:
            yield Finding("I3", f"It is {state}, but its last move says otherwise.", known[number])


def _attempts_are_numbered(db: apsw.Connection) -> Iterator[Finding]:
    rows = db.execute(
        "SELECT id, count(*), max(attempt) FROM attempts JOIN requests ON number = request "
        "GROUP BY request HAVING count(*) <> max(attempt)"
    )
    for name, count, highest in rows:
        yield Finding("attempts", f"{count} attempts, but the highest number is {highest}.", name)
    rows = db.execute(
        "SELECT id, attempt FROM attempts AS a JOIN requests ON number = request WHERE a.ended IS NULL AND EXISTS "
        "(SELECT 1 FROM attempts AS b WHERE b.request = a.request AND b.attempt > a.attempt)"
    )
    for name, attempt in rows:
        yield Finding("attempts", f"Attempt {attempt} did not end before the next began.", name)


def _events_are_gapless(db: apsw.Connection) -> Iterator[Finding]:
    """I5, the journal's half: an event stream is numbered from 1 without gaps."""
    rows = db.execute(
        "SELECT id, count(*), max(seq) FROM events LEFT JOIN requests ON number = request "
        "GROUP BY request HAVING count(*) <> max(seq)"
    )
    for name, count, highest in rows:
        yield Finding("I5", f"{count} events, but the highest number is {highest}.", name)


def _open_requests_can_go_on(db: apsw.Connection) -> Iterator[Finding]:
    rows = db.execute(
        "SELECT id FROM requests LEFT JOIN payloads ON request = number "
        "WHERE requests.ended IS NULL AND (request IS NULL OR blanked IS NOT NULL)"
    )
    for (name,) in rows:
        yield Finding("payload", "It has not ended, but what it asked is gone.", name)


_CHECKS: tuple[Callable[[apsw.Connection], Iterator[Finding]], ...] = (
    _file_is_whole,
    _nothing_is_missing,
    _all_accepted_are_accounted_for,
    _each_ends_once,
    _attempts_are_numbered,
    _events_are_gapless,
    _open_requests_can_go_on,
)
