"""The angles of rotary embedding, the same for every plan."""

import math

import numpy as np
import numpy.typing as npt

from triptych.services.executor.model_config import Rope

Floats = npt.NDArray[np.float32]


def inverse_frequencies(rope: Rope, head_dim: int, factors: Floats | None = None) -> Floats:
    """Radians per position of each pair, float32 [head_dim / 2], as transformers computes them.

    `factors` (GGUF's rope_freqs) divide what the scaling leaves.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.float32(rope.theta) ** exponents
    match rope.kind:
        case "none":
            pass
        case "linear":
            frequencies = frequencies / np.float32(rope.factor)
        case "llama3":
            frequencies = _llama3(frequencies, rope)
    return frequencies if factors is None else frequencies / factors


def _llama3(frequencies: Floats, rope: Rope) -> Floats:
    """Long waves slowed by `factor`, short ones kept, a ramp between (Llama 3.1's scaling)."""
    turns = np.float32(rope.original_max_position / (2 * math.pi)) * frequencies
    ramp = (turns - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = ramp.clip(0, 1)
    return (1 - ramp) * frequencies / np.float32(rope.factor) + ramp * frequencies
