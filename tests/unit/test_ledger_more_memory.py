"""The same events on a larger device never give a worse answer."""

from __future__ import annotations

import random

import pytest

from relevo.core.leases.lease import Lease
from relevo.core.leases.ledger import Ledger
from relevo.core.leases.reading import Reading

MIB = 1 << 20
TOTAL = 1000 * MIB


@pytest.mark.parametrize("seed", range(6))
def test_more_memory_never_gives_a_worse_answer(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(20):
        more = dice.randrange(1, 400) * MIB
        pair = Ledger("small", headroom_bytes=50 * MIB), Ledger("large", headroom_bytes=50 * MIB)
        _walk(dice, pair, (TOTAL, TOTAL + more))


def _walk(dice: random.Random, pair: tuple[Ledger, Ledger], totals: tuple[int, int]) -> None:
    now, leases = 0.0, list[tuple[Lease, Lease]]()
    for _ in range(40):
        now += dice.choice((0.3, 1.0, 4.0))
        act = dice.randrange(6)
        if act < 2:
            used = dice.randrange(TOTAL)
            block = dice.choice((None, dice.randrange(TOTAL - used + 1)))
            for ledger, total in zip(pair, totals, strict=True):
                larger = None if block is None else block + total - TOTAL
                ledger.observe(Reading(total, total - used, read_at=now, largest_block_bytes=larger))
        elif act < 4:
            bytes_ = dice.randrange(300) * MIB
            largest = dice.choice((None, bytes_ // 2, bytes_))
            small, large = (ledger.request("h", bytes_, now, largest_allocation_bytes=largest) for ledger in pair)
            if isinstance(small, Lease):
                assert isinstance(large, Lease)
                leases.append((small, large))
            elif isinstance(large, Lease):
                pair[1].cancel(large)
        elif leases:
            both = leases.pop(dice.randrange(len(leases)))
            observed = dice.randrange(both[0].bytes_ + MIB)
            for ledger, lease in zip(pair, both, strict=True):
                if act == 4 and lease.state == "granted":
                    ledger.settle(lease, observed)
                else:
                    ledger.release(lease, now)
            if act == 4 and both[0].state == "settled":
                leases.append(both)
        _compare(*pair)


def _compare(small: Ledger, large: Ledger) -> None:
    assert (small.available_bytes is None) == (large.available_bytes is None)
    assert (large.available_bytes or 0) >= (small.available_bytes or 0)
    assert (large.slack_bytes or 0) >= (small.slack_bytes or 0)
