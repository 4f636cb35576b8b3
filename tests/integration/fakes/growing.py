"""Child processes that take memory when told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GROWER = Path(__file__).parent / "grower.py"


class Grower:
    """A child process that takes memory when told."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-I", str(GROWER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._line() == "ready"

    @property
    def pid(self) -> int:
        return self.popen.pid

    def grow(self, size_bytes: int) -> str:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{size_bytes}\n")
        self.popen.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def close(self) -> None:
        self.popen.kill()
        self.popen.communicate()
