"""`python -m bench [CASE ...] [--quick] [--json FILE] [--litellm FOLDER] [--trace FILE] [--node FOLDER]`: measurements.

Everything runs on loopback. Cases: engine latency gateway accepts journal pause faults decisions cells memory.
None named: all.
"""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

from bench.figures import Report, machine

CASES = ("latency", "gateway", "accepts", "journal", "decisions", "cells", "memory", "faults", "engine", "pause")


def main() -> None:
    """Run what was named."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=f"of: {' '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="few repeats of small work: to see that it runs")
    parser.add_argument("--json", type=Path, help="also append every measurement to this file, a JSON line each")
    parser.add_argument("--litellm", type=Path, help="a virtual environment with litellm[proxy], to measure it too")
    parser.add_argument("--trace", type=Path, action="append", help="request lengths for `cells`: an Azure LLM trace")
    parser.add_argument("--node", type=Path, help="a folder with node-llama-cpp in its node_modules, for `memory`")
    arguments = parser.parse_args()
    report = Report(arguments.json)
    began = time.monotonic()
    report.say("# Benchmarks" + (" (quick: not for quoting)" if arguments.quick else "") + "\n")
    for line in machine():
        report.say(line)
    for name in CASES:
        if arguments.cases and name not in arguments.cases:
            continue
        case = importlib.import_module(f"bench.cases.{name}")
        more = {"litellm": arguments.litellm} if name in ("gateway", "faults") else {}
        if name == "cells":
            more = {"traces": arguments.trace or ()}
        if name == "memory":
            more = {"node": arguments.node}
        case.run(report, quick=arguments.quick, **more)
    report.say(f"\nAll of it took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
