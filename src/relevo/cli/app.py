"""The tree of commands."""

from __future__ import annotations

import cyclopts

import relevo
from relevo.cli import connect, devices, doctor, keys, models, plan, requests, serve, status

HELP = """One endpoint for the AI on a home server.

Relevo weighs every request, records it, and hands it over to the CPU by plan when the GPU cannot serve.

Start with `relevo serve --demo`. Exit codes: 0 done, 1 not done (the reason is on stderr), 2 wrong usage.
`--json` prints facts for programs. Colours are left out where the output is not a terminal or NO_COLOR is set.
"""


def build_app() -> cyclopts.App:
    """The whole command line. The commands' files are light; what they need is imported when they run."""
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
    app.command(serve.serve, sort_key=0)
    app.command(doctor.doctor, sort_key=1)
    app.command(status.status, sort_key=2)
    app.command(plan.plan, sort_key=3)
    app.command(connect.connect, sort_key=7)
    for order, group in enumerate((requests.app, devices.app, models.app, keys.app), 4):
        group.sort_key = order
        app.command(group)
    return app
