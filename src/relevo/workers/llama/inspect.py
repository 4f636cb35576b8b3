"""`python -m relevo.workers.llama.inspect --libraries DIR [--json]`: what these libraries see on this machine.

Runs as its own process, because loading a GPU backend may touch a driver that takes the process down.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relevo.core.errors import LibraryError
from relevo.workers.llama.native import cpu_variants, load_native


def facts(libraries: Path, cpu_variant: str | None = None) -> dict[str, Any]:
    """Versions, devices, CPU libraries and the one chosen. Raises LibraryError, LayoutMismatch."""
    native = load_native(libraries, cpu_variant, gpu=True)
    return {
        "libraries": str(libraries),
        "engine": native.engine,
        "commit": native.string(native.call.ggml_commit()),
        "system": native.system_info(),
        "cpu_library": native.cpu_library,
        "cpu_variants": [{"name": v.name, "file": v.path.name, "score": v.score} for v in cpu_variants(libraries)],
        "devices": [asdict(device) for device in native.devices()],
    }


def main() -> int:
    """Print the facts; 0, or 1 with one sentence on stderr (with --json also as {"error", "code"} on stdout)."""
    parser = argparse.ArgumentParser(prog="relevo.workers.llama.inspect", description=__doc__)
    parser.add_argument("--libraries", type=Path, required=True)
    parser.add_argument("--cpu-variant")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        found = facts(arguments.libraries, arguments.cpu_variant)
    except LibraryError as e:
        if arguments.json:
            print(json.dumps({"error": e.message, "code": e.code}))
        print(e.message, file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(found))
        return 0
    print(f"{found['engine']}, commit {found['commit']}")
    print(f"CPU library: {found['cpu_library'] or 'linked in'}")
    for variant in found["cpu_variants"]:
        print(f"  {variant['name'] or '(plain)':16} score {variant['score']}")
    for device in found["devices"]:
        total = device["memory_total_bytes"]
        memory = "memory unknown" if total is None else f"{device['memory_free_bytes'] >> 20} of {total >> 20} MiB free"
        print(f"{device['name']} ({device['kind']}, {device['backend']}): {device['description']}, {memory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
