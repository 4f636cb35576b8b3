"""When a device or a replica is not to be trusted, and how it earns trust again.

It trips on the *kind* of a fault, never on a rate: a home server sees too few requests for rates to mean anything.
Everything is told with `now`, in monotonic seconds; converting to wall time is the caller's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from relevo.core.described import Described


class FaultKind(Described):
    """What went wrong. The kind decides how many it takes."""

    STICKY_DEVICE = (
        "sticky_device",
        "The device context is poisoned: every later call in that process returns the same error.",
    )
    DEVICE_LOST = "device_lost", "The device does not answer any more, or left the bus."
    RESET_CLASS = "reset_class", "The driver reported an event that only a reset of the device heals."
    DEVICE_CHANGED = "device_changed", "A worker computes on another device than it was started for."
    WORKER_KILLED_BY_DEVICE = "worker_killed_by_device", "A device fault ended the worker."
    ALLOCATION = "allocation", "Memory that was leased could not be allocated."
    UNCLASSIFIED_DEATH = "unclassified_death", "A worker died, and nothing says the device was the cause."
    PROBE_FAILED = "probe_failed", "A small real inference with a known answer did not give it."
    STALL = "stall", "No token came before the token deadline."
    CUT_SHORT = "cut_short", "An answer ended in the middle without the worker dying."


class BreakerState(Described):
    """Whether work may be sent."""

    CLOSED = "closed", "Work is sent."
    OPEN = "open", "Nothing is sent."
    HALF_OPEN = "half_open", "Only numbered probes are sent, one at a time."


class Hold(Described):
    """What an operator asked for. Only an operator lifts it; no probe does."""

    OPENED = "opened", "An operator opened it; running work is moved."
    DRAINING = "draining", "An operator drains it: running work ends where it is, new work goes elsewhere."


class Threshold(msgspec.Struct, frozen=True):
    """How many faults of a kind open the breaker, within how long."""

    count: int
    window_s: float = 0.0
    distinct_sources: bool = False
    """Count each source (a replica) once."""


_AT_ONCE: Final = Threshold(1)

_ALIKE: Final[dict[FaultKind, Threshold]] = {
    FaultKind.STICKY_DEVICE: _AT_ONCE,
    FaultKind.DEVICE_LOST: _AT_ONCE,
    FaultKind.RESET_CLASS: _AT_ONCE,
    FaultKind.DEVICE_CHANGED: _AT_ONCE,
    FaultKind.WORKER_KILLED_BY_DEVICE: _AT_ONCE,
    FaultKind.ALLOCATION: Threshold(2, 60.0),
    FaultKind.PROBE_FAILED: Threshold(3, 600.0),
    FaultKind.STALL: Threshold(3, 600.0),
    FaultKind.CUT_SHORT: Threshold(3, 600.0),
}

DEVICE_THRESHOLDS: Final[Mapping[FaultKind, Threshold]] = MappingProxyType(
    # One replica that dies over and over has a fault of its own; two that die within the window share a device.
    {**_ALIKE, FaultKind.UNCLASSIFIED_DEATH: Threshold(2, 600.0, distinct_sources=True)}
)

REPLICA_THRESHOLDS: Final[Mapping[FaultKind, Threshold]] = MappingProxyType(
    {**_ALIKE, FaultKind.UNCLASSIFIED_DEATH: Threshold(2, 600.0)}
)


class BreakerSettings(msgspec.Struct, frozen=True):
    """How it returns. Times in seconds."""

    first_open_s: float = 5.0
    """Until the first probe; doubles each time it opens again."""
    longest_open_s: float = 300.0
    probes_to_close: int = 2
    """Consecutive ones."""
    probe_timeout_s: float = 30.0
    """A permit not reported by then is overtaken by the next."""
    flap_window_s: float = 3600.0
    """Unforced returns within this time make the next opening longer: each doubles it once."""


class Transition(msgspec.Struct, frozen=True):
    """One change of state, for the log, the journal and the status page."""

    breaker: str
    from_: BreakerState
    to: BreakerState
    at: float
    cause: str
    kind: FaultKind | None = None
    next_probe_s: float | None = None
    """From `at` until a probe may go; None: none is planned."""


class Permit(msgspec.Struct, frozen=True):
    """Leave to send one probe. Only the latest number's answer counts."""

    breaker: str
    number: int


class BreakerRecord(msgspec.Struct, frozen=True):
    """What survives a restart. Times are those of the `now` it was told; `shifted` converts them."""

    state: BreakerState = BreakerState.CLOSED
    cause: str | None = None
    since: float = 0.0
    next_probe_at: float | None = None
    level: int = 0
    returns: tuple[float, ...] = ()
    faults: tuple[tuple[FaultKind, float, str], ...] = ()
    hold: Hold | None = None
    last_permit: int = 0

    def shifted(self, by_s: float) -> BreakerRecord:
        """The same record with every time moved, e.g. from monotonic to wall time."""
        return msgspec.structs.replace(
            self,
            since=self.since + by_s,
            next_probe_at=None if self.next_probe_at is None else self.next_probe_at + by_s,
            returns=tuple(at + by_s for at in self.returns),
            faults=tuple((kind, at + by_s, source) for kind, at, source in self.faults),
        )


Transitions = tuple[Transition, ...]


class Breaker:
    """Closed, open or half-open. Every method returns the transitions it made, in order."""

    def __init__(
        self,
        name: str,
        thresholds: Mapping[FaultKind, Threshold] = DEVICE_THRESHOLDS,
        settings: BreakerSettings = BreakerSettings(),  # noqa: B008  # frozen
    ) -> None:
        self.name = name
        self.state = BreakerState.CLOSED
        self.cause: str | None = None
        self.since = 0.0
        self.hold: Hold | None = None
        self.overtaken_probes = 0  # answers that came too late to count
        self._thresholds = thresholds
        self._settings = settings
        self._faults: list[tuple[FaultKind, float, str]] = []
        self._next_probe_at: float | None = None
        self._level = 0  # openings in a row without a return in between
        self._returns: list[float] = []
        self._last_permit = 0
        self._permit_at: float | None = None  # when the outstanding permit was given
        self._good_probes = 0

    def __repr__(self) -> str:
        if self.state is BreakerState.CLOSED:
            return f"<Breaker {self.name} closed>"
        held = f", {self.hold} by an operator" if self.hold is not None else ""
        probe = f", next probe at {self._next_probe_at:g}" if self._next_probe_at is not None else ""
        return f"<Breaker {self.name} {self.state} since {self.since:g}: {(self.cause or '').rstrip('.')}{held}{probe}>"

    # -- questions

    def allow_work(self, now: float) -> bool:  # noqa: ARG002  # told the time like every other question
        """Whether ordinary work may be sent."""
        return self.state is BreakerState.CLOSED

    def next_probe_s(self, now: float) -> float | None:
        """Seconds until a probe may go: 0 when one may go now; None when closed or held by an operator."""
        if self.state is BreakerState.CLOSED or self.hold is not None:
            return None
        return 0.0 if self._next_probe_at is None else max(0.0, self._next_probe_at - now)

    @property
    def unforced_returns(self) -> int:
        """Returns by probes alone that are still remembered."""
        return len(self._returns)

    # -- faults

    def fault(self, kind: FaultKind, now: float, source: str = "") -> Transitions:
        """A fault happened; `source` names the replica it happened on. Opens where the kind's threshold is reached.

        Half-open, any fault opens: only a probe was under way. Open, a fault only adds to the memory.
        """
        self._remember(kind, now, source)
        if self.state is BreakerState.OPEN:
            return ()
        if self.state is BreakerState.HALF_OPEN:
            return (self._open(now, kind.sentence, kind),)
        threshold = self._thresholds[kind]
        alike = [
            s for k, at, s in self._faults if k is kind and (threshold.count == 1 or now - at <= threshold.window_s)
        ]
        count = len(set(alike)) if threshold.distinct_sources else len(alike)
        return (self._open(now, kind.sentence, kind),) if count >= threshold.count else ()

    def _remember(self, kind: FaultKind, now: float, source: str) -> None:
        longest = max(t.window_s for t in self._thresholds.values())
        self._faults = [f for f in self._faults if now - f[1] <= longest]
        self._faults.append((kind, now, source))

    def _open(self, now: float, cause: str, kind: FaultKind | None) -> Transition:
        settings = self._settings
        self._returns = [at for at in self._returns if now - at <= settings.flap_window_s]
        doublings = min(self._level + len(self._returns), 32)
        open_s = min(settings.longest_open_s, settings.first_open_s * 2**doublings)
        self._level += 1
        self._next_probe_at = now + open_s
        return self._become(BreakerState.OPEN, now, cause, kind)

    def _become(self, state: BreakerState, now: float, cause: str, kind: FaultKind | None = None) -> Transition:
        old, self.state = self.state, state
        self._permit_at = None
        self._good_probes = 0
        # Half-open keeps the cause and the time of the opening: that is what people ask for.
        if state is not BreakerState.HALF_OPEN:
            self.since = now
            self.cause = None if state is BreakerState.CLOSED else cause
        return Transition(self.name, old, state, now, cause, kind, self.next_probe_s(now))

    # -- probes

    def permit_probe(self, now: float) -> tuple[Permit | None, Transitions]:
        """Leave for one probe, if one is due: one at a time, numbered. Closed, a probe may always go.

        The first permit after an opening makes it half-open. A permit that was not reported within
        `probe_timeout_s` is overtaken: its answer will not count.
        """
        if self.hold is not None:
            return None, ()
        if self._permit_at is not None and now - self._permit_at < self._settings.probe_timeout_s:
            return None, ()
        changed: Transitions = ()
        if self.state is not BreakerState.CLOSED and self._next_probe_at is not None and now < self._next_probe_at:
            return None, ()
        if self.state is BreakerState.OPEN:
            self._next_probe_at = None
            changed = (self._become(BreakerState.HALF_OPEN, now, "A probe is due."),)
        self._last_permit += 1
        self._permit_at = now
        return Permit(self.name, self._last_permit), changed

    def report_probe(self, permit: Permit, ok: bool, now: float) -> Transitions:
        """The answer to a probe. One that was overtaken, or that an opening overran, is counted and ignored."""
        if permit.number != self._last_permit or self._permit_at is None:
            self.overtaken_probes += 1
            return ()
        self._permit_at = None
        if not ok:
            return self.fault(FaultKind.PROBE_FAILED, now)
        if self.state is BreakerState.CLOSED:
            self._faults = [f for f in self._faults if f[0] is not FaultKind.PROBE_FAILED]
            return ()
        self._good_probes += 1
        if self._good_probes < self._settings.probes_to_close:
            return ()
        self._returns.append(now)
        return (self._close(now, f"{self._settings.probes_to_close} probes in a row gave the known answer."),)

    def _close(self, now: float, cause: str) -> Transition:
        self._next_probe_at = None
        self._level = 0
        self._faults.clear()
        return self._become(BreakerState.CLOSED, now, cause)

    # -- the operator

    def force_open(self, now: float, cause: str = "An operator opened it.") -> Transitions:
        """Nothing is sent, probes included, until `force_close`."""
        return self._hold(Hold.OPENED, now, cause)

    def drain(self, now: float, cause: str = "An operator drains it.") -> Transitions:
        """Nothing new is sent until `force_close`; what runs may end (the shell reads `hold`)."""
        return self._hold(Hold.DRAINING, now, cause)

    def _hold(self, hold: Hold, now: float, cause: str) -> Transitions:
        self.hold = hold
        self._next_probe_at = None
        if self.state is BreakerState.OPEN:
            self.cause = cause
            self._permit_at = None
            return ()
        return (self._become(BreakerState.OPEN, now, cause),)

    def force_close(self, now: float, cause: str = "An operator closed it.") -> Transitions:
        """Work is sent again; everything it remembered is forgotten."""
        self.hold = None
        self._returns.clear()
        if self.state is BreakerState.CLOSED:
            self._faults.clear()
            return ()
        return (self._close(now, cause),)

    def probe_soon(self, now: float) -> bool:
        """An operator asks for a probe without waiting. False when closed, or held (only `force_close` lifts that)."""
        if self.state is BreakerState.CLOSED or self.hold is not None:
            return False
        if self.state is BreakerState.OPEN:
            self._next_probe_at = now
        return True

    # -- across a restart

    def export(self) -> BreakerRecord:
        """What must survive a restart."""
        return BreakerRecord(
            state=self.state,
            cause=self.cause,
            since=self.since,
            next_probe_at=self._next_probe_at,
            level=self._level,
            returns=tuple(self._returns),
            faults=tuple(self._faults),
            hold=self.hold,
            last_permit=self._last_permit,
        )

    def restore(self, record: BreakerRecord) -> None:
        """Take up an exported record. Half-open becomes open with a probe due: its probe died with the process."""
        half_open = record.state is BreakerState.HALF_OPEN
        self.state = BreakerState.OPEN if half_open else record.state
        self.cause = record.cause
        self.since = record.since
        self.hold = record.hold
        # Without a plan it would stay open for ever; due at once is safe, because only a probe goes.
        due = record.since if self.state is BreakerState.OPEN and record.hold is None else None
        self._next_probe_at = due if record.next_probe_at is None else record.next_probe_at
        self._level = record.level
        self._returns = list(record.returns)
        self._faults = list(record.faults)
        self._last_permit = max(self._last_permit, record.last_permit)
        self._permit_at = None
        self._good_probes = 0
