"""Processes: limits laid on from outside, identities, and leftovers of an earlier gateway."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from relevo.processes.identity import Identity, group_members, start_time
from relevo.processes.limits import limit_data_bytes
from relevo.replicas.process import (
    ProcessLimits,
    WorkerProcess,
    kill_leftover,
    worker_command,
    worker_environment,
)

from .fakes.replica_house import open_descriptors, process_exists, under_both_loops


async def started(
    code: str, limits: ProcessLimits | None = None, **environment: str
) -> tuple[WorkerProcess, list[Any]]:
    exits: list[Any] = []
    read, write = os.pipe()
    try:
        process = WorkerProcess.start(
            [sys.executable, "-I", "-u", "-c", code],
            name="test",
            fd=read,
            environment=worker_environment(2, environment),
            limits=limits or ProcessLimits(),
            on_exit=lambda: exits.append(1),
        )
    finally:
        os.close(read)
        os.close(write)
    return process, exits


def test_the_limits_are_laid_on_and_can_be_moved_both_ways() -> None:
    async def scenario() -> None:
        code = "import sys; print('up'); sys.stdin.read(); import time; time.sleep(60)"
        process, _ = await started(code, ProcessLimits(data_bytes=300 << 20, oom_score_adj=800))
        pid = process.pid
        assert resource.prlimit(pid, resource.RLIMIT_DATA)[0] == 300 << 20
        assert resource.prlimit(pid, resource.RLIMIT_CORE)[0] == 0
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "800"
        assert limit_data_bytes(pid, 100 << 20) and resource.prlimit(pid, resource.RLIMIT_DATA)[0] == 100 << 20
        assert limit_data_bytes(pid, 500 << 20) and resource.prlimit(pid, resource.RLIMIT_DATA)[0] == 500 << 20
        assert limit_data_bytes(pid, None)
        assert os.getpgid(pid) == os.getsid(pid) == pid
        process.kill()
        await process.wait_gone()
        assert process.return_code == -signal.SIGKILL
        assert not limit_data_bytes(pid, 1 << 20)

    under_both_loops(scenario)


def test_a_worker_gets_only_what_the_gateway_names(monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    async def scenario() -> None:
        process, exits = await started(
            "import os; print(sorted(os.environ)); print('e\\u00e9', 'last', end='')", EXTRA="1"
        )
        assert await process.wait_exit(10) and exits == [1]
        names = process.log_tail[0]
        assert "OPENAI_API_KEY" not in names and "CUDA_VISIBLE_DEVICES" in names and "EXTRA" in names
        assert "GGML_NO_BACKTRACE" in names and "OMP_NUM_THREADS" in names
        assert process.log_tail[1].endswith("last") and process.return_code == 0

    asyncio.run(scenario())
    assert worker_environment(3)["OMP_NUM_THREADS"] == "3"
    assert worker_command("llama", 7)[-4:] == ["-m", "relevo.workers.llama", "--fd", "7"]


def test_only_the_last_lines_are_kept_and_a_chatterbox_does_not_hang() -> None:
    async def scenario() -> None:
        process, _ = await started("for n in range(20000): print('line', n)\nprint('x' * 10**6)\nprint('the end')")
        assert await process.wait_exit(20)
        tail = process.log_tail
        assert len(tail) <= 201 and tail[-1] == "the end" and max(map(len, tail)) <= 500
        assert "line 19999" in tail

    under_both_loops(scenario)


def test_an_exit_is_told_once_and_leaves_no_descriptors_even_with_a_grandchild_on_the_pipe() -> None:
    async def scenario() -> None:
        before = open_descriptors()
        code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid); sys.exit(5)"
        process, exits = await started(code)
        async with asyncio.timeout(10):
            await process.wait_gone()
        assert exits == [1] and process.return_code == 5 and process.is_empty() and process.fate() == 5
        assert not process_exists(int(process.log_tail[0])) and group_members(process.pid) == []
        assert open_descriptors() == before
        process.kill()  # harmless

    under_both_loops(scenario)


def test_a_leftover_is_killed_with_its_group_only_when_it_is_the_same_process() -> None:
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    # A shell in between, so that the leftover is nobody's child here, as after a crash of the gateway.
    command = ["setsid", sys.executable, "-I", "-c", code]
    leftover = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=False)
    assert leftover.stdout is not None
    try:
        grandchild = int(leftover.stdout.readline())
        pid = os.getpgid(grandchild)
        started_at = start_time(pid)
        assert started_at is not None
        assert asyncio.run(kill_leftover(Identity(pid, started_at + 1)))
        assert process_exists(pid) and process_exists(grandchild)
        assert asyncio.run(kill_leftover(Identity(pid, started_at)))
        assert not process_exists(pid) and not process_exists(grandchild)
        assert asyncio.run(kill_leftover(Identity(pid, started_at)))
    finally:
        leftover.kill()
        leftover.wait()
        leftover.stdout.close()


def test_an_identity_tells_two_processes_of_one_number_apart() -> None:
    me = start_time(os.getpid())
    assert me is not None and me == start_time(os.getpid())
    assert start_time(2**22 + 5) is None
