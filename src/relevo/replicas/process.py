"""One operating-system process of ours: started, limited, watched, killed with its whole group, and known to be gone.

The order at the end matters. The group is killed while the leader is still a zombie, because until it
is reaped its number cannot belong to anybody else; only then is the leader reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from relevo.processes.identity import Identity, group_members, start_time, stat_fields
from relevo.processes.limits import keep_no_core_file, limit_data_bytes, prefer_as_victim

KEPT_LINES = 200
KEPT_LINE_CHARACTERS = 500
_READ_BYTES = 65536
_DRAIN_READS = 32
_POLL_S = 0.02

_PASSED_ON = frozenset(
    {"PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
)
_PASSED_ON_PREFIXES = ("LC_", "XDG_", "CUDA_", "NVIDIA_", "VK_", "GGML_", "HIP_", "ROCR_", "HSA_", "MESA_")


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What a worker may take. None: not limited by us."""

    data_bytes: int | None = None
    """RLIMIT_DATA: private writable memory, counted when reserved. Mapped model files do not count."""
    oom_score_adj: int | None = None
    """How gladly the kernel kills it when the machine runs out of memory: 0 to 1000."""


def worker_command(kind: str, fd: int) -> list[str]:
    """The command of a worker of this kind ("llama", "text") whose socket is file descriptor `fd`."""
    return [sys.executable, "-I", "-u", "-X", "faulthandler", "-m", f"relevo.workers.{kind}", "--fd", str(fd)]


def worker_environment(threads: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Everything a worker gets from the environment: no keys, no proxies, nothing the gateway did not name."""
    kept = {k: v for k, v in os.environ.items() if k in _PASSED_ON or k.startswith(_PASSED_ON_PREFIXES)}
    count = str(max(1, threads))
    kept |= {
        "GGML_NO_BACKTRACE": "1",  # its backtrace starts a debugger, which holds the dying process for seconds
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",  # arenas are reservations, and RLIMIT_DATA counts those
    }
    return kept | dict(extra or {})


class WorkerProcess:
    """A running worker. Create it with `start`, inside a running loop; it is gone when `wait_gone` returns.

    `on_exit` is called once from the loop, after the leader was reaped and its last output was read.
    """

    def __init__(self, popen: subprocess.Popen[bytes], name: str, on_exit: Callable[[], None]) -> None:
        self._popen = popen
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._log = logging.getLogger(f"relevo.worker.{name}")
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._rest = b""
        self._exited = asyncio.Event()
        self._statm_fd = _open_quietly(f"/proc/{popen.pid}/statm")
        self._pid_fd: int | None = None
        self.identity = Identity(popen.pid, start_time(popen.pid) or 0)
        assert popen.stdout is not None
        self._output: IO[bytes] | None = popen.stdout
        os.set_blocking(popen.stdout.fileno(), False)
        self._loop.add_reader(popen.stdout.fileno(), self._read_output)
        self._watch_exit()

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        name: str,
        fd: int,
        environment: Mapping[str, str],
        limits: ProcessLimits,
        on_exit: Callable[[], None],
    ) -> WorkerProcess:
        """Start `command` as the leader of a session of its own, with `fd` open in it.

        The limits are in force before the worker is told what to load. Raises OSError when the program
        cannot be started.
        """
        popen = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(fd,),
            env=dict(environment),
            start_new_session=True,
            bufsize=0,
        )
        try:
            process = cls(popen, name, on_exit)
        except OSError:
            popen.kill()
            popen.wait()
            raise
        keep_no_core_file(popen.pid)
        if limits.data_bytes is not None:
            limit_data_bytes(popen.pid, limits.data_bytes)
        if limits.oom_score_adj is not None:
            prefer_as_victim(popen.pid, limits.oom_score_adj)
        return process

    @property
    def pid(self) -> int:
        """Process id, and id of its group and session."""
        return self._popen.pid

    @property
    def return_code(self) -> int | None:
        """Exit code, or minus the signal's number; None while it is not reaped."""
        return self._popen.returncode

    @property
    def log_tail(self) -> tuple[str, ...]:
        """The last lines it wrote, oldest first."""
        return (*self._lines, self._rest.decode("utf-8", "replace")) if self._rest else tuple(self._lines)

    def is_empty(self) -> bool:
        """True when it has no memory map any more: it is dying or dead, whatever its exit says so far."""
        if self._exited.is_set():
            return True
        if self._statm_fd is None:
            return False
        try:
            return not os.pread(self._statm_fd, 128, 0).strip(b"0 \n")
        except ProcessLookupError:
            return True

    def fate(self) -> int | None:
        """The return code, already while the kernel is still taking the process apart. None when it cannot be known."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        fields = stat_fields(self._popen.pid)
        if fields is None or not self.is_empty():
            return None
        status = int(fields[49])  # field 52, set before the memory is let go
        return os.waitstatus_to_exitcode(status) if status else None

    def terminate(self) -> None:
        """Ask the whole group to end (SIGTERM)."""
        self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the whole group (SIGKILL, which a stopped process obeys as well)."""
        self._signal_group(signal.SIGKILL)

    async def wait_exit(self, timeout_s: float | None = None) -> bool:
        """Wait until the leader was reaped. False when the time passed first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._exited.wait()
        return self._exited.is_set()

    async def wait_gone(self) -> None:
        """Wait until the leader was reaped and nobody else of its group is alive: its memory is free then."""
        await self._exited.wait()
        await _until_empty(self.pid)

    def abandon(self) -> None:
        """Stop watching a process that will not go (it hangs inside the kernel). Frees our descriptors."""
        self._release()

    # --- output

    def _read_output(self) -> bool:
        """Take what is in the pipe, up to a limit; False when there was nothing."""
        if self._output is None:
            return False
        try:
            data = os.read(self._output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_output()
            return False
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_READ_BYTES:]
        for line in lines:
            self._keep(line)
        return True

    def _keep(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()[:KEPT_LINE_CHARACTERS]
        if text:
            self._lines.append(text)
            self._log.debug("%s", text)

    def _close_output(self) -> None:
        if self._output is not None:
            self._loop.remove_reader(self._output.fileno())
            self._output.close()
            self._output = None
        if self._rest:
            self._keep(self._rest)
            self._rest = b""

    def drain_output(self) -> None:
        """Take what is in the pipe already. Bounded: a grandchild may still be writing into it."""
        for _ in range(_DRAIN_READS):
            if not self._read_output():
                return

    # --- exit

    def _watch_exit(self) -> None:
        if hasattr(os, "pidfd_open"):
            self._pid_fd = os.pidfd_open(self._popen.pid)
            self._loop.add_reader(self._pid_fd, self._reap)
        else:  # other systems: a thread waits, and leaves the reaping to the loop
            threading.Thread(target=self._wait_elsewhere, name=f"wait-{self._popen.pid}", daemon=True).start()

    def _wait_elsewhere(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is interested any more
            self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        if self._exited.is_set():
            return
        self._signal_group(signal.SIGKILL)  # grandchildren; the zombie still holds the number
        self._popen.wait()
        self.drain_output()
        self._release()
        self._exited.set()
        self._on_exit()

    def _release(self) -> None:
        if self._pid_fd is not None:
            self._loop.remove_reader(self._pid_fd)
            os.close(self._pid_fd)
            self._pid_fd = None
        if self._statm_fd is not None:
            os.close(self._statm_fd)
            self._statm_fd = None
        self._close_output()

    def _signal_group(self, number: signal.Signals) -> None:
        if self._popen.returncode is None:  # once reaped, the number may be somebody else's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, number)


async def kill_leftover(identity: Identity, timeout_s: float = 30.0) -> bool:
    """Kill a worker that an earlier gateway left behind, with its group, and wait until its memory is free.

    Does nothing when that pid is free by now or belongs to a process that started at another time.
    Returns True when it is gone, False when it did not go within `timeout_s` (it hangs inside the kernel).
    """
    if start_time(identity.pid) != identity.start_time:
        return True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(identity.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await _until_empty(identity.pid)
            return True
    return False


async def _until_empty(group: int) -> None:
    while group_members(group):  # noqa: ASYNC110 - processes that are not our children announce nothing
        await asyncio.sleep(_POLL_S)


def _open_quietly(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
