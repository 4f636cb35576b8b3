"""A worker that computes nothing: it answers every attempt as fast, or at the pace, that it was told.

    fast_worker.py [--first-ms M] [--gap-ms M] --fd FD

One frame a step, with a piece for every running attempt, as the real worker sends them: whoever comes while others
run joins the next step. For measuring what stands around a worker; never part of Relevo.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import time
from dataclasses import dataclass

from relevo.core.events import (
    AttemptEnded,
    Cancel,
    Heartbeat,
    Piece,
    Probe,
    ProbeAnswer,
    Ready,
    Shutdown,
    StartModel,
    Step,
    Submit,
    ToWorker,
)
from relevo.workers.frames import FrameSocket

HEARTBEAT_S = 0.25
VOCABULARY = 49_152
TRAINED = 8192


@dataclass(slots=True)
class Running:
    """An attempt and how far it is."""

    submit: Submit
    position: int = 0


class FastWorker:
    """One socket, one thread: reads what is there, sends what is due."""

    def __init__(self, sock: socket.socket, first_s: float, gap_s: float) -> None:
        self._socket = sock
        self._wire = FrameSocket(sock)
        self._first_s = first_s
        self._gap_s = gap_s
        self._running: dict[tuple[str, int], Running] = {}
        self._steps = 0
        self._beat_due = 0.0
        self._step_due = 0.0

    def load(self) -> None:
        """Say at once that the model is loaded."""
        start = self._wire.receive(StartModel)
        if start is None:
            os._exit(0)
        ready = Ready(
            os.getpid(), "fast worker of the benchmark", "none", start.device, "nothing", start.context_tokens,
            start.slots, VOCABULARY, TRAINED, 1.0, [1, 2, 3, 4],
        )  # fmt: skip
        self._wire.send(ready)

    def serve(self) -> None:
        """Until the socket closes."""
        while True:
            now = time.monotonic()
            if now >= self._beat_due:
                self._beat_due = now + HEARTBEAT_S
                self._wire.send(Heartbeat(self._steps, 0.0, len(self._running), 50_000_000))
            due = min(self._step_due, self._beat_due) if self._running else self._beat_due
            wait_s = max(0.0, due - now)
            while select.select([self._socket], [], [], wait_s)[0]:
                self._obey()
                wait_s = 0.0
            now = time.monotonic()
            if self._running and now >= self._step_due:
                self._step_due = now + self._gap_s
                self._step()

    def _obey(self) -> None:
        order = self._wire.receive(ToWorker)
        if order is None or isinstance(order, Shutdown):
            os._exit(0)
        if isinstance(order, Submit):
            key = (order.request_id, order.attempt)
            if not self._running:
                self._step_due = time.monotonic() + self._first_s
            self._running[key] = Running(order)
        elif isinstance(order, Cancel):
            if self._running.pop((order.request_id, order.attempt), None) is not None:
                self._wire.send(AttemptEnded(order.request_id, order.attempt, "cancelled"))
        elif isinstance(order, Probe):
            self._wire.send(ProbeAnswer(order.number, True, [1, 2, 3, 4][: order.tokens], 1.0))

    def _step(self) -> None:
        pieces, ended = [], []
        for key, run in self._running.items():
            run.position += 1
            last = run.position >= run.submit.choices[0].max_output_tokens
            text = f" word{run.position}"
            pieces.append(Piece(*key, 0, run.position, [run.position], text, "length" if last else None))
            if last:
                ended.append(key)
        self._steps += 1
        self._wire.send(Step(pieces))
        for key in ended:
            del self._running[key]
            self._wire.send(AttemptEnded(*key, "completed"))


def main() -> None:
    """Be a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-ms", type=float, default=0.0)
    parser.add_argument("--gap-ms", type=float, default=0.0)
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    worker = FastWorker(socket.socket(fileno=arguments.fd), arguments.first_ms / 1e3, arguments.gap_ms / 1e3)
    worker.load()
    worker.serve()


if __name__ == "__main__":
    main()
