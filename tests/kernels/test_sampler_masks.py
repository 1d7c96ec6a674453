"""A grammar's bit mask: exactly the ids whose bits are set can be drawn."""

import numpy as np
import pytest

from sampler_sequences import BOTH, MakeSampler
from triptych.kernels.sampler_params import NO_TOKEN, SamplerParams


@BOTH
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64, 70, 1000])
def test_words_of_all_of_none_and_of_some_ids(make: MakeSampler, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    words = -(-vocabulary // 32)
    sampler = make(vocabulary, processed_logprobs=True)
    sampler.open(1, SamplerParams(logprobs=vocabulary), [], [])
    logits = rng.standard_normal((1, vocabulary)).astype(np.float32)
    for _ in range(20):
        kinds = rng.integers(0, 3, words)
        mask = rng.integers(0, 2**32, words, np.uint32)
        mask[kinds == 0] = 0
        mask[kinds == 1] = 0xFFFFFFFF
        allowed = {i for i in range(vocabulary) if mask[i >> 5] >> np.uint32(i & 31) & 1}
        drawn = sampler.draw(logits, [1], [0], [mask])
        if not allowed:
            assert drawn.token_ids.tolist() == [NO_TOKEN]
        else:
            assert int(drawn.token_ids[0]) in allowed
            assert set(drawn.logprobs[0].top_ids.tolist()) == allowed
