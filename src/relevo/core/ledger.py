"""Who holds how much of a device's memory, and what a further lease could still take.

Two views are kept apart and the smaller wins: what the device reports, and what its leases have been
promised. Formulas: docs/design.md, "Admission".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from relevo.core.described import Described, move
from relevo.core.errors import OurBug
from relevo.core.units import size_text


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

UNDER_WAY: Final = frozenset({_S.GRANTED, _S.DRAINING, _S.UNVERIFIED, _S.ORPHAN})
"""While a lease is in one of these, its share of the observed use is not known, so `external` rests."""

MIB: Final = 1 << 20

RETURNS_WITHIN_S: Final = 5.0
"""Memory of a released lease that is not back by then is booked as external like anybody's."""


class Reading(msgspec.Struct, frozen=True):
    """What a device says of its memory at one moment. Unknown figures are None, with the reason."""

    total_bytes: int | None
    free_bytes: int | None
    driver_reserved_bytes: int = 0
    read_at: float = 0.0
    """Monotonic seconds."""
    reason: str | None = None
    """Why a figure is None."""
    free_at_most_bytes: int | None = None
    """Where free_bytes is None: what it cannot exceed. It may lower what is available, and never proves any."""

    @property
    def used_bytes(self) -> int | None:
        """Everybody's use together, without what the driver keeps for itself."""
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.driver_reserved_bytes)


class Lease:
    """A reservation on a device. Only its ledger changes it; everybody else reads."""

    __slots__ = ("bytes_", "device", "holder", "number", "observed_bytes", "since", "state")

    def __init__(self, number: int, device: str, holder: str, bytes_: int, since: float) -> None:
        self.number = number
        self.device = device
        self.holder = holder
        self.bytes_ = bytes_
        self.observed_bytes = 0
        self.since = since
        self.state = LeaseState.REQUESTED

    def __repr__(self) -> str:
        return f"<Lease {self.number} on {self.device}: {self.holder} {self.state} {self.counted_bytes} bytes>"

    @property
    def counted_bytes(self) -> int:
        """What counts against the device: what was leased, or what was observed where that is more."""
        return 0 if self.state is LeaseState.RELEASED else max(self.bytes_, self.observed_bytes)


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


class LedgerView(msgspec.Struct, frozen=True):
    """A device's memory, for the status page. Never decided on."""

    device: str
    total_bytes: int | None
    leased_bytes: int
    external_bytes: int | None
    available_bytes: int | None
    headroom_bytes: int | None
    pressure: float | None
    read_at: float | None
    reason: str | None
    """Why the figures that are None are not known."""
    leases: tuple[Holding, ...]


class Ledger:
    """The one owner of a device's leases. Granting compares and reserves in one step.

    `declared_bytes` is the most that leases may hold in all. It is needed where the device cannot report;
    beside a reading it is a further bound. `headroom_bytes` stays free of us; None: a twentieth of the total,
    at most 512 MiB. `external_half_life_s`: how slowly memory that foreign processes gave back is believed in.
    """

    def __init__(
        self,
        device: str,
        *,
        declared_bytes: int | None = None,
        headroom_bytes: int | None = None,
        external_half_life_s: float = 10.0,
        stale_after_s: float = 30.0,
    ) -> None:
        self.device = device
        self._declared_bytes = declared_bytes
        self._headroom_bytes = headroom_bytes
        self._half_life_s = external_half_life_s
        self._stale_after_s = stale_after_s
        self._leases: dict[int, Lease] = {}
        self._next_number = 1
        self._reading: Reading | None = None
        self._external: float = 0.0
        self._external_at: float | None = None  # of the reading it was taken from
        self._returning_bytes = 0  # of released leases, as long as the device may still count it as used
        self._returning_since: float | None = None  # the first reading after the release

    def __repr__(self) -> str:
        total = "unknown" if self.total_bytes is None else str(self.total_bytes)
        available = "unknown" if self.available_bytes is None else str(self.available_bytes)
        return (
            f"<Ledger {self.device}: {self.leased_bytes} of {total} bytes leased in {len(self._leases)} leases, "
            f"{available} available>"
        )

    # -- what is observed

    def observe(self, reading: Reading) -> None:
        """Take a new reading. One with unknown figures makes the device unknown, not empty."""
        self._reading = reading
        used = reading.used_bytes
        if used is None:
            return
        held = sum(lease.observed_bytes for lease in self._leases.values() if lease.state is _S.SETTLED)
        # Of a lease under way anything between nothing and all may be visible. What exceeds even all of it is foreign.
        possible = sum(lease.counted_bytes for lease in self._leases.values() if lease.state in UNDER_WAY)
        least = max(0, used - held - possible)
        if self._external > least:
            # What was ours a moment ago is not a neighbour that may come back: its fall is believed at once.
            fallen = min(round(self._external - least), self._returning_bytes)
            self._external -= fallen
            self._returning_bytes -= fallen
        if self._external_at is None or least >= self._external:
            self._external = float(least)
        elif not possible:
            passed_s = max(0.0, reading.read_at - self._external_at)
            self._external = least + (self._external - least) * 0.5 ** (passed_s / self._half_life_s)
            if self._external - least < MIB:
                self._external = float(least)
        self._external_at = reading.read_at
        if self._returning_since is None:
            self._returning_since = reading.read_at
        if reading.read_at - self._returning_since > RETURNS_WITHIN_S:
            self._returning_bytes = 0
        self._returning_bytes = min(self._returning_bytes, max(0, used - held))

    def doubt(self, reason: str, now: float) -> None:
        """A suspend or driver event: no figure is trusted until the device was read and each lease settled again."""
        for lease in self._leases.values():
            if lease.state in (_S.GRANTED, _S.SETTLED):
                self._move(lease, _S.UNVERIFIED)
        self._reading = Reading(total_bytes=None, free_bytes=None, read_at=now, reason=reason)

    # -- figures

    @property
    def total_bytes(self) -> int | None:
        """What the device has, else what was declared for it."""
        reported = self._reading.total_bytes if self._reading is not None else None
        return self._declared_bytes if reported is None else reported

    @property
    def leased_bytes(self) -> int:
        """The sum of all leases that are not released."""
        return sum(lease.counted_bytes for lease in self._leases.values())

    @property
    def external_bytes(self) -> int | None:
        """What foreign processes hold: quick up, slow down, at rest while a load or unload is under way."""
        if self._reading is None or self._reading.used_bytes is None:
            return None
        return round(self._external)

    @property
    def headroom_bytes(self) -> int | None:
        """Kept free for kernels and neighbours."""
        if self._headroom_bytes is not None or self.total_bytes is None:
            return self._headroom_bytes
        return min(self.total_bytes // 20, 512 * MIB)

    @property
    def available_bytes(self) -> int | None:
        """What a lease could still take; None when unknown. Source: docs/design.md, "Admission"."""
        headroom = self.headroom_bytes
        if headroom is None:
            return None
        reading, leased = self._reading, self.leased_bytes
        if reading is None or reading.total_bytes is None or reading.free_bytes is None:
            # Only a declared total can answer. Foreign use is not seen, which is what the headroom is for.
            if self._declared_bytes is None:
                return None
            by_promise = self._declared_bytes - leased
            if reading is not None and reading.free_at_most_bytes is not None:
                by_promise = min(by_promise, reading.free_at_most_bytes - self._not_yet_visible_bytes())
            return max(0, by_promise - headroom)
        by_report = reading.free_bytes - self._not_yet_visible_bytes()
        by_promise = reading.total_bytes - reading.driver_reserved_bytes - leased - round(self._external)
        available = min(by_report, by_promise) - headroom
        if self._declared_bytes is not None:
            available = min(available, self._declared_bytes - leased)
        return max(0, available)

    @property
    def pressure(self) -> float | None:
        """The share of what we could ever lease that is taken, 0 to 1; None when unknown."""
        available, headroom = self.available_bytes, self.headroom_bytes
        if available is None or headroom is None or self.total_bytes is None:
            return None
        reserved = self._reading.driver_reserved_bytes if self._reading is not None else 0
        leasable = self.total_bytes - headroom - reserved
        if self._declared_bytes is not None:
            leasable = min(leasable, self._declared_bytes)
        return 1.0 if leasable <= 0 else min(1.0, max(0.0, 1.0 - available / leasable))

    @property
    def unknown_reason(self) -> str | None:
        """Why `available_bytes` is None; None when it is known."""
        if self.available_bytes is not None:
            return None
        if self._reading is None:
            return f"The memory of {self.device} was not read yet."
        return self._reading.reason or f"{self.device} does not report its memory, and no total is declared for it."

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All leases that are not released, oldest first."""
        return tuple(self._leases.values())

    def _not_yet_visible_bytes(self) -> int:
        """The part of granted leases that the reported free memory still contains."""
        assert self._reading is not None
        used = self._reading.used_bytes or 0
        granted = sum(
            lease.counted_bytes for lease in self._leases.values() if lease.state in (_S.GRANTED, _S.UNVERIFIED)
        )
        others = sum(
            lease.observed_bytes
            for lease in self._leases.values()
            if lease.state in (_S.SETTLED, _S.DRAINING, _S.ORPHAN)
        )
        # Memory of released leases that the reading still counts belongs to nobody who is loading.
        foreign = max(round(self._external), self._returning_bytes)
        visible = min(granted, max(0, used - others - foreign))
        # A settled lease may grow up to what it was granted: that part is free by report, but promised.
        growth = sum(
            lease.counted_bytes - lease.observed_bytes for lease in self._leases.values() if lease.state is _S.SETTLED
        )
        return granted - visible + growth

    # -- leases

    def request(self, holder: str, bytes_: int, now: float) -> Lease | Shortfall:
        """Reserve memory now, or say by what numbers it is not there. Unknown is no."""
        if bytes_ < 0:
            raise OurBug(f"{holder} asked for a lease of {bytes_} bytes on {self.device}.")
        available = self.available_bytes
        reason = self.unknown_reason
        if self._is_stale(now):
            available, reason = None, f"The last reading of {self.device} is older than {self._stale_after_s:g} s."
        if available is None or bytes_ > available:
            return Shortfall(
                device=self.device,
                need_bytes=bytes_,
                available_bytes=available,
                holders=self._holdings(),
                reason=reason
                or f"{holder} needs {size_text(bytes_)} of {self.device}; {size_text(available)} is free to lease.",
            )
        lease = Lease(self._next_number, self.device, holder, bytes_, now)
        self._next_number += 1
        self._move(lease, _S.GRANTED)
        self._leases[lease.number] = lease
        return lease

    def adopt(self, holder: str, observed_bytes: int, now: float) -> Lease:
        """Book what a process holds already (a leftover of a crash). It counts even where nothing was available."""
        lease = Lease(self._next_number, self.device, holder, observed_bytes, now)
        self._next_number += 1
        self._move(lease, _S.GRANTED)
        lease.observed_bytes = observed_bytes
        self._move(lease, _S.UNVERIFIED)
        self._leases[lease.number] = lease
        return lease

    def settle(self, lease: Lease, observed_bytes: int) -> None:
        """The holder's use was observed. More than was leased counts in full; less keeps the promise."""
        self._own(lease)
        self._move(lease, _S.SETTLED)
        lease.observed_bytes = max(0, observed_bytes)

    def recount(self, lease: Lease, observed_bytes: int) -> None:
        """A later observation of a settled lease: its holder grew or shrank."""
        self._own(lease)
        if lease.state is not _S.SETTLED:
            raise OurBug(f"{lease!r} is not settled, so its use cannot be counted again.")
        lease.observed_bytes = max(0, observed_bytes)

    def drain(self, lease: Lease) -> None:
        """The holder is being ended. Harmless when it is draining already."""
        self._own(lease)
        if lease.state is not _S.DRAINING:
            self._move(lease, _S.DRAINING)

    def orphan(self, lease: Lease) -> None:
        """The holder's process is gone, but its memory has not come back."""
        self._own(lease)
        self._move(lease, _S.ORPHAN)

    def release(self, lease: Lease) -> None:
        """The process is gone and the memory with it. Raises OurBug the second time."""
        self._own(lease)
        self._returning_bytes += lease.counted_bytes
        self._returning_since = None
        self._move(lease, _S.RELEASED)
        del self._leases[lease.number]

    def _own(self, lease: Lease) -> None:
        if self._leases.get(lease.number) is not lease:
            raise OurBug(f"{lease!r} is not (or no longer) a lease of {self.device}.")

    @staticmethod
    def _move(lease: Lease, state: LeaseState) -> None:
        lease.state = move(f"The lease of {lease.holder} on {lease.device}", TRANSITIONS, lease.state, state)

    def _is_stale(self, now: float) -> bool:
        """A reading with figures that is too old to decide on. An unknown one is no staler than it was."""
        reading = self._reading
        return reading is not None and reading.used_bytes is not None and now - reading.read_at > self._stale_after_s

    # -- shown

    def _holdings(self) -> tuple[Holding, ...]:
        return tuple(Holding(lease.holder, lease.counted_bytes, lease.state) for lease in self._leases.values())

    def snapshot(self) -> LedgerView:
        """The figures of now, for status."""
        reading = self._reading
        known = reading is not None and reading.used_bytes is not None
        reason = self.unknown_reason
        if reason is None and not known:
            reason = (reading.reason if reading is not None else None) or f"{self.device} does not report its memory."
        return LedgerView(
            device=self.device,
            total_bytes=self.total_bytes,
            leased_bytes=self.leased_bytes,
            external_bytes=self.external_bytes,
            available_bytes=self.available_bytes,
            headroom_bytes=self.headroom_bytes,
            pressure=self.pressure,
            read_at=reading.read_at if reading is not None and known else None,
            reason=reason,
            leases=self._holdings(),
        )
