"""The noise of tokens: Philox4x32-10 and Gumbel in float64, as `kernels.reference.philox`."""

import triton
import triton.language as tl


@triton.jit
def philox_quad(quads, part, choice, position, key_low, key_high):
    """Ten rounds over the counters (quad, part, choice, position): four uint32 words, as uint64.

    All arguments are uint64 below 2^32; `quads` is a tensor. Wide throughout: the compiler makes
    32-bit products of it, and nothing can overflow.
    """
    low: tl.constexpr = 0xFFFFFFFF
    c0 = quads
    c1 = tl.zeros_like(quads) + part
    c2 = tl.zeros_like(quads) + choice
    c3 = tl.zeros_like(quads) + position
    k0, k1 = key_low, key_high
    for _ in tl.static_range(10):
        first = c0 * 0xD2511F53
        second = c2 * 0xCD9E8D57
        c0 = (second >> 32) ^ c1 ^ k0
        c2 = (first >> 32) ^ c3 ^ k1
        c1 = second & low
        c3 = first & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


@triton.jit
def word_of_each(w0, w1, w2, w3):
    """[Q, 4] of four words [Q]: token 4q + j has word j."""
    j = tl.arange(0, 4)[None, :]
    lower = tl.where(j == 0, w0[:, None], w1[:, None])
    upper = tl.where(j == 2, w2[:, None], w3[:, None])
    return tl.where(j < 2, lower, upper)


@triton.jit
def gumbel(quads, choice, position, key_low, key_high):
    """Standard Gumbel noise float64 [Q, 4] of the tokens 4q + j, for `quads` uint64 [Q]."""
    w0, w1, w2, w3 = philox_quad(quads, 0, choice, position, key_low, key_high)
    high = word_of_each(w0, w1, w2, w3)
    w0, w1, w2, w3 = philox_quad(quads, 1, choice, position, key_low, key_high)
    low = word_of_each(w0, w1, w2, w3)
    bits = ((high << 20) | (low >> 12)).to(tl.int64)
    uniform = (2.0 * bits.to(tl.float64) + 1.0) * 1.1102230246251565e-16  # 2^-53
    return -tl.log(-tl.log(uniform))
