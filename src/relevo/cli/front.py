"""The HTTP side, handed to the service: it binds first, so that a taken port is found before any model loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relevo.api.app import create_app
from relevo.api.keys import KeyRing
from relevo.api.operator import OperatorKey
from relevo.api.server import HttpServer, bind
from relevo.cli.running import local_url
from relevo.service.run import Front

if TYPE_CHECKING:
    from relevo.config import Config
    from relevo.service.facade import Service
    from relevo.service.paths import Paths


def open_front(config: Config, paths: Paths) -> Front:
    """Bind the address. Raises StartupError: taken, not this machine's, or open to the network without a key."""
    keys = KeyRing(paths.keys)
    keys.operator = OperatorKey(paths.state)
    sock = bind(config.server.host, config.server.port, keys)
    host, port = sock.getsockname()[:2]
    servers: list[HttpServer] = []

    async def serve(service: Service) -> None:
        server = HttpServer(create_app(service, config, keys, address=str(host)), sock, config.limits)
        servers.append(server)
        await server.run_until_stopped()

    def stop() -> None:
        for server in servers:
            server.stop()

    return Front(url=local_url(str(host), int(port)), keys=keys.required, serve=serve, stop=stop)
