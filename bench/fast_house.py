"""Relevo's real service with the benchmark's fast worker in place of the llama worker. Everything else is as served.

python -m bench.fast_house --config FILE --port P --state DIR -- ARGUMENTS-OF-THE-FAST-WORKER
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from relevo.cli.serve import serve
from relevo.replicas.replica import ReplicaSettings
from relevo.service import house

FAST_WORKER = Path(__file__).with_name("fast_worker.py")


def worker_command(arguments: list[str], fd: int) -> list[str]:
    """The fast worker, in place of `python -m relevo.workers.llama`."""
    return [sys.executable, "-I", "-u", str(FAST_WORKER), *arguments, "--fd", str(fd)]


def main() -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("worker", nargs="*")
    arguments = parser.parse_args()
    command = functools.partial(worker_command, arguments.worker)
    house.ReplicaSettings = functools.partial(ReplicaSettings, command=command)  # type: ignore
    return serve(config=arguments.config, port=arguments.port, state=arguments.state)


if __name__ == "__main__":
    sys.exit(main())
