"""The docs say what the program says."""

from __future__ import annotations

from pathlib import Path

from relevo.core.request import mermaid

DOCS = Path(__file__).parents[2] / "docs"


def test_the_design_page_draws_the_request_states_as_the_table_has_them() -> None:
    assert f"```mermaid\n{mermaid()}```" in (DOCS / "design.md").read_text(encoding="utf-8")
