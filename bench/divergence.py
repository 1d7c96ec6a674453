"""How far an engine's numbers are from a reference's. Pure; arrays in, floats out."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


def log_probabilities(logits: Logits) -> NDArray[np.float64]:
    """Log softmax over the last axis, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    normal: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return normal


def divergence(reference: Logits, engine: Logits) -> NDArray[np.float64]:
    """KL(reference || engine) in nats over the last axis: [..., vocabulary] to [...]."""
    assert reference.shape == engine.shape, (reference.shape, engine.shape)
    log_p, log_q = log_probabilities(reference), log_probabilities(engine)
    total: NDArray[np.float64] = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return np.maximum(total, 0.0)  # rounding can leave a tiny negative sum


def equal_answers(reference: Sequence[Sequence[int]], engine: Sequence[Sequence[int]]) -> int:
    """How many answers are the reference's, token for token."""
    return sum(list(a) == list(b) for a, b in zip(reference, engine, strict=True))


def perplexity(log_likelihood: float, tokens: int) -> float:
    """exp of the mean negative log probability of so many tokens."""
    return float(np.exp(-log_likelihood / tokens))


def windows_of(token_ids: Sequence[int], length: int, most: int) -> list[list[int]]:
    """The text cut into at most `most` windows of exactly `length` tokens; the rest is left out."""
    count = min(most, len(token_ids) // length)
    assert count, f"{len(token_ids)} tokens are less than one window of {length}"
    return [list(token_ids[i * length : (i + 1) * length]) for i in range(count)]
