"""How the next token is chosen: llama.cpp's sampler chain, in numpy, with a counter for its random number.

Order, as llama.cpp's own: logit bias, penalties, top-k, top-p, min-p, temperature, draw. The remaining candidates are
sorted by probability descending, then id ascending, and the draw of (seed, choice, position) picks one.
Penalties count the last `penalty_last_tokens` of prompt and output together, as llama.cpp's server does; that count is
a fold over those tokens and the only state there is, so a choice resumed from its tokens goes on as if never stopped.

No loop runs over the vocabulary. The k best are found through the maxima of blocks: the k-th largest block maximum is
a lower bound for the k-th largest logit, so only blocks at least that large can hold one of the k best.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from relevo.core.draw import uniform
from relevo.core.events import Sampling

_BLOCK: Final = 64
_FIRST_LEADERS: Final = 256  # how many sorted candidates are looked at before more are

Floats = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


class NotFinite(Exception):
    """The logits are not numbers: the computation went wrong."""


def wrong_with(sampling: Sampling, vocabulary_tokens: int) -> str | None:
    """One sentence about the first value out of range, or None. Top-k of 0 or less is off."""
    finite = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repeat_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )
    bias = sampling.logit_bias
    rules = (
        (all(map(math.isfinite, finite)), "Sampling values must be finite numbers."),
        (0 <= sampling.seed < 1 << 64, "The seed must lie between 0 and 2**64 - 1."),
        (sampling.temperature >= 0, "The temperature must not be negative."),
        (0 <= sampling.top_p <= 1, "top_p must lie between 0 and 1."),
        (0 <= sampling.min_p <= 1, "min_p must lie between 0 and 1."),
        (sampling.repeat_penalty > 0, "The repeat penalty must be greater than 0."),
        (-1 <= sampling.penalty_last_tokens <= 1 << 24, "penalty_last_tokens must be -1 (all), 0 (off) or a count."),
        (all(0 <= t < vocabulary_tokens for t in bias), "The logit bias names a token that the vocabulary lacks."),
        (all(v < math.inf for v in bias.values()), "Logit biases must be numbers below infinity."),
    )
    return next((sentence for holds, sentence in rules if not holds), None)


class Leaders:
    """A row of logits from which the largest are taken in order. One for all rows of a worker: `fill` reuses it.

    Block j holds the logits j, j + stride, j + 2 * stride ...: the maxima are then whole-row operations.
    """

    def __init__(self, vocabulary_tokens: int) -> None:
        self._size = vocabulary_tokens
        self._stride = -(-vocabulary_tokens // _BLOCK)
        self._padded = np.full(self._stride * _BLOCK, -np.inf, np.float32)
        self._own: npt.NDArray[np.float32] = self._padded[:vocabulary_tokens]
        self._maxima = np.zeros(self._stride, np.float32)
        self._borrows = vocabulary_tokens % _BLOCK == 0
        self.row: npt.NDArray[np.float32] = self._own
        self._blocks = self._padded.reshape(_BLOCK, self._stride)
        self.largest = 0.0

    def fill(self, logits: Floats) -> None:
        """Look at this row until the next `fill`. Raises NotFinite for NaN, for +inf, and when everything is -inf."""
        if self._borrows:
            self.row = logits
            self._blocks = logits.reshape(_BLOCK, self._stride)
            self.measure()
        else:
            np.copyto(self._own, logits)
            self.measure()

    def own(self) -> npt.NDArray[np.float32]:
        """The row as a copy that may be changed; call `measure` afterwards."""
        if self.row is not self._own:
            np.copyto(self._own, self.row)
            self.row = self._own
            self._blocks = self._padded.reshape(_BLOCK, self._stride)
        return self._own

    def measure(self) -> None:
        """Find the maxima, again after the row was changed. Raises NotFinite."""
        np.max(self._blocks, axis=0, out=self._maxima)
        self.largest = float(self._maxima.max())  # NaN wins every maximum
        if not math.isfinite(self.largest):
            raise NotFinite

    def best(self, count: int) -> tuple[Ids, npt.NDArray[np.float64]]:
        """Ids and logits of the `count` largest: logit descending, then id ascending."""
        if count >= self._stride // 2:
            if count >= self._size:
                return self._sorted(np.arange(self._size), count)
            bound = np.partition(self.row, self._size - count)[self._size - count]
            return self._sorted(np.flatnonzero(self.row >= bound), count)
        return self.above(float(np.partition(self._maxima, self._stride - count)[-count]), count)

    def above(self, bound: float, count: int | None = None) -> tuple[Ids, npt.NDArray[np.float64]]:
        """Ids and logits of at most `count` that are at least `bound`, in the same order."""
        columns = np.flatnonzero(self._maxima >= bound)
        lines, found = np.nonzero(self._blocks[:, columns] >= bound)
        return self._sorted(lines * self._stride + columns[found], count)  # line by line: ids ascend

    def _sorted(self, ids: Ids, count: int | None) -> tuple[Ids, npt.NDArray[np.float64]]:
        logits = self.row[ids].astype(np.float64)
        order = np.argsort(-logits, kind="stable")[:count]  # ids ascend already, so ties keep the lowest first
        return ids[order], logits[order]

    def mass(self, temperature: float) -> float:
        """Sum over the whole row of exp((logit - largest) / temperature)."""
        shifted = np.subtract(self.row, self.largest, dtype=np.float64)
        if temperature != 1:
            shifted /= temperature
        return float(np.exp(shifted, out=shifted).sum())


class Sampler:
    """Chooses the tokens of one choice of one request."""

    def __init__(self, sampling: Sampling, choice: int, leaders: Leaders) -> None:
        self._sampling = sampling
        self._choice = choice
        self._leaders = leaders
        bias = sorted(sampling.logit_bias.items())
        self._bias_ids = np.array([token for token, _ in bias], np.int64)
        self._bias = np.array([value for _, value in bias], np.float32)
        self._penalizes = sampling.penalty_last_tokens != 0 and not (
            sampling.repeat_penalty == 1 and sampling.frequency_penalty == 0 and sampling.presence_penalty == 0
        )
        self._recent: deque[int] = deque()
        self._counts: Counter[int] = Counter()

    def fold(self, tokens: Sequence[int]) -> None:
        """These tokens follow those folded before: prompt first, then output as it is drawn."""
        if not self._penalizes:
            return
        window = self._sampling.penalty_last_tokens
        if 0 <= window <= len(tokens):
            self._recent = deque(tokens[len(tokens) - window :])
            self._counts = Counter(self._recent)
            return
        for token in tokens:
            self._recent.append(token)
            self._counts[token] += 1
            if 0 <= window < len(self._recent):
                oldest = self._recent.popleft()
                self._counts[oldest] -= 1
                if not self._counts[oldest]:
                    del self._counts[oldest]

    def draw(self, logits: Floats, position: int) -> int:
        """The token at this output position. It is not folded yet. Raises NotFinite."""
        leaders = self._leaders
        leaders.fill(logits)
        if self._bias_ids.size or self._penalizes:
            self._adjust()
        if self._sampling.temperature == 0:
            return int(leaders.row.argmax())
        return self._pick(uniform(self._sampling.seed, self._choice, position))

    def _adjust(self) -> None:
        """Logit bias, then penalties, as llama.cpp computes them (in 32 bits)."""
        row = self._leaders.own()
        if self._bias_ids.size:
            row[self._bias_ids] += self._bias
        if self._counts:
            ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            repeat = np.float32(self._sampling.repeat_penalty)
            seen = row[ids]
            seen = np.where(seen <= 0, seen * repeat, seen / repeat)
            frequency, presence = self._sampling.frequency_penalty, self._sampling.presence_penalty
            row[ids] = seen - (counts * np.float32(frequency) + np.float32(presence))
        self._leaders.measure()

    def _pick(self, drawn: float) -> int:
        sampling, leaders = self._sampling, self._leaders
        if sampling.top_k > 0:
            ids, logits = leaders.best(sampling.top_k)
            total = None
        elif sampling.min_p > 0:  # top-p and min-p both keep a head of the same order, so either may go first
            ids, logits = leaders.above(self._min_p_bound())
            total = leaders.mass(1.0) if sampling.top_p < 1 else None
        else:
            return self._pick_from_all(drawn)
        if sampling.top_p < 1:
            kept = _nucleus(logits, leaders.largest, sampling.top_p, total)
            logits = logits[: len(logits) if kept is None else kept]
        if sampling.min_p > 0:
            bound = self._min_p_bound()
            logits = logits[: max(1, int(np.searchsorted(-logits, -bound, side="right")))]
        return int(ids[_chosen(logits, sampling.temperature, drawn)])

    def _pick_from_all(self, drawn: float) -> int:
        """Neither top-k nor min-p: look at ever more leaders until the answer lies among them."""
        sampling, leaders = self._sampling, self._leaders
        narrowed = sampling.top_p < 1
        total = leaders.mass(1.0 if narrowed else sampling.temperature)
        count = _FIRST_LEADERS
        while True:
            ids, logits = leaders.best(count)
            everything = len(ids) == len(leaders.row)
            if narrowed:
                kept = _nucleus(logits, leaders.largest, sampling.top_p, total)
                if kept is not None or everything:
                    return int(ids[_chosen(logits[:kept], sampling.temperature, drawn)])
            else:
                weights = np.exp((logits - logits[0]) / sampling.temperature).cumsum()
                if everything or drawn * total < weights[-1]:
                    at = int(np.searchsorted(weights, drawn * total, side="right"))
                    return int(ids[min(at, int(np.searchsorted(weights, weights[-1])))])
            count *= 8

    def _min_p_bound(self) -> float:
        return self._leaders.largest + math.log(self._sampling.min_p)


def _nucleus(logits: npt.NDArray[np.float64], largest: float, top_p: float, total: float | None) -> int | None:
    """How many of the sorted candidates make up `top_p`, at least one; None: more than these. No `total`: of these."""
    weights = np.exp(logits - largest).cumsum()
    reached = int(np.searchsorted(weights, top_p * (weights[-1] if total is None else total), side="left"))
    return reached + 1 if reached < len(weights) else None


def _chosen(logits: npt.NDArray[np.float64], temperature: float, drawn: float) -> int:
    weights = np.exp((logits - logits[0]) / temperature).cumsum()
    at = int(np.searchsorted(weights, drawn * weights[-1], side="right"))
    return min(at, int(np.searchsorted(weights, weights[-1])))  # the last with any weight, should rounding overshoot


def log_probabilities(
    logits: Floats, token: int, count: int, leaders: Leaders
) -> tuple[float, list[tuple[int, float]]]:
    """Log-softmax of the raw logits (before bias, penalties and filters) for `token`, and the `count` best.

    Uses `leaders` anew. Raises NotFinite.
    """
    leaders.fill(logits)
    norm = leaders.largest + math.log(leaders.mass(1.0))
    if count <= 0:
        return float(logits[token]) - norm, []
    ids, values = leaders.best(count)
    best = [(i, v - norm) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return float(logits[token]) - norm, best
