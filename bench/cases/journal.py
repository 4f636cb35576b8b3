"""Journal rows per second, and what one durable commit takes."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from bench.figures import Report, file_system
from bench.journal_rows import raw_sync_ms, writers


def run(report: Report, *, quick: bool) -> None:
    """The case."""
    folder = Path(tempfile.mkdtemp(prefix="bench_journal_"))
    report.start(
        "Journal: rows per second",
        f"The journal alone, on {file_system(folder)}, every commit synced. Goal: 5,000 rows a second.",
    )
    seconds, repeats = (0.5, 1) if quick else (2.0, 3)
    rows = []
    try:
        raw = raw_sync_ms(folder)
        for repeat in range(repeats):
            for waiting, whole_life in ((1, False), (64, False), (64, True)):
                one = asyncio.run(
                    writers(folder / f"{waiting}-{whole_life}-{repeat}", waiting, seconds, whole_life=whole_life)
                )
                report.keep("journal", **one)
                rows.append((waiting, whole_life, one))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.table(
        ["writers", "what", "rows/s", "commits/s", "rows a commit", "acceptance p50 / p99 / max ms"],
        [
            [
                waiting,
                "whole lives (3 commits each)" if whole_life else "acceptances of 1,500 bytes",
                one["submissions_per_s"],
                one["commits_per_s"],
                one["submissions_per_commit"],
                "{p50} / {p99} / {max}".format(**one["accept_ms"]),
            ]
            for waiting, whole_life, one in sorted(rows, key=lambda row: row[:2])
        ],
    )
    report.say("\nThe disk itself, 4 KiB and an fdatasync: p50 {p50} ms, p99 {p99} ms.".format(**raw))
    report.end()


def one_commit_ms(folder: Path, _count: int) -> dict[str, float]:
    """One acceptance at a time: p50, p99 and longest."""
    place = Path(tempfile.mkdtemp(prefix="bench_commit_", dir=folder))
    try:
        found: dict[str, float] = asyncio.run(writers(place / "one", 1, 0.5))["accept_ms"]
        return found
    finally:
        shutil.rmtree(place, ignore_errors=True)
