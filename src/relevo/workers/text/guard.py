"""Walls around one call of a stranger's code in this process: processor time and memory.

Time is processor time, not the clock's: an endless loop burns it, and a busy machine does not fail an honest call.
First an exception is raised in the main thread; code that cannot be interrupted (one long native call) is ended a
little later by the kernel, with the process.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_REPEAT_S = 0.05


class OutOfTime(BaseException):
    """The call used up its processor time. Not an Exception, so that no handler in between can swallow it."""


class Guard:
    """Bounds calls made in the main thread. One of these a process, made before the first call."""

    def __init__(self) -> None:
        self._armed = False
        signal.signal(signal.SIGPROF, self._on_time)

    @contextlib.contextmanager
    def limit(self, soft_s: float, hard_s: float) -> Iterator[None]:
        """Run the body for at most `soft_s` of processor time; past `hard_s` the process is ended by SIGXCPU.

        Raises OutOfTime.
        """
        try:
            _end_process_after(hard_s)
            try:
                self._armed = True
                signal.setitimer(signal.ITIMER_PROF, soft_s, _REPEAT_S)
                yield
            finally:
                self._armed = False
        finally:  # also when the signal comes just before the line above
            self._armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            _end_process_after(None)

    def _on_time(self, _number: int, _frame: FrameType | None) -> None:
        if self._armed:  # a last signal may arrive after the body ended
            raise OutOfTime


def _end_process_after(seconds: float | None) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if seconds is None:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        return
    wanted = int(time.process_time() + seconds) + 1  # the kernel counts whole seconds
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def bound_memory(more_bytes: int) -> int | None:
    """Let this process take `more_bytes` beyond what it holds now (RLIMIT_DATA); a tighter limit from outside stays.

    Returns the limit in force in bytes, or None where the system does not say what the process holds.
    """
    held = held_bytes()
    if held is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = held + more_bytes
    for limit in (soft, hard):
        if limit != resource.RLIM_INFINITY:
            wanted = min(wanted, limit)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    return wanted


def held_bytes() -> int | None:
    """What RLIMIT_DATA counts of this process now: private writable memory as reserved."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()
