"""The command line. One file a command group; each imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts import CycloptsError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 not done and why on stderr, 2 wrong usage, 130 interrupted."""
    from cyclopts import CycloptsError

    from relevo.cli.app import build_app
    from relevo.cli.output import complain
    from relevo.core.errors import RelevoError

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a letter must not end a command
            stream.reconfigure(errors="backslashreplace")
    try:
        code = build_app()(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, where a reader that went away can still be handled
    except CycloptsError as error:
        complain(_usage(error))
        return EXIT_USAGE
    except RelevoError as error:
        complain(error.message)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader went away (`| head`); nothing of this is worth a word, nor is flushing at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    return code if isinstance(code, int) else EXIT_OK


def _usage(error: CycloptsError) -> str:
    """What was wrong with the words on the command line, and where the right ones are listed."""
    command = " ".join(("relevo", *(error.command_chain or ())))
    return f"{' '.join(str(error).split())} See `{command} --help`."
