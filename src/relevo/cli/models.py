"""`relevo models`: what is served, and how to add a model file of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter

from relevo.cli.output import (
    bytes_text,
    console,
    plain,
    print_json,
    say,
    table,
)
from relevo.cli.place import NO_PLACE, NO_SERVICE_PLACE, Json, Place, ServicePlace

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

    from relevo.cli.planning.planner import Plan
    from relevo.cli.trial import Trial
    from relevo.config import Config, ModelConfig

app = cyclopts.App(name="models", help="List the models, or add one of your own.", result_action="return_value")

_SLOTS = 8


@app.command(name="list")
def list_models(*, place: ServicePlace = NO_SERVICE_PLACE, json: Json = False) -> int:
    """List the models: those of the running service with their routes, else those of the configuration."""
    from relevo.cli.running import ServiceDown, running

    try:
        with running(place) as service:
            models = list(service.get("/v1/models")["data"])
        source = "service"
    except ServiceDown:
        models = [
            {"id": name, "path": model.path, "device": model.device, "aliases": list(model.aliases),
             "context_tokens": model.context_tokens, "slots": model.slots}
            for name, model in place.load().models.items()
        ]  # fmt: skip
        source = "configuration"
    if json:
        print_json({"source": source, "models": models})
        return 0
    if not models:
        say("There is no model. Add one with `relevo models add PATH`, or try `relevo serve --demo`.")
        return 0
    made = table("" if source == "service" else "Configured; no service is running", "name", "context", "served on")
    for model in models:
        context = model.get("context_tokens") or (model.get("relevo") or {}).get("context_tokens")
        made.add_row(plain(str(model["id"])), f"{context} tokens" if context else "-", _served_on(model))
    console().print(made)
    return 0


def _served_on(model: dict[str, Any]) -> str:
    routes = model.get("routes") or (model.get("relevo") or {}).get("routes")
    if isinstance(routes, list):
        return plain(", ".join(str(r.get("route") if isinstance(r, dict) else r) for r in routes)) or "nothing now"
    return plain(f"{model['device']} and cpu" if model.get("device") else "cpu")


@app.command
def add(
    path: Annotated[Path, Parameter(name="PATH", help="A model file in GGUF form.")],
    /,
    *,
    place: Place = NO_PLACE,
    name: Annotated[str | None, Parameter(help="What clients ask for. Else made from the file.")] = None,
    context: Annotated[int | None, Parameter(help="Tokens of context. Else 8192, or what it was trained for.")] = None,
    slots: Annotated[int, Parameter(help="Requests computed together, 1 to 255.")] = _SLOTS,
    yes: Annotated[bool, Parameter(negative=(), show_default=False, help="Write without asking.")] = False,
    json: Json = False,
) -> int:
    """Add a model file: see what it takes, try one answer on the CPU, write it into the configuration.

    The configuration is changed only after the model has answered; the file before is kept beside it as `.bak`.
    """
    from relevo.cli.config_file import edit_config
    from relevo.cli.planning.planner import Planner
    from relevo.cli.planning.sizing import check_name, check_ram, name_from
    from relevo.cli.planning.view import plan_view
    from relevo.cli.trial import try_model

    planner = Planner(ServicePlace(state=place.state, config=place.config), config_may_be_missing=True)
    config = planner.paths.config
    chosen = name or name_from(path.stem)
    check_name(planner.config, chosen, given=name is not None)
    made = planner.plan(
        str(path.expanduser().absolute()),
        {"context_tokens": context, "slots": slots},
        device=_device_for(planner.config),
    )
    if not json:
        _print_plan(chosen, made)
    check_ram(made.cpu, made.host_target.available_bytes)
    if not yes:
        _ask_to_go_on(str(config), silent=json)
    model = made.sizing.model
    trial = try_model(chosen, model, libraries=planner.config.engine.libraries, chat=made.sizing.has_template)
    if not json:
        _print_trial(trial)
    kept = edit_config(config, lambda document: write_model(document, chosen, model, planner.config))
    if json:
        print_json(
            {"name": chosen, "config": str(config), "backup": None if kept is None else str(kept),
             "plan": plan_view(made), "trial": {field: getattr(trial, field) for field in trial.__slots__}}
        )  # fmt: skip
        return 0
    say(f"Written to {config}" + (f"; the file before is {kept}." if kept else "."))
    say("Start it with `relevo serve`; a Relevo that runs already takes it up at its next start.")
    return 0


def _device_for(config: Config) -> str:
    """A described device, else the card that is here, else none; never a running demo's stand-in."""
    from relevo.cli.planning.targets import described_devices

    names = [name for name, _ in described_devices(config)]
    return "gpu0" if "gpu0" in names else names[0] if names else "cpu"


def write_model(document: TOMLDocument, name: str, model: ModelConfig, config: Config) -> None:
    """The model's table, and its device's where a card was found that nobody has described."""
    from relevo.cli.config_file import put

    if model.device is not None and model.device not in config.devices:
        put(document, ("devices", model.device), {"kind": "auto"})
    put(document, ("models", name), model_fields(model))


def model_fields(model: ModelConfig) -> dict[str, Any]:
    """What has to be written of a model; all else is default."""
    usual = type(model)(path=model.path)
    fields = {
        "path": model.path,
        "device": model.device or "",
        "context_tokens": model.context_tokens,
        "slots": model.slots,
    }
    for name in ("batch_tokens", "ubatch_tokens"):  # smaller than usual where the context is
        if getattr(model, name) != getattr(usual, name):
            fields[name] = getattr(model, name)
    return fields


def _print_plan(name: str, made: Plan) -> None:
    from relevo.cli.planning.view import demand_text, head_lines

    say(f"{plain(name)}:")
    for line in head_lines(made):
        say(f"  {line}")
    if made.sizing.gpu is not None:
        say(f"  on {plain(made.sizing.target.name)}: {demand_text(made.device)}")
    else:
        say("  no GPU is described or found: it will be served on the CPU only")
    say(f"  on the CPU: {demand_text(made.cpu)}; {bytes_text(made.host_target.available_bytes)} of RAM are available")
    if not made.sizing.has_template:
        say("  It has no chat template: it completes text, and cannot chat unless you name a `chat_template`.")


def _print_trial(trial: Trial) -> None:
    speed = "" if trial.tokens_per_s is None else f", {trial.tokens_per_s:.1f} tokens/s"
    say(f"It answered on the CPU: {plain(trial.answer)}")
    say(f"  ready after {trial.load_s:.1f} s, first word after {trial.first_token_s:.2f} s{speed}")


def _ask_to_go_on(config: str, *, silent: bool) -> None:
    """Raises ConfigError unless a person says yes."""
    from relevo.core.errors import ConfigError

    if silent or not sys.stdin.isatty():
        raise ConfigError(f"Nothing was changed: pass --yes to try the model and write it to {config}.")
    if input(f"Try it and write it to {config}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("Nothing was changed.")
