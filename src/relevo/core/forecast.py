"""How long a request will take, learned from attempts that ended. Nothing learned means no estimate, never a guess."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

LONGEST_MS: Final = 24 * 3600 * 1000.0
"""No estimate says more than a day: beyond that the figure helps nobody."""

SHORTEST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 600.0
UNKNOWN_RETRY_S: Final = 10.0
"""What a client is told to wait where nothing was learned yet. A convention, not an estimate."""

_FULL_WEIGHT_TOKENS: Final = 32
"""An observation of fewer tokens weighs less: its time is mostly overhead."""

_FEWEST_OUTPUT_TOKENS: Final = 2
"""The time of one output token says nothing about the pace of the next."""

_SLOWEST_MS_PER_TOKEN: Final = 600_000.0

START_OUTPUT_TOKENS: Final = 256
"""Expected of an answer without a named limit until enough were seen: most answers of a chat are shorter."""

FEWEST_OUTPUTS: Final = 20
"""So many are needed to speak of a 95th percentile."""

OUTPUT_SHARE: Final = 0.95
"""This share of answers is expected to be no longer than what is set aside for one."""

_OUTPUTS_KEPT: Final = 512


class Rates(msgspec.Struct, frozen=True):
    """What was learned of a route at about this many requests side by side. Paces are of one request."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    request_ms: float | None = None
    """How long a request holds its place, on average."""
    output_tokens: float | None = None
    """Output of a request that named no limit, on average."""
    samples: int = 1


class Load(msgspec.Struct, frozen=True):
    """What stands before a request in a lane."""

    queued_ahead: int = 0
    running: int = 0
    concurrency: int = 1
    must_wait: bool = False
    """It cannot start now even where concurrency is left (no free cells, say)."""
    ready_in_ms: float = 0.0
    """Until the route serves at all."""


class Eta(msgspec.Struct, frozen=True):
    """Estimated times from now, for a request that takes its place now."""

    first_token_ms: float
    total_ms: float


class Unknown(msgspec.Struct, frozen=True):
    """No estimate, and why."""

    reason: str


class _Mean:
    """An exponentially weighted mean; the first value counts in full."""

    __slots__ = ("samples", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.samples = 0

    def add(self, value: float, weight: float) -> None:
        self.value = value if self.samples == 0 else self.value + weight * (value - self.value)
        self.samples += 1


class _Learned:
    """Means of one route at one level of concurrency. Times a token, not tokens a second: times add up."""

    __slots__ = ("decode_ms", "output_tokens", "prefill_ms", "request_ms")

    def __init__(self) -> None:
        self.prefill_ms = _Mean()
        self.decode_ms = _Mean()
        self.request_ms = _Mean()
        self.output_tokens = _Mean()


class Observation(msgspec.Struct, frozen=True):
    """What an attempt took. `output_tokens` is of its longest choice, because choices run side by side."""

    prompt_tokens: int
    prompt_ms: float
    output_tokens: int
    decode_ms: float
    held_ms: float | None = None
    """From its start to its end; None for one that did not complete."""
    limit_named: bool = True
    """Whether the client named an output limit."""


class OutputLengths:
    """How long the answers of one model were whose clients named no limit: the last few hundred.

    Answers of requests that named one say nothing here: they were cut, or made short on purpose.
    """

    def __init__(self, kept: int = _OUTPUTS_KEPT) -> None:
        self._kept = kept
        self._in_order: deque[int] = deque()
        self._sorted: list[int] = []
        self.added = 0
        """How many were ever added."""

    def __repr__(self) -> str:
        return f"<OutputLengths of {len(self._sorted)} answers>"

    @property
    def samples(self) -> int:
        """How many are known."""
        return len(self._sorted)

    @property
    def values(self) -> list[int]:
        """All that are known, oldest first: to be kept over a restart."""
        return list(self._in_order)

    def add(self, tokens: int) -> None:
        """An answer is complete."""
        if len(self._in_order) >= self._kept:
            self._sorted.remove(self._in_order.popleft())
        self._in_order.append(tokens)
        self.added += 1
        insort(self._sorted, tokens)

    def expected(self, limit: int, drawn: int = 0) -> int:
        """Tokens that an answer will have in all, which 95 % of those that came as far as this one did not exceed.

        Where fewer than FEWEST_OUTPUTS came that far: what it has and START_OUTPUT_TOKENS more. Never above `limit`.
        """
        first = bisect_right(self._sorted, drawn) if drawn else 0
        longer = len(self._sorted) - first
        if longer < FEWEST_OUTPUTS:
            return min(limit, drawn + START_OUTPUT_TOKENS)
        return min(limit, self._sorted[first + math.ceil(OUTPUT_SHARE * longer) - 1])


class Forecast:
    """Learns from attempts. `weight` is what a new observation counts against the past."""

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self._learned: dict[str, dict[int, _Learned]] = {}
        self.outputs = OutputLengths()
        """Of the model, whatever the route."""

    def __repr__(self) -> str:
        routes = ", ".join(f"{route} at {sorted(levels)}" for route, levels in sorted(self._learned.items()))
        return f"<Forecast of {routes or 'nothing yet'}>"

    def observe(self, route: str, concurrency: int, seen: Observation) -> None:
        """Learn from an attempt on a route that ran beside others, `concurrency` of them in all.

        What makes no sense as a time (negative, not finite, nothing at all) is passed over.
        """
        learned = self._learned.setdefault(route, {}).setdefault(_level(concurrency), _Learned())
        prefill = _ms_per_token(seen.prompt_tokens, seen.prompt_ms)
        if prefill is not None:
            learned.prefill_ms.add(prefill, self._weight_of(seen.prompt_tokens))
        if seen.output_tokens >= _FEWEST_OUTPUT_TOKENS:
            decode = _ms_per_token(seen.output_tokens, seen.decode_ms)
            if decode is not None:
                learned.decode_ms.add(decode, self._weight_of(seen.output_tokens))
        if seen.held_ms is not None and 0 < seen.held_ms < LONGEST_MS:
            learned.request_ms.add(seen.held_ms, self._weight)
            if not seen.limit_named:
                learned.output_tokens.add(float(seen.output_tokens), self._weight)

    def _weight_of(self, tokens: int) -> float:
        return self._weight * min(1.0, tokens / _FULL_WEIGHT_TOKENS)

    def rates(self, route: str, concurrency: int) -> Rates | None:
        """What is known at this concurrency, else at the nearest learned; None before prompt and output were seen."""
        complete = {
            level: learned
            for level, learned in self._learned.get(route, {}).items()
            if learned.prefill_ms.samples and learned.decode_ms.samples
        }
        if not complete:
            return None
        wanted = _level(concurrency)
        learned = complete[min(complete, key=lambda level: (abs(math.log2(level / wanted)), level))]
        return Rates(
            prefill_tokens_per_s=1000.0 / learned.prefill_ms.value,
            decode_tokens_per_s=1000.0 / learned.decode_ms.value,
            request_ms=learned.request_ms.value if learned.request_ms.samples else None,
            output_tokens=learned.output_tokens.value if learned.output_tokens.samples else None,
            samples=learned.decode_ms.samples,
        )


def _level(concurrency: int) -> int:
    """1, 2, 4, 8, ...: the power of two at or above. Finer steps would never see enough requests."""
    return 1 << (max(1, concurrency) - 1).bit_length()


def _ms_per_token(tokens: int, ms: float) -> float | None:
    if tokens < 1 or not math.isfinite(ms) or ms <= 0:
        return None
    return min(ms / tokens, _SLOWEST_MS_PER_TOKEN)


def wait_ms(rates: Rates | None, load: Load) -> float | None:
    """Until a request that takes its place now starts; None when it must wait and nothing says how long.

    Places come free at the pace at which running requests end: `concurrency` of them in `request_ms`.
    """
    must_wait = load.must_wait or load.queued_ahead > 0 or load.running >= load.concurrency
    if not must_wait:
        return min(LONGEST_MS, load.ready_in_ms)
    if rates is None or rates.request_ms is None:
        return None
    # Before the route serves nothing runs there, and the first `concurrency` in the line start together.
    before = (
        load.queued_ahead + 1 if load.running or load.must_wait else max(0, load.queued_ahead + 1 - load.concurrency)
    )
    return min(LONGEST_MS, load.ready_in_ms + before * rates.request_ms / load.concurrency)


def estimate(
    rates: Rates | None, prompt_tokens: int, outputs: Sequence[int], load: Load, *, output_is_default: bool = False
) -> Eta | Unknown:
    """First token = wait + prompt at the learned pace; total = first token + the longest output at the learned pace.

    A limit the client did not name is rarely reached: there the learned average output counts, where it is less.
    """
    if rates is None:
        return Unknown("No request has run on this route yet.")
    wait = wait_ms(rates, load)
    if wait is None:
        return Unknown("No request has completed on this route yet, so the wait in its lane is not known.")
    output = float(max(outputs, default=0))
    if output_is_default and rates.output_tokens is not None:
        output = min(output, rates.output_tokens)
    first = min(LONGEST_MS, wait + 1000.0 * prompt_tokens / rates.prefill_tokens_per_s)
    return Eta(first_token_ms=first, total_ms=min(LONGEST_MS, first + 1000.0 * output / rates.decode_tokens_per_s))


def retry_after_s(rates: Rates | None, concurrency: int) -> float:
    """When a full lane should have a place again: the time in which one request ends. Between 1 s and 10 min."""
    if rates is None or rates.request_ms is None:
        return UNKNOWN_RETRY_S
    return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, math.ceil(rates.request_ms / 1000.0 / max(1, concurrency))))
