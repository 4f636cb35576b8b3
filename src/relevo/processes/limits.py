"""Limits that are laid on another process from outside. Each returns whether it is in force; why not is logged.

A process that is gone already is no reason for a word: whoever waits for it learns so.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

_log = logging.getLogger("relevo.limits")


def available() -> bool:
    """Whether this system lets us limit a running process. Only Linux does."""
    return sys.platform == "linux"


def limit_data_bytes(pid: int, data_bytes: int | None) -> bool:
    """Set RLIMIT_DATA of a running process; None lifts it. May be raised and lowered again while it runs.

    Below what the process holds already, its next allocation fails and nothing else happens. It counts
    private writable memory when it is reserved, and neither mapped files nor shared memory.
    """
    return _limit(pid, "RLIMIT_DATA", data_bytes)


def keep_no_core_file(pid: int) -> bool:
    """A crash writes no core file: it would hold prompts, and gigabytes."""
    return _limit(pid, "RLIMIT_CORE", 0)


def prefer_as_victim(pid: int, oom_score_adj: int) -> bool:
    """Tell the kernel whom to kill first when memory runs out: 0 (like others) to 1000 (first)."""
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(oom_score_adj), encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError as e:
        _log.warning("The kernel's choice of a victim could not be set for process %s: %s.", pid, e)
        return False
    return True


def _limit(pid: int, name: str, value: int | None) -> bool:
    if sys.platform != "linux":
        _log.info("%s of a running process is not available here: only Linux has it.", name)
        return False
    import resource

    number = getattr(resource, name)
    try:
        # Only the soft limit: without privileges a lowered hard limit could never be raised again.
        _, hard = resource.prlimit(pid, number)
        soft = hard if value is None else value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.prlimit(pid, number, (soft, hard))
    except ProcessLookupError:
        return False
    except (OSError, ValueError) as e:
        _log.warning("%s could not be set for process %s: %s.", name, pid, e)
        return False
    return True
