"""A small worker with every bad habit. Started like a real one; its habits come as JSON in FAKE_HABITS.

Habits, all optional:
  ready_after_s, hold_bytes (of memory, touched), refuse [code, message], mute (no heartbeats)
  die {"when": start | load | submit | end, "code" or "signal" or "oom", "says": lines}
  grandchild (path of a file for its pid), deaf (ignores SIGTERM and Shutdown)
  tokens, token_s (of each), step_forever (claims an endless step), stop_itself (SIGSTOP on submit)
  lie (answers probes wrongly), probe_s, garbage (hex, sent on submit), close_socket (on submit)
  flood (steps on submit, as fast as it can), pieces (of each of those)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from relevo.core import events as e
from relevo.workers.frames import FrameSocket

HABITS = json.loads(os.environ.get("FAKE_HABITS", "{}"))


def die(when: str) -> None:
    """End as the habits say, when they say so."""
    habit = HABITS.get("die")
    if not habit or habit["when"] != when:
        return
    for line in habit.get("says", []):
        print(line, flush=True)
    if habit.get("oom"):
        hoard = []
        while True:  # RLIMIT_DATA ends this
            hoard.append(bytearray(8 << 20))
    if "signal" in habit:
        os.kill(os.getpid(), getattr(signal, habit["signal"]))
        time.sleep(60)
    os._exit(habit["code"])


class Fake:
    """The worker."""

    def __init__(self, fd: int) -> None:
        self.raw = socket.socket(fileno=fd)
        self.wire = FrameSocket(self.raw)
        self.steps = 0
        self.hoard = bytearray()
        self.cancelled: set[tuple[str, int]] = set()

    def beat(self) -> None:
        """Heartbeats until the socket is closed."""
        while True:
            in_step_ms = 1e9 if HABITS.get("step_forever") and self.steps else 0.0
            try:
                self.wire.send(e.Heartbeat(self.steps, in_step_ms, 0, 1000))
            except OSError:
                return
            time.sleep(0.1)

    def load(self) -> None:
        """Answer StartModel."""
        start = self.wire.receive(e.ToWorker)
        if start is None:
            sys.exit(0)
        print(f"loading {start.path}", flush=True)
        die("load")
        if "refuse" in HABITS:
            self.wire.send(e.StartFailed(*HABITS["refuse"]))
            sys.exit(1)
        time.sleep(HABITS.get("ready_after_s", 0))
        self.hoard = bytearray(HABITS.get("hold_bytes", 0))
        for at in range(0, len(self.hoard), 4096):
            self.hoard[at] = 1
        self.wire.send(
            e.Ready(os.getpid(), "fake", "none", start.device, "nothing", 4096, 8, 100, 4096, 1.0, [1, 2, 3, 4])
        )

    def submit(self, frame: e.Submit) -> None:
        """Answer Submit, or not."""
        self.steps += 1
        die("submit")
        if "garbage" in HABITS:
            self.raw.sendall(bytes.fromhex(HABITS["garbage"]))
            return
        if HABITS.get("close_socket"):
            self.raw.shutdown(socket.SHUT_RDWR)
            time.sleep(60)
        if HABITS.get("stop_itself"):
            os.kill(os.getpid(), signal.SIGSTOP)
        for position in range(1, HABITS.get("tokens", 3) + 1):
            if (frame.request_id, frame.attempt) in self.cancelled:
                self.wire.send(e.AttemptEnded(frame.request_id, frame.attempt, "cancelled"))
                return
            piece = e.Piece(frame.request_id, frame.attempt, 0, position, [position], f"t{position} ")
            self.wire.send(e.Step([piece]))
            time.sleep(HABITS.get("token_s", 0))
        self.wire.send(e.AttemptEnded(frame.request_id, frame.attempt, "completed"))
        die("end")

    def flood(self, count: int) -> None:
        """Send many small steps at once."""
        pieces = [e.Piece(f"req_{n:032x}", 1, 0, 7, [n], " word") for n in range(HABITS.get("pieces", 1))]
        for _ in range(count):
            self.wire.send(e.Step(pieces))

    def serve(self) -> None:
        """Obey until told to stop."""
        while True:
            frame = self.wire.receive(e.ToWorker)
            match frame:
                case None:
                    time.sleep(60 if HABITS.get("close_socket") else 0)
                    os._exit(0)
                case e.Submit():
                    if "flood" in HABITS:
                        self.flood(HABITS["flood"])
                    threading.Thread(target=self.submit, args=(frame,), daemon=True).start()
                case e.Cancel():
                    self.cancelled.add((frame.request_id, frame.attempt))
                case e.Probe():
                    tokens = [9] * frame.tokens if HABITS.get("lie") else [1, 2, 3, 4][: frame.tokens]
                    time.sleep(HABITS.get("probe_s", 0))
                    self.wire.send(e.ProbeAnswer(frame.number, True, tokens, 1.0))
                case e.Shutdown():
                    if not HABITS.get("deaf"):
                        os._exit(0)
                case _:
                    pass


def main() -> None:
    """Be a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    fd = parser.parse_args().fd
    if HABITS.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "grandchild" in HABITS:
        child = subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(600)"])
        Path(HABITS["grandchild"]).write_text(str(child.pid))
    die("start")
    fake = Fake(fd)
    if not HABITS.get("mute"):
        threading.Thread(target=fake.beat, daemon=True).start()
    fake.load()
    fake.serve()


main()
