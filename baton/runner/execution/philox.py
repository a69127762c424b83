"""Random numbers by counter: the number for a position is a pure function of (seed, position).

Philox4x32-10 from Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), with the
authors' constants; the known answers of their Random123 library are in the tests.
"""

from __future__ import annotations

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_MASK_32 = 0xFFFFFFFF
_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four 32-bit random words for a 128-bit counter under a 64-bit key; every word given in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK_32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK_32,
        )
        k0 = (k0 + _WEYL_0) & _MASK_32
        k1 = (k1 + _WEYL_1) & _MASK_32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) that draws output position `position` (53 random bits).

    `seed` counts modulo 2**64, so negative seeds are fine; `position` is the output index, from 0.
    """
    key = (seed & _MASK_32, (seed >> 32) & _MASK_32)
    high, low, _, _ = philox4x32((position & _MASK_32, (position >> 32) & _MASK_32, 0, 0), key)
    return ((high >> 5) * 67108864.0 + (low >> 6)) / 9007199254740992.0
