"""Where the real libraries and the real model are. Without them the tests that need them say how to get them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relevo.core.errors import RelevoError


def _find(variable: str, find) -> Path:
    if given := os.environ.get(variable):
        return Path(given)
    try:
        return Path(find())
    except RelevoError as e:
        pytest.fail(f"{e.message} Or set {variable}.", pytrace=False)


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The folder of llama.cpp libraries."""
    from relevo.setup import libraries as setup

    return _find("RELEVO_TEST_LIBRARIES", setup.find)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's file: SmolLM2-135M-Instruct."""
    from relevo.setup import demo

    return _find("RELEVO_TEST_MODEL", demo.find)
