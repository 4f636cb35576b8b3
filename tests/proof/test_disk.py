"""A disk that is full: nothing new is promised, what was promised ends, and space alone mends it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.acceptance.house import House, wait_for

from .calls import Call, assert_sound, body, idle

pytestmark = [pytest.mark.proof, pytest.mark.timeout(300)]
DISK = "24m"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 24 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(file: Path) -> int:
    """Take every byte that is left. Returns how many."""
    taken = 0
    with contextlib.suppress(OSError), file.open("ab", buffering=0) as f:
        for size in (2**16, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    taken += f.write(b"x" * size)
    return taken


def small(house: House) -> httpx2.Response:
    """A request that is new."""
    return house.http.post("/v1/chat/completions", json=body(2, model="demo"))


def refused(house: House) -> httpx2.Response | None:
    """Ask; the answer if it is a refusal."""
    answer = small(house)
    return answer if answer.status_code != 200 else None


@pytest.mark.parametrize("times", [1, 2], ids=["once", "and the reserve as well"])
def test_a_full_disk_refuses_what_is_new_and_ends_what_is_old(disk: Path, tmp_path: Path, times: int) -> None:
    house = House(disk, "--demo").start()
    ids: set[str] = set()
    try:
        assert small(house).status_code == 200
        calls = [Call(house.url, body(250, model="demo", stream=n % 2 == 0)) for n in range(4)]
        calls += [
            Call(house.url, body(250, model="demo", stream=True), {"Idempotency-Key": f"key-{n}"}) for n in range(2)
        ]
        wait_for("all to run", lambda: len(house.records(state="running")) == 6)
        ids |= {r["id"] for r in house.records(state="running")}
        filler = disk / "filler"
        taken = fill(filler)
        answer = wait_for("a refusal", lambda: refused(house), every_s=0.1)
        began = time.monotonic()
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "journal_unavailable" and "disk" in error["message"].lower(), error
        assert int(answer.headers["retry-after"]) >= 1
        status = house.status()
        assert status["state"] == "degraded" and any("disk" in r.lower() for r in status["reasons"]), status["reasons"]
        print(f"{taken} bytes filled; told: {error['message']}")
        for _ in range(times - 1):
            taken += fill(filler)
        if times == 1:
            for call in calls:
                call.finish()
                assert call.status == 200 and call.done, (call.status, call.error, call.broken)
            assert {house.record(i)["state"] for i in ids} == {"completed"}
        else:
            time.sleep(4)
            assert not [c for c in calls if c.done and c.ask.get("stream") is not True], "an end was told, unrecorded"
        assert house.http.get("/health").status_code == 200
        assert small(house).status_code == 503
        filler.unlink()
        wait_for("the service to accept again", lambda: small(house).status_code == 200, 40, 0.2)
        print(f"accepted again {time.monotonic() - began:.1f} s after the first refusal, without a restart")
        for call in calls:
            call.finish()
            assert call.status == 200 and call.done, (call.status, call.error, call.broken)
        for request_id in ids:
            record = house.wait_state(request_id, "completed")
            assert record["result"]["usage"]["completion_tokens"] == 250
        assert house.status()["state"] == "ok" and house.status()["reasons"] == []
        wait_for("the lanes to be idle", lambda: idle(house))
        ids |= {c.request_id for c in calls if c.request_id}
        assert_sound(house, ids)
    finally:
        house.close()
    del tmp_path


def test_a_gateway_killed_on_a_full_disk_starts_again_and_loses_nothing(disk: Path) -> None:
    house = House(disk, "--demo").start()
    try:
        calls = [Call(house.url, body(200, model="demo")) for _ in range(3)]
        wait_for("all to run", lambda: len(house.records(state="running")) == 3)
        ids = {r["id"] for r in house.records(state="running")}
        filler = disk / "filler"
        fill(filler)
        wait_for("a refusal", lambda: refused(house), every_s=0.1)
        house.kill()
        for call in calls:
            call.finish()
        fill(filler)  # nothing is left, not even for a start
        try:
            house.start()
        except AssertionError:
            said = house.log.read_text().strip().splitlines()[-1]
            print(f"a start without any space: {said}")
            assert house.process is not None and house.process.poll() == 1 and "Traceback" not in house.log.read_text()
            filler.unlink()
            house.start()
        else:
            assert small(house).status_code == 503
            filler.unlink()
        for request_id in ids:
            assert house.wait_state(request_id, "completed")["result"]["usage"]["completion_tokens"] == 200
        wait_for("the service to accept again", lambda: small(house).status_code == 200, 40, 0.2)
        assert_sound(house, ids)
    finally:
        house.close()
