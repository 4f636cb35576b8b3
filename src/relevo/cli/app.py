"""The tree of commands."""

from __future__ import annotations

import cyclopts

import relevo

HELP = """One endpoint for the AI on a home server.

Relevo weighs every request, records it, and hands it over to the CPU by plan when the GPU cannot serve.

Start with `relevo serve --demo`. Exit codes: 0 done, 1 not done (the reason is on stderr), 2 wrong usage.
`--json` prints facts for programs. Colours are left out where the output is not a terminal or NO_COLOR is set.
"""

_COMMANDS = (
    ("serve", "relevo.cli.serve:serve", "Run the service."),
    ("doctor", "relevo.cli.doctor:doctor", "Check every link of the chain on this machine, each with its fix."),
    ("status", "relevo.cli.status:status", "Show devices, replicas and lanes of the running service."),
    ("requests", "relevo.cli.requests:app", "List, show, cancel and resume requests."),
    ("models", "relevo.cli.models:app", "List the models, or add one of your own."),
    ("keys", "relevo.cli.keys:app", "Make, list and revoke the keys that open the server."),
    ("connect", "relevo.cli.connect:connect", "Set up and test the connection from a client."),
)


def build_app() -> cyclopts.App:
    """The whole command line; a command's own file is imported when it is used."""
    app = cyclopts.App(
        name="relevo",
        help=HELP,
        help_format="markdown",
        version=f"relevo {relevo.__version__}",
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for order, (name, target, sentence) in enumerate(_COMMANDS):
        app.command(target, name=name, help=sentence, sort_key=order)
    return app
