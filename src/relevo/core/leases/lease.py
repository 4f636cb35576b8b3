"""A lease on a device's memory: its states, what of it counts, and the refusal of one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from relevo.core.described import Described


class LeaseState(Described):
    """Where a lease is. Until it is released it counts, whatever its state."""

    REQUESTED = "requested", "It is being compared with what is available; it holds nothing yet."
    GRANTED = "granted", "It holds its bytes; its holder's use is not, or only partly, visible on the device."
    SETTLED = "settled", "Its holder's use was observed on the device."
    DRAINING = "draining", "Its holder is being ended; the bytes count until the process is gone."
    UNVERIFIED = "unverified", "A suspend or a driver event made its observed use doubtful; it counts in full."
    ORPHAN = "orphan", "Its process is gone, but the device has not given the bytes back yet."
    RELEASED = "released", "It holds nothing any more. This is final."


_S = LeaseState

TRANSITIONS: Final[Mapping[LeaseState, frozenset[LeaseState]]] = MappingProxyType(
    {
        _S.REQUESTED: frozenset({_S.GRANTED}),
        _S.GRANTED: frozenset({_S.SETTLED, _S.DRAINING, _S.UNVERIFIED, _S.ORPHAN, _S.RELEASED}),
        _S.SETTLED: frozenset({_S.DRAINING, _S.UNVERIFIED, _S.ORPHAN, _S.RELEASED}),
        _S.DRAINING: frozenset({_S.ORPHAN, _S.RELEASED}),
        _S.UNVERIFIED: frozenset({_S.SETTLED, _S.DRAINING, _S.ORPHAN, _S.RELEASED}),
        _S.ORPHAN: frozenset({_S.RELEASED}),
        _S.RELEASED: frozenset(),
    }
)


class Lease:
    """A reservation on a device. Only its ledger changes it; everybody else reads."""

    __slots__ = (
        "bytes_",
        "device",
        "holder",
        "number",
        "observed_bytes",
        "resting",
        "since",
        "state",
        "use_known",
        "used_since_reading",
    )

    def __init__(self, number: int, device: str, holder: str, bytes_: int, since: float) -> None:
        self.number = number
        self.device = device
        self.holder = holder
        self.bytes_ = bytes_
        self.observed_bytes = 0
        self.resting = False
        """Granted, and nobody is there to use it: no process of its holder runs."""
        self.use_known = False
        """Whether `observed_bytes` holds; False before it was settled, and after a doubt."""
        self.used_since_reading: int | None = None
        """All of its use was there by this reading, so that later ones show it; None: it was never seen whole."""
        self.since = since
        self.state = LeaseState.REQUESTED

    def __repr__(self) -> str:
        return f"<Lease {self.number} on {self.device}: {self.holder} {self.state} {self.counted_bytes} bytes>"

    @property
    def counted_bytes(self) -> int:
        """What counts against the device: what was leased, or what was observed where that is more."""
        if self.state is LeaseState.RELEASED:
            return 0
        return self.bytes_ if self.bytes_ >= self.observed_bytes else self.observed_bytes


class Holding(msgspec.Struct, frozen=True):
    """One lease, as shown to people."""

    holder: str
    bytes_: int
    state: LeaseState


class Shortfall(msgspec.Struct, frozen=True):
    """A lease that could not be granted, with the numbers. Nothing was changed."""

    device: str
    need_bytes: int
    available_bytes: int | None
    holders: tuple[Holding, ...]
    reason: str
    """A plain sentence."""
    holder: str = ""
    """Who asked."""
    missing_bytes: int | None = None
    """How much more would have to be available; 0 where only a block is missing, None where nothing is known."""
    largest_allocation_bytes: int | None = None
    """The largest single buffer that was asked for."""
    largest_block_bytes: int | None = None
    """The largest buffer that could be had beside the loads that are under way; None: the device does not tell."""
