"""Loads as a worker does, for files that have no tokenizer to probe with: prints what the engine then said it took."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from relevo.core.events import StartModel
from relevo.workers.llama.model import find_device, load_weights, make_context
from relevo.workers.llama.native import load_native
from relevo.workers.llama.native_log import reported_bytes


def main() -> None:
    """One StartModel as JSON on stdin."""
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=StartModel)
    native = load_native(Path(start.libraries), gpu=start.device != "cpu")
    weights = load_weights(native, start, find_device(native, start))
    make_context(native, weights, start)
    told = reported_bytes(native.log, start.device if start.device != "cpu" else None)
    sys.stdout.buffer.write(msgspec.json.encode(told))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
