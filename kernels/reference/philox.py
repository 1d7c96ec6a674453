"""Counter-based noise: Philox4x32-10, and the Gumbel noise of a token drawn from it.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Ten rounds over counters [..., 4] with a key of two 32-bit words -> uint32 [..., 4]."""
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _32) ^ c1 ^ np.uint64(k0), product1 & _LOW
        c2, c3 = (product0 >> _32) ^ c3 ^ np.uint64(k1), product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniform(
    token_ids: NDArray[np.int64], seed: int, choice: int, position: int
) -> NDArray[np.float64]:
    """The odd multiples of 2^-53 in (0, 1) that belong to the tokens, float64, same shape.

    Token t has word t % 4 of the counter (t // 4, part, choice, position) under the key `seed` (low
    word first): part 0 gives the upper 32 of 52 bits, part 1 the others.
    """
    key = seed & 0xFFFFFFFF, seed >> 32
    counter = np.zeros((*token_ids.shape, 4), np.uint32)
    counter[..., 0] = token_ids // 4
    counter[..., 2] = choice
    counter[..., 3] = position
    words = []
    for part in (0, 1):
        counter[..., 1] = part
        quad = philox4x32(counter, key)
        word = np.take_along_axis(quad, (token_ids % 4)[..., None], axis=-1)[..., 0]
        words.append(word.astype(np.uint64))
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    return (2.0 * bits.astype(np.float64) + 1.0) * 2.0**-53


def gumbel(
    token_ids: NDArray[np.int64], seed: int, choice: int, position: int
) -> NDArray[np.float64]:
    """Standard Gumbel noise of the tokens, float64, same shape; at most 36.74, at least -3.61."""
    noise: NDArray[np.float64] = -np.log(-np.log(uniform(token_ids, seed, choice, position)))
    return noise
