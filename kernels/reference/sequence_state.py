"""What the sampler keeps of a sequence, and how it changes its logits; numpy, docs/sampling.md."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from triptych.kernels.sampler_params import Integers, SamplerParams


class SequenceState:
    """Parameters, prompt and output of one sequence."""

    def __init__(
        self,
        params: SamplerParams,
        vocabulary_size: int,
        prompt_ids: Integers,
        output_ids: Integers,
    ) -> None:
        self.params = params
        self.prompt_ids = [int(token) for token in prompt_ids]
        self.output_ids = [int(token) for token in output_ids]
        self._size = vocabulary_size

    @property
    def position(self) -> int:
        """How many tokens are out."""
        return len(self.output_ids)

    def modified(
        self, row: NDArray[np.float32], allowed_mask: NDArray[np.uint32] | None
    ) -> NDArray[np.float32]:
        """The row that is drawn from, [vocabulary_size]; a copy."""
        params, row = self.params, row.copy()
        if params.allowed_token_ids is not None:
            row[~self._marked(list(params.allowed_token_ids))] = -np.inf
        if allowed_mask is not None:
            bits = np.unpackbits(allowed_mask.view(np.uint8), bitorder="little")
            row[bits[: self._size] == 0] = -np.inf
        row[self._marked(self._completing_bad_words())] = -np.inf
        row[self._marked(self._completing_repeats())] = -np.inf
        if self.position < params.mask_until:
            row[self._marked(list(params.masked_token_ids))] = -np.inf
        for token, bias in params.logit_bias:
            if 0 <= token < self._size:
                row[token] += np.float32(bias)
        self._penalize(row)
        return row

    def _marked(self, token_ids: list[int]) -> NDArray[np.bool_]:
        marked = np.zeros(self._size, np.bool_)
        marked[[token for token in token_ids if 0 <= token < self._size]] = True
        return marked

    def _completing_bad_words(self) -> list[int]:
        """As in vLLM: the tokens in front are looked for in the output only."""
        output = tuple(self.output_ids)
        return [
            word[-1]
            for word in self.params.bad_words
            if output[len(output) - len(word) + 1 :] == word[:-1] and len(word) <= len(output) + 1
        ]

    def _completing_repeats(self) -> list[int]:
        """As in Hugging Face: over prompt and output."""
        size, history = self.params.no_repeat_ngram_size, self.prompt_ids + self.output_ids
        if size == 0 or len(history) < size:
            return []
        prefix = history[len(history) - size + 1 :]
        starts = range(len(history) - size + 1)
        return [
            history[start + size - 1]
            for start in starts
            if history[start : start + size - 1] == prefix
        ]

    def _penalize(self, row: NDArray[np.float32]) -> None:
        """In float32, rounded after each operation."""
        params, outputs = self.params, Counter(self.output_ids)
        repetition = np.float32(params.repetition_penalty)
        if repetition != 1.0:
            seen = self._marked(self.prompt_ids + self.output_ids)
            with np.errstate(over="ignore"):  # by a penalty near 0: then there is no token
                row[seen] = np.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
        frequency, presence = (
            np.float32(params.frequency_penalty),
            np.float32(params.presence_penalty),
        )
        if frequency == 0.0 and presence == 0.0:
            return
        for token, count in outputs.items():
            if 0 <= token < self._size:
                row[token] -= frequency * np.float32(count)
                row[token] -= presence
