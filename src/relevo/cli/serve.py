"""`relevo serve`: run the service in the foreground."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from relevo.cli.output import bytes_text, plain
from relevo.cli.place import Place, load_config_at

if TYPE_CHECKING:
    from relevo.config import Config
    from relevo.service.paths import Paths
    from relevo.service.run import Announcement

Demo = Annotated[
    bool, Parameter(name="--demo", negative=(), show_default=False, help="Serve a small built-in model, on a GPU "
                    "if one is usable, else on an emulated one.")
]  # fmt: skip


def serve(
    *,
    config: Annotated[Path | None, Parameter(help="Configuration file. Else RELEVO_CONFIG, else your own.")] = None,
    demo: Demo = False,
    host: Annotated[str | None, Parameter(help="Address to listen on, instead of the configuration's.")] = None,
    port: Annotated[int | None, Parameter(help="Port to listen on; 0 lets the system choose.")] = None,
    state: Annotated[Path | None, Parameter(help="State folder. Else RELEVO_STATE, else your own.")] = None,
) -> int:
    """Run the service until it is interrupted or told to stop.

    Prints where it listens and what it has once it is ready. Exits 0 after a clean stop, 1 if it cannot start.
    """
    paths = Place(state=state, config=config).paths()
    loaded = override(load_config_at(paths), host=host, port=port)
    if demo:
        from relevo.cli.demo import demo_config

        loaded = demo_config(loaded)
    check_models(loaded, paths)

    from relevo.cli.front import open_front
    from relevo.core.errors import DeviceError
    from relevo.service.run import configure_logging, run_service

    def announce(said: Announcement) -> None:
        print(render_announcement(said), flush=True)

    configure_logging()
    print(f"Starting {', '.join(loaded.models)}; the state folder is {paths.state} ...", flush=True)
    try:
        return run_service(loaded, paths, announce=announce, listen=lambda: open_front(loaded, paths))
    except DeviceError as error:
        if not demo:
            raise
        hint = f"To try the demo without the card, describe [devices.gpu0] as emulated in {paths.config}."
        raise DeviceError(f"{error.message} {hint}") from None


def override(config: Config, *, host: str | None, port: int | None) -> Config:
    """What the command line says wins over the file. Raises ConfigError."""
    import msgspec

    from relevo.core.errors import ConfigError

    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is not a port: it must be 0 to 65535.")
    server = msgspec.structs.replace(
        config.server,
        host=config.server.host if host is None else host,
        port=config.server.port if port is None else port,
    )
    return msgspec.structs.replace(config, server=server)


def check_models(config: Config, paths: Paths) -> None:
    """There is a model to serve. Raises ConfigError."""
    from relevo.core.errors import ConfigError

    if not config.models:
        there = "names none" if paths.config.exists() else "does not exist"
        raise ConfigError(
            f"There is no model to serve: {paths.config} {there}. "
            "Add one with `relevo models add PATH`, or try `relevo serve --demo`."
        )


def render_announcement(said: Announcement) -> str:
    """What a person needs right after the start: the address, a line to try, what there is, where the state lies."""
    lines = [f"Relevo is ready at {said.url}"]
    lines += [f"  {device_line(device)}" for device in said.devices]
    lines += [f"  {model_line(model)}" for model in said.models]
    lines.append(f"  state    {said.state}")
    if said.recovered:
        lines.append(f"  {said.recovered} request(s) of an earlier run were taken up again: `relevo requests list`")
    lines += [f"  WARNING  {plain(warning)}" for warning in said.warnings]
    if said.models:
        lines += ["", "Try it:", curl_line(said.url, str(said.models[0]["id"]), keys=said.keys)]
    if said.keys:
        lines.append("(RELEVO_KEY holds a key; `relevo keys create NAME` makes one.)")
    lines += ["", f"Look at it with `relevo status{_state_option(said.state)}`; stop it with Ctrl-C."]
    return "\n".join(lines)


def _state_option(state: str) -> str:
    """What another shell has to add to find this service; nothing where it lies in its own place."""
    from relevo.service.paths import find_paths

    return "" if Path(state) == find_paths(environment={}).state else f" --state {quote(state)}"


def device_line(device: dict[str, Any]) -> str:
    """One device: what it is, whether it is emulated, how much memory it has."""
    from relevo.cli.status import kind_text

    what = plain(str(device.get("description") or kind_text(device)))
    if device.get("emulated") and "emulated" not in what:
        what += ", emulated"
    return f"device   {plain(str(device.get('name')))}: {what}; {bytes_text(device.get('total_bytes'))}"


def model_line(model: dict[str, Any]) -> str:
    """One model and its routes."""
    routes = [_route_text(route) for route in model.get("routes") or []]
    return f"model    {plain(str(model['id']))}: " + (" and ".join(routes) or "no route")


def _route_text(route: Any) -> str:
    if not isinstance(route, dict):
        return plain(str(route))
    device = f" on {route['device']}" if route.get("device") else ""
    return plain(f"{route.get('route') or route.get('name')}{device}")


def curl_line(url: str, model: str, *, keys: bool) -> str:
    """One line for a shell that asks the model something. The key stays in the environment, out of the history."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
    header = ' -H "Authorization: Bearer $RELEVO_KEY"' if keys else ""
    return f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d {quote(body)}"


def quote(text: str) -> str:
    """As one word of a POSIX shell."""
    import shlex

    return shlex.quote(text)
