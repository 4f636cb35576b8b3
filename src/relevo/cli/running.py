"""How a command reaches the running service: its address, a key, and errors in plain words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from relevo.cli.place import ServicePlace, load_config_at
from relevo.core.errors import ConfigError, RelevoError

if TYPE_CHECKING:
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


class Found(NamedTuple):
    """The address to try, and what is known before trying."""

    url: str
    announced: bool = False
    """The holder of the state folder says that it answers there."""
    starting_pid: int | None = None
    """A process that holds the state folder and has not said yet where it answers."""


def find_url(place: ServicePlace) -> Found:
    """Where the service is: --url, RELEVO_URL, what the holder of the state folder wrote, or the configuration."""
    from relevo.journal.folder import read_holder

    named = place.url or os.environ.get(URL_VARIABLE)
    if named:
        return Found(named.rstrip("/"))
    holder = read_holder(place.paths().state)  # the lock tells, so what a crash left behind is not believed
    if holder is None:
        return Found(configured_url(place))
    if holder.address is None:
        return Found(configured_url(place), starting_pid=holder.pid)
    return Found(holder.address.rstrip("/"), announced=True)


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


class Service:
    """One running service, over HTTP."""

    def __init__(self, client: httpx2.Client, url: str, starting_pid: int | None = None) -> None:
        self._client = client
        self._starting_pid = starting_pid
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
            if self._starting_pid is not None:
                raise ServiceDown(f"Relevo (process {self._starting_pid}) is starting or stopping.") from None
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

    found = find_url(place)
    key = place.key or os.environ.get(KEY_VARIABLE)
    if key is None and found.announced:
        from relevo.api.operator import read_operator_key

        key = read_operator_key(place.paths().state)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # no proxy from the environment: it would be asked for an address of this house
    with httpx2.Client(
        base_url=found.url, headers=headers, timeout=httpx2.Timeout(timeout_s, connect=_CONNECT_S), trust_env=False
    ) as client:
        yield Service(client, found.url, found.starting_pid)


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
