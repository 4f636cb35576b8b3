"""CPU time that the gateway spends on one streamed event, against the least a gateway can do, and LiteLLM."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.client import Connection
from bench.engine_files import shipped
from bench.figures import Report, cpu_us, number, pairs_ratio, quantile, spread
from bench.processes import Process, Relevo, free_port, toml

EVENTS = 500
GAP_MS = 4.0


class BareForward(Process):
    """The yardstick's process."""

    name = "bare forward"

    def __init__(self, arguments: list[str]) -> None:
        self.port = free_port()
        super().__init__([sys.executable, "-m", "bench.bare_forward", str(self.port), *arguments])

    def _is_ready(self) -> bool:
        with suppress(OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=5).status == 200
        return False


class LiteLlm(Process):
    """LiteLLM's proxy in front of an OpenAI-compatible server, from a virtual environment of its own."""

    name = "LiteLLM"

    def __init__(self, environment: Path, upstream_port: int) -> None:
        self.port, self.key = free_port(), "sk-" + secrets.token_hex(24)
        self.folder = environment
        config = environment / f"bench-{self.port}.yaml"
        upstream = {"model": "openai/m", "api_base": f"http://127.0.0.1:{upstream_port}/v1", "api_key": "none"}
        config.write_text(
            json.dumps(
                {
                    "model_list": [{"model_name": "m", "litellm_params": upstream}],
                    "general_settings": {"master_key": self.key},
                }
            )
        )
        self._config = config
        super().__init__(
            [str(environment / "bin" / "litellm"), "--config", str(config), "--port", str(self.port), "--host",
             "127.0.0.1", "--num_workers", "1"],
            {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
             "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"},
        )  # fmt: skip

    def _is_ready(self) -> bool:
        with suppress(OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health/liveliness", timeout=5).status == 200
        return False

    def stop(self) -> None:
        """End it; its configuration goes too."""
        super().stop()
        self._config.unlink(missing_ok=True)


def fast_config(slots: int = 255) -> str:
    """Relevo around the fast worker: cells and lanes wide enough never to be the limit."""
    lane = {"queue": 4096, "deadline_s": 600.0}
    return toml(
        {
            "m": {
                "path": shipped(), "device": "", "context_tokens": 200_000 if slots > 64 else 65_536, "slots": slots,
                "threads": 1, "cpu_lane": lane,
            }
        }
    ) + "\n[host]\nbudget_bytes = 16000000000\nfloor_bytes = 100000000\n"  # fmt: skip


@dataclass(slots=True)
class Through:
    """One gateway and what was measured on it."""

    name: str
    port: int
    pid: Callable[[], int]
    headers: dict[str, str]
    us: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    rates: dict[tuple[str, int], list[float]] = field(default_factory=dict)


def run(report: Report, *, quick: bool, litellm: Path | None = None) -> None:
    """The case."""
    events = 100 if quick else EVENTS
    report.start(
        "Gateway: CPU time of one streamed event",
        f"A worker that computes nothing streams {events} texts to each of 1 or 8 clients: every {GAP_MS:g} ms (as an "
        "engine would), or as fast as it can. Counted is the CPU time of the gateway's process alone (all its threads, "
        "the journal's included; not the worker, not the text process), whole requests, divided by their events. "
        "*Bare forward*: uvicorn and a raw ASGI app that decodes the same frames and writes the same chunks, nothing "
        "else. Repeats interleaved. Goal: at most 1.3 times the bare forward.",
    )
    repeats = 2 if quick else 7
    with ExitStack() as stack:
        every: dict[str, list[Through]] = {}
        for pace, arguments in (("paced", ["--gap-ms", str(GAP_MS)]), ("flood", [])):
            bare = stack.enter_context(BareForward(arguments))
            ours = stack.enter_context(Relevo(fast_config(), fast_worker=arguments))
            every[pace] = [
                Through("**Relevo**", ours.port, lambda p=ours: p.pid, {}),
                Through("bare forward", bare.port, lambda p=bare: p.pid, {}),
            ]
            if litellm is not None:
                proxy = stack.enter_context(LiteLlm(litellm, bare.port))
                auth = {"authorization": f"Bearer {proxy.key}"}
                every[pace].append(
                    Through("LiteLLM, in front of the bare forward", proxy.port, lambda p=proxy: p.pid, auth)
                )
        for repeat in range(repeats):
            for pace, throughs in every.items():
                for streams in (1, 8):
                    for through in throughs[repeat % 2 :] + throughs[: repeat % 2]:
                        if through.name.startswith("LiteLLM") and repeat >= 3:
                            continue  # it is far off, and slow to measure
                        asyncio.run(_measure(report, through, pace, streams, events))
        idle = _idle_us(every["paced"][0])
    rows = []
    for pace, throughs in every.items():
        for streams in (1, 8):
            for through in throughs:
                us, ours_us = through.us[pace, streams], throughs[0].us[pace, streams]
                ratio = "-" if through is throughs[0] else pairs_ratio(ours_us[: len(us)], us)
                rows.append([pace, streams, through.name, spread(us), ratio, spread(through.rates[pace, streams])])
    report.table(
        ["pace", "streams", "through", "gateway CPU us an event", "Relevo / this", "events/s in all"],
        rows,
    )
    report.say(
        f"\nRelevo's gateway at rest takes {number(idle / 1e3)} ms of CPU a second (watching devices and workers)."
    )
    if litellm is None:
        report.say("LiteLLM: not run (name a virtual environment that has it with --litellm).")
    report.end()


async def _measure(report: Report, through: Through, pace: str, streams: int, events: int) -> None:
    connections = [Connection(through.port, through.headers) for _ in range(streams)]
    path = "/v1/completions"
    bodies = [
        json.dumps(
            {"model": "m", "prompt": f"Say {secrets.token_hex(8)}", "max_tokens": events, "stream": True}
        ).encode()
        for _ in connections
    ]
    warm = bodies[0].replace(f'"max_tokens": {events}'.encode(), b'"max_tokens": 4')
    await asyncio.gather(*(c.count(path, warm) for c in connections))
    await asyncio.sleep(0.05)  # what the warm-up left to be recorded
    before, began = cpu_us(through.pid()), time.perf_counter()
    counted = await asyncio.gather(*(c.count(path, b) for c, b in zip(connections, bodies, strict=True)))
    took_s, spent_us = time.perf_counter() - began, cpu_us(through.pid()) - before
    for connection in connections:
        connection.close()
    assert all(n >= events for n, _, _ in counted), counted
    through.us.setdefault((pace, streams), []).append(spent_us / (events * streams))
    through.rates.setdefault((pace, streams), []).append(events * streams / took_s)
    report.keep("gateway", through=through.name, pace=pace, streams=streams, us=spent_us / (events * streams))


def _idle_us(through: Through) -> float:
    """CPU time of one second without work."""
    seen = []
    for _ in range(3):
        before = cpu_us(through.pid())
        time.sleep(1)
        seen.append(cpu_us(through.pid()) - before)
    return quantile(seen, 0.5)
