"""Who holds how much of a device's memory, and what a further lease could still take.

Two views are kept apart and the smaller wins: what the device reports, and what its leases have been promised.
Formulas: docs/design.md, "Admission". Sums are kept as leases change: a decision costs the same with thousands.
"""

from __future__ import annotations

from typing import Final

from relevo.core.described import move
from relevo.core.errors import OurBug
from relevo.core.leases.belief import Belief
from relevo.core.leases.external import External
from relevo.core.leases.lag import HeldWindow, Returns
from relevo.core.leases.lease import TRANSITIONS, Holding, Lease, LeaseState, Shortfall
from relevo.core.leases.ledger_view import LedgerView
from relevo.core.leases.pressure import Pressure, PressureGauge, PressureStage
from relevo.core.leases.reading import Reading
from relevo.core.leases.tally import Tally
from relevo.core.units import size_text

_S = LeaseState

MIB: Final = 1 << 20

LAG_S: Final = 1.5
"""How far a card's figures lag behind a load or an unload at most (seen: 0.5 to 1.5 s)."""


class Ledger:
    """The one owner of a device's leases. Granting compares and reserves in one step.

    `declared_bytes` is the most that leases may hold in all. It is needed where the device cannot report;
    beside a reading it is a further bound. `headroom_bytes` stays free of us; None: a twentieth of the total,
    at most 512 MiB. `external_half_life_s`: how slowly memory that foreign processes gave back is believed in.
    `lag_s`: how far readings lag behind (0 where the kernel itself counts). `pressure_stay_s`: how long a stage
    of pressure lasts at least before a better one follows.
    """

    def __init__(
        self,
        device: str,
        *,
        declared_bytes: int | None = None,
        headroom_bytes: int | None = None,
        external_half_life_s: float = 10.0,
        stale_after_s: float = 30.0,
        lag_s: float = LAG_S,
        pressure_stay_s: float = 5.0,
    ) -> None:
        self.device = device
        self._declared_bytes = declared_bytes
        self._headroom_bytes = headroom_bytes
        self._stale_after_s = stale_after_s
        self._leases: dict[int, Lease] = {}
        self._holdings: dict[int, Holding] = {}
        self._next_number = 1
        self._sums = Tally()
        # What is observed
        self._reading: Reading | None = None
        self._external = External(external_half_life_s)
        self._window = HeldWindow(lag_s)
        self._returns = Returns()
        self._gauge = PressureGauge(pressure_stay_s)
        self._belief = Belief(device)
        self._doubted: tuple[str, float] | None = None  # why, and since when

    def __repr__(self) -> str:
        total = "unknown" if self.total_bytes is None else str(self.total_bytes)
        available = "unknown" if self.available_bytes is None else str(self.available_bytes)
        leased = f"{self.leased_bytes} of {total} bytes leased in {len(self._leases)} leases"
        return f"<Ledger {self.device}: {leased}, {available} available>"

    # -- what is observed

    def observe(self, reading: Reading) -> None:
        """Take a new reading. One with unknown figures makes the device unknown, not empty.

        One that was taken before a doubt, or before the newest one, tells nothing new and is passed over.
        """
        if self._doubted is not None:
            if reading.read_at < self._doubted[1]:
                return
            self._doubted = None
        used, last = reading.used_bytes, self._reading
        if used is not None and last is not None and last.used_bytes is not None and reading.read_at < last.read_at:
            return
        self._reading = reading
        self._window.read(reading.read_at, self._sums.held_bytes)
        self._belief.weigh(reading, min(self._window.low_bytes, self._sums.settled_bytes))
        if used is None or self._belief.reason is not None:
            self._returns.overdue(reading.read_at)
        else:
            self._returns.see(self._unexplained_bytes(used), self._window)
            self._external.bytes_ += self._returns.overdue(reading.read_at)
            self._follow_external(used, reading.read_at)
        self.assess(reading.read_at)

    def _unexplained_bytes(self, used: int) -> int:
        """Use that neither neighbours nor holders known to be visible account for."""
        return max(0, used - self._external.bytes_ - min(self._window.low_bytes, self._sums.held_bytes))

    def _follow_external(self, used: int, at: float) -> None:
        # What exceeds all that holders may use is foreign for sure; what exceeds the least that they use may be.
        sums, window = self._sums, self._window
        least = max(0, used - window.high_bytes - sums.loading_bytes - self._returns.bytes_)
        most = max(0, used - window.low_bytes)
        under_way = bool(sums.loading_bytes or sums.ending or self._returns.bytes_)
        self._external.follow(least, most, at, at_rest=under_way)

    def doubt(self, reason: str, now: float) -> None:
        """A suspend or driver event: nothing is granted until the device was read again.

        The leases are unverified and count in full until each is settled again.
        """
        for lease in self._leases.values():
            if lease.state in (_S.GRANTED, _S.SETTLED) and not lease.resting:
                self._change(lease, _S.UNVERIFIED)
        self._doubted = (reason, now)
        self._belief.forget()
        self._reading = Reading(total_bytes=None, free_bytes=None, read_at=now, reason=reason)
        self.assess(now)

    # -- figures

    @property
    def total_bytes(self) -> int | None:
        """What the device has, else what was declared for it."""
        reported = self._reading.total_bytes if self._reading is not None else None
        return self._declared_bytes if reported is None else reported

    @property
    def leased_bytes(self) -> int:
        """The sum of all leases that are not released."""
        return self._sums.leased_bytes

    @property
    def returning_bytes(self) -> int:
        """Of released leases: what counts until the device shows it back, or 5 s have passed."""
        return self._returns.bytes_

    @property
    def external_bytes(self) -> int | None:
        """What foreign processes hold: quick up, slow down, at rest while a load or unload is under way."""
        if self._reading is None or self._reading.used_bytes is None or self._belief.reason is not None:
            return None
        return self._external.bytes_

    @property
    def headroom_bytes(self) -> int | None:
        """Kept free for kernels and neighbours."""
        if self._headroom_bytes is not None or self.total_bytes is None:
            return self._headroom_bytes
        return min(self.total_bytes // 20, 512 * MIB)

    @property
    def slack_bytes(self) -> int | None:
        """Free by the smaller of report and promise, before headroom; may be negative. None when not reported."""
        reading = self._reading
        if reading is None or reading.total_bytes is None or reading.free_bytes is None:
            return None
        by_promise = (
            reading.total_bytes
            - reading.driver_reserved_bytes
            - self._sums.leased_bytes
            - self._returns.bytes_
            - self._external.bytes_
        )
        if self._belief.reason is not None:
            return by_promise
        return min(reading.free_bytes - self._not_yet_visible_bytes() - self._sums.growth_bytes, by_promise)

    @property
    def available_bytes(self) -> int | None:
        """What a lease could still take; None when unknown. Source: docs/design.md, "Admission"."""
        headroom, slack = self.headroom_bytes, self.slack_bytes
        if headroom is None or self._doubted is not None:
            return None
        declared = None if self._declared_bytes is None else self._declared_bytes - self._sums.leased_bytes
        if slack is not None:
            available = slack - headroom
            return max(0, available if declared is None else min(available, declared))
        # Only a declared total can answer. Foreign use is not seen, which is what the headroom is for.
        if declared is None:
            return None
        declared -= self._returns.bytes_
        if self._reading is not None and self._reading.free_at_most_bytes is not None:
            declared = min(
                declared, self._reading.free_at_most_bytes - self._not_yet_visible_bytes() - self._sums.growth_bytes
            )
        return max(0, declared - headroom)

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
    def stage(self) -> PressureStage:
        """The stage of pressure as it was last assessed."""
        return self._gauge.pressure.stage

    @property
    def unknown_reason(self) -> str | None:
        """Why `available_bytes` is None; None when it is known."""
        if self.available_bytes is not None:
            return None
        return self._unread_reason()

    @property
    def disbelief(self) -> str | None:
        """Why the reported figures are not believed; None when they are."""
        return self._belief.reason

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All leases that are not released, oldest first."""
        return tuple(self._leases.values())

    @property
    def unverified(self) -> tuple[Lease, ...]:
        """Leases whose holders must be looked at again: settle those that live, drain and release the others."""
        return tuple(lease for lease in self._leases.values() if lease.state is _S.UNVERIFIED)

    def assess(self, now: float) -> Pressure:
        """The stage of pressure as of now; worse is believed at once, better after a stay."""
        slack = self.slack_bytes
        reason = self._why_stale(now) or (self._unread_reason() if slack is None else self._belief.reason)
        return self._gauge.update(slack if reason is None else None, self.headroom_bytes, now, reason)

    def _unread_reason(self) -> str:
        if self._reading is None:
            return f"The memory of {self.device} was not read yet."
        return self._reading.reason or f"{self.device} does not report its memory, and no total is declared for it."

    def _not_yet_visible_bytes(self) -> int:
        """The part of leases that the reported free memory may still contain."""
        assert self._reading is not None
        used = self._reading.used_bytes
        shown = min(self._window.low_bytes, self._sums.held_bytes)
        hidden = self._sums.held_bytes - shown + self._sums.loading_bytes
        if used is None:
            return hidden
        # Memory of released leases that the reading still counts belongs to nobody who is loading.
        return hidden - min(hidden, max(0, used - shown - self._external.bytes_ - self._returns.bytes_))

    # -- leases

    def request(
        self, holder: str, bytes_: int, now: float, *, largest_allocation_bytes: int | None = None
    ) -> Lease | Shortfall:
        """Reserve memory now, or say by what numbers it is not there. Unknown is no.

        `largest_allocation_bytes`: the largest single buffer of it, for which a block must be free.
        """
        refusal = self.shortfall(holder, bytes_, now, largest_allocation_bytes=largest_allocation_bytes)
        return refusal if refusal is not None else self._book(holder, bytes_, now)

    def shortfall(
        self,
        holder: str,
        bytes_: int,
        now: float,
        *,
        largest_allocation_bytes: int | None = None,
        beside_bytes: int = 0,
    ) -> Shortfall | None:
        """Why such a lease would be refused now, beside others of `beside_bytes`; None: it would be granted."""
        if bytes_ < 0 or beside_bytes < 0 or (largest_allocation_bytes or 0) > bytes_:
            raise OurBug(
                f"{holder} asked for a lease of {bytes_} bytes on {self.device}, beside {beside_bytes}, with a largest "
                f"buffer of {largest_allocation_bytes}."
            )
        if self._returns.bytes_ and (self._reading is None or self._reading.used_bytes is None):
            self._returns.overdue(now)  # no reading will tell
        available, stale = self.available_bytes, self._why_stale(now)
        if stale is not None or available is None:
            available, missing = None, None
            reason = stale or self._unread_reason()
        else:
            available = max(0, available - beside_bytes)
            missing = max(0, bytes_ - available)
            reason = f"{holder} needs {size_text(bytes_)} of {self.device}; {size_text(available)} is free to lease."
        block = self.largest_block_bytes
        if block is not None:
            block = max(0, block - beside_bytes)
        if missing == 0:
            if block is None or largest_allocation_bytes is None or largest_allocation_bytes <= block:
                return None
            reason = (
                f"{holder} needs a single buffer of {size_text(largest_allocation_bytes)} on {self.device}, where "
                f"{size_text(available)} is free to lease, but no block is larger than {size_text(block)}."
            )
        return Shortfall(
            device=self.device,
            need_bytes=bytes_,
            available_bytes=available,
            holders=tuple(self._holdings.values()),
            reason=reason,
            holder=holder,
            missing_bytes=missing,
            largest_allocation_bytes=largest_allocation_bytes,
            largest_block_bytes=block,
        )

    @property
    def largest_block_bytes(self) -> int | None:
        """The largest buffer that can be had for sure: loads not visible yet may all come out of that block."""
        if self._reading is None or self._reading.largest_block_bytes is None:
            return None
        return max(0, self._reading.largest_block_bytes - self._not_yet_visible_bytes() - self._sums.growth_bytes)

    def adopt(self, holder: str, observed_bytes: int, now: float) -> Lease:
        """Book what a process holds already (a leftover of a crash). It counts even where nothing was available."""
        lease = self._book(holder, observed_bytes, now)
        self._change(lease, _S.UNVERIFIED, observed_bytes=observed_bytes)
        lease.used_since_reading = -1  # it was there before us, and was taken for a neighbour's
        self._external.bytes_ = max(0, self._external.bytes_ - observed_bytes)
        return lease

    def settle(self, lease: Lease, observed_bytes: int) -> None:
        """The holder's use was observed. More than was leased counts in full; less keeps the promise."""
        self._own(lease)
        self._change(lease, _S.SETTLED, observed_bytes=max(0, observed_bytes))

    def recount(self, lease: Lease, observed_bytes: int) -> None:
        """A later observation of a settled lease: its holder grew or shrank."""
        self._own(lease)
        if lease.state is not _S.SETTLED:
            raise OurBug(f"{lease!r} is not settled, so its use cannot be counted again.")
        self._change(lease, None, observed_bytes=max(0, observed_bytes))

    def shrink(self, lease: Lease, bytes_: int) -> None:
        """Promise a settled holder less than it leased, once its peak was measured. Raises OurBug for more."""
        self._own(lease)
        if lease.state is not _S.SETTLED or not 0 <= bytes_ <= lease.bytes_:
            raise OurBug(f"{lease!r} can only be shrunk when it is settled, and not to {bytes_} bytes.")
        self._change(lease, None, bytes_=bytes_)

    def drain(self, lease: Lease) -> None:
        """The holder is being ended. Harmless when it is draining already."""
        self._own(lease)
        if lease.state is not _S.DRAINING:
            self._change(lease, _S.DRAINING)

    def orphan(self, lease: Lease) -> None:
        """The holder's process is gone, but its memory has not come back."""
        self._own(lease)
        self._change(lease, _S.ORPHAN)

    def release(self, lease: Lease, now: float | None = None) -> None:
        """The process is gone. Raises OurBug the second time.

        The bytes count as returning until three quarters are seen to be back, or 5 s have passed from `now`
        (None: from the next reading); what is still used then is external.
        """
        self._own(lease)
        counted, since = lease.counted_bytes, lease.used_since_reading
        if lease.resting:
            counted = 0
        self._remove(lease)
        # Where readings may never have shown it, its absence from the newest one proves nothing yet.
        shown = since is not None and self._window.has_shown(since)
        used = self._reading.used_bytes if self._reading is not None else None
        left = counted
        if shown and used is not None and self._belief.reason is None:
            left = min(counted, self._unexplained_bytes(used))  # it may be back already
        self._returns.expect(counted, left, None if shown else self._window.number, now)

    def renew(self, lease: Lease, now: float) -> Lease:
        """The process is gone, but its claim stays: the same bytes are granted anew, and nobody is asked in between."""
        self.release(lease, now)
        return self._book(lease.holder, lease.bytes_, now)

    def rest(self, lease: Lease) -> None:
        """No process of its holder runs: whatever becomes visible on the device is somebody else's."""
        self._own(lease)
        if lease.state is not _S.GRANTED:
            raise OurBug(f"{lease!r} may be in use, so it cannot rest.")
        self._change(lease, None, resting=True)

    def begin(self, lease: Lease) -> None:
        """A process of its holder is being started. Harmless where it did not rest."""
        self._own(lease)
        self._change(lease, None, resting=False)

    def cancel(self, lease: Lease) -> None:
        """Nobody ever used it: give it back as if it had not been granted. Raises OurBug when it was settled."""
        self._own(lease)
        if lease.state is not _S.GRANTED:
            raise OurBug(f"{lease!r} may have been used, so it can only be released.")
        self._remove(lease)

    def _book(self, holder: str, bytes_: int, now: float) -> Lease:
        lease = Lease(self._next_number, self.device, holder, bytes_, now)
        self._next_number += 1
        self._leases[lease.number] = lease
        self._sums.count(lease, 1)  # requested: nothing
        self._change(lease, _S.GRANTED)
        return lease

    def _remove(self, lease: Lease) -> None:
        self._change(lease, _S.RELEASED)
        del self._leases[lease.number]
        del self._holdings[lease.number]

    def _own(self, lease: Lease) -> None:
        if self._leases.get(lease.number) is not lease:
            raise OurBug(f"{lease!r} is not (or no longer) a lease of {self.device}.")

    def _change(
        self,
        lease: Lease,
        state: LeaseState | None,
        *,
        observed_bytes: int | None = None,
        bytes_: int | None = None,
        resting: bool | None = None,
    ) -> None:
        """The one place where a lease changes: out of all sums as it was, into them as it is."""
        new = lease.state
        if state is not None:
            new = move(f"The lease of {lease.holder} on {lease.device}", TRANSITIONS, lease.state, state)
        self._sums.count(lease, -1)
        known_bytes = lease.observed_bytes if lease.use_known else 0
        lease.state = new
        if observed_bytes is not None:
            if observed_bytes > lease.observed_bytes or lease.used_since_reading is None:
                lease.used_since_reading = self._window.number
            lease.observed_bytes = observed_bytes
        if bytes_ is not None:
            lease.bytes_ = bytes_
        if resting is not None or state is not None:
            lease.resting = bool(resting)
        if state is _S.SETTLED:
            lease.use_known = True
        elif state is _S.UNVERIFIED or state is _S.RELEASED:
            lease.use_known = False
        self._sums.count(lease, 1)
        self._holdings[lease.number] = Holding(lease.holder, lease.counted_bytes, new)
        if known_bytes and not lease.use_known:
            self._window.forget(known_bytes, self._sums.held_bytes)
        else:
            self._window.change(self._sums.held_bytes)

    def _why_stale(self, now: float) -> str | None:
        """Of a reading with figures that is too old to decide on. An unknown one is no staler than it was."""
        reading = self._reading
        if reading is None or reading.used_bytes is None or now - reading.read_at <= self._stale_after_s:
            return None
        return f"The last reading of {self.device} is older than {self._stale_after_s:g} s."

    # -- shown

    def snapshot(self, now: float | None = None) -> LedgerView:
        """The figures for status. With `now` the stage of pressure is assessed anew, else it is as last assessed."""
        reading = self._reading
        pressure = self._gauge.pressure if now is None else self.assess(now)
        known = reading is not None and reading.used_bytes is not None
        reason = self.unknown_reason or self._belief.reason
        if reason is None and not known:
            reason = (reading.reason if reading is not None else None) or f"{self.device} does not report its memory."
        return LedgerView(
            device=self.device,
            total_bytes=self.total_bytes,
            driver_reserved_bytes=reading.driver_reserved_bytes if reading is not None and known else None,
            reported_free_bytes=reading.free_bytes if reading is not None else None,
            leased_bytes=self._sums.leased_bytes,
            granted_not_visible_bytes=self._sums.growth_bytes
            + (self._sums.loading_bytes if reading is None else self._not_yet_visible_bytes()),
            returning_bytes=self._returns.bytes_,
            unverified_bytes=self._sums.unverified_bytes,
            external_bytes=self.external_bytes,
            available_bytes=self.available_bytes,
            headroom_bytes=self.headroom_bytes,
            slack_bytes=self.slack_bytes,
            largest_block_bytes=reading.largest_block_bytes if reading is not None else None,
            pressure=self.pressure,
            stage=pressure.stage,
            stage_reason=pressure.reason,
            read_at=reading.read_at if reading is not None and known else None,
            reason=reason,
            disbelief=self._belief.reason,
            leases=tuple(self._holdings.values()),
        )
