"""Fixtures of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """State and configuration of the command line's own: no test touches the user's folders or service."""
    for name in ("RELEVO_URL", "RELEVO_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RELEVO_STATE", str(tmp_path / "state"))
    config = tmp_path / "relevo.toml"
    config.write_text("# mine\n[server]\nport = 1\n")
    monkeypatch.setenv("RELEVO_CONFIG", str(config))
    return tmp_path
