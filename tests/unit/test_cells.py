"""Cells of a replica's pool: a request takes what it may need, and gives it back once."""

from __future__ import annotations

import pytest

from relevo.core.cells import CellLease, CellPool, CellShortfall
from relevo.core.errors import OurBug


def taken(pool: CellPool, prompt: int, outputs: list[int]) -> CellLease:
    lease = pool.lease("req_a", prompt, outputs)
    assert isinstance(lease, CellLease), lease
    return lease


def test_a_shared_pool_counts_the_prompt_once_for_all_choices() -> None:
    pool = CellPool(1000, 8, shared=True)
    lease = taken(pool, 400, [100, 100, 100])
    assert (lease.cells, lease.slots) == (700, 3)
    assert repr(pool) == "<CellPool shared: 700 of 1000 cells, 3 of 8 slots leased by 1>"


def test_a_strict_pool_gives_each_choice_a_whole_slot() -> None:
    pool = CellPool(512, 4, shared=False)
    lease = taken(pool, 400, [100, 50])
    assert (lease.cells, lease.slots) == (1024, 2)
    assert (pool.total_cells, pool.free_cells, pool.free_slots) == (2048, 1024, 2)


def test_a_strict_pool_compares_prompt_and_output_with_one_slot() -> None:
    pool = CellPool(512, 4, shared=False)
    assert pool.fits_ever(412, [100, 100, 100, 100])
    assert not pool.fits_ever(413, [100])


def test_a_request_may_fill_the_pool_exactly() -> None:
    pool = CellPool(1000, 2, shared=True)
    taken(pool, 900, [100])
    assert pool.free_cells == 0
    assert isinstance(pool.lease("req_b", 0, [1]), CellShortfall)


def test_a_shortfall_says_what_is_missing_and_changes_nothing() -> None:
    pool = CellPool(1000, 2, shared=True)
    taken(pool, 600, [100])
    refused = pool.lease("req_b", 300, [200])
    assert isinstance(refused, CellShortfall)
    assert (refused.need_cells, refused.free_cells, refused.need_slots, refused.free_slots) == (500, 300, 1, 1)
    assert refused.ever
    assert refused.reason == (
        "300 prompt tokens with 1 answer of up to 200 tokens need 500 cells and 1 slot; 300 cells and 1 slot are free."
    )
    assert pool.free_cells == 300


def test_missing_slots_are_a_shortfall_too() -> None:
    pool = CellPool(1000, 2, shared=True)
    taken(pool, 1, [1, 1])
    refused = pool.lease("req_b", 1, [1])
    assert isinstance(refused, CellShortfall)
    assert (refused.need_slots, refused.free_slots, refused.ever) == (1, 0, True)


def test_what_never_fits_says_so() -> None:
    for pool in (CellPool(1000, 2, shared=True), CellPool(1000, 2, shared=False)):
        for prompt, outputs in ((1000, [1]), (1, [1, 1, 1])):
            refused = pool.lease("req_b", prompt, outputs)
            assert isinstance(refused, CellShortfall)
            assert not refused.ever
            assert "can never fit here" in refused.reason


def test_a_lease_is_released_once() -> None:
    pool = CellPool(1000, 2, shared=True)
    lease = taken(pool, 10, [10])
    pool.release(lease)
    assert (pool.free_cells, pool.free_slots, pool.leases) == (1000, 2, ())
    assert repr(lease) == "<CellLease 1: req_a released>"
    with pytest.raises(OurBug):
        pool.release(lease)
    assert pool.free_cells == 1000


def test_a_lease_of_another_pool_is_refused() -> None:
    old, new = CellPool(1000, 2, shared=True), CellPool(1000, 2, shared=True)
    lease = taken(old, 10, [10])
    taken(new, 10, [10])
    with pytest.raises(OurBug):
        new.release(lease)


def test_the_largest_context_is_one_choices() -> None:
    assert CellPool(1000, 2, shared=True).largest_context_tokens == 1000
    assert CellPool(1000, 2, shared=False).largest_context_tokens == 1000


def test_fitting_now_agrees_with_leasing() -> None:
    pool = CellPool(100, 2, shared=True)
    for prompt in (10, 60, 90):
        fits = pool.fits_now(prompt, [20])
        assert isinstance(pool.lease("req_a", prompt, [20]), CellLease) == fits


@pytest.mark.parametrize(("prompt", "outputs"), [(-1, [1]), (1, []), (1, [-1])])
def test_nonsense_is_our_bug(prompt: int, outputs: list[int]) -> None:
    with pytest.raises(OurBug):
        CellPool(10, 1, shared=True).lease("req_a", prompt, outputs)


def test_a_pool_of_nothing_is_our_bug() -> None:
    with pytest.raises(OurBug):
        CellPool(0, 1, shared=True)
