"""Requests a second that are durably accepted, answered and durably ended, over HTTP."""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.cases.gateway import fast_config
from bench.client import Connection
from bench.figures import Report, cpu_us, file_system, quantile, spread
from bench.processes import Relevo


def run(report: Report, *, quick: bool) -> None:
    """The case."""
    folder = Path(tempfile.gettempdir())
    report.start(
        "Accepts per second over HTTP",
        f"Clients in a closed loop, each call one token from a worker that answers at once; record on the disk "
        f"({file_system(folder)}). Every counted request was committed at its acceptance and at its end. The clients, "
        "the gateway, the text process and the worker share the machine's cores. Goal: 500 a second.",
    )
    seconds, repeats = (1.0, 1) if quick else (3.0, 3)
    rows = []
    with ExitStack() as stack:
        service = stack.enter_context(Relevo(fast_config(), fast_worker=[]))
        seen: dict[tuple[str, int], list[dict[str, float]]] = {}
        for _ in range(repeats):
            for kind in ("chat", "completion of token ids"):
                for clients in (8, 64, 128):
                    one = asyncio.run(_load(service, kind, clients, seconds))
                    seen.setdefault((kind, clients), []).append(one)
                    report.keep("accepts", kind=kind, clients=clients, **one)
    for (kind, clients), found in seen.items():
        rows.append(
            [
                kind,
                clients,
                *(spread(f[c] for f in found) for c in ("per_s", "p50_ms", "p99_ms", "gateway_us", "rows_per_s")),
            ]
        )
    report.table(
        ["kind", "clients", "requests/s", "p50 ms", "p99 ms", "gateway CPU us a request", "journal rows/s (about)"],
        rows,
    )
    report.say("\nJournal rows: acceptance with its move, start of the attempt with its move, end of the attempt, end.")
    report.end()


async def _load(service: Relevo, kind: str, clients: int, seconds: float) -> dict[str, float]:
    took: list[float] = []
    refused = 0
    stop = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal refused
        connection = Connection(service.port)
        while time.perf_counter() < stop:
            said = {"messages": [{"role": "user", "content": f"Say {secrets.token_hex(8)}."}]} if kind == "chat" else {
                "prompt": [1, 2, 3, *secrets.token_bytes(4)]
            }  # fmt: skip
            path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
            before = time.perf_counter()
            status, _, _ = await connection.call(path, json.dumps({"model": "m", "max_tokens": 1, **said}).encode())
            took.append((time.perf_counter() - before) * 1e3)
            refused += status != 200
        connection.close()

    cpu, began = cpu_us(service.pid), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    wall_s = time.perf_counter() - began
    assert not refused, f"{refused} of {len(took)} were refused"
    per_s = len(took) / wall_s
    return {
        "per_s": per_s,
        "p50_ms": quantile(took, 0.5),
        "p99_ms": quantile(took, 0.99),
        "gateway_us": (cpu_us(service.pid) - cpu) / len(took),
        "rows_per_s": per_s * 6,
    }
