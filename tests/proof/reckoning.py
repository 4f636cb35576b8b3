"""The reckoning after kills: every accepted request is accounted for, nothing is leased, nothing is left running."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from relevo.journal import JournalReader
from relevo.journal.audit import audit
from tests.acceptance.house import ENDED, House, assert_idle, process_of, wait_for

from .callers import Call

CONTROL = re.compile(rb"<[|\w]+>")


def settled(house: House, timeout_s: float = 120.0) -> dict[str, dict[str, Any]]:
    """Wait until every request that the journal knows has ended or rests; their records by id."""

    def all_at_rest() -> dict[str, dict[str, Any]] | None:
        rows = house.records(limit="1000")
        return {r["id"]: r for r in rows} if all(r["state"] in (*ENDED, "resumable") for r in rows) else None

    ids = wait_for("every request to end or to rest", all_at_rest, timeout_s, 0.1)
    return {i: house.record(i) for i in ids}


def assert_accounted(house: House, calls: list[Call], *, lost_allowed: bool = False) -> dict[str, dict[str, Any]]:
    """Ids that clients saw are known; what completed has exactly its tokens; what failed is not our fault."""
    records = settled(house)
    tokens = {c.request_id: (c.tokens, c.kind.choices) for c in calls if c.request_id is not None}
    for request_id, (each, choices) in tokens.items():
        assert request_id in records, f"{request_id} was told to a client and is not in the journal"
        record = records[request_id]
        if record["state"] == "completed":
            assert record["result"]["usage"]["completion_tokens"] == each * choices, record
            assert [c["output_tokens"] for c in record["result"]["choices"]] == [each] * choices, record
    for record in records.values():
        if record["state"] in ("failed", "cancelled", "resumable"):
            assert record["reason"], record
        if record["state"] == "failed" and not lost_allowed:
            raise AssertionError(f"failed by our own fault: {record['reason']} {record['error']}")
    for c in calls:
        assert_told_the_truth(c, records)
    assert_idle(house)
    return records


def assert_told_the_truth(c: Call, records: dict[str, dict[str, Any]]) -> None:
    """What a client was given agrees with the record."""
    if c.request_id is None:
        return
    record = records[c.request_id]
    if c.ok:
        assert record["state"] == "completed", record
        texts = {choice["index"]: choice["text"] for choice in record["result"]["choices"]}
        assert texts == c.texts, f"{c.kind.name}: the client's text is not the record's"
        assert set(c.finishes.values()) == {"length"}, c.finishes
        assert len(c.finishes) == c.kind.choices, c.finishes
        if c.kind.logprobs:
            assert_each_token_once(c)
    elif c.texts and record["result"] is not None and (c.kind.kept or c.broken is None):
        # A gateway that dies may take the last tokens of a stream that is not kept: it is recorded every 16 tokens.
        for choice in record["result"]["choices"]:
            assert choice["text"].startswith(c.texts.get(choice["index"], "")), "what was delivered is not kept"


def assert_each_token_once(c: Call) -> None:
    """Nothing is doubled and nothing is missing, counted token by token."""
    entries = c.token_bytes[0]
    assert len(entries) == c.tokens, f"{len(entries)} tokens came, {c.tokens} were asked for"
    # Control tokens (the end of a turn, which these requests ignore) are counted, and have no text.
    whole = b"".join(e for e in entries if not CONTROL.fullmatch(e)).decode("utf-8", "replace")
    same = next((n for n, (a, b) in enumerate(zip(whole, c.texts[0], strict=False)) if a != b), 0)
    assert whole == c.texts[0], f"from {same}: {whole[same : same + 60]!r}, {c.texts[0][same : same + 60]!r}"


def assert_clean_after(house: House) -> dict[str, int]:
    """Stop it: no orphan is left, and the journal's audit finds nothing. Returns how many ended how."""
    assert house.stop() == 0, house.log.read_text()[-3000:]
    with JournalReader(house.state) as journal:
        assert [w for w in journal.workers() if alive(w.pid)] == []
        assert audit(journal) == []
        return dict(journal.counts().by_state)


def alive(pid: int) -> bool:
    """Whether a process runs."""
    p = process_of(pid)
    return p is not None and p.status() != "zombie"


def figures(what: str, values: list[float], unit: str = "ms") -> None:
    """Print the median and the extremes."""
    if values:
        ordered = sorted(values)
        middle = ordered[len(ordered) // 2]
        print(f"\n{what}: n={len(ordered)} median {middle:.0f} {unit}, {ordered[0]:.0f} to {ordered[-1]:.0f}", end="")


class Log:
    """Figures of one test, printed as it goes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began = time.monotonic()

    def say(self, cell: str, **facts: Any) -> None:
        """One cell."""
        print(f"\n{self.name} {cell}: {json.dumps(facts)}", end="", flush=True)
