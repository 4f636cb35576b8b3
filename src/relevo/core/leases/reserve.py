"""Several leases in one step, of one device or of several: all of them or none."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relevo.core.errors import OurBug
from relevo.core.leases.lease import Lease, Shortfall
from relevo.core.leases.ledger import Ledger


class Want(msgspec.Struct, frozen=True):
    """A lease that is wanted together with others."""

    ledger: Ledger
    holder: str
    bytes_: int
    largest_allocation_bytes: int | None = None


def reserve(wants: Sequence[Want], now: float) -> tuple[Lease, ...] | Shortfall:
    """All of these leases, in their order, or none: the first refusal, with nothing changed anywhere."""
    beside: dict[int, int] = {}
    for want in wants:
        taken = beside.get(id(want.ledger), 0)
        refusal = want.ledger.shortfall(
            want.holder,
            want.bytes_,
            now,
            largest_allocation_bytes=want.largest_allocation_bytes,
            beside_bytes=taken,
        )
        if refusal is not None:
            return refusal
        beside[id(want.ledger)] = taken + want.bytes_
    leases = []
    for want in wants:
        lease = want.ledger.request(want.holder, want.bytes_, now)
        if isinstance(lease, Shortfall):
            raise OurBug(f"{want.ledger!r} refused what it had found free: {lease.reason}")
        leases.append(lease)
    return tuple(leases)
