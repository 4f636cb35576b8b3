"""The program for dry runs with one device more: a stand-in for an accelerator, so that no driver is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import cffi

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.golden.accelerator import Accelerator

from relevo.workers.llama import dry_run
from relevo.workers.llama.native import find_library, load_native


def main() -> int:
    libraries = Path(sys.argv[sys.argv.index("--libraries") + 1])
    load_native(libraries, gpu=True)  # the program asks for the same and gets this one
    accelerator = Accelerator(find_library(libraries, "ggml-base"))
    ffi = cffi.FFI()
    ffi.cdef("void ggml_backend_device_register(void * device);")
    ffi.dlopen(str(find_library(libraries, "ggml"))).ggml_backend_device_register(
        ffi.cast("void *", accelerator.handle)
    )
    return dry_run.main()


if __name__ == "__main__":
    sys.exit(main())
