"""The draw is the published generator, and a pure function of (seed, choice, position)."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relevo.core.draw import philox4x32, uniform

# kat_vectors of Random123 1.14, philox4x32 with 10 rounds
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_the_generator_gives_the_published_answers(counter, key, words):
    assert philox4x32(counter, key) == words


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_every_draw_lies_in_the_half_open_unit_interval_and_repeats(seed, choice, position):
    drawn = uniform(seed, choice, position)
    assert 0.0 <= drawn < 1.0
    assert drawn == uniform(seed, choice, position)
    assert (drawn * 2**53).is_integer()


def test_the_first_two_words_make_the_fraction():
    assert uniform(0, 0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_seed_choice_and_position_each_matter_over_their_whole_width():
    draws = {uniform(s, c, p) for s in (0, 1, 1 << 32, 1 << 63) for c in (0, 1, 1 << 31) for p in (0, 1, 1 << 40)}
    assert len(draws) == 4 * 3 * 3


def test_draws_are_spread_evenly():
    draws = [uniform(7, 1, position) for position in range(4000)]
    tenths = [sum(1 for d in draws if int(d * 10) == tenth) for tenth in range(10)]
    assert abs(statistics.fmean(draws) - 0.5) < 0.02
    assert sum((n - 400) ** 2 / 400 for n in tenths) < 27.9  # chi squared, 9 degrees of freedom, one in a thousand


@pytest.mark.parametrize("wrong", [(-1, 0, 0), (1 << 64, 0, 0), (0, -1, 0), (0, 1 << 32, 0), (0, 0, -1)])
def test_a_draw_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match="none negative"):
        uniform(*wrong)
