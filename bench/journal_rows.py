"""Journal speed: acceptances a second with many writers waiting, and the latency of one durable acceptance.

    python bench/journal_rows.py [--seconds 3] [--folder DIR] [--json]

The folder decides what is measured: put it on the disk the state folder will be on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import apsw

from relevo.journal import AcceptRequest, ChangeState, EndRequest, Journal

ASK_BYTES = 1500


def acceptance(name: str) -> AcceptRequest:
    return AcceptRequest(
        id=f"req_{name}",
        owner="local",
        model="demo",
        kind="chat",
        created=time.time(),
        body_digest=f"{name:0>64}",
        kept=False,
        ask=b'{"messages":"' + b"x" * ASK_BYTES + b'"}',
        prompt_tokens=range(200),
        seed=1,
    )


async def writers(folder: Path, waiting: int, seconds: float, *, whole_life: bool = False) -> dict[str, Any]:
    """`waiting` writers, each with one commit under way at a time."""
    journal = Journal.open(folder, reserve_bytes=2**23, retention_s=86400.0, payload_bytes=2**34)
    took_ms: list[float] = []
    stop = time.perf_counter() + seconds

    async def write(writer: int) -> None:
        n = 0
        while time.perf_counter() < stop:
            n += 1
            name = f"{writer}_{n}"
            before = time.perf_counter()
            await journal.commit(acceptance(name))
            took_ms.append((time.perf_counter() - before) * 1e3)
            if whole_life:
                request = f"req_{name}"
                await journal.commit(ChangeState(id=request, old="accepted", new="running", at=time.time()))
                await journal.commit(EndRequest(id=request, state="completed", at=time.time(), result=b"x" * 500))

    started = time.perf_counter()
    await asyncio.gather(*(write(w) for w in range(waiting)))
    wall_s = time.perf_counter() - started
    stats = journal.stats
    await journal.close()
    took_ms.sort()
    return {
        "writers": waiting,
        "whole_life": whole_life,
        "submissions_per_s": round(stats.submissions / wall_s),
        "acceptances_per_s": round(len(took_ms) / wall_s),
        "commits_per_s": round(stats.commits / wall_s),
        "submissions_per_commit": round(stats.submissions / max(1, stats.commits), 1),
        "checkpoints": stats.checkpoints,
        "accept_ms": {
            "p50": round(statistics.median(took_ms), 2),
            "p99": round(took_ms[int(len(took_ms) * 0.99)], 2),
            "max": round(took_ms[-1], 2),
        },
    }


def raw_sync_ms(folder: Path) -> dict[str, float]:
    """What the disk itself takes for 4 KiB and an fdatasync."""
    took = []
    fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT, 0o600)
    for n in range(200):
        before = time.perf_counter()
        os.pwrite(fd, b"x" * 4096, n * 4096)
        os.fdatasync(fd)
        took.append((time.perf_counter() - before) * 1e3)
    os.close(fd)
    took.sort()
    return {"p50": round(took[100], 2), "p99": round(took[197], 2)}


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def file_system(folder: Path) -> str:
    found = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if folder.is_relative_to(mount) and len(mount) > len(found[0]):
            found = (mount, kind)
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="journal_rows_", dir=args.folder)).resolve()
    try:
        load = os.getloadavg()[0]
        report: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{processor()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
            "load_before": round(load, 2),
            "file_system": file_system(folder),
            "python": platform.python_version(),
            "sqlite": apsw.sqlite_lib_version(),
            "raw_sync_ms": raw_sync_ms(folder),
            "runs": [
                asyncio.run(writers(folder / "one", 1, args.seconds)),
                asyncio.run(writers(folder / "many", 64, args.seconds)),
                asyncio.run(writers(folder / "lives", 64, args.seconds, whole_life=True)),
            ],
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        print(json.dumps(report))
        return
    print("{machine}; {file_system}; Python {python}; SQLite {sqlite}; load {load_before}; {date}".format(**report))
    print("raw 4 KiB write and sync: p50 {p50} ms, p99 {p99} ms".format(**report["raw_sync_ms"]))
    for run in report["runs"]:
        what = "whole lives (3 commits each)" if run["whole_life"] else f"acceptances of {ASK_BYTES} bytes"
        print(
            f"{run['writers']:3d} writers, {what}: {run['submissions_per_s']} rows/s, "
            f"{run['commits_per_s']} commits/s, {run['submissions_per_commit']} rows a commit, "
            "accept p50 {p50} ms, p99 {p99} ms, max {max} ms".format(**run["accept_ms"])
        )


if __name__ == "__main__":
    main()
