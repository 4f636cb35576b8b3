"""How a command reaches the running service: its address, a key, and errors in plain words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from relevo.cli.place import ServicePlace, load_config_at
from relevo.core.errors import ConfigError, RelevoError

if TYPE_CHECKING:
    from pathlib import Path

    import httpx2

KEY_VARIABLE = "RELEVO_KEY"
URL_VARIABLE = "RELEVO_URL"
_TIMEOUT_S = 30.0
_CONNECT_S = 3.0


class ServiceDown(RelevoError):
    """Relevo is not running. Start it with `relevo serve`."""

    code = "service_down"


class ServiceRefused(RelevoError):
    """The service refused."""

    code = "refused"


def find_url(place: ServicePlace) -> tuple[str, bool]:
    """The address to try, and whether a service is known to hold the state folder.

    In order: --url, RELEVO_URL, what the running service wrote into its state folder, the configuration.
    """
    named = place.url or os.environ.get(URL_VARIABLE)
    if named:
        return named.rstrip("/"), False
    written = written_url(place.paths().state)
    if written:
        return written.rstrip("/"), True
    return configured_url(place), False


def configured_url(place: ServicePlace) -> str:
    """Where the configuration says that the service listens, as reached from this machine."""
    try:
        server = load_config_at(place.paths()).server
    except ConfigError:
        from relevo.config import ServerConfig

        server = ServerConfig()
    return local_url(server.host, server.port)


def local_url(host: str, port: int) -> str:
    """The URL of a bound address. All-addresses is reached by loopback."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def written_url(state: Path) -> str | None:
    """Where the holder of the state folder says that it answers; None where nobody holds it.

    The lock tells, so what a crash left behind is not believed.
    """
    from relevo.journal.folder import read_holder

    holder = read_holder(state)
    return None if holder is None else holder.address


class Service:
    """One running service, over HTTP."""

    def __init__(self, client: httpx2.Client, url: str) -> None:
        self._client = client
        self.url = url

    def get(self, path: str, **query: Any) -> Any:
        """The JSON at `path`. Raises ServiceDown or ServiceRefused."""
        return self.ask("GET", path, params={k: v for k, v in query.items() if v is not None})

    def post(self, path: str, body: Any = None) -> Any:
        """Send JSON, get JSON. Raises ServiceDown or ServiceRefused."""
        return self.ask("POST", path, json={} if body is None else body)

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """One call. Raises ServiceDown or ServiceRefused with the server's own sentence."""
        import httpx2

        try:
            answer = self._client.request(method, path, **options)
        except httpx2.TimeoutException:
            raise ServiceDown(
                f"Relevo at {self.url} does not answer in time. `relevo doctor` looks for the cause."
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as e:
            raise ServiceDown(f"Relevo is not running: nothing answers at {self.url} ({_why(e)}).") from None
        if answer.status_code >= 400:
            raise ServiceRefused(_sentence(answer), detail={"status": answer.status_code})
        try:
            return answer.json()
        except ValueError:
            raise ServiceRefused(f"What answers at {self.url} is not Relevo: {path} gave no JSON.") from None


@contextmanager
def running(place: ServicePlace, *, timeout_s: float = _TIMEOUT_S) -> Iterator[Service]:
    """The service of this place. Raises ServiceDown at the first call if it does not run."""
    import httpx2

    url, _ = find_url(place)
    key = place.key or os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # no proxy from the environment: it would be asked for an address of this house
    with httpx2.Client(
        base_url=url, headers=headers, timeout=httpx2.Timeout(timeout_s, connect=_CONNECT_S), trust_env=False
    ) as client:
        yield Service(client, url)


def _why(error: Exception) -> str:
    text = str(error).strip()
    return "connection refused" if "refused" in text.lower() else text or type(error).__name__


def _sentence(answer: httpx2.Response) -> str:
    try:
        error = answer.json()["error"]
        message = error if isinstance(error, str) else str(error["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {answer.status_code} at {answer.request.url.path} without saying why."
    if answer.status_code == 401:
        return f"{message} For this command, set {KEY_VARIABLE} or pass --key."
    return message
