"""What is said of a process: who it is, what it holds, and that a stranger with its number is not it."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys

import pytest

from relevo.processes.identity import Identity, alive_since, group_members, is_alive, kill_group, start_time
from relevo.processes.limits import limit_data_bytes, prefer_as_victim
from relevo.processes.memory import (
    anonymous_bytes,
    data_bytes,
    peak_resident_bytes,
    proportional_bytes,
    resident_bytes,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads what only the Linux kernel tells")

MIB = 1 << 20
NOBODY = 2**22 + 5


def test_a_zombie_has_a_start_time_and_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-I", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    began = start_time(child.pid)
    assert began is not None and alive_since(child.pid) is None
    assert not is_alive(Identity(child.pid, began))
    child.wait()
    assert start_time(child.pid) is None


def test_a_process_is_itself_and_not_one_that_had_its_number() -> None:
    began = alive_since(os.getpid())
    assert began is not None and is_alive(Identity(os.getpid(), began))
    assert not is_alive(Identity(os.getpid(), began - 1))


def test_reserved_and_touched_memory_are_told_apart() -> None:
    me = os.getpid()
    before = data_bytes(me), anonymous_bytes(me), proportional_bytes(me)
    block = mmap.mmap(-1, 96 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        reserved, resident, proportional = data_bytes(me), anonymous_bytes(me), proportional_bytes(me)
        assert None not in (*before, reserved, resident, proportional)
        assert reserved - before[0] == 96 * MIB  # type: ignore[operator]
        assert resident - before[1] < 8 * MIB  # type: ignore[operator]
        for offset in range(0, 64 * MIB, 4096):
            block[offset] = 1
        assert (anonymous_bytes(me) or 0) - before[1] > 56 * MIB  # type: ignore[operator]
        assert (proportional_bytes(me) or 0) - before[2] > 56 * MIB  # type: ignore[operator]
        assert (peak_resident_bytes(me) or 0) >= (resident_bytes(me) or 0) > 64 * MIB
    finally:
        block.close()


def test_nothing_is_said_of_a_process_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    for figure in (data_bytes, resident_bytes, peak_resident_bytes, anonymous_bytes, proportional_bytes, alive_since):
        assert figure(NOBODY) is None
    assert group_members(NOBODY) == []
    kill_group(NOBODY)
    assert not limit_data_bytes(NOBODY, MIB) and not prefer_as_victim(NOBODY, 500)
    assert caplog.records == []


def test_a_leader_is_killed_with_its_group() -> None:
    code = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    leader = subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    grandchild = int(leader.stdout.readline())
    assert sorted(group_members(leader.pid)) == sorted([leader.pid, grandchild])
    kill_group(leader.pid)
    assert leader.wait(5) == -signal.SIGKILL
    leader.stdout.close()
    while alive_since(grandchild) is not None:
        pass
