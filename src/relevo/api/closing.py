"""Leaving an iterator in the middle: it is closed there and then, not when memory happens to be tidied."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

Item = TypeVar("Item")


@contextlib.asynccontextmanager
async def closing(items: AsyncIterator[Item]) -> AsyncIterator[AsyncIterator[Item]]:
    """Iterate inside the block; whoever waits behind a generator learns of the end when the block is left."""
    try:
        yield items
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()
