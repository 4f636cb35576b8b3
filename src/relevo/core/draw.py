"""Random state as one counter: the number for a token depends only on (seed, choice, position).

Philox4x32 with ten rounds: J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011. Nothing is kept between draws, so a worker that takes over draws what the lost one would have drawn.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85  # golden ratio, square root of three minus one
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for a counter of four and a key of two 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: key is the seed, counter is (position, choice).

    `position` is the number of output tokens before the one drawn.
    Raises ValueError unless 0 <= seed < 2**64, 0 <= choice < 2**32 and 0 <= position < 2**64.
    """
    if not (0 <= seed < 1 << 64 and 0 <= choice < 1 << 32 and 0 <= position < 1 << 64):
        raise ValueError("A draw needs a seed and a position below 2**64 and a choice below 2**32, none negative.")
    first, second, _, _ = philox4x32((position & _MASK, position >> 32, choice, 0), (seed & _MASK, seed >> 32))
    return ((first >> 5) * (1 << 26) + (second >> 6)) / (1 << 53)
