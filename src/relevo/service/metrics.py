"""Prometheus series of one service. Few labels; never an id or anything of a prompt."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
COMMIT_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.5, 2)


class Metrics:
    """The series, in a registry of their own so that two services in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        by_route = ["model", "route"]

        self.requests = counter("relevo_requests", "Requests that ended, by outcome.", [*by_route, "outcome"])
        self.refusals = counter("relevo_refusals", "Requests refused at admission, by reason.", ["model", "reason"])
        self.queued = gauge("relevo_queue_requests", "Requests waiting in a lane.", by_route)
        self.running = gauge("relevo_running_requests", "Requests running on a route.", by_route)
        self.tokens = counter("relevo_tokens", "Tokens read and written.", [*by_route, "direction"])
        self.handovers = counter(
            "relevo_handovers", "Requests that lost their route, by what followed.", ["model", "outcome"]
        )
        self.stale_frames = counter("relevo_stale_frames", "Frames of an overtaken attempt, dropped.")
        self.worker_exits = counter("relevo_worker_exits", "Worker deaths, by kind.", [*by_route, "kind"])
        self.worker_up = gauge("relevo_worker_serving", "1 while the worker of this route serves.", by_route)
        self.device_leased = gauge("relevo_device_leased_bytes", "Memory leased on a device.", ["device"])
        self.device_available = gauge(
            "relevo_device_available_bytes", "Memory a lease could still take; absent when unknown.", ["device"]
        )
        self.breaker = gauge("relevo_breaker_state", "1 for the state the device's breaker is in.", ["device", "state"])
        self.cells = gauge(
            "relevo_cells",
            "Cells of a route's replica: in all, leased, holding a token, set aside, free.",
            [*by_route, "what"],
        )
        self.cell_extensions = counter(
            "relevo_cell_extensions", "Leases of running answers that were raised.", by_route
        )
        self.cell_parks = counter("relevo_cell_parks", "Answers that had to wait for a cell.", by_route)
        self.cell_give_ways = counter(
            "relevo_cell_give_ways", "Requests taken out of their replica because all there waited for cells.", by_route
        )
        self.loop_lag = gauge("relevo_event_loop_lag_seconds", "How late the event loop's last tick was.")
        self.queue_wait = histogram(
            "relevo_queue_wait_seconds",
            "Time from acceptance to the first attempt.",
            by_route,
            buckets=FIRST_TOKEN_BUCKETS_S,
        )
        self.first_token = histogram(
            "relevo_time_to_first_token_seconds",
            "Time from acceptance to output.",
            by_route,
            buckets=FIRST_TOKEN_BUCKETS_S,
        )
        self.per_token = histogram(
            "relevo_time_per_output_token_seconds", "Mean of an ended request.", by_route, buckets=TOKEN_BUCKETS_S
        )
        self.accept_commit = histogram(
            "relevo_accept_commit_seconds", "Time of an acceptance's durable commit.", buckets=COMMIT_BUCKETS_S
        )

    def exposition(self) -> bytes:
        """The text that /metrics answers."""
        return generate_latest(self.registry)
