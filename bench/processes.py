"""The processes that are measured: Relevo's service, the bare worker, llama.cpp's own server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from bench.figures import cpu_us
from relevo.core.events import (
    AttemptEnded,
    ChoiceStart,
    FromWorker,
    Heartbeat,
    Ready,
    Sampling,
    StartFailed,
    StartModel,
    Step,
    Submit,
)
from relevo.workers.frames import FrameSocket

HERE = Path(__file__).parent
START_TIMEOUT_S = 90.0
Stream = tuple[float, list[float], int]
"""When it was asked, when each token came, how many there were."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Process:
    """A child that is ready when `_is_ready` says so and gone when the block ends."""

    name = "process"

    def __init__(self, command: list[str], environment: dict[str, str] | None = None, log: Path | None = None) -> None:
        self._command = command
        self._environment = {**os.environ, **(environment or {}), "GGML_NO_BACKTRACE": "1"}
        self.log = log or Path(tempfile.mkstemp(prefix="bench_", suffix=".log")[1])
        self.popen: subprocess.Popen[bytes]

    def _is_ready(self) -> bool:
        return True

    def start(self) -> Self:
        """Start it and wait until it is ready."""
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment, cwd=HERE.parent
            )
        end = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self.popen.poll() is not None or time.monotonic() > end:
                tail = self.log.read_text()[-2000:]
                self.stop()
                raise RuntimeError(f"{self.name} did not start: {self._command}\n{tail}")
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """End it and everything below it."""
        below = [self.popen.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            below += [p.pid for p in psutil.Process(self.popen.pid).children(recursive=True)]
        if self.popen.poll() is None:
            self.popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(15)
        for pid in below:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if psutil.Process(pid).ppid() in (1, os.getpid(), *below):
                    os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        self.log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.popen.pid

    def cpu_us(self) -> float:
        """CPU time of it and of everything below it."""
        processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        return sum(cpu_us(p.pid) for p in processes)


class Relevo(Process):
    """`relevo serve` with a configuration, its own state folder and a free port."""

    name = "relevo"

    def __init__(self, config: str, *, state_in: Path | None = None, fast_worker: list[str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bench_relevo_", dir=state_in))
        self.port = free_port()
        path = self.folder / "relevo.toml"
        path.write_text(config)
        place = ["--config", str(path), "--port", str(self.port), "--state", str(self.folder / "state")]
        module = ["relevo", "serve", *place]
        if fast_worker is not None:
            module = ["bench.fast_house", *place, "--", *fast_worker]
        super().__init__([sys.executable, "-m", *module])

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/relevo/v1/status", timeout=5) as answer:
            return dict(json.load(answer))

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            replicas = self.status()["replicas"]
            return bool(replicas) and all(r["state"] == "serving" for r in replicas)
        return False

    def stop(self) -> None:
        """End it; its state folder goes too."""
        super().stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class EngineServer(Process):
    """llama.cpp's own HTTP server, in a process of its own."""

    name = "llama.cpp's server"

    def __init__(self, model: Path, **settings: Any) -> None:
        self.port = free_port()
        super().__init__(
            [sys.executable, str(HERE / "engine_server.py"), str(model), str(self.port), json.dumps(settings)],
            {"OMP_NUM_THREADS": "1"},
        )

    def _is_ready(self) -> bool:
        return "\nready " in "\n" + self.log.read_text()


class BareWorker:
    """Relevo's llama worker with nothing around it: frames over one socket pair, read as they come."""

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command
        self._numbers = 0

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = self._command or [sys.executable, "-I", "-u", "-m", "relevo.workers.llama"]
            self.popen = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "MALLOC_ARENA_MAX": "2"},
            )
        self._frames = FrameSocket(self._socket)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self._socket.close()
        try:
            self.popen.wait(5)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def load(self, start: StartModel) -> Ready:
        """Load a model."""
        self._frames.send(start)
        answer = self._receive()
        if isinstance(answer, StartFailed):
            raise RuntimeError(answer.message)
        assert isinstance(answer, Ready)
        return answer

    def cpu_us(self) -> float:
        """CPU time so far."""
        return cpu_us(self.popen.pid)

    def _receive(self) -> Any:
        while isinstance(record := self._frames.receive(FromWorker), Heartbeat):
            pass
        return record

    def run(
        self,
        prompts: list[list[int]],
        tokens: int,
        *,
        at: int = 0,
        then: Callable[[], tuple[list[int], int]] | None = None,
    ) -> list[Stream]:
        """All prompts at once, each to exactly this many tokens.

        With `then`: when the first stream has had `at` tokens, the prompt and limit that `then()` gives join it.
        """
        streams: dict[str, Stream] = {}
        for prompt in prompts:
            self._submit(streams, prompt, tokens)
        first = next(iter(streams))
        waiting = set(streams)
        while waiting:
            record = self._receive()
            if record is None:
                raise RuntimeError("The bare worker died.")
            if isinstance(record, Step):
                now = time.perf_counter()
                for piece in record.pieces:
                    streams[piece.request_id][1].append(now)
                    if then is not None and piece.request_id == first and len(streams[first][1]) == at:
                        waiting.add(self._submit(streams, *then()))
            elif isinstance(record, AttemptEnded):
                assert record.outcome == "completed", record
                waiting.discard(record.request_id)
        return list(streams.values())

    def _submit(self, streams: dict[str, Stream], prompt: list[int], tokens: int) -> str:
        self._numbers += 1
        name = f"req_{self._numbers}"
        streams[name] = (time.perf_counter(), [], len(prompt))
        choices = [ChoiceStart(0, tokens)]
        self._frames.send(Submit(name, 1, prompt, choices, Sampling(temperature=0), ignore_eos=True))
        return name


def toml(models: dict[str, dict[str, Any]], devices: dict[str, dict[str, Any]] | None = None) -> str:
    """A configuration with these models and devices; limits wide enough for a benchmark."""
    lines = ["[limits]", "running_per_key = 100000"]
    for kind, tables in (("devices", devices or {}), ("models", models)):
        for name, table in tables.items():
            lines.append(f'[{kind}."{name}"]')
            lines += [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    return json.dumps(str(value) if isinstance(value, Path) else value)
