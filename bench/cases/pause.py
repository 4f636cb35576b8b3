"""How long a running stream pauses while another's long prompt is read, and what that costs the prompt."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any

from bench.cases.engine import BATCH, CONTEXT, SLOTS, UBATCH
from bench.client import Connection, Streamed
from bench.engine_files import Prompts, shipped
from bench.figures import Report, cpu_us, median, number, quantile, spread
from bench.processes import EngineServer, Relevo, toml

CHUNKS = (16, 32, 64, 128)
DEFAULT_CHUNKS = (64,)
_seeds = count(int(time.time()) % 100_000 * 100 + 7)


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine that answers on a port, and its process."""

    name: str
    port: int
    model: str
    pid: int
    kin: str
    """Whose prompt alone it is compared with: a chunk size plays no part there."""


def run(report: Report, *, quick: bool) -> None:
    """The case."""
    prompt_tokens = 600 if quick else 4000
    chunks = CHUNKS[1:3] if quick else CHUNKS
    report.start(
        f"Pause: a running stream while another's {prompt_tokens:,}-token prompt is read",
        f"Q4_1, one thread, micro-batch {UBATCH}, KV f16, flash attention on unless said. A stream runs; after 24 "
        "tokens a second request comes with the long prompt. *Pause* is the longest time between two texts of the "
        "running stream while the prompt is read; *prompt time* is the second request's time to first token, beside "
        "the stream and alone. "
        "Goal: at most 300 ms, for at most 25 % more prompt time than alone.",
    )
    repeats = 1 if quick else 2
    prompts = Prompts()
    with ExitStack() as stack:
        plain = {f"chunk-{c}": _model(c) for c in chunks}
        default = {f"default-{c}": _model(c, flash=False) for c in chunks if c in DEFAULT_CHUNKS}
        service = stack.enter_context(Relevo(toml({**plain, **default})))
        pids = {r["model"]: int(r["pid"]) for r in service.status()["replicas"]}
        contenders = [
            Contender(f"Relevo, chunk {c}", service.port, f"chunk-{c}", pids[f"chunk-{c}"], "ours") for c in chunks
        ]
        contenders += [
            Contender(
                f"Relevo, no flash attention (its default on CPUs), chunk {name.removeprefix('default-')}",
                service.port,
                name,
                pids[name],
                "ours without flash attention",
            )
            for name in default
        ]
        contenders += _servers(stack)
        seen: dict[str, list[dict[str, float]]] = {c.name: [] for c in contenders}
        for repeat in range(repeats):
            alone: dict[str, float] = {}
            turn = contenders[repeat % len(contenders) :] + contenders[: repeat % len(contenders)]
            for c in turn:
                if c.kin not in alone:
                    alone[c.kin] = asyncio.run(_alone(c, prompts, prompt_tokens))
                figures = asyncio.run(_beside(c, prompts, prompt_tokens, 250 if quick else 900))
                figures["alone_cpu_s"] = alone[c.kin]
                seen[c.name].append(figures)
                report.keep("pause", through=c.name, prompt_tokens=prompt_tokens, **figures)
    rows = [_row(c.name, seen[c.name]) for c in contenders]
    report.table(
        ["through", "pause ms, longest", "pause CPU ms, longest", "gap CPU ms, p50 during", "before", "texts during",
         "prompt CPU s, alone", "prompt CPU s, beside", "beside / alone", "less the stream's own share"],
        rows,
    )  # fmt: skip
    report.say(
        "\nCPU: of the engine's process, one thread, so what the wall clock shows on a core of its own, whatever else "
        "the machine does. The last column takes the running stream's own tokens out: (prompt beside - texts during "
        "x gap before) / alone. What is left is what small chunks cost."
    )
    report.end()


def _servers(stack: ExitStack) -> list[Contender]:
    """llama.cpp's own server as it comes and with small batches; one that does not start is left out."""
    found = []
    for name, batch in (("llama.cpp's server, default n_batch 2048", None), ("llama.cpp's server, n_batch 64", 64)):
        settings = {"context": CONTEXT, "slots": SLOTS, "unified": True, "threads": 1, "repack": True, "kv": "f16"}
        sizes = {"batch": batch, "ubatch": min(batch or UBATCH, UBATCH), "cache_ram_mib": 0}
        try:
            server = stack.enter_context(EngineServer(shipped(), **settings, **sizes))
        except RuntimeError:
            continue
        found.append(Contender(name, server.port, "m", server.pid, name))
    return found


def _model(chunk: int, *, flash: bool = True) -> dict[str, Any]:
    return {
        "path": shipped(),
        "device": "",
        "context_tokens": CONTEXT,
        "slots": SLOTS,
        "threads": 1,
        "batch_tokens": BATCH,
        "ubatch_tokens": UBATCH,
        "flash_attention": flash,
        "prefill_chunk_tokens": chunk,
    }


async def _alone(c: Contender, prompts: Prompts, size: int) -> float:
    """What a long prompt takes until its first token with nothing beside it, in CPU seconds of the engine."""
    await _ask(c, prompts.tokens(8, next(_seeds)), 4)
    before = cpu_us(c.pid)
    got = await _ask(c, prompts.tokens(size, next(_seeds)), 2, stamp=lambda: cpu_us(c.pid))
    return (got.stamps[0] - before) / 1e6


async def _beside(c: Contender, prompts: Prompts, size: int, long_stream: int) -> dict[str, float]:
    """The same beside a running stream, and what became of that."""
    await _ask(c, prompts.tokens(8, next(_seeds)), 4)
    started = asyncio.Event()

    def cpu() -> float:
        return cpu_us(c.pid)

    running = asyncio.create_task(
        _ask(c, prompts.tokens(27, next(_seeds)), long_stream, at=24, then=started.set, stamp=cpu)
    )
    await started.wait()
    before = cpu()
    beside = await _ask(c, prompts.tokens(size, next(_seeds)), 2, stamp=cpu)
    began, until = beside.asked_at, beside.times[0]
    stream = await running
    assert stream.ended_at > until, "the running stream ended too early to be measured"
    during = stream.gaps_ms(began, until)
    cpu_gaps = [
        (b - a) / 1e3
        for a, b, at, to in zip(stream.stamps, stream.stamps[1:], stream.times, stream.times[1:], strict=False)
        if to > began and at < until
    ]
    calm = [(b - a) / 1e3 for a, b in zip(stream.stamps[4:22], stream.stamps[5:23], strict=True)]
    return {
        "pause_ms": max(during),
        "pause_cpu_ms": max(cpu_gaps),
        "gap_during_cpu_ms": quantile(cpu_gaps, 0.5),
        "gap_before_cpu_ms": quantile(calm, 0.5),
        "texts_during": float(len(during)),
        "beside_cpu_s": (beside.stamps[0] - before) / 1e6,
        "beside_s": beside.first_ms / 1e3,
    }


async def _ask(
    c: Contender, prompt: list[int], tokens: int, *, at: int = 0, then: Any = None, stamp: Any = None
) -> Streamed:
    connection = Connection(c.port)
    body = {"model": c.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    got = await connection.stream("/v1/completions", {**body, "stream": True, "cache_prompt": False}, at, then, stamp)
    connection.close()
    if got.cut or got.error or not got.times:
        raise RuntimeError(f"{got.status} {got.cut or got.error}")
    return got


def _row(name: str, seen: list[dict[str, float]]) -> list[str]:
    own = [(s["beside_cpu_s"] - s["texts_during"] * s["gap_before_cpu_ms"] / 1e3) / s["alone_cpu_s"] for s in seen]
    columns = (
        "pause_ms", "pause_cpu_ms", "gap_during_cpu_ms", "gap_before_cpu_ms", "texts_during", "alone_cpu_s",
        "beside_cpu_s",
    )  # fmt: skip
    return [
        name,
        *(spread(s[c] for s in seen) for c in columns),
        number(median(s["beside_cpu_s"] / s["alone_cpu_s"] for s in seen)),
        number(median(own)),
    ]
