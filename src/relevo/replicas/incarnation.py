"""One life of a worker: from the start of its process until that process is gone, with everything that can end it.

A life ends for the first reason that is certain (`ended`), then it is fenced (nothing of it can be
received any more, and it is killed), then it is gone (its memory is free). A replica lives many lives.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from relevo.core.breaker import FaultKind
from relevo.core.events import Heartbeat, Shutdown, StartFailed
from relevo.replicas.death import Death, Evidence, explain, oom_kills
from relevo.replicas.liveness import TICK_S, Liveness, LivenessLimits, Sign
from relevo.replicas.process import ProcessLimits, WorkerProcess
from relevo.replicas.wire import Wire, WireError

_EVIDENCE_S = 0.1
"""How long a death that is certain may wait for its return code, so that its cause can be told."""

_LAST_WORDS_S = 0.02
"""How long a dead process's socket is read for what it had sent: finished work is not to be done again."""

_SHUTDOWN_SHARE = 0.6
"""Of the grace: the time for the Shutdown frame to work before SIGTERM helps."""


class End(enum.Enum):
    """What ended a life."""

    EXITED = "The process exited."
    EMPTIED = "The process lost its memory map: it is dying, whatever its exit will say."
    DISCONNECTED = "The worker closed its connection."
    RUBBISH = "The worker sent something that is no frame."
    REFUSED = "The worker said that it cannot start."
    SILENT = "No heartbeat for too long."
    STUCK = "One engine step lasted beyond its deadline."
    NOT_READY = "The model was not ready within its time."
    KILLED = "We killed it, with a reason."
    OUR_MISTAKE = "The gateway could not take in a frame."


@dataclass(frozen=True, slots=True)
class LifeSettings:
    """How a worker is started, and the patience with it. Seconds."""

    command: Callable[[int], Sequence[str]]
    """The program and its arguments, given the number of the socket's file descriptor."""
    environment: Mapping[str, str]
    incoming: Any
    """Union of the records the worker may send."""
    liveness: LivenessLimits = field(default_factory=LivenessLimits)
    start_silence_s: float = 20.0
    """Longest time without a heartbeat before the worker is ready (a cold disk, a driver waking up)."""
    load_timeout_s: float = 600.0
    """Longest time until it is ready, however well its heart beats."""


class Incarnation:
    """See the module. `on_frame` gets every frame but heartbeats; `on_sign` each change of the heartbeats' verdict."""

    def __init__(
        self,
        number: int,
        name: str,
        settings: LifeSettings,
        on_frame: Callable[[Any], None],
        on_sign: Callable[[Sign], None],
    ) -> None:
        self.number = number
        self.name = name
        self.is_ready = False
        self.last_heartbeat: float | None = None
        self.rss_bytes: int | None = None
        self.mistake: Exception | None = None
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._on_frame = on_frame
        self._on_sign = on_sign
        self._sign = Sign.ALIVE
        self._process: WorkerProcess | None = None
        self._wire: Wire | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._tick_timer: asyncio.TimerHandle | None = None
        self._liveness: Liveness | None = None
        self._start_failed: StartFailed | None = None
        self._rubbish: str | None = None
        self._ordered: tuple[str, FaultKind | None] | None = None
        self._dying: End | None = None
        self._stopping = False
        self._oom_kills = 0

    @property
    def process(self) -> WorkerProcess | None:
        """Its process, once started."""
        return self._process

    @property
    def is_over(self) -> bool:
        """True once nothing sent to it can be answered any more, though what it sent before may still arrive."""
        return self._dying is not None or self.ended.done()

    async def start(self, limits: ProcessLimits) -> None:
        """Start the process and connect to it. Raises OSError when the program cannot be started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._oom_kills = oom_kills()
                self._process = WorkerProcess.start(
                    self._settings.command(theirs.fileno()),
                    name=self.name,
                    fd=theirs.fileno(),
                    environment=self._settings.environment,
                    limits=limits,
                    on_exit=lambda: self._die(End.EXITED),
                )
            self._wire = await Wire.connect(ours, self._settings.incoming, self._receive, self._wire_closed)
        except BaseException:
            if self._wire is None:
                ours.close()
            raise
        now_s = self._loop.time()
        waiting = LivenessLimits(
            suspect_s=self._settings.start_silence_s,
            fence_s=self._settings.start_silence_s,
        )
        self._liveness = Liveness(waiting, now_s)
        self._timers.append(self._loop.call_later(self._settings.load_timeout_s, self._load_timed_out))
        self._tick_timer = self._loop.call_later(TICK_S, self._tick)

    def send(self, record: msgspec.Struct) -> None:
        """Send a record. Raises WireError when that is not possible."""
        if self._wire is None:
            raise WireError("The worker is not connected.")
        self._wire.send(record)

    def ready(self) -> None:
        """It proved that it can work: from now on it is watched more strictly, and its load time does not count."""
        self.is_ready = True
        self._liveness = Liveness(self._settings.liveness, self._loop.time())

    def kill(self, reason: str, kind: FaultKind | None) -> None:
        """End it now by our own will. `kind` is what the breaker is to think of it; None: no fault."""
        if not self.ended.done():
            self._ordered = (reason, kind)
            self._end(End.KILLED)

    def shut_down(self, grace_s: float) -> None:
        """Ask it to end: by a frame, then by SIGTERM, then by SIGKILL when `grace_s` is over. Returns at once."""
        if self._stopping:
            return
        self._stopping = True
        try:
            self.send(Shutdown())
        except WireError:
            grace_s = 0.0
        self._timers.append(self._loop.call_later(grace_s * _SHUTDOWN_SHARE, self._terminate))
        self._timers.append(self._loop.call_later(grace_s, self.kill, "It did not end within its grace.", None))

    async def fence(self) -> Death:
        """Make it certain that nothing of this life is ever received again, kill what is left of it, and say why.

        Takes a few milliseconds, and at most a fifth of a second (a worker that closed its connection and lives on).
        """
        end = self.ended.result() if self.ended.done() else End.KILLED
        self._stop_timers()
        if self._wire is not None:
            self._wire.close()
        process = self._process
        if process is None:
            return self._judge(end)
        if end in (End.DISCONNECTED, End.REFUSED):
            await process.wait_exit(_EVIDENCE_S)  # let its own exit speak before ours is forced on it
            if end is End.DISCONNECTED and not process.is_empty():
                self._rubbish = "closed its connection but did not end, so it was killed"
        process.kill()
        if process.fate() is None:
            await process.wait_exit(_EVIDENCE_S)
        process.drain_output()
        return self._judge(end)

    async def wait_gone(self) -> None:
        """Wait until its memory is free. Without a bound: a process can hang inside the kernel."""
        if self._process is not None:
            await self._process.wait_gone()

    def abandon(self) -> None:
        """Stop watching it, gone or not."""
        self._stop_timers()
        if self._wire is not None:
            self._wire.close()
        if self._process is not None:
            self._process.kill()
            self._process.abandon()

    # --- what can end it

    def _die(self, end: End) -> None:
        """The process is dead. What it had sent may still be in the socket: hear it, until the socket's end."""
        if self._dying is None:
            self._dying = end
            if self._wire is None or self._wire.closed:
                self._end(end)
            else:
                self._timers.append(self._loop.call_later(_LAST_WORDS_S, self._end, end))

    def _end(self, end: End) -> None:
        if not self.ended.done():
            self.ended.set_result(end)

    def _receive(self, record: Any) -> None:
        if self.ended.done():
            return
        if type(record) is Heartbeat:
            self.last_heartbeat = self._loop.time()
            self.rss_bytes = record.rss_bytes
            if self._liveness is not None:
                self._liveness.heard(record.in_step_ms)
            return
        if type(record) is StartFailed:
            self._start_failed = record
            self._end(End.REFUSED)
            return
        try:
            self._on_frame(record)
        except Exception as e:
            self._our_mistake(e)

    def _our_mistake(self, error: Exception) -> None:
        self.mistake = error
        self._end(End.OUR_MISTAKE)

    def _wire_closed(self, reason: Exception | None) -> None:
        if reason is not None:
            self._rubbish = str(reason)
        self._end(End.RUBBISH if reason is not None else self._dying or End.DISCONNECTED)

    def _tick(self) -> None:
        if self.ended.done():
            return
        self._tick_timer = self._loop.call_later(TICK_S, self._tick)
        if self._dying is not None:
            return
        if self._process is not None and self._process.is_empty():
            self._die(End.EMPTIED)
            return
        if self._liveness is None:
            return
        sign = self._liveness.tick(self._loop.time())
        if sign is Sign.SILENT:
            self._end(End.SILENT)
        elif sign is Sign.STUCK:
            self._end(End.STUCK)
        elif sign is not self._sign:
            self._sign = sign
            try:
                self._on_sign(sign)
            except Exception as e:
                self._our_mistake(e)

    def _load_timed_out(self) -> None:
        if not self.is_ready:
            self._end(End.NOT_READY)

    def _terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
            self._tick_timer = None

    # --- why

    def _judge(self, end: End) -> Death:
        process = self._process
        tail = process.log_tail if process is not None else ()
        return_code = process.fate() if process is not None else None
        if self._ordered is not None or self._stopping or not self.ended.done():
            reason, kind = self._ordered or ("It was asked to end.", None)
            code = return_code if return_code is not None and return_code >= 0 else None
            number = -return_code if return_code is not None and return_code < 0 else None
            return Death(cause=reason, kind=kind, at=time.time(), code=code, signal=number, log_tail=tail)
        circumstance, kind = self._circumstance(end)
        evidence = Evidence(
            return_code=return_code,
            log_tail=tail,
            start_failed=self._start_failed,
            was_ready=self.is_ready,
            oom_kills=oom_kills() - self._oom_kills,
            circumstance=circumstance,
            kind=kind,
        )
        return explain(evidence, time.time())

    def _circumstance(self, end: End) -> tuple[str | None, FaultKind | None]:
        settings = self._settings
        patience = settings.liveness
        silence_s = patience.fence_s if self.is_ready else settings.start_silence_s
        match end:
            case End.SILENT:
                return f"sent no heartbeat for {silence_s:g} s, so it was killed", FaultKind.STALL
            case End.STUCK:
                deadline_s = patience.step_deadline_s
                return f"spent more than {deadline_s:g} s in one engine step, so it was killed", FaultKind.STALL
            case End.NOT_READY:
                return f"was not ready within {settings.load_timeout_s:g} s, so it was killed", FaultKind.STALL
            case End.RUBBISH:
                return f"was disconnected: {(self._rubbish or '').rstrip('.')}", FaultKind.CUT_SHORT
            case End.DISCONNECTED if self._rubbish is not None:
                return self._rubbish, FaultKind.CUT_SHORT
            case End.OUR_MISTAKE:
                return f"was ended because the gateway failed to take in a frame ({self.mistake!r})", None
            case _:
                return None, None
