"""The C++ sampler. Same calls and same tokens as `kernels.reference.sampler`; docs/sampling.md."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.kernels.cpu import _cpu
from triptych.kernels.sampler_params import Drawn, Integers, SamplerParams, TokenLogprobs, check


class Sampler:
    """`SamplerProtocol` in C++: state per sequence, no Python objects per plain row.

    `draw` and `score` release the GIL: the caller keeps the matrix as it is, and calls nothing else
    of this sampler, until they return.
    """

    def __init__(self, vocabulary_size: int, *, processed_logprobs: bool = False) -> None:
        self._sampler = _cpu.Sampler(vocabulary_size, processed_logprobs)

    def open(
        self, sequence_id: int, params: SamplerParams, prompt_ids: Integers, output_ids: Integers
    ) -> None:
        """A sequence begins, or goes on, with these tokens."""
        check(params)
        self._sampler.open(sequence_id, params, prompt_ids, output_ids)

    def append(self, sequence_ids: Integers, token_ids: Integers) -> None:
        """One more output token for each."""
        self._sampler.append(sequence_ids, token_ids)

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self._sampler.close(sequence_id)

    @property
    def open_sequences(self) -> int:
        """How many are open."""
        return self._sampler.open_sequences

    def draw(
        self,
        logits: NDArray[np.float32],
        sequence_ids: Integers,
        logits_rows: Integers,
        allowed_masks: Sequence[NDArray[np.uint32] | None] | None = None,
    ) -> Drawn:
        """Draw a token for each sample."""
        tokens, reported = self._sampler.draw(logits, sequence_ids, logits_rows, allowed_masks)
        return Drawn(tokens, {index: TokenLogprobs(*values) for index, values in reported})

    def score(
        self, logits: NDArray[np.float32], logits_rows: Integers, token_ids: Integers, top: int
    ) -> list[TokenLogprobs | None]:
        """Logprobs of given tokens by the model's own logits."""
        scores = self._sampler.score(logits, logits_rows, token_ids, top)
        return [None if values is None else TokenLogprobs(*values) for values in scores]
