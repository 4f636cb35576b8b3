"""What admission reads: a request as it was counted, and the routes of its model as they are at this moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from relevo.core.described import Described
from relevo.core.forecast import Rates
from relevo.core.loads.wish import CPU_ROUTES

PREFERENCE: Final = ("gpu", "hybrid", "cpu", "backup")
"""The ways to run a model, the quickest first. All but the last are the same model."""

PRESSED: Final = frozenset({"tight", "critical"})
"""Stages of a device's memory in which other programs want it, so new work goes elsewhere while it can."""


class Policy(Described):
    """What the client allows."""

    AUTO = "auto", "The accelerator if it can take it, else the CPU, by plan."
    GPU_ONLY = "gpu-only", "Only the accelerator; refuse or wait where it cannot."
    CPU_ONLY = "cpu-only", "Only the CPU."


class RouteState(Described):
    """Whether the replica behind a route serves."""

    SERVING = "serving", "Its replica is ready."
    STARTING = "starting", "Its replica is loading the model."
    BACKING_OFF = "backing_off", "Its replica failed and will be started again."
    GIVEN_UP = "given_up", "Its replica failed too often and waits for a person."
    STOPPED = "stopped", "It is not meant to run."


class Weighed(msgspec.Struct, frozen=True, gc=False):
    """What a request needs, counted."""

    prompt_tokens: int
    outputs: tuple[int, ...]
    """The most tokens of each choice."""
    output_is_default: bool = False
    """The client named no limit, so it may be reduced to what the context leaves."""
    may_be_cut: bool = False
    """The client named a limit, and allows a smaller one where that fits."""
    expected_outputs: tuple[int, ...] | None = None
    """What its answers are likely to need, where the client named no limit and leases grow: enough to start with."""
    priority: int = 0
    """Among requests. The lane goes by it; here it counts as what `RouteView.ahead` says of it."""
    policy: Policy = Policy.AUTO
    deadline_s: float | None = None
    """The longest the client wants to wait for the first token; None: as long as the lane allows."""


class RouteView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A route as the owner of all state sees it at this moment."""

    route: str
    device: str
    state: RouteState
    cells: int
    """As in CellPool: of the whole pool when shared, else of each slot."""
    slots: int
    shared: bool
    cells_free: int
    slots_free: int
    queued: int
    running: int
    queue_limit: int
    concurrency: int
    ahead: int | None = None
    """Of those who wait, how many would start before this request; None: all of them."""
    breaker_open: bool = False
    reopens_in_s: float | None = None
    """Until its next probe or its next start; None: not by itself."""
    cause: str | None = None
    """Why it does not serve, as a plain sentence."""
    max_context_tokens: int | None = None
    max_output_tokens: int | None = None
    rates: Rates | None = None
    load_eta_ms: float | None = None
    pressure: str = "calm"
    """Of its device's memory: calm | tight | critical | unknown."""

    @property
    def open(self) -> bool:
        """Whether work may be sent there."""
        return self.state is RouteState.SERVING and not self.breaker_open

    @property
    def on_cpu(self) -> bool:
        """Whether it needs no accelerator."""
        return self.route in CPU_ROUTES

    @property
    def pressed(self) -> bool:
        """Whether other programs want its device's memory."""
        return self.pressure in PRESSED

    @property
    def shut(self) -> bool:
        """Whether nothing new starts there although it serves: it may have to give its accelerator's memory back."""
        return self.pressure == "critical" and not self.on_cpu

    @property
    def context_tokens(self) -> int:
        """Prompt and output that one choice may have."""
        return self.cells if self.max_context_tokens is None else min(self.cells, self.max_context_tokens)

    @property
    def output_tokens(self) -> int:
        """Output that one choice may have."""
        return (
            self.context_tokens if self.max_output_tokens is None else min(self.context_tokens, self.max_output_tokens)
        )

    @property
    def has_room(self) -> bool:
        """Whether its line takes one more."""
        return self.queued < self.queue_limit

    @property
    def before_it(self) -> int:
        """How many who wait would start before the request that is weighed."""
        return self.queued if self.ahead is None else self.ahead

    def limits(self) -> dict[str, int]:
        """The `limits` of the outer contract."""
        return {
            "context_tokens": self.context_tokens,
            "max_output_tokens": self.output_tokens,
            "concurrency": self.concurrency,
        }

    def why_pressed(self) -> str:
        """Why new work should not go there, though it serves."""
        if self.pressure == "critical":
            return (
                f"Other programs have taken the memory of {self.device}: nothing new starts on the {self.route} route."
            )
        return f"Other programs want the memory of {self.device}: new work does not go to the {self.route} route."

    def why_not_open(self) -> str:
        """The cause, or what its state and breaker say."""
        if self.cause is not None:
            return self.cause
        if self.breaker_open:
            return f"The {self.route} route is closed to work until probes have succeeded on {self.device}."
        return f"The {self.route} route does not serve: {self.state.sentence}"


def in_preference(routes: Sequence[RouteView]) -> list[RouteView]:
    """The routes of a model in the order in which they are preferred; names that are not known come last."""
    return sorted(
        routes, key=lambda view: PREFERENCE.index(view.route) if view.route in PREFERENCE else len(PREFERENCE)
    )
