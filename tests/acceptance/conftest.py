"""Fixtures of the acceptance tests: one service for all, or a fresh one for a test that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .house import House


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One service for all the tests that leave it as they found it."""
    h = House(tmp_path_factory.mktemp("house") / "state").start()
    yield h
    h.close()


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., House]]:
    """Makes services that a test may break; all are stopped at the end."""
    houses: list[House] = []

    def make(*arguments: str, config: str | None = None, state: str = "state") -> House:
        h = House(tmp_path / state, *arguments, config=config)
        houses.append(h)
        return h

    yield make
    for h in houses:
        h.close()
