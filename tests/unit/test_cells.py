"""Cells of a replica's pool: a request takes what it may need, and gives it back once."""

from __future__ import annotations

import pytest

from relevo.core.cells import Answer, CellLease, CellPool, CellShortfall, live_cells
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


# ------------------------------------------------------------ leases that grow


def growing(pool: CellPool, prompt: int, *answers: Answer) -> CellLease:
    lease = pool.lease_growing("req_g", prompt, answers)
    assert isinstance(lease, CellLease), lease
    return lease


def test_a_lease_takes_what_is_set_aside_and_not_its_limit() -> None:
    pool = CellPool(1000, 4, shared=True)
    lease = growing(pool, 100, Answer(0, 800, 200, 16))
    assert (lease.cells, pool.free_cells) == (300, 700)


def test_a_prompt_is_held_as_it_is_read_and_its_answers_only_after_it() -> None:
    pool = CellPool(1000, 4, shared=True)
    lease = growing(pool, 100, Answer(0, 800, 200, 16))
    assert pool.held_cells == 0
    pool.read(lease, 64)
    assert lease.held_cells == 64
    pool.read(lease, 32)
    assert lease.held_cells == 64, "what is read stays read"
    pool.read(lease, 5000)
    assert pool.held_cells == 116


def test_up_to_what_was_set_aside_an_extension_takes_nothing_more() -> None:
    pool = CellPool(1000, 4, shared=True)
    lease = growing(pool, 100, Answer(0, 800, 200, 16))
    assert pool.extend(lease, 0, 150) == 150
    assert (lease.cells, pool.free_cells) == (300, 700)
    assert pool.extend(lease, 0, 216) == 216
    assert (lease.cells, pool.free_cells) == (316, 684)


def test_beyond_it_an_extension_gets_what_is_free_and_never_more_than_its_limit() -> None:
    pool = CellPool(400, 4, shared=True)
    lease = growing(pool, 100, Answer(0, 220, 50, 50))
    other = taken(pool, 100, [100])
    assert pool.extend(lease, 0, 150) == 100, "50 were free"
    assert pool.free_cells == 0
    assert pool.extend(lease, 0, 150) == 100
    pool.release(other)
    assert pool.extend(lease, 0, 999) == 220
    assert pool.free_cells == 80


def test_an_extension_to_less_changes_nothing() -> None:
    pool = CellPool(400, 4, shared=True)
    lease = growing(pool, 100, Answer(0, 220, 50, 50))
    assert pool.extend(lease, 0, 10) == 50
    assert pool.free_cells == 250


def test_an_answer_that_ends_gives_its_cells_and_its_slot_back_and_leaves_the_prompt() -> None:
    pool = CellPool(1000, 3, shared=True)
    lease = growing(pool, 100, Answer(0, 200, 60, 60), Answer(2, 200, 30, 10))
    pool.end_answer(lease, 0)
    assert (pool.free_cells, pool.free_slots, lease.answer(0)) == (870, 2, None)
    pool.end_answer(lease, 0)
    assert pool.extend(lease, 0, 100) == 0
    assert pool.free_cells == 870, "an ended answer takes and gives nothing"
    pool.end_answer(lease, 2)
    assert (pool.free_cells, pool.free_slots) == (900, 3)
    pool.release(lease)
    assert pool.free_cells == 1000


def test_a_strict_pool_has_nothing_to_grow_into() -> None:
    pool = CellPool(512, 4, shared=False)
    lease = growing(pool, 100, Answer(0, 300, 20, 10), Answer(1, 200, 20, 10))
    assert [(a.held, a.set_aside) for a in lease.answers] == [(300, 300), (200, 200)]
    assert (lease.cells, pool.held_cells) == (1024, 1024)
    pool.end_answer(lease, 0)
    assert (pool.free_cells, pool.free_slots) == (1536, 3)
    pool.release(lease)
    assert (pool.free_cells, pool.free_slots) == (2048, 4)


def test_limits_that_an_empty_pool_could_not_take_are_never_leased() -> None:
    refused = CellPool(100, 4, shared=True).lease_growing("req_g", 50, [Answer(0, 51, 10, 10)])
    assert isinstance(refused, CellShortfall) and not refused.ever
    assert "can never fit here" in refused.reason


def test_a_growing_lease_needs_only_what_is_set_aside_to_be_free() -> None:
    pool = CellPool(100, 4, shared=True)
    taken(pool, 30, [30])
    assert isinstance(pool.lease_growing("req_g", 20, [Answer(0, 80, 21, 5)]), CellShortfall)
    assert isinstance(pool.lease_growing("req_g", 20, [Answer(0, 80, 20, 5)]), CellLease)
    assert pool.free_cells == 0


@pytest.mark.parametrize("answer", [Answer(0, 10, 11, 5), Answer(0, 10, 5, 6), Answer(0, 10, 5, -1)])
def test_an_answer_that_holds_more_than_is_set_aside_or_allowed_is_our_bug(answer: Answer) -> None:
    with pytest.raises(OurBug):
        CellPool(100, 2, shared=True).lease_growing("req_g", 1, [answer])


def test_the_same_choice_twice_is_our_bug_and_takes_nothing() -> None:
    pool = CellPool(100, 2, shared=True)
    with pytest.raises(OurBug):
        pool.lease_growing("req_g", 1, [Answer(0, 5, 5, 5), Answer(0, 5, 5, 5)])
    assert (pool.free_cells, pool.free_slots) == (100, 2)


def test_released_leases_do_not_grow() -> None:
    pool = CellPool(100, 2, shared=True)
    lease = growing(pool, 10, Answer(0, 50, 5, 5))
    pool.release(lease)
    for change in (lambda: pool.extend(lease, 0, 9), lambda: pool.read(lease, 1), lambda: pool.end_answer(lease, 0)):
        with pytest.raises(OurBug):
            change()
    assert pool.free_cells == 100


def test_the_newest_token_of_an_answer_is_in_no_cell_yet() -> None:
    assert live_cells(100, [1], shared=True) == 100
    assert live_cells(100, [5, 3], shared=True) == 106
    assert live_cells(100, [5, 3], shared=False) == 206
    assert live_cells(40, [0], shared=True) == 40


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
