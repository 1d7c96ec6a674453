"""The accuracy benchmark's arithmetic."""

import math

import numpy as np
import pytest

from bench_modules import load_bench_module

divergence = load_bench_module("divergence")


def test_divergence_by_hand() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    expected = 0.5 * math.log(2) - 0.25 * math.log(2)
    # Logits are log probabilities up to a constant of each row.
    found = divergence.divergence(
        np.log(p).astype(np.float32)[None] + 3, np.log(q).astype(np.float32)[None] - 40
    )
    assert found.shape == (1,)
    assert found[0] == pytest.approx(expected, rel=1e-5)


def test_divergence_is_zero_of_itself_and_never_negative() -> None:
    generator = np.random.default_rng(0)
    logits = (generator.standard_normal((5, 7, 1000)) * 5).astype(np.float32)
    assert (divergence.divergence(logits, logits) == 0).all()
    near = logits + np.float32(1e-6)
    assert (divergence.divergence(logits, near) >= 0).all()
    far = divergence.divergence(logits, logits[::-1].copy())
    assert far.shape == (5, 7)
    assert (far[[0, 1, 3, 4]] > 0).all()


def test_divergence_survives_extreme_logits() -> None:
    logits = np.array([[1e4, -1e4, 0.0], [-3e38, 0.0, 3e38]], np.float32)
    assert np.isfinite(divergence.log_probabilities(logits)).all()
    assert (divergence.divergence(logits, logits) == 0).all()


def test_equal_answers_compares_whole_answers() -> None:
    reference = [[1, 2, 3], [4, 5, 6], [7]]
    assert divergence.equal_answers(reference, [(1, 2, 3), (4, 5, 7), (7,)]) == 2
    with pytest.raises(ValueError, match="shorter"):
        divergence.equal_answers(reference, [[1, 2, 3]])


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices() -> None:
    assert divergence.perplexity(100 * math.log(1 / 32), 100) == pytest.approx(32)


def test_windows_are_whole() -> None:
    assert divergence.windows_of(range(10), 4, 9) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert divergence.windows_of(range(10), 4, 1) == [[0, 1, 2, 3]]
    with pytest.raises(AssertionError):
        divergence.windows_of(range(3), 4, 1)


def test_fifty_different_questions() -> None:
    questions = load_bench_module("questions").QUESTIONS
    assert len(questions) == len(set(questions)) == 50
