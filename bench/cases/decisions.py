"""What a decision takes: a request over three routes with a lease beside a thousand others, and a load's ladder."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from bench.figures import Report, quantile
from relevo.core.admission import RouteState, RouteView, Weighed, decide
from relevo.core.events import StartModel
from relevo.core.forecast import Rates
from relevo.core.leases.lease import Lease
from relevo.core.leases.ledger import Ledger
from relevo.core.leases.reading import Reading
from relevo.core.loads.ladder import DeviceView, Holder, LoadWish, decide_load
from relevo.core.memory.demand import Demand

GIB = 1 << 30
MIB = 1 << 20
LEASES = 1000


def run(report: Report, *, quick: bool) -> None:
    """The case."""
    report.start(
        "Decisions",
        f"In one process, nothing else in it. A request: verdict over three routes with its standby, then a lease "
        f"compared and reserved in a ledger that holds {LEASES} others; released again outside the clock. A load: "
        "the ladder over a model whose demand is a sum (so the search is timed, not the formulas). "
        "Goal: a request's p99 under 100 us.",
    )
    repeats = 500 if quick else 20_000
    rows = []
    for name, decided in (*_requests(), *_loads()):
        took_us = sorted(_timed(decided, repeats if name.startswith("request") else repeats // 10))
        row = {"p50_us": quantile(took_us, 0.5), "p99_us": quantile(took_us, 0.99)}
        report.keep("decisions", decision=name, **row)
        rows.append([name, *(f"{value:.1f}" for value in row.values())])
    report.table(["decision", "p50 us", "p99 us"], rows)
    report.end()


def _timed(decided: Callable[[], Callable[[], None] | None], repeats: int) -> list[float]:
    took_us = []
    for _ in range(repeats):
        before = time.perf_counter_ns()
        undo = decided()
        took_us.append((time.perf_counter_ns() - before) / 1e3)
        if undo is not None:
            undo()
    return took_us


def _crowded() -> Ledger:
    """A device on which a thousand leases are held, most of them seen."""
    ledger = Ledger("gpu0", headroom_bytes=0)
    ledger.observe(Reading(total_bytes=1000 * GIB, free_bytes=1000 * GIB, read_at=0.0))
    held = [ledger.request(f"holder {n}", GIB // 2, 0.0) for n in range(LEASES)]
    ledger.observe(Reading(total_bytes=1000 * GIB, free_bytes=550 * GIB, read_at=0.0))
    for lease in held[: LEASES * 9 // 10]:
        assert isinstance(lease, Lease)
        ledger.settle(lease, GIB // 2)
    return ledger


def _requests() -> list[tuple[str, Callable[[], Callable[[], None] | None]]]:
    ledger = _crowded()
    quickly, slowly = Rates(1000.0, 100.0, 2000.0), Rates(100.0, 10.0, 20_000.0)
    gpu = RouteView(
        route="gpu",
        device="gpu0",
        state=RouteState.SERVING,
        cells=8192,
        slots=8,
        shared=True,
        cells_free=8192,
        slots_free=8,
        queued=0,
        running=0,
        queue_limit=64,
        concurrency=8,
        rates=quickly,
    )
    hybrid = replace(gpu, route="hybrid", rates=slowly)
    cpu = replace(gpu, route="cpu", device="host", rates=slowly)
    busy = replace(gpu, running=8, slots_free=0, cells_free=0, queued=40)
    ask = Weighed(prompt_tokens=500, outputs=(300,), output_is_default=True)

    def with_lease(routes: list[RouteView]) -> Callable[[], Callable[[], None]]:
        def decided() -> Callable[[], None]:
            decide(ask, routes)
            lease = ledger.request("request", MIB, 0.0)
            assert isinstance(lease, Lease)
            return lambda: ledger.release(lease)

        return decided

    return [
        ("request, admitted", with_lease([gpu, hybrid, cpu])),
        ("request, to a quicker route", with_lease([busy, busy, cpu])),
        ("request, redirected from a lost device", with_lease([replace(gpu, breaker_open=True), hybrid, cpu])),
        ("request, refused", lambda: _nothing(decide(replace(ask, prompt_tokens=9000), [gpu, hybrid, cpu]))),
    ]


def _nothing(_: object) -> None:
    """There is nothing to undo."""


def _weigh(start: StartModel) -> tuple[Demand, Demand]:
    """Forty layers of 100 MiB, with 4 KiB of cache a token each."""
    here = max(0, min(start.gpu_layers, 41) - 1)
    cache = start.context_tokens * 4096 // (1 if start.kv_type == "f16" else 2)
    device = Demand(weights_bytes=here * 100 * MIB, kv_bytes=here * cache, compute_bytes=start.ubatch_tokens * MIB // 4)
    return device, Demand(weights_bytes=(40 - here) * 100 * MIB, kv_bytes=(40 - here) * cache)


def _loads() -> list[tuple[str, Callable[[], Callable[[], None] | None]]]:
    start = StartModel(
        model="m", route="gpu", path="", libraries="", device="gpu0", gpu_layers=41, context_tokens=32_768, slots=8
    )
    wish = LoadWish(
        holder="m/gpu",
        start=replace(start, ubatch_tokens=512),
        layers=40,
        allow=frozenset({"ubatch", "slots", "kv_type", "context"}),
        least_context_tokens=4096,
        offload=True,
    )
    host = DeviceView(name="host", available_bytes=64 * GIB)
    idle = tuple(
        Holder(holder=f"h{n}", bytes_=(n + 1) * 100 * MIB, idle=True, evictable=True, reload_s=float(n % 5))
        for n in range(12)
    )

    def over(available_bytes: int, holders: tuple[Holder, ...] = ()) -> Callable[[], Callable[[], None] | None]:
        device = DeviceView(name="gpu0", available_bytes=available_bytes, holders=holders)
        return lambda: _nothing(decide_load(wish, device, host, _weigh))

    full = _weigh(wish.start)[0].known_bytes
    return [
        ("load, admitted", over(full)),
        ("load, reduced", over(full * 8 // 10)),
        ("load, twelve idle replicas to choose from", over(0, idle)),
        ("load, offloaded", over(full * 3 // 10)),
        ("load, redirected", over(0)),
    ]
