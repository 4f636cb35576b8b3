"""`relevo doctor`: a line for each link of the chain, and what would mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relevo.cli.output import console, plain, print_json, say
from relevo.cli.place import NO_PLACE, Json, Place, load_config_at

if TYPE_CHECKING:
    from relevo.config import Config

_WIDTH = 14
_MARKS = {True: ("ok  ", "green"), False: ("FIX ", "bold red"), None: ("?   ", "yellow")}


def doctor(*, place: Place = NO_PLACE, json: Json = False) -> int:
    """Check every link of the chain on this machine, each with its fix. Changes nothing.

    Exits 0 when all that is needed is fine, 1 otherwise.
    """
    checks = examine(place)
    failed = [check for check in checks if check["ok"] is False]
    unclear = [check for check in checks if check["ok"] is None]
    if json:
        print_json({"ok": not failed, "checks": checks})
        return 1 if failed else 0
    from rich.text import Text

    screen = console()
    for check in checks:
        mark = _MARKS[check["ok"]]
        screen.print(Text.assemble(mark, f"{plain(check['name']):<{_WIDTH}} {plain(check['found'])}"), soft_wrap=True)
        if check["fix"]:
            screen.print(Text(f"    {'':<{_WIDTH}} {plain(check['fix'])}"), soft_wrap=True)
    say("Everything needed is fine." if not failed else f"{len(failed)} to mend.")
    if unclear:
        say(f"{len(unclear)} could not be told, and may or may not be fine.")
    return 1 if failed else 0


def examine(place: Place) -> list[dict[str, Any]]:
    """All checks as records. Never raises: a check that breaks is itself a finding."""
    from relevo.config import Config

    paths = place.paths()
    checks: list[dict[str, Any]] = []
    config: Config
    try:
        config = load_config_at(paths)
        there = str(paths.config) if paths.config.exists() else f"none at {paths.config}: defaults apply"
        checks.append(_check("configuration", True, there, ""))
    except Exception as error:  # whatever it is, the other checks still help
        config = Config()
        checks.append(_check("configuration", False, str(error), f"Correct {paths.config}."))
    try:
        from relevo.setup.checks import run_checks

        checks += [
            _check(check.name, check.ok, check.found, check.fix)
            for check in run_checks(config, paths.state, config.server.port)
        ]
        checks += _devices()
    except Exception as error:
        checks.append(
            _check("checks", False, f"The checks broke off: {type(error).__name__}: {error}", "Please report this.")
        )
    return checks


def _devices() -> list[dict[str, Any]]:
    """Each device, with what it can tell of its memory. One that cannot needs a declared budget to be used."""
    from relevo.devices.survey import survey

    fix = "Write total_bytes for this device into the configuration, or look at its driver."
    return [_check(told.name, told.known or None, told.sentence, None if told.known else fix) for told in survey()]


def _check(name: str, ok: bool | None, found: str, fix: str | None) -> dict[str, Any]:
    return {"name": name, "ok": ok, "found": found, "fix": fix or None}
