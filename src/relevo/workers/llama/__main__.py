"""`python -m relevo.workers.llama --fd N`: one model on one device, spoken to over an inherited socket.

Three threads: this one loads and computes, one reads orders, one sends heartbeats. Native code releases the
interpreter, so the other two go on during a decode call: when the socket closes the process ends at once, whatever
it is computing. stdout carries nothing; the last stderr lines say why a worker died.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import msgspec

from relevo.core.events import (
    Cancel,
    Extend,
    Heartbeat,
    Probe,
    Ready,
    Shutdown,
    StartFailed,
    StartModel,
    Submit,
    ToWorker,
)
from relevo.workers.frames import FrameError, FrameSocket
from relevo.workers.llama.engine import Engine, EngineLost
from relevo.workers.llama.footprint import OwnFootprint
from relevo.workers.llama.model import Model, ProbeFault, StartFailure, load
from relevo.workers.llama.native import Native
from relevo.workers.llama.native_log import reported_bytes

HEARTBEAT_S = 0.25
_OK, _INTERNAL, _PROTOCOL, _ENGINE_LOST, _START_FAILED = 0, 1, 2, 3, 4


def exit_now(code: int, why: str = "") -> NoReturn:
    """End the process without waiting for native code or for other threads."""
    if why:
        print(why, file=sys.stderr, flush=True)
    os._exit(code)


class Worker:
    """The process around an engine."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._engine: Engine | None = None

    def run(self) -> NoReturn:
        """Load as the first frame says, then serve until Shutdown or the end of the socket."""
        try:
            start = self._frames.receive(StartModel)
        except FrameError as e:
            exit_now(_PROTOCOL, f"The first frame must be StartModel. {e}")
        if start is None:
            exit_now(_OK)
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        try:
            self._start(start)
        except StartFailure as e:
            self._send(StartFailed(e.code, e.message))
            exit_now(_START_FAILED, e.message)
        self._serve()

    def _start(self, start: StartModel) -> None:
        began = time.monotonic()
        # The engine makes no batch larger than its context, and a step with more rows than its batch would abort.
        cells = start.context_tokens * (start.slots if start.profile == "strict" else 1)
        start = msgspec.structs.replace(start, batch_tokens=min(start.batch_tokens, cells))
        native, model = load(start)
        engine = Engine(model, start.prefill_chunk_tokens, self._send)
        try:
            answer = engine.prove()
        except ProbeFault as e:
            raise StartFailure("probe", f"The model is loaded but cannot compute. {e}") from None
        ready = _describe(start, native, model, answer, (time.monotonic() - began) * 1000)
        self._engine = engine
        self._model = model
        self._send(ready)

    def _serve(self) -> NoReturn:
        engine = self._engine
        assert engine is not None
        while True:
            try:
                self._obey(engine)
                if engine.busy:
                    engine.step()
            except EngineLost as e:
                exit_now(_ENGINE_LOST, str(e))

    def _obey(self, engine: Engine) -> None:
        """All orders that are there; wait for one when there is nothing else to do."""
        while True:
            try:
                order = self._orders.get(block=not engine.busy)
            except queue.Empty:
                return
            if isinstance(order, Submit):
                engine.submit(order)
            elif isinstance(order, Extend):
                engine.extend(order)
            elif isinstance(order, Cancel):
                engine.cancel(order)
            elif isinstance(order, Probe):
                engine.probe(order)
            elif isinstance(order, Shutdown):
                engine.end_all()
                self._model.free()
                exit_now(_OK)
            else:
                exit_now(_PROTOCOL, "A second StartModel came; a worker serves one model.")

    def _read(self) -> None:
        try:
            while (order := self._frames.receive(ToWorker)) is not None:
                self._orders.put(order)
        except FrameError as e:
            exit_now(_PROTOCOL, str(e))
        except OSError:
            pass
        exit_now(_OK)  # the gateway closed the socket or is gone: nobody is left to work for

    def _beat(self) -> None:
        memory = OwnFootprint()
        while True:
            engine = self._engine
            began = engine.step_began if engine is not None else None
            in_step_ms = (time.monotonic() - began) * 1000 if began is not None else 0.0
            steps, running = (engine.steps, engine.running) if engine is not None else (0, 0)
            now = memory.read()
            self._send(Heartbeat(steps, in_step_ms, running, now.rss_bytes, now.peak_rss_bytes, now.data_bytes))
            time.sleep(HEARTBEAT_S)

    def _send(self, record: Any) -> None:
        try:
            self._frames.send(record)
        except OSError:
            exit_now(_OK)
        except FrameError as e:
            exit_now(_INTERNAL, str(e))


def _describe(start: StartModel, native: Native, model: Model, answer: list[int], load_ms: float) -> Ready:
    on = start.device if start.device != "cpu" else None
    device = next((d for d in native.devices() if (d.name == on if on else d.kind == "cpu")), None)
    computes = device.backend if on and device else native.cpu_library or "linked in"
    return Ready(
        pid=os.getpid(),
        engine=native.engine,
        library=computes,
        device=start.device,
        device_description=device.description if device else "",
        cells=model.cells,
        slots=model.slots,
        vocabulary_tokens=model.vocabulary_tokens,
        context_trained_tokens=model.vocabulary.n_ctx_train,
        load_ms=load_ms,
        probe_tokens=answer,
        **reported_bytes(native.log, on),
    )


def main() -> NoReturn:
    """Serve on the inherited descriptor."""
    parser = argparse.ArgumentParser(prog="relevo.workers.llama", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="one end of a connected stream socket")
    arguments = parser.parse_args()
    try:
        sock = socket.socket(fileno=arguments.fd)
    except OSError as e:
        exit_now(_PROTOCOL, f"Descriptor {arguments.fd} is no socket: {e.strerror}.")
    with contextlib.suppress(OSError):
        sock.set_inheritable(False)
    try:
        Worker(FrameSocket(sock)).run()
    except Exception as e:  # the last line on stderr is what the gateway shows
        traceback.print_exc()
        exit_now(_INTERNAL, f"The worker failed: {type(e).__name__}: {e}")


if __name__ == "__main__":
    main()
