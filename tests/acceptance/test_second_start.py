"""Who would take a place that is taken, or open one to everybody, is told so in one sentence and does not start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .house import House


def refusal(state: Path, port: int, *arguments: str) -> str:
    """The one sentence of a service that does not start."""
    command = [
        sys.executable,
        "-m",
        "relevo",
        "serve",
        "--demo",
        "--state",
        str(state),
        "--port",
        str(port),
        *arguments,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=40, stdin=subprocess.DEVNULL, check=False)
    assert ended.returncode == 1, (ended.returncode, ended.stdout, ended.stderr)
    said = [line for line in ended.stderr.splitlines() if line and not line.startswith("timestamp=")]
    assert len(said) == 1 and said[0].endswith("."), ended.stderr
    return said[0]


def test_a_second_service_on_the_same_state_folder_names_the_holder(house: House) -> None:
    assert house.process is not None
    assert str(house.process.pid) in refusal(house.state, 0)
    assert house.status()["state"] == "ok"


def test_a_port_that_is_taken_is_said(house: House, tmp_path: Path) -> None:
    assert str(house.port) in refusal(tmp_path / "state", house.port)


def test_an_open_address_needs_keys(tmp_path: Path) -> None:
    assert "keys create" in refusal(tmp_path / "state", 0, "--host", "0.0.0.0")
