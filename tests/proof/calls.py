"""Calls in threads, and what must be true of a service once they are over: shared by the proofs."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil

from relevo.journal import JournalReader
from relevo.journal.audit import audit
from relevo.setup import demo
from tests.acceptance.house import ENDED, House, process_of, wait_for

CONFIG = """
[devices.gpu0]
kind = "emulated"
total_bytes = 2147483648
equal_arithmetic = true

[models.m]
path = "{path}"
context_tokens = 4096
slots = 4
profile = "strict"
threads = 1
"""
"""Both routes compute bit-equal and batches change nothing: every answer has one right text, whoever was killed."""

STORY = "Tell me a long story about a lighthouse."
LONG_STORY = "The keeper counted the ships that passed the lighthouse in the night. " * 42 + STORY
"""About 600 tokens, and bit-equal reading is slow: there is time to kill in the middle of it."""
LONGER_STORY = "The keeper counted the ships that passed the lighthouse in the night. " * 212 + STORY
"""About 3,000 tokens, for the fast profile."""


def equal_config() -> str:
    """The configuration of the proofs."""
    return CONFIG.format(path=demo.find())


def body(tokens: int, *, prompt: str = STORY, **more: Any) -> dict[str, Any]:
    """A chat whose answer has exactly so many tokens, always the same."""
    messages = [{"role": "user", "content": prompt}]
    return {
        "model": "m",
        "messages": messages,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": 11,
    } | more


@dataclass
class Call(threading.Thread):
    """One client. What it was told so far can be read at any time."""

    url: str
    ask: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    path: str = "/v1/chat/completions"
    request_id: str | None = None
    status: int | None = None
    chunks: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    answer: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    broken: str | None = None
    handovers: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.http = httpx2.Client(timeout=120)
        self.start()

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        try:
            with self.http.stream("POST", self.url + self.path, json=self.ask, headers=self.headers) as answer:
                self.request_id = answer.headers.get("x-request-id")
                self.status = answer.status_code
                if answer.headers.get("content-type", "").startswith("text/event-stream"):
                    for line in answer.iter_lines():
                        self.take_line(line)
                else:
                    answer.read()
                    self.take_whole(answer.json())
        except Exception as e:
            self.broken = repr(e)

    def take_line(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        assert not self.done, "something followed [DONE]"
        if line == "data: [DONE]":
            self.done = True
            return
        chunk = json.loads(line[6:])
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.chunks += 1
        self.handovers = chunk.get("relevo", {}).get("handovers", self.handovers)
        for choice in chunk["choices"]:
            i = choice["index"]
            self.texts[i] = self.texts.get(i, "") + (choice["delta"].get("content") or "")

    def take_whole(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        if self.status == 200:
            self.handovers = answer["relevo"]["handovers"]
            self.texts = {c["index"]: c["message"]["content"] for c in answer["choices"]}
            self.done = True
        else:
            self.error = answer["error"]

    def leave(self) -> None:
        """The client goes: its connection is cut from another thread, as a closed window does."""
        with contextlib.suppress(Exception):
            self.http.close()

    def finish(self, timeout_s: float = 90.0) -> Call:
        self.join(timeout_s)
        assert not self.is_alive(), f"no end of {self.ask.get('stream')} after {timeout_s} s"
        self.http.close()
        return self


def id_of(house: House, call: Call, known: set[str]) -> str:
    """The id of a call that may not have been told it yet: the one new record."""

    def find() -> str | None:
        return call.request_id or next((r["id"] for r in house.records(limit="1000") if r["id"] not in known), None)

    return str(wait_for("the request to be accepted", find))


def tokens_of(house: House, request_id: str) -> int:
    """Output tokens of all choices so far."""
    result = house.record(request_id)["result"]
    return int(result["usage"]["completion_tokens"]) if result else 0


def both_serve(house: House, *killed: int) -> None:
    """Both routes serve again, without the killed ones. Back-off and give-up are ended, as a person would end them."""

    def serve() -> bool:
        replicas = house.status()["replicas"]
        if any(r["pid"] in killed for r in replicas):
            return False
        for r in replicas:
            if r["state"] in ("waiting", "given_up"):
                house.http.post(f"/relevo/v1/devices/{r['device']}/probe")
        return all(r["state"] == "serving" for r in replicas)

    wait_for("both routes to serve", serve, 60, 0.1)


class Person(threading.Thread):
    """Starts again what was given up (six deaths in ten minutes do that), as the log asks a person to."""

    def __init__(self, house: House) -> None:
        super().__init__(daemon=True)
        self._house = house
        self._gone = threading.Event()
        self.asked = 0
        self.start()

    def run(self) -> None:
        with httpx2.Client(base_url=self._house.url, timeout=10) as http:
            while not self._gone.wait(0.3):
                with contextlib.suppress(httpx2.HTTPError):
                    for r in http.get("/relevo/v1/status").json()["replicas"]:
                        if r["state"] == "given_up":
                            http.post(f"/relevo/v1/devices/{r['device']}/probe")
                            self.asked += 1

    def leave(self) -> None:
        self._gone.set()
        self.join()


def assert_accounted(house: House, ids: list[str]) -> dict[str, dict[str, Any]]:
    """Every id ended or rests; failures have a reason; each completed one has exactly its tokens."""
    records = {i: house.wait_state(i, *ENDED, "resumable", timeout_s=90) for i in ids}
    for record in records.values():
        assert record["state"] != "failed", record
    return records


def assert_empty(house: House, loaded: dict[str, int]) -> None:
    """Lanes idle, no cell leased, the ledgers back at the loaded models, no worker beside those of the status."""
    wait_for("lanes and ledgers to be as before", lambda: leased(house) == loaded and idle(house), 15)
    known = {r["pid"] for r in house.status()["replicas"]}
    stray = [p for pid in house.worker_pids() if pid not in known and (p := process_of(pid))]
    assert all("relevo.workers.text" in " ".join(p.cmdline()) or not is_worker(p) for p in stray), stray


def is_worker(process: psutil.Process) -> bool:
    """Whether a process of ours serves a model."""
    with contextlib.suppress(psutil.Error):
        return "relevo.workers.llama" in " ".join(process.cmdline())
    return False


def leased(house: House) -> dict[str, int]:
    """Leased bytes of every device."""
    return {d["name"]: d["leased_bytes"] for d in house.status()["devices"]}


def idle(house: House) -> bool:
    """Nothing runs, waits or holds a cell."""
    return all(lane["queued"] == lane["running"] == lane["cells_leased"] == 0 for lane in house.status()["lanes"])


def assert_sound(house: House, ids: set[str]) -> None:
    """Stop it: nothing is left running, the audit finds nothing, and every id a client saw is in the journal."""
    assert house.stop() == 0
    with JournalReader(house.state) as snapshot:
        assert audit(snapshot) == []
        kept = {row[0] for row in snapshot.connection.execute("SELECT id FROM requests")}
        torn = list(
            snapshot.connection.execute("SELECT id FROM requests WHERE state IN ('accepted','queued','running')")
        )
    assert ids <= kept, f"{len(ids - kept)} ids that clients saw are not in the journal"
    assert not torn, f"left open by a clean stop with nothing to do: {torn}"
