"""What Relevo adds to one call that is not streamed, with the syncs of its record reported apart."""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.cases.gateway import BareForward, fast_config
from bench.cases.journal import one_commit_ms
from bench.client import Connection
from bench.fast_house import worker_command
from bench.figures import Report, file_system, number, quantile
from bench.processes import BareWorker, Relevo
from relevo.core.events import StartModel

WORKER_MS = 20.0
MEMORY = Path("/dev/shm")


def run(report: Report, *, quick: bool) -> None:
    """The case."""
    disk = Path(tempfile.gettempdir())
    report.start(
        "Latency: what Relevo adds to one call of one token",
        f"A worker that answers after {WORKER_MS:g} ms without computing, so that only what stands around it differs. "
        "*Added* is the client's whole call (keep-alive) less the same worker's own time over its socket, asked in "
        "turn. The *bare forward* of the next case shows what HTTP alone costs here. The record on the disk "
        f"({file_system(disk)} here) costs one sync at the end of the call (the one at its "
        "acceptance happens while the worker works); in memory (tmpfs) a sync costs nothing, so what is left there is "
        "what is added besides the sync. Goal: under 1 ms besides the sync.",
    )
    calls = 50 if quick else 400
    arguments = ["--first-ms", str(WORKER_MS)]
    with ExitStack() as stack:
        bare = stack.enter_context(BareWorker(worker_command(arguments, 0)[:-2]))
        bare.load(StartModel("m", "cpu", "none", "none"))
        places = [("on the disk", disk)]
        if file_system(MEMORY) == "tmpfs":
            places.append(("in memory (no sync)", MEMORY))
        services = [
            (name, stack.enter_context(Relevo(fast_config(), state_in=folder, fast_worker=arguments)))
            for name, folder in places
        ]
        forward = stack.enter_context(BareForward(arguments))
        own_ms, took = asyncio.run(_calls(bare, [(n, s.port) for n, s in services], forward.port, calls))
    base = quantile(own_ms, 0.5)
    rows = [["the bare worker itself", number(base), number(quantile(own_ms, 0.9)), "-", "-"]]
    for (name, kind), ms in took.items():
        report.keep("latency", record=name, kind=kind, p50_ms=quantile(ms, 0.5), added_ms=quantile(ms, 0.5) - base)
        p50, p90 = quantile(ms, 0.5), quantile(ms, 0.9)
        what = f"{kind}, record {name}" if name else kind
        added = [f"{p50 - base:.2f}", f"{quantile(ms, 0.25) - quantile(own_ms, 0.25):.2f}"]
        rows.append([what, number(p50), number(p90), *added])
    report.table(["call", "p50 ms", "p90 ms", "added, p50 ms", "added, p25 ms"], rows)
    sync = one_commit_ms(disk, 50 if quick else 200)
    report.say(f"\nOne commit of the journal alone, on the disk: p50 {sync['p50']} ms, p99 {sync['p99']} ms.")
    report.end()


async def _calls(
    bare: BareWorker, services: list[tuple[str, int]], forward_port: int, calls: int
) -> tuple[list[float], dict[tuple[str, str], list[float]]]:
    own: list[float] = []
    took: dict[tuple[str, str], list[float]] = {}
    connections = {name: Connection(port) for name, port in services}
    forward = Connection(forward_port)
    for number_of_call in range(calls + 10):
        prompt = f"Say {secrets.token_hex(8)}."
        [(asked, times, _)] = bare.run([[1, 2, 3]], 1)
        if number_of_call >= 10:
            own.append((times[-1] - asked) * 1e3)
        before = time.perf_counter()
        await forward.call("/", b'{"max_tokens": 1}')
        if number_of_call >= 10:
            took.setdefault(("", "bare forward (uvicorn and nothing else)"), []).append(
                (time.perf_counter() - before) * 1e3
            )
        for name, connection in connections.items():
            for kind, path, said in (
                ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}),
                ("completion of token ids", "/v1/completions", {"prompt": [1, 2, 3, number_of_call]}),
            ):
                body = json.dumps({"model": "m", "max_tokens": 1, **said}).encode()
                before = time.perf_counter()
                status, _, answer = await connection.call(path, body)
                spent = (time.perf_counter() - before) * 1e3
                assert status == 200, answer
                if number_of_call >= 10:
                    took.setdefault((name, kind), []).append(spent)
    return own, took
