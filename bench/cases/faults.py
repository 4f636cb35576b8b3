"""What a client sees when the engine's process is killed: Relevo, llama.cpp's own server, LiteLLM in front of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.cases.engine import BATCH, CONTEXT, EMULATED_BYTES, SLOTS, UBATCH
from bench.cases.gateway import LiteLlm
from bench.client import Connection, Cut, Streamed
from bench.engine_files import shipped
from bench.figures import Report, spread
from bench.processes import EngineServer, Relevo, toml

STREAM_TOKENS, PLAIN_TOKENS, KILL_AT = 120, 60, 20
PROMPT = "Tell me a long story about a relay race."
PATIENCE_S, PEERS_PATIENCE_S = 20.0, 3.0


@dataclass(slots=True)
class Seen:
    """What the clients of one contender saw, repeat after repeat."""

    name: str
    streams: list[str] = field(default_factory=list)
    plains: list[str] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    next_s: list[float | None] = field(default_factory=list)
    back_s: list[float | None] = field(default_factory=list)
    killed_at: float = 0.0


def run(report: Report, *, quick: bool, litellm: Path | None = None) -> None:
    """The case."""
    report.start(
        "Faults: the engine's process is killed with SIGKILL",
        f"Real engine, one thread. A stream of {STREAM_TOKENS} tokens is cut after {KILL_AT}; then a plain call of "
        f"{PLAIN_TOKENS} tokens 0.3 s after it was sent. *Next answer*: from the kill to the first whole answer to a "
        "new small request, asked every 20 ms. *Route back*: from the kill until the killed engine serves again by "
        "itself. Relevo's GPU route is **emulated** here (its memory limits and its death are real, its arithmetic is "
        "the CPU's).",
    )
    repeats = 1 if quick else 3
    everybody: dict[str, Seen] = {}
    for _ in range(repeats):
        _relevo(everybody.setdefault("relevo", Seen("**Relevo**, GPU worker killed")), "gpu")
        _server(everybody.setdefault("server", Seen("llama.cpp's server, killed")), None)
        if litellm is not None:
            _server(everybody.setdefault("litellm", Seen("LiteLLM, its llama.cpp server killed")), litellm)
    for seen in everybody.values():
        report.say(f"- {seen.name}")
        report.say(f"  - stream, killed after {KILL_AT} tokens: {_said(seen.streams)}")
        report.say(f"  - plain call, killed meanwhile: {_said(seen.plains)}")
        next_answer = (
            spread(seen.next_s)
            if any(s is not None for s in seen.next_s)
            else f"none (asked for {PEERS_PATIENCE_S:g} s)"
        )
        back = spread(seen.back_s) if any(s is not None for s in seen.back_s) else "never (nothing restarts it)"
        report.say(f"  - next answer after s: {next_answer}; route back after s: {back}")
        report.keep("faults", through=seen.name, streams=seen.streams, plains=seen.plains, next_s=seen.next_s,
                    back_s=seen.back_s)  # fmt: skip
    if litellm is None:
        report.say("- LiteLLM: not run (name a virtual environment that has it with --litellm).")
    report.end()


def _said(all_of_them: list[str]) -> str:
    """The same thing once."""
    return "; or ".join(f"{s} ({all_of_them.count(s)} of {len(all_of_them)})" for s in dict.fromkeys(all_of_them))


# ------------------------------------------------------------------ Relevo


def _relevo(seen: Seen, route: str) -> None:
    model = {
        "path": shipped(), "device": "gpu0", "context_tokens": CONTEXT, "slots": SLOTS, "threads": 1,
        "batch_tokens": BATCH, "ubatch_tokens": UBATCH,
    }  # fmt: skip
    devices = {"gpu0": {"kind": "emulated", "total_bytes": EMULATED_BYTES}}
    with Relevo(toml({"m": model}, devices)) as service:
        for stream in (True, False):

            def kill() -> None:
                pid = next(r["pid"] for r in service.status()["replicas"] if r["route"] == route)
                os.kill(pid, signal.SIGKILL)
                seen.killed_at = time.perf_counter()

            asyncio.run(_kill_during(seen, service.port, {}, kill, stream=stream, patience_s=PATIENCE_S))
            while not all(r["state"] == "serving" for r in service.status()["replicas"]):
                time.sleep(0.02)
                if time.perf_counter() - seen.killed_at > PATIENCE_S:
                    raise RuntimeError("the killed route did not come back")
            seen.back_s.append(time.perf_counter() - seen.killed_at)
            time.sleep(0.5)


# ------------------------------------------------------------------ llama.cpp's server


def _server(seen: Seen, litellm: Path | None) -> None:
    settings = {"context": CONTEXT, "slots": SLOTS, "unified": True, "threads": 1, "repack": True, "kv": "f16",
                "batch": BATCH, "ubatch": UBATCH, "cache_ram_mib": 0}  # fmt: skip
    for stream in (True, False):
        with ExitStack() as stack:
            server = stack.enter_context(EngineServer(shipped(), **settings))
            port, headers = server.port, {}
            if litellm is not None:
                proxy = stack.enter_context(LiteLlm(litellm, server.port))
                port, headers = proxy.port, {"authorization": f"Bearer {proxy.key}"}

            def kill(server: EngineServer = server) -> None:
                server.popen.kill()
                seen.killed_at = time.perf_counter()

            asyncio.run(_kill_during(seen, port, headers, kill, stream=stream, patience_s=PEERS_PATIENCE_S))
            seen.back_s.append(None)


# ------------------------------------------------------------------ what a client sees


async def _kill_during(
    seen: Seen, port: int, headers: dict[str, str], kill: Callable[[], None], *, stream: bool, patience_s: float
) -> None:
    connection = Connection(port, headers)
    body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "ignore_eos": True}
    small = json.dumps({**body, "max_tokens": 2}).encode()
    assert (await connection.call("/v1/chat/completions", small))[0] == 200
    if stream:
        got = await connection.stream(
            "/v1/chat/completions",
            {**body, "max_tokens": STREAM_TOKENS, "stream": True},
            KILL_AT,
            kill,
        )
        seen.streams.append(_stream_words(got))
    else:
        began = time.perf_counter()
        call = asyncio.create_task(
            Connection(port, headers).call(
                "/v1/chat/completions", json.dumps({**body, "max_tokens": PLAIN_TOKENS}).encode()
            )
        )
        await asyncio.sleep(0.3)
        kill()
        try:
            status, answer_headers, answer = await call
            seen.plains.append(_plain_words(status, answer_headers, answer))
            seen.whole_s.append(time.perf_counter() - began)
        except (Cut, OSError) as e:
            seen.plains.append(f"no answer: connection {e}")
    seen.next_s.append(await _next_answer(port, headers, small, seen.killed_at, patience_s))
    connection.close()


async def _next_answer(
    port: int, headers: dict[str, str], small: bytes, since: float, patience_s: float
) -> float | None:
    while time.perf_counter() - since < patience_s:
        connection = Connection(port, headers)
        try:
            async with asyncio.timeout(patience_s):
                status, _, _ = await connection.call("/v1/chat/completions", small)
            if status == 200:
                return time.perf_counter() - since
        except (Cut, OSError, TimeoutError):
            pass
        finally:
            connection.close()
        await asyncio.sleep(0.02)
    return None


def _stream_words(got: Streamed) -> str:
    if got.cut:
        return f"connection {got.cut}: no error event, no finish, no [DONE]"
    if got.error:
        resume = ", with how to resume it" if got.error.get("resume") else ", nothing to resume it by"
        return (
            f"an error event, code {got.error.get('code')!r}{resume}; {'[DONE] follows' if got.done else 'no [DONE]'}"
        )
    return f"finished with {'[DONE]' if got.done else 'no [DONE]'}, {len(got.times)} texts"


def _plain_words(status: int, headers: dict[str, str], answer: bytes) -> str:
    if status == 200:
        used = json.loads(answer).get("usage", {}).get("completion_tokens")
        route = headers.get("x-relevo-route")
        return f"200 with all {used} tokens" + (f", from the {route} route" if route else "")
    return f"status {status}, retry-after {headers.get('retry-after', 'none')}"
