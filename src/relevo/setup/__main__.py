"""`python -m relevo.setup`: fetch the engine's libraries and the demo model, or say that they are here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from relevo.core.errors import RelevoError
from relevo.setup import demo, libraries
from relevo.setup.build import compile_from_source
from relevo.setup.machine import look_at_machine
from relevo.setup.progress import Progress, make_progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch what is asked for; with no option, both. Returns 0, or 1 after one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m relevo.setup", description=__doc__)
    parser.add_argument("--libraries", action="store_true", help="only the engine's native libraries")
    parser.add_argument("--demo", action="store_true", help="only the demo model")
    parser.add_argument("--build", action="store_true", help="build the libraries from source instead of fetching them")
    parser.add_argument("--set", choices=sorted(libraries.SETS), help="fetch this set instead of the best one")
    parser.add_argument("--quiet", action="store_true", help="say nothing unless something fails")
    options = parser.parse_args(arguments)
    both = not (options.libraries or options.demo or options.build or options.set)
    progress = make_progress(options.quiet)
    try:
        if options.build:
            progress.say(f"Libraries: built from source, in {compile_from_source(progress)}")
        elif options.libraries or options.set or both:
            _fetch_libraries(progress, options.set)
        if options.demo or both:
            progress.say(f"Demo model: {demo.fetch(progress)}")
    except RelevoError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped. Nothing half-fetched is kept; run it again to go on.", file=sys.stderr)
        return 130
    return 0


def _fetch_libraries(progress: Progress, name: str | None) -> None:
    wanted = libraries.SETS[name] if name else libraries.choose(look_at_machine())
    folder = libraries.fetch(progress, wanted)
    progress.say(f"Libraries: llama.cpp {libraries.ENGINE_RELEASE}, {wanted.about}, in {folder}")


if __name__ == "__main__":
    sys.exit(main())
