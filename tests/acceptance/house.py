"""A real Relevo for a test: the serve command as its own process, on a free port and an empty state folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
from openai import OpenAI

START_TIMEOUT_S = 60.0
ENDED = ("completed", "cancelled", "failed")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for(what: str, check: Any, timeout_s: float = 20.0, every_s: float = 0.02) -> Any:
    """Poll until `check()` is truthy; the failure names what was waited for."""
    end = time.monotonic() + timeout_s
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < end, f"waited {timeout_s} s in vain for {what}"
        time.sleep(every_s)


class House:
    """One running service and what a test may do to it."""

    def __init__(self, state: Path, *arguments: str, port: int | None = None, config: str | None = None) -> None:
        self.state = state
        self.port = port or free_port()
        self.log = state.parent / f"{state.name}.log"
        self.arguments = list(arguments) or ["--demo"]
        if config is not None:
            path = state.parent / f"{state.name}.toml"
            path.write_text(config)
            self.arguments += ["--config", str(path)]
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx2.Client(base_url=self.url, timeout=60.0)
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, both_routes: bool = True) -> House:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "relevo",
                    "serve",
                    "--port",
                    str(self.port),
                    "--state",
                    str(self.state),
                    *self.arguments,
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        wait_for("the service to be ready", lambda: self.up(both_routes), START_TIMEOUT_S, 0.05)
        return self

    def up(self, both_routes: bool) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the service ended at start:\n{self.log.read_text()[-3000:]}"
        with contextlib.suppress(httpx2.HTTPError):
            if both_routes:
                replicas = self.status()["replicas"]
                return bool(replicas) and all(r["state"] == "serving" for r in replicas)
            return self.http.get("/ready").status_code == 200
        return False

    def status(self) -> dict[str, Any]:
        return dict(self.http.get("/relevo/v1/status").json())

    def replica(self, route: str) -> dict[str, Any]:
        return next(r for r in self.status()["replicas"] if r["route"] == route)

    def record(self, request_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/relevo/v1/requests/{request_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def records(self, **query: str) -> list[dict[str, Any]]:
        answer = self.http.get("/relevo/v1/requests", params=query).json()
        return list(answer["data"] if isinstance(answer, dict) else answer)

    def wait_state(self, request_id: str, *states: str, timeout_s: float = 30.0) -> dict[str, Any]:
        return dict(
            wait_for(
                f"{request_id} to be {states}",
                lambda: (r := self.record(request_id))["state"] in states and r,
                timeout_s,
            )
        )

    def worker_pids(self) -> list[int]:
        """Every process below the service."""
        if self.process is None or self.process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [p.pid for p in psutil.Process(self.process.pid).children(recursive=True)]
        return []

    def kill_worker(self, route: str, sig: int = signal.SIGKILL) -> int:
        pid = int(self.replica(route)["pid"])
        os.kill(pid, sig)
        return pid

    def kill(self) -> list[int]:
        """kill -9 of the gateway; the pids of what it leaves behind."""
        assert self.process is not None
        left = self.worker_pids()
        self.process.kill()
        self.process.wait()
        return left

    def stop(self) -> int:
        if self.process is None or self.process.poll() is not None:
            return 0
        workers = self.worker_pids()
        self.process.terminate()
        try:
            code = self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the service did not stop:\n{self.log.read_text()[-3000:]}") from None
        _, alive = psutil.wait_procs([p for pid in workers if (p := process_of(pid))], timeout=5)
        assert not alive, f"orphans: {alive}"
        return code

    def close(self) -> None:
        self.http.close()
        self.client.close()
        self.stop()


def process_of(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def all_accounted(house: House, ids: list[str], timeout_s: float = 40.0) -> dict[str, dict[str, Any]]:
    """Every accepted id has ended or is resumable, no lease is left on the routes, and the record says why."""
    records = {i: house.wait_state(i, *ENDED, "resumable", timeout_s=timeout_s) for i in ids}
    for record in records.values():
        assert record["state"] != "failed" or record["reason"], record
    return records


def assert_idle(house: House) -> None:
    """Nothing runs, nothing waits, no cell is leased."""

    def idle() -> bool:
        status = house.status()
        return all(
            lane["queued"] == 0 and lane["running"] == 0 and lane.get("cells_leased", 0) == 0
            for lane in status["lanes"]
        )

    wait_for("every lane to be idle", idle, 10.0)


def stream_lines(answer: httpx2.Response) -> Iterator[str]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield line[6:]


_followed: list[Iterator[str]] = []


def first_line(answer: httpx2.Response) -> str:
    """Read one line of a stream that is to go on: an iterator that is let go would close it."""
    lines = stream_lines(answer)
    _followed.append(lines)
    return next(lines)


def events_of(lines: Iterator[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line != "[DONE]"]
