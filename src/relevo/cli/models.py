"""`relevo models`: what is served, and how to add a model file of one's own."""

from __future__ import annotations

import re
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

    from relevo.cli.sizing import Sizing
    from relevo.cli.trial import Trial
    from relevo.config import ModelConfig

app = cyclopts.App(name="models", help="List the models, or add one of your own.", result_action="return_value")

_SLOTS = 8
_CONTEXT_TOKENS = 8192


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
    from relevo.cli.sizing import size_up
    from relevo.cli.trial import try_model

    paths = place.paths()
    sizing = size_up(place, path, name=name, context_tokens=context, slots=slots)
    if not json:
        _print_sizing(sizing)
    sizing.check_fits()
    if not yes:
        _ask_to_go_on(str(paths.config), silent=json)
    trial = try_model(sizing.name, sizing.model, libraries=sizing.config.engine.libraries, chat=sizing.has_template)
    if not json:
        _print_trial(trial)
    from relevo.cli.config_file import edit_config

    kept = edit_config(paths.config, lambda document: write_model(document, sizing))
    if json:
        print_json(
            {"name": sizing.name, "config": str(paths.config), "backup": None if kept is None else str(kept),
             "plan": sizing.view(), "trial": {field: getattr(trial, field) for field in trial.__slots__}}
        )  # fmt: skip
        return 0
    say(f"Written to {paths.config}" + (f"; the file before is {kept}." if kept else "."))
    say("Start it with `relevo serve`; a Relevo that runs already takes it up at its next start.")
    return 0


def write_model(document: TOMLDocument, sizing: Sizing) -> None:
    """The model's table, and its device's where that is new."""
    from relevo.cli.config_file import put

    for name, fields in sizing.new_devices.items():
        put(document, ("devices", name), fields)
    put(document, ("models", sizing.name), model_fields(sizing.model))


def model_fields(model: ModelConfig) -> dict[str, Any]:
    """What has to be written of a model; all else is default."""
    return {
        "path": model.path,
        "device": model.device or "",
        "context_tokens": model.context_tokens,
        "slots": model.slots,
    }


def name_from(text: str) -> str:
    """A name that clients can type, from a file's: without its number format, in small letters."""
    text = re.sub(r"(?i)[._-](i?q\d\w*|b?f16|f32|mxfp4\w*)$", "", text)
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")
    return re.sub(r"-{2,}", "-", name)[:64] or "model"


def _print_sizing(sizing: Sizing) -> None:
    header = sizing.header
    say(
        f"{plain(sizing.name)}: {plain(header.name or 'a model without a name')}, {plain(header.architecture)}, "
        f"mostly {header.quantization}, {bytes_text(header.file_bytes)}; "
        f"{sizing.model.context_tokens} tokens of context, {sizing.model.slots} at once"
    )
    for line in sizing.lines():
        say(f"  {line}")
    if not sizing.has_template:
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
