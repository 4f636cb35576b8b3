"""Tokens per second and time to first token: through Relevo, from the bare worker, from llama.cpp's own server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median as middle
from typing import Any

from bench.client import Connection
from bench.engine_files import Prompts, requantized, shipped
from bench.figures import Report, pairs_ratio, quantile, spread
from bench.processes import BareWorker, EngineServer, Relevo, toml
from relevo.core.events import StartModel
from relevo.setup import libraries

CONTEXT, SLOTS, BATCH, UBATCH, PROMPT_TOKENS = 8192, 8, 512, 128, 27
EMULATED_BYTES = 3 * 2**29
_seeds = count(int(time.time()) % 100_000 * 100)


@dataclass(frozen=True, slots=True)
class Setting:
    """A file and a profile."""

    quant: str
    path: Path
    profile: str
    emulated: bool

    @property
    def strict(self) -> bool:
        """KV as q8_0, no repacking, a part of the cache for each slot."""
        return self.profile == "strict"

    @property
    def context(self) -> int:
        """Cells of the pool (fast) or of each slot (strict)."""
        return CONTEXT // SLOTS if self.strict else CONTEXT

    def model(self) -> dict[str, Any]:
        """The model's table in the configuration."""
        return {
            "path": self.path,
            "device": "gpu0" if self.emulated else "",
            "context_tokens": self.context,
            "slots": SLOTS,
            "threads": 1,
            "profile": self.profile,
            "batch_tokens": BATCH,
            "ubatch_tokens": UBATCH,
            "flash_attention": True,
        }

    def start(self) -> StartModel:
        """The same for the bare worker."""
        return StartModel(
            model="m",
            route="cpu",
            path=str(self.path),
            libraries=str(libraries.find()),
            context_tokens=self.context,
            slots=SLOTS,
            batch_tokens=BATCH,
            ubatch_tokens=UBATCH,
            kv_type="q8_0" if self.strict else "f16",
            profile=self.profile,
            threads=1,
            repack=not self.strict,
        )

    def server(self) -> dict[str, Any]:
        """The same for llama.cpp's server."""
        return {
            "context": CONTEXT,
            "slots": SLOTS,
            "unified": not self.strict,
            "threads": 1,
            "batch": BATCH,
            "ubatch": UBATCH,
            "repack": not self.strict,
            "kv": "q8_0" if self.strict else "f16",
            "cache_ram_mib": 0,
        }


@dataclass(slots=True)
class Trial:
    """One repeat of one contender at one number of streams."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    first_ms: float
    gap_ms: float


@dataclass(slots=True)
class Contender:
    """Something that answers prompts."""

    name: str
    run: Callable[[list[list[int]], int], list[tuple[float, list[float], int]]]
    cpu_us: Callable[[], float]
    trials: dict[int, list[Trial]] = field(default_factory=dict)

    def trial(self, prompts: list[list[int]], tokens: int) -> Trial:
        """All prompts at once."""
        before = self.cpu_us()
        streams = self.run(prompts, tokens)
        cpu_s = (self.cpu_us() - before) / 1e6
        done = tokens * len(prompts)
        wall_s = max(s[1][-1] for s in streams) - min(s[0] for s in streams)
        gaps = [(b - a) * 1e3 for s in streams for a, b in zip(s[1], s[1][1:], strict=False)]
        first = quantile([(s[1][0] - s[0]) * 1e3 for s in streams], 0.5)
        trial = Trial(done / wall_s, done / cpu_s, first, quantile(gaps, 0.5))
        self.trials.setdefault(len(prompts), []).append(trial)
        return trial


def over_http(port: int, model: str, policy: str | None, **more: Any) -> Callable[..., Any]:
    """Streamed completions of token-id prompts."""

    async def one(prompt: list[int], tokens: int) -> tuple[float, list[float], int]:
        connection = Connection(port, {"x-relevo-policy": policy} if policy else None)
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        got = await connection.stream(
            "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}, **more}
        )
        connection.close()
        if got.cut or got.error or not got.times:
            raise RuntimeError(f"{got.status} {got.cut or got.error}")
        assert got.usage.get("completion_tokens") == tokens, got.usage
        return got.asked_at, got.times, int(got.usage["prompt_tokens"])

    async def all_of(prompts: list[list[int]], tokens: int) -> list[tuple[float, list[float], int]]:
        return list(await asyncio.gather(*(one(p, tokens) for p in prompts)))

    return lambda prompts, tokens: asyncio.run(all_of(prompts, tokens))


def run(report: Report, *, quick: bool) -> None:
    """The case."""
    report.start(
        "Engine: Relevo, the bare worker, llama.cpp's own server",
        f"One thread each; context {CONTEXT}, {SLOTS} slots, batch {BATCH}, micro-batch {UBATCH}, flash attention on, "
        "cache_ram 0. *fast*: KV f16, repacking on, one shared pool. *strict*: KV q8_0, no repacking, a part of the "
        f"cache for each slot; the same for all. {PROMPT_TOKENS}-token prompts (the same token ids for all, new ones "
        "each repeat), temperature 0, ignore_eos, streamed, all streams at once. Relevo and the bare worker compute "
        "with the same libraries; the server's wheel carries its own build. Repeats interleaved, order turning; "
        "median (smallest-largest). Ratios are of neighbours in a repeat.",
    )
    files = [("Q4_1 (shipped)", shipped())] + ([] if quick else [("Q4_K_M (requantized)", requantized())])
    repeats = 2 if quick else 5
    levels = [(1, 48), (8, 24)] if quick else [(1, 96), (8, 48)]
    prompts = Prompts()
    rows = []
    for quant, path in files:
        for profile in ("fast", "strict"):
            setting = Setting(quant, path, profile, emulated=profile == "fast" and path == shipped())
            rows += _compare(report, setting, prompts, levels, repeats)
    report.table(
        [
            "file, profile",
            "streams",
            "through",
            "tokens/s",
            "Relevo / this",
            "tokens per CPU s",
            "first token ms",
            "gap ms",
        ],
        rows,
    )
    report.end()


def _compare(
    report: Report, setting: Setting, prompts: Prompts, levels: list[tuple[int, int]], repeats: int
) -> list[list[str]]:
    with ExitStack() as stack:
        contenders = _contenders(setting, stack)
        for contender in contenders:
            contender.run([prompts.tokens(8, next(_seeds))], 4)  # warm up
        for repeat in range(repeats):
            for streams, tokens in levels:
                asked = [prompts.tokens(PROMPT_TOKENS, next(_seeds)) for _ in range(streams)]
                turn = repeat % len(contenders)
                for contender in contenders[turn:] + contenders[:turn]:
                    trial = contender.trial(asked, tokens)
                    report.keep(
                        "engine",
                        quant=setting.quant,
                        profile=setting.profile,
                        through=contender.name,
                        streams=streams,
                        tokens_per_s=trial.tokens_per_s,
                        tokens_per_cpu_s=trial.tokens_per_cpu_s,
                        first_ms=trial.first_ms,
                        gap_ms=trial.gap_ms,
                    )
    return [_row(setting, streams, c, contenders[0]) for streams, _ in levels for c in contenders]


def _contenders(setting: Setting, stack: ExitStack) -> list[Contender]:
    devices: dict[str, Any] = {"gpu0": {"kind": "emulated", "total_bytes": EMULATED_BYTES}} if setting.emulated else {}
    models = {"m": setting.model()}
    if not setting.strict:  # the strict profile always has flash attention
        models["default"] = {k: v for k, v in setting.model().items() if k != "flash_attention"} | {"device": ""}
    service = stack.enter_context(Relevo(toml(models, devices)))
    bare = stack.enter_context(BareWorker())
    bare.load(setting.start())
    contenders = [
        Contender("**Relevo**, CPU twin", over_http(service.port, "m", "cpu-only"), service.cpu_us),
        Contender("bare worker", bare.run, bare.cpu_us),
    ]
    try:
        server = stack.enter_context(EngineServer(setting.path, **setting.server()))
    except RuntimeError as e:
        print(f"llama.cpp's server is left out: {e}", flush=True)
    else:
        answer = over_http(server.port, "m", None, cache_prompt=False)
        contenders.append(Contender("llama.cpp's server", answer, server.cpu_us))
    if "default" in models:
        answer = over_http(service.port, "default", "cpu-only")
        contenders.append(Contender("Relevo, CPU only, its default there: no flash attention", answer, service.cpu_us))
    if setting.emulated:
        replicas = service.status()["replicas"]
        library = next(r.get("library") for r in replicas if r["route"] == "gpu")
        name = "Relevo, GPU route (**emulated**: the CPU" + (
            f" through {library})" if library else ", another library)"
        )
        contenders.append(Contender(name, over_http(service.port, "m", "gpu-only"), service.cpu_us))
    return contenders


def _row(setting: Setting, streams: int, contender: Contender, ours: Contender) -> list[str]:
    trials, own = contender.trials[streams], ours.trials[streams]
    same = contender is ours
    speed = [t.tokens_per_s for t in trials]
    ratio = "-" if same else pairs_ratio([t.tokens_per_s for t in own], speed)
    return [
        f"{setting.quant}, {setting.profile}",
        str(streams),
        contender.name,
        spread(speed),
        ratio,
        spread(t.tokens_per_cpu_s for t in trials),
        spread(t.first_ms for t in trials),
        f"{middle(t.gap_ms for t in trials):.1f}",
    ]
