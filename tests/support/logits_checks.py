"""A back-end's logits against transformers': whole, in chunks, in mixed batches."""

from itertools import pairwise

import numpy as np
import torch

from step_driver import DrivenSequence, StepDriver
from tiny_models import reference_logits
from triptych.services.executor.backend import Backend

Pair = tuple[torch.nn.Module, Backend]


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return [int(value) for value in np.random.default_rng(seed).integers(0, 96, length)]


def check_decode(pair: Pair, tolerance: float) -> None:
    model, backend = pair
    tokens = tokens_of(40)
    expected = reference_logits(model, tokens)
    driver, sequence = StepDriver(backend), DrivenSequence()
    got = driver.step([(sequence, tokens[:22])])[0]
    np.testing.assert_allclose(got, expected[21], atol=tolerance)
    for at in range(22, 40):
        got = driver.step([(sequence, [tokens[at]])])[0]
        np.testing.assert_allclose(got, expected[at], atol=tolerance)


def check_chunks(pair: Pair, tolerance: float) -> None:
    model, backend = pair
    random = np.random.default_rng(5)
    tokens = tokens_of(30, seed=1)
    expected = reference_logits(model, tokens)
    for _ in range(3):
        driver, sequence = StepDriver(backend), DrivenSequence()
        cuts = sorted({0, 30, *(int(cut) for cut in random.integers(1, 30, 4))})
        for start, end in pairwise(cuts):
            got = driver.step([(sequence, tokens[start:end])])[0]
            np.testing.assert_allclose(got, expected[end - 1], atol=tolerance)


def check_mixed_batches(pair: Pair, tolerance: float) -> None:
    """Sequences of all lengths start, go on in chunks and decode in the same steps."""
    model, backend = pair
    random = np.random.default_rng(6)
    texts = [tokens_of(int(length), seed) for seed, length in enumerate((3, 34, 17, 9, 25, 1))]
    expected = [reference_logits(model, text) for text in texts]
    driver = StepDriver(backend)
    sequences = [DrivenSequence() for _ in texts]
    for _ in range(50):
        rows, wanted = [], []
        for text, logits, sequence in zip(texts, expected, sequences, strict=True):
            left = len(text) - sequence.computed
            if left == 0 or random.random() < 0.3:
                continue
            take = min(left, int(random.choice([1, 1, 1, 4, 7])))
            end = sequence.computed + take
            rows.append((sequence, text[sequence.computed : end]))
            wanted.append(logits[end - 1])
        if rows:
            np.testing.assert_allclose(driver.step(rows), np.stack(wanted), atol=tolerance)
    assert all(s.computed == len(t) for s, t in zip(sequences, texts, strict=True))
