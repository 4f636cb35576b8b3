"""The sums over a ledger's leases, kept as they change."""

from __future__ import annotations

from relevo.core.leases.lease import Lease, LeaseState

_S = LeaseState


class Tally:
    """Add a lease after a change and take it out, as it was, before: then every sum equals a recount."""

    __slots__ = (
        "ending",
        "growth_bytes",
        "held_bytes",
        "leased_bytes",
        "loading_bytes",
        "settled_bytes",
        "unverified_bytes",
    )

    def __init__(self) -> None:
        self.leased_bytes = 0
        """Of all."""
        self.held_bytes = 0
        """Observed, of those whose use is known."""
        self.settled_bytes = 0
        """Of these, what settled holders use."""
        self.growth_bytes = 0
        """What settled and resting holders leased and do not use: free by report, but promised."""
        self.loading_bytes = 0
        """In full, of those whose use is not known."""
        self.unverified_bytes = 0
        self.ending = 0
        """How many are draining or orphans."""

    def count(self, lease: Lease, sign: int) -> None:
        """Add (1) or take out (-1)."""
        state = lease.state
        if state is _S.REQUESTED or state is _S.RELEASED:
            return
        counted = sign * lease.counted_bytes
        self.leased_bytes += counted
        if lease.use_known:
            observed = sign * lease.observed_bytes
            self.held_bytes += observed
            if state is _S.SETTLED:
                self.settled_bytes += observed
                self.growth_bytes += counted - observed
        elif lease.resting:
            self.growth_bytes += counted
        else:
            self.loading_bytes += counted
        if state is _S.UNVERIFIED:
            self.unverified_bytes += counted
        elif state is _S.DRAINING or state is _S.ORPHAN:
            self.ending += sign
