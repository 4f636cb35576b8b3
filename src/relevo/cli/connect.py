"""`relevo connect`: what a client needs (a key, an allowed host name, an address), set up, shown and tested."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from relevo.cli.output import (
    plain,
    print_json,
    say,
)
from relevo.cli.place import NO_SERVICE_PLACE, Json, ServicePlace

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

Client = Literal["open-webui", "openai"]
DOCKER_NAME = "host.docker.internal"
DOCKER_ADDRESS = "172.17.0.1"
"""The host as containers on Docker's default bridge see it, by name and by number."""
_TEST_TIMEOUT_S = 60.0
_CONNECT_S = 2.0


@dataclass(slots=True)
class Connection:
    """What a client is told, and what became of the test."""

    client: str
    base_url: str
    key_name: str
    key: str | None = None  # shown once: None where it was made before
    hosts: list[str] = field(default_factory=list)
    hosts_added: list[str] = field(default_factory=list)
    config: str = ""
    models: list[str] = field(default_factory=list)
    reaches: bool = True  # whether the client can reach the address the server listens on
    running: bool = False
    tested: str | None = None  # through which address
    problem: str | None = None


def connect(
    client: Annotated[Client, Parameter(name="CLIENT", help="Which client.")],
    /,
    *,
    place: ServicePlace = NO_SERVICE_PLACE,
    host: Annotated[
        str | None, Parameter(help="Name or address by which the client reaches this machine, such as `server.lan`.")
    ] = None,
    json: Json = False,
) -> int:
    """Set up and test the connection from a client.

    Makes a key for it (once), allows the host name it will use, prints what to enter where, and asks the running
    service for its models and one word through that address. Exits 1 when the test fails.
    """
    made = prepare(client, place, host)
    _test(made, place)
    if json:
        print_json({name: getattr(made, name) for name in Connection.__slots__})
    else:
        _explain(made)
    return 1 if made.problem else 0


def prepare(client: Client, place: ServicePlace, host: str | None) -> Connection:
    """The key, the allowed hosts and the address. Raises RelevoError; then nothing has changed but the key file."""
    from urllib.parse import urlsplit

    from relevo.cli.config_file import edit_config
    from relevo.cli.running import find_url
    from relevo.config import is_loopback

    paths = place.paths()
    config = place.load(may_be_missing=True)
    found = find_url(place)
    listens = urlsplit(found.url)
    open_to_all = _listens_outside(listens.hostname or "", listens.port or 80, config.server.host)
    docker = client == "open-webui" and host is None
    reached = _checked_host(host) if host else DOCKER_NAME if docker else "127.0.0.1"
    wanted = [DOCKER_NAME, DOCKER_ADDRESS] if client == "open-webui" else []
    wanted += [reached] if reached not in wanted and not is_loopback(reached) else []
    added = [name for name in wanted if name not in config.server.allowed_hosts]
    if added:

        def allow(document: TOMLDocument) -> None:
            from relevo.cli.config_file import put

            put(document, ("server",), {"allowed_hosts": [*config.server.allowed_hosts, *added]})

        edit_config(paths.config, allow)
    return Connection(
        client=client,
        base_url=f"http://{_bracketed(reached)}:{listens.port or 80}/v1",
        key_name=client,
        key=_key_for(client, place),
        hosts=wanted,
        hosts_added=added,
        config=str(paths.config),
        reaches=open_to_all or is_loopback(reached),
    )


def _listens_outside(host: str, port: int, configured: str) -> bool:
    """Whether others than this machine can reach the port.

    Found by trying this machine's own addresses, since a service on all of them is announced by loopback's; by the
    configuration where nothing runs.
    """
    import socket

    import psutil  # type: ignore[import-untyped]

    from relevo.config import is_loopback

    if not is_loopback(host):
        return True
    if not _reachable(f"http://{_bracketed(host)}:{port}"):
        return not is_loopback(configured)
    own = [a.address for group in psutil.net_if_addrs().values() for a in group if a.family == socket.AF_INET]
    return any(_reachable(f"http://{address}:{port}") for address in own if not is_loopback(address))


def _checked_host(host: str) -> str:
    """A bare name or address. Raises BadRequest."""
    from relevo.api.hosts import split_host
    from relevo.core.errors import BadRequest

    text = f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host
    parts = split_host(text.encode("ascii", "replace"))
    if parts is None or parts[1] is not None:
        raise BadRequest(
            f"--host {host!r} is not a host name or address. Give it bare, such as `server.lan` or 192.168.1.5."
        )
    return parts[0]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _key_for(client: str, place: ServicePlace) -> str | None:
    """A new key for this client; None where it has a working one, which nobody can show again."""
    from relevo.cli.keys import open_ring
    from relevo.journal.folder import make_folder

    make_folder(place.paths().state)
    ring = open_ring(place)
    if any(key.name == client and key.revoked is None for key in ring.list()):
        return None
    return ring.create(client)[1]


def _test(made: Connection, place: ServicePlace) -> None:
    """Ask for the models and for one word, as the client will. Fills in what came of it."""
    from urllib.parse import urlsplit

    from relevo.cli.running import KEY_VARIABLE, find_url

    key = made.key or place.key or os.environ.get(KEY_VARIABLE)
    local = find_url(place).url
    asked = made.base_url.removesuffix("/v1")
    direct = made.reaches and _reachable(asked)
    if not direct and not _reachable(local):
        return
    made.running = True
    if key is None:
        made.problem = f"Not tested: put the key of {made.key_name} into {KEY_VARIABLE} and run this again."
        return
    # a name that only the client can resolve is tested with its Host header, at the address we can reach
    made.tested = asked if direct else f"{local} under the name {urlsplit(asked).netloc}"
    host = None if direct else urlsplit(asked).netloc
    made.problem = _ask_as_client(made, asked if direct else local, host, key)


def _ask_as_client(made: Connection, url: str, host: str | None, key: str) -> str | None:
    """GET /v1/models and a chat of one token. Returns what went wrong."""
    import httpx2

    from relevo.cli.running import Service
    from relevo.core.errors import RelevoError

    headers = {"authorization": f"Bearer {key}", **({"host": host} if host else {})}
    try:
        with httpx2.Client(base_url=url, headers=headers, timeout=_TEST_TIMEOUT_S, trust_env=False) as client:
            service = Service(client, url)
            made.models = [str(model["id"]) for model in service.get("/v1/models")["data"]]
            if not made.models:
                return "It lists no model. Add one with `relevo models add PATH`."
            body = {"model": made.models[0], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            answer = service.post("/v1/chat/completions", body)
            if not answer.get("choices"):
                return "It answered a chat without any choice."
    except RelevoError as error:
        if error.detail.get("status") == 421:
            return "The running service does not know the new host name yet: restart Relevo and run this again."
        return error.message
    except (KeyError, TypeError, AttributeError):
        return f"What answers at {url} is not Relevo."
    return None


def _reachable(url: str) -> bool:
    import socket
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=_CONNECT_S):
            return True
    except OSError:
        return False


def _explain(made: Connection) -> None:
    key = made.key or f"the key of {made.key_name} made before (lost? `relevo keys revoke {made.key_name}`, then again)"
    if made.client == "open-webui":
        say("In Open WebUI: Admin Panel, Settings, Connections, OpenAI API, +")
        say(f"  URL      {made.base_url}")
        say(f"  Key      {key}")
        if DOCKER_NAME in made.base_url:
            say(f"  Docker   start its container with --add-host={DOCKER_NAME}:host-gateway")
    else:
        say("In an OpenAI client:")
        say(f"  OPENAI_BASE_URL={made.base_url}")
        say(f"  OPENAI_API_KEY={key}")
    if made.models:
        say(f"  Model    {plain(made.models[0])}")
    if made.key is not None:
        say("The key is shown only now. With a key in place, every client of this server needs one.")
    if made.hosts_added:
        say(f"Allowed in {made.config}: {', '.join(made.hosts_added)}. Relevo takes that up at its next start.")
    if not made.reaches:
        say(
            f"Not reachable yet: Relevo listens on this machine alone. Set `host = \"0.0.0.0\"` under [server] in "
            f"{made.config} and restart it; keys are required then, and there is one now."
        )  # fmt: skip
    if not made.running:
        say("Not tested: Relevo is not running. Start it with `relevo serve` and run this again.")
    elif made.problem:
        say(f"The test failed: {plain(made.problem)}" if made.tested else plain(made.problem))
    else:
        say(f"Tested through {made.tested}: {len(made.models)} model(s) listed, and one answered.")
