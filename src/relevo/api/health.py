"""Health, readiness, metrics, and a plain text at the root."""

from __future__ import annotations

from relevo import __version__
from relevo.api.call import Call
from relevo.api.front import Front
from relevo.api.route import Access, GuardedRoute


class HealthRoutes:
    """What operators and orchestrators ask."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def routes(self) -> list[GuardedRoute]:
        """The addresses, and who may use them."""
        keys = self._front.keys
        return [
            GuardedRoute("GET", "/health", self.health, access=Access.OPEN, keys=keys),
            GuardedRoute("GET", "/ready", self.ready, access=Access.OPEN, keys=keys),
            GuardedRoute("GET", "/metrics", self.metrics, access=Access.KEY, keys=keys),
            GuardedRoute("GET", "/", self.root, access=Access.KEY, keys=keys),
        ]

    async def health(self, call: Call) -> None:
        """The process lives and its loop turns."""
        await call.reply_json(self._front.service.health())

    async def ready(self, call: Call) -> None:
        """200 while any route serves, degraded or not; else 503 and why."""
        serves, body = self._front.service.ready()
        await call.reply_json(body, status=200 if serves else 503)

    async def metrics(self, call: Call) -> None:
        """Prometheus text."""
        await call.reply(200, self._front.service.metrics(), b"text/plain; version=0.0.4; charset=utf-8")

    async def root(self, call: Call) -> None:
        """What this is, and where to go on."""
        state = self._front.service.status().get("state", "unknown")
        names = ", ".join(model["id"] for model in self._front.service.models()) or "none"
        text = (
            f"Relevo {__version__}: one endpoint for the AI on a home server.\n"
            f"State: {state}\nModels: {names}\n\n"
            "OpenAI-compatible clients: use this address with /v1 behind it.\n"
            "State in full: /relevo/v1/status   Requests: /relevo/v1/requests   Health: /health and /ready\n"
            "Documentation: the docs folder of the project; `relevo doctor` checks this machine.\n"
        )
        await call.reply(200, text.encode(), b"text/plain; charset=utf-8")
