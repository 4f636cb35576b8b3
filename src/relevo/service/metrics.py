"""Prometheus series of one service. Few labels; never an id or anything of a prompt."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
COMMIT_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.5, 2)


class Metrics:
    """The series, in a registry of their own so that two services in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "relevo_requests", "Requests that ended, by outcome.", ["model", "route", "outcome"], registry=r
        )
        self.refusals = Counter(
            "relevo_refusals", "Requests refused at admission, by reason.", ["model", "reason"], registry=r
        )
        self.queued = Gauge("relevo_queue_requests", "Requests waiting in a lane.", ["model", "route"], registry=r)
        self.running = Gauge("relevo_running_requests", "Requests running on a route.", ["model", "route"], registry=r)
        self.queue_wait = Histogram(
            "relevo_queue_wait_seconds",
            "Time from acceptance to the first attempt.",
            ["model", "route"],
            registry=r,
            buckets=FIRST_TOKEN_BUCKETS_S,
        )
        self.first_token = Histogram(
            "relevo_time_to_first_token_seconds",
            "Time from acceptance to the first output.",
            ["model", "route"],
            registry=r,
            buckets=FIRST_TOKEN_BUCKETS_S,
        )
        self.per_token = Histogram(
            "relevo_time_per_output_token_seconds",
            "Mean time per output token of an ended request.",
            ["model", "route"],
            registry=r,
            buckets=TOKEN_BUCKETS_S,
        )
        self.tokens = Counter("relevo_tokens", "Tokens read and written.", ["model", "route", "direction"], registry=r)
        self.handovers = Counter(
            "relevo_handovers",
            "Requests that changed route after they ran, by how they went on.",
            ["model", "outcome"],
            registry=r,
        )
        self.stale_frames = Counter("relevo_stale_frames", "Frames of an overtaken attempt, dropped.", registry=r)
        self.worker_exits = Counter(
            "relevo_worker_exits", "Worker deaths, by kind.", ["model", "route", "kind"], registry=r
        )
        self.worker_up = Gauge(
            "relevo_worker_serving", "1 while the worker of this route serves.", ["model", "route"], registry=r
        )
        self.device_leased = Gauge("relevo_device_leased_bytes", "Memory leased on a device.", ["device"], registry=r)
        self.device_available = Gauge(
            "relevo_device_available_bytes",
            "Memory a lease could still take; absent when unknown.",
            ["device"],
            registry=r,
        )
        self.breaker = Gauge(
            "relevo_breaker_state", "1 for the state the device's breaker is in.", ["device", "state"], registry=r
        )
        self.accept_commit = Histogram(
            "relevo_accept_commit_seconds",
            "Time of an acceptance's durable commit.",
            registry=r,
            buckets=COMMIT_BUCKETS_S,
        )
        self.loop_lag = Gauge("relevo_event_loop_lag_seconds", "How late the event loop's last tick was.", registry=r)

    def exposition(self) -> bytes:
        """The text that /metrics answers."""
        return generate_latest(self.registry)
