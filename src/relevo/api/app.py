"""The whole HTTP layer as one ASGI application."""

from __future__ import annotations

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from relevo.api.call import Call
from relevo.api.control import ControlRoutes
from relevo.api.door import Door
from relevo.api.front import Front
from relevo.api.health import HealthRoutes
from relevo.api.hosts import HostWall
from relevo.api.keys import KeyRing
from relevo.api.openai import OpenAIRoutes
from relevo.api.route import CALL, GuardedRoute
from relevo.api.sse import Pace
from relevo.config import Config
from relevo.core.errors import NotFound
from relevo.service.facade import Service


def create_app(
    service: Service, config: Config, keys: KeyRing, *, address: str = "127.0.0.1", pace: Pace | None = None
) -> ASGIApp:
    """The application over a service.

    `address` is the one the server is bound to (it counts as an allowed host name); `pace` sets a stream's times.
    """
    front = Front(service, config, keys, pace or Pace(send_timeout_s=config.limits.send_timeout_s))
    router = Router(all_routes(front), redirect_slashes=False, default=_nothing_here)
    return Door(router, config.limits, HostWall(config.server, address))


def all_routes(front: Front) -> list[GuardedRoute]:
    """Every address there is."""
    return [*OpenAIRoutes(front).routes(), *ControlRoutes(front).routes(), *HealthRoutes(front).routes()]


async def _nothing_here(scope: Scope, _receive: Receive, _send: Send) -> None:
    call: Call = scope[CALL]
    path = scope["path"][:120].encode("utf-8", "replace").decode()
    hint = (
        "OpenAI's routes are under /v1 (set the client's base URL to this address with /v1 behind it), "
        "Relevo's own under /relevo/v1."
    )
    raise NotFound(f"There is nothing at {call.scope['method']} {path}. {hint}")
