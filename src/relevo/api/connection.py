"""The client's end of the line: knowing that it hung up, in every phase."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import NoReturn

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


class ReaderStalled(Exception):
    """The client stopped reading; its stream is given up."""


class Hangup:
    """Watches for the disconnect while a handler works. Use after the whole body was read.

    Nothing else listens while a request waits in a lane: without this a client that left would keep its place.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Hangup:
        self._task = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def happened(self) -> asyncio.Task[None]:
        """Done once the client is gone."""
        assert self._task is not None, "use `async with`"
        return self._task

    async def raise_when_gone(self) -> NoReturn:
        """Wait for the disconnect, then raise ClientGone. A side task of a group."""
        await asyncio.wait({self.happened})
        raise ClientGone

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return
