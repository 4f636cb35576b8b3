"""Fixtures of the proof: services that a test may break."""

from tests.acceptance.conftest import build

__all__ = ["build"]
