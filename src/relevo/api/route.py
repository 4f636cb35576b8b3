"""A route that carries its own access rule, so that no address can be reached by forgetting one."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from relevo.api.auth import identify
from relevo.api.call import Call
from relevo.api.keys import KeyRing
from relevo.core.errors import MethodNotAllowed, OperatorOnly

CALL = "relevo.call"
Handler = Callable[[Call], Awaitable[None]]


class Access(enum.Enum):
    """Who may use a route."""

    OPEN = "open"
    """Anybody who can reach the port: health checks, which say nothing about anyone's requests."""
    KEY = "key"
    """Holders of a key, once there are keys."""
    OPERATOR = "operator"
    """Whoever runs Relevo, once there are keys: no client's key is enough."""


class GuardedRoute(Route):
    """An address, its method, who may use it, and what it does. The check is inside: there is no way round it."""

    def __init__(self, method: str, path: str, handler: Handler, *, access: Access, keys: KeyRing) -> None:
        self.access = access
        self._handler = handler
        self._keys = keys
        super().__init__(path, self._run_checked, methods=[method])
        self.app = self._run_checked

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the wrong method in the family's own shape; else check and run."""
        methods = self.methods or set()
        if scope["method"] not in methods:
            call: Call = scope[CALL]
            allowed = ", ".join(sorted(methods))
            call.extra_headers.append((b"allow", allowed.encode()))
            raise MethodNotAllowed(f"{self.path_format} does not take {scope['method']}. It takes {allowed}.")
        await self._run_checked(scope, receive, send)

    async def _run_checked(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        call: Call = scope[CALL]
        identify(call, self._keys, needs_key=self.access is not Access.OPEN)
        if self.access is Access.OPERATOR and call.sees is not None:
            raise OperatorOnly
        await self._handler(call)
