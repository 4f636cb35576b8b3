"""llama.cpp's own HTTP server in this process, through the wheel xllamacpp: MODEL PORT SETTINGS-as-JSON.

Prints "ready PORT" when it listens. What the settings do not name is the library's default.
"""

from __future__ import annotations

import json
import signal
import sys
import time

import xllamacpp

KV_TYPES = {"f16": 1, "q8_0": 8}  # ggml.h: ggml_type


def main() -> None:
    """Serve until SIGTERM."""
    path, port, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    c = xllamacpp.CommonParams()
    c.model.path = path
    c.hostnames = ["127.0.0.1"] if isinstance(c.hostnames, list) else "127.0.0.1"
    c.port = port
    c.n_gpu_layers = 0
    c.n_ctx = settings["context"]
    c.n_parallel = settings["slots"]
    c.kv_unified = settings["unified"]
    c.cpuparams.n_threads = c.cpuparams_batch.n_threads = settings["threads"]
    if settings.get("batch"):
        c.n_batch = settings["batch"]
    if settings.get("ubatch"):
        c.n_ubatch = settings["ubatch"]
    c.no_extra_bufts = not settings["repack"]
    kinds = type(c.cache_type_k)
    c.cache_type_k = c.cache_type_v = kinds(KV_TYPES[settings["kv"]])
    c.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    c.cache_ram_mib = settings["cache_ram_mib"]
    c.verbosity = 0
    server = xllamacpp.Server(c)
    print(f"\nready {port}", server.listening_address, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
