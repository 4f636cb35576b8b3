"""`python -m relevo.devices.ballast --folder DIR --bytes N`: a neighbour that holds N bytes of an emulated device.

It puts a pid file into the device's folder, waits until the device governs it, then takes its memory and touches it.
It ends on SIGTERM, when its pid file is removed, or when it is killed. On standard output it says one line of JSON:
`{"holding_bytes": N}`, or `{"error": "..."}` and exit code 1 when the device does not have that much.
"""

from __future__ import annotations

import argparse
import json
import mmap
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from relevo.processes.identity import alive_since

SUFFIX: Final = ".ballast"
_PAGE_BYTES: Final = 4096
_GOVERNED_WITHIN_S: Final = 10.0


def command(folder: Path, bytes_: int) -> list[str]:
    """The command that starts a ballast process."""
    return [sys.executable, "-I", "-m", "relevo.devices.ballast", "--folder", str(folder), "--bytes", str(bytes_)]


def registered_pids(folder: Path) -> Iterator[tuple[int, int]]:
    """(pid, start in clock ticks after boot) of every pid file in a device's folder."""
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            yield int(path.name.removesuffix(SUFFIX)), int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):  # just being written, or removed
            continue


def main(arguments: Sequence[str] | None = None) -> int:
    """Register, take the memory, hold it until told. Returns 0, or 1 when it could not take it."""
    parser = argparse.ArgumentParser(prog="python -m relevo.devices.ballast", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the emulated device")
    parser.add_argument("--bytes", type=int, required=True, help="how much to hold")
    options = parser.parse_args(arguments)
    if sys.platform != "linux":
        return _fail("The emulated accelerator needs Linux.")
    if options.bytes <= 0:
        return _fail("--bytes must be positive.")
    import os

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    path = options.folder / f"{os.getpid()}{SUFFIX}"
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(str(alive_since(os.getpid())), encoding="ascii")
        partial.rename(path)
        return _hold(path, options.bytes)
    except OSError as e:
        return _fail(f"The device's folder {options.folder} cannot be used: {e.strerror or e}.")
    finally:
        path.unlink(missing_ok=True)


def _hold(path: Path, bytes_: int) -> int:
    import resource

    deadline = time.monotonic() + _GOVERNED_WITHIN_S
    while resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY:
        if time.monotonic() > deadline:
            return _fail(f"No emulated device governs the folder {path.parent}.")
        if _told_to_end(path, 0.02):
            return 0
    try:
        memory = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        return _fail(f"The device does not have {bytes_} bytes free: {e.strerror}.")
    for offset in range(0, bytes_, _PAGE_BYTES):
        memory[offset] = 1
    print(json.dumps({"holding_bytes": bytes_}), flush=True)
    while not _told_to_end(path, 0.2):
        pass
    return 0


def _told_to_end(path: Path, wait_s: float) -> bool:
    return signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, wait_s) is not None or not path.exists()


def _fail(sentence: str) -> int:
    print(json.dumps({"error": sentence}), flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
