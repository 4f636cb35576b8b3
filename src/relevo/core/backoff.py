"""When a worker that died is started again, and when that is given up."""

from __future__ import annotations

import msgspec


class Wait(msgspec.Struct, frozen=True):
    """Start it again after `delay_s`."""

    delay_s: float
    failures: int


class GivenUp(msgspec.Struct, frozen=True):
    """It is not started again by itself. `resume` says what a person does."""

    failures: int
    window_s: float
    resume: str

    @property
    def sentence(self) -> str:
        """For the log and the status page."""
        return f"It failed {self.failures} times in {self.window_s:g} s and is not started again. {self.resume}"


class Backoff:
    """Exponential, with a cap, jitter, and an end.

    Gives up at `give_up_after` failures within `window_s`; a worker that served `healthy_s` in one piece has its
    past forgotten. `resume` is the sentence that tells a person how to start it again.
    """

    def __init__(
        self,
        resume: str,
        *,
        first_s: float = 0.5,
        longest_s: float = 30.0,
        give_up_after: int = 6,
        window_s: float = 600.0,
        healthy_s: float = 60.0,
    ) -> None:
        self.given_up: GivenUp | None = None
        self._resume = resume
        self._first_s = first_s
        self._longest_s = longest_s
        self._give_up_after = give_up_after
        self._window_s = window_s
        self._healthy_s = healthy_s
        self._failures: list[float] = []
        self._in_a_row = 0
        self._serving_since: float | None = None

    def __repr__(self) -> str:
        state = "given up" if self.given_up is not None else "serving" if self._serving_since is not None else "waiting"
        return f"<Backoff {state}, {self._in_a_row} failures in a row, {len(self._failures)} remembered>"

    @property
    def failures(self) -> int:
        """Failures that still count."""
        return len(self._failures)

    def serving(self, now: float) -> None:
        """It is ready, after a real inference."""
        if self._serving_since is None:
            self._serving_since = now

    def failed(self, now: float, jitter: float) -> Wait | GivenUp:
        """It died, or did not become ready. `jitter` is drawn by the caller from [0, 1).

        Delay = min(longest, first * 2^(failures in a row - 1)), of which the upper half is scaled by the jitter,
        so that workers which fell together do not come back together.
        """
        served_s = 0.0 if self._serving_since is None else now - self._serving_since
        self._serving_since = None
        if served_s >= self._healthy_s:
            self._failures.clear()
            self._in_a_row = 0
        self._failures = [at for at in self._failures if now - at <= self._window_s]
        self._failures.append(now)
        self._in_a_row += 1
        if self.given_up is not None or len(self._failures) >= self._give_up_after:
            self.given_up = GivenUp(len(self._failures), self._window_s, self._resume)
            return self.given_up
        delay_s = min(self._longest_s, self._first_s * 2.0 ** min(self._in_a_row - 1, 32))
        return Wait(delay_s * (0.5 + 0.5 * min(1.0, max(0.0, jitter))), len(self._failures))

    def reset(self) -> None:
        """A person says: try again. Everything is forgotten."""
        self.given_up = None
        self._failures.clear()
        self._in_a_row = 0
        self._serving_since = None
