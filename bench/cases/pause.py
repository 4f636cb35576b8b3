"""How long a running stream pauses while another's long prompt is read, and what that costs the prompt."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from itertools import count
from typing import Any

from bench.cases.engine import BATCH, CONTEXT, SLOTS, UBATCH
from bench.client import Connection, Streamed
from bench.engine_files import Prompts, shipped
from bench.figures import Report, median, number, quantile, spread
from bench.processes import EngineServer, Relevo, toml

CHUNKS = (16, 32, 64, 128)
DEFAULT_CHUNKS = (64, 128)
_seeds = count(int(time.time()) % 100_000 * 100 + 7)


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
        # (name, port, model, whose prompt alone it is compared with: a chunk size plays no part there)
        contenders = [(f"Relevo, chunk {c}", service.port, f"chunk-{c}", "ours") for c in chunks]
        contenders += [
            (f"Relevo, no flash attention (its default on CPUs), chunk {name.removeprefix('default-')}",
             service.port, name, "ours without flash attention")
            for name in default
        ]  # fmt: skip
        for name, batch in (("llama.cpp's server, default n_batch 2048", None), ("llama.cpp's server, n_batch 64", 64)):
            settings = {"context": CONTEXT, "slots": SLOTS, "unified": True, "threads": 1, "repack": True, "kv": "f16"}
            sizes = {"batch": batch, "ubatch": min(batch or UBATCH, UBATCH), "cache_ram_mib": 0}
            try:
                server = stack.enter_context(EngineServer(shipped(), **settings, **sizes))
            except RuntimeError:
                continue
            contenders.append((name, server.port, "m", name))
        seen: dict[str, list[dict[str, float]]] = {name: [] for name, *_ in contenders}
        for repeat in range(repeats):
            alone: dict[str, float] = {}
            turn = contenders[repeat % len(contenders) :] + contenders[: repeat % len(contenders)]
            for name, port, model, kin in turn:
                if kin not in alone:
                    alone[kin] = asyncio.run(_alone(port, model, prompts, prompt_tokens))
                stream_tokens = 250 if quick else 900
                figures = asyncio.run(_beside(port, model, prompts, prompt_tokens, stream_tokens))
                figures["alone_s"] = alone[kin]
                seen[name].append(figures)
                report.keep("pause", through=name, prompt_tokens=prompt_tokens, **figures)
    rows = [_row(name, seen[name]) for name, *_ in contenders]
    report.table(
        ["through", "pause ms, longest", "gap ms, p50 during", "gap ms, p50 before", "texts during",
         "prompt s, alone", "prompt s, beside", "beside / alone", "beside / alone, less the stream's own share"],
        rows,
    )  # fmt: skip
    report.say(
        "\nThe last column takes the running stream's own tokens out: (prompt beside - texts during x gap before) / "
        "alone. What is left is what small chunks cost."
    )
    report.end()


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


async def _alone(port: int, model: str, prompts: Prompts, size: int) -> float:
    """Time to first token of a long prompt, in seconds, with nothing beside it."""
    await _ask(port, model, prompts.tokens(8, next(_seeds)), 4)
    got = await _ask(port, model, prompts.tokens(size, next(_seeds)), 2)
    return got.first_ms / 1e3


async def _beside(port: int, model: str, prompts: Prompts, size: int, long_stream: int) -> dict[str, float]:
    """The same beside a running stream, and what became of that."""
    await _ask(port, model, prompts.tokens(8, next(_seeds)), 4)
    started = asyncio.Event()
    running = asyncio.create_task(
        _ask(port, model, prompts.tokens(27, next(_seeds)), long_stream, at=24, then=started.set)
    )
    await started.wait()
    beside = await _ask(port, model, prompts.tokens(size, next(_seeds)), 2)
    began, until = beside.asked_at, beside.times[0]
    stream = await running
    assert stream.ended_at > until, "the running stream ended too early to be measured"
    during = stream.gaps_ms(began, until)
    return {
        "pause_ms": max(during),
        "gap_during_ms": quantile(during, 0.5),
        "gap_before_ms": quantile(stream.gaps_ms(0, began), 0.5),
        "texts_during": float(len(during)),
        "beside_s": beside.first_ms / 1e3,
    }


async def _ask(port: int, model: str, prompt: list[int], tokens: int, at: int = 0, then: Any = None) -> Streamed:
    connection = Connection(port)
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    got = await connection.stream("/v1/completions", {**body, "stream": True, "cache_prompt": False}, at, then)
    connection.close()
    if got.cut or got.error or not got.times:
        raise RuntimeError(f"{got.status} {got.cut or got.error}")
    return got


def _row(name: str, seen: list[dict[str, float]]) -> list[str]:
    own = [(s["beside_s"] - s["texts_during"] * s["gap_before_ms"] / 1e3) / s["alone_s"] for s in seen]
    columns = ("pause_ms", "gap_during_ms", "gap_before_ms", "texts_during", "alone_s", "beside_s")
    return [
        name,
        *(spread(s[c] for s in seen) for c in columns),
        number(median(s["beside_s"] / s["alone_s"] for s in seen)),
        number(median(own)),
    ]
