"""The real service on a real small file system that runs full while it works, and gets its space back."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relevo.journal import JournalReader
from relevo.journal.audit import audit
from tests.acceptance.house import House, wait_for

from .callers import CONTINUOUS, FOUR, KEPT, PLAIN, STREAM, Call, call, known_ids
from .reckoning import Log, assert_accounted

pytestmark = [pytest.mark.proof, pytest.mark.timeout(300)]

DISK_BYTES = 24 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own; always unmounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        if subprocess.run(["umount", str(place)], check=False).returncode:
            subprocess.run(["umount", "-l", str(place)], check=True)


class SmallHouse(House):
    """A service whose state lies on the small disk and whose log does not."""

    def __init__(self, disk: Path) -> None:
        super().__init__(disk / "state")
        self.log = disk.parent / "service.log"


def fill(place: Path) -> Path:
    """A neighbour takes all the space there is."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError:
            pass
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass
    return ballast


def room(place: Path) -> int:
    free = os.statvfs(place)
    return free.f_bavail * free.f_bsize


BULK = [{"type": "function", "function": {"name": "noop", "description": "x" * 230_000}}]
"""The model's template does not render it, but the journal keeps it: the log, whose pages are used again, must grow."""


def refusal(house: House) -> Call | None:
    """A request of a few tokens that takes space in the journal, refused or not."""
    c = call(house, PLAIN, 4, more={"tools": BULK}).end()
    assert c.ok or c.status == 503, (c.status, c.error, c.broken)
    return c if c.status == 503 else None


@pytest.fixture
def house(disk: Path) -> Iterator[SmallHouse]:
    h = SmallHouse(disk)
    yield h
    h.close()


def test_a_disk_that_runs_full_refuses_the_new_and_ends_the_accepted(disk: Path, house: SmallHouse) -> None:
    house.start()
    log = Log("disk full")
    running = [call(house, kind, 250) for kind in (PLAIN, STREAM, KEPT, FOUR, CONTINUOUS)]
    wait_for("all to be accepted", lambda: len(known_ids(house)) == len(running))
    wait_for("output", lambda: all(c.seen > 5 for c in running if c.kind.stream), 60)
    ballast = fill(disk)
    filled_at = time.monotonic()
    refused = wait_for("a refusal", lambda: refusal(house), 30, 0.05)
    log.say("refused", after_ms=round((time.monotonic() - filled_at) * 1000), error=refused.error)
    assert refused.error["code"] == "journal_unavailable"
    assert "disk is full" in refused.error["message"].lower()
    assert int(refused.headers["retry-after"]) >= 1
    status = house.status()
    assert status["state"] == "degraded"
    assert any("disk is full" in r.lower() for r in status["reasons"]), status["reasons"]
    ready = house.http.get("/ready").json()
    assert ready["status"] == "degraded"
    log.say("ready", **{k: ready[k] for k in ("status", "reasons") if k in ready})
    for c in running:
        c.end(120)
        assert c.ok, (c.kind.name, c.status, c.error, c.broken)
    assert refusal(house) is not None, "ended work does not make space for new work"
    ballast.unlink()
    freed_at = time.monotonic()
    wait_for("acceptance again, without a restart", lambda: refusal(house) is None, 30, 0.1)
    log.say("accepts again", after_ms=round((time.monotonic() - freed_at) * 1000))
    assert house.status()["state"] == "ok"
    assert not house.status()["reasons"]
    later = call(house, STREAM, 30).end()
    assert later.ok
    assert_accounted(house, [*running, later])
    log.say("ended", **clean(house))


def test_a_worker_that_falls_while_the_disk_is_full_loses_nothing(disk: Path, house: SmallHouse) -> None:
    house.start()
    log = Log("disk full, then gpu killed")
    running = [call(house, kind, 250) for kind in (PLAIN, CONTINUOUS, FOUR)]
    wait_for("all to be accepted", lambda: len(known_ids(house)) == len(running))
    wait_for("output", lambda: running[1].seen > 5, 60)
    ballast = fill(disk)
    wait_for("a refusal", lambda: refusal(house), 30, 0.05)
    house.kill_worker("gpu")
    for c in running:
        c.end(120)
        assert c.ok, (c.kind.name, c.status, c.error, c.broken)
        assert c.relevo[-1]["handovers"], "it was handed over"
    wait_for("the GPU worker to be back", lambda: house.replica("gpu")["state"] == "serving", 30)
    ballast.unlink()
    wait_for("acceptance again", lambda: refusal(house) is None, 30, 0.1)
    assert_accounted(house, running)
    log.say("ended", **clean(house))


def test_a_gateway_that_dies_on_a_full_disk_starts_again_and_loses_nothing(disk: Path, house: SmallHouse) -> None:
    house.start()
    log = Log("disk full, then gateway killed")
    running = [call(house, kind, 250) for kind in (PLAIN, STREAM, KEPT)]
    wait_for("all to be accepted", lambda: len(known_ids(house)) == len(running))
    wait_for("output", lambda: all(c.seen > 5 for c in running if c.kind.stream), 60)
    ballast = fill(disk)
    wait_for("a refusal", lambda: refusal(house), 30, 0.05)
    house.kill()
    for c in running:
        c.end(20)
    house.start()
    refused = refusal(house)
    log.say("after the restart", room_bytes=room(disk), error=refused.error if refused else None)
    ballast.unlink()
    wait_for("acceptance again", lambda: refusal(house) is None, 30, 0.1)
    records = assert_accounted(house, running)
    states = sorted(records[str(c.request_id)]["state"] for c in running if c.request_id)
    assert states == ["resumable", "resumable"]
    log.say("ended", **clean(house))


def clean(house: House) -> dict[str, Any]:
    """Stopped, and nothing to be found."""
    assert house.stop() == 0
    with JournalReader(house.state) as journal:
        assert audit(journal) == []
        return dict(journal.counts().by_state)
