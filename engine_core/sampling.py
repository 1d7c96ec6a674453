"""What the scheduler needs of a sampler: to be told which sequences run and what they were given.

The sampler itself, which reads logits, is the kernels' (kernels/sampler_params.py); whoever builds
a Scheduler fits it to this.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from triptych.engine_core.sampling_params import SamplingParams


class SamplingState(Protocol):
    """A sequence is open from when it runs until it ceases to, or until the step is over in which
    it ceased to.

    It may also guess what comes next (speculative decoding): the guesses are computed together with
    the sequence's own tokens and taken as far as the very same tokens are drawn.
    """

    def open(
        self,
        sequence_id: int,
        params: SamplingParams,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        salt: str = "",
    ) -> None:
        """A sequence runs, with these tokens. What is learned from its text serves only those of
        the same `salt` (Request.cache_salt)."""
        ...

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """One more output token for each."""
        ...

    def close(self, sequence_id: int) -> None:
        """A sequence runs no more."""
        ...

    def drafts(self) -> Iterable[tuple[int, Sequence[int]]]:
        """Guesses for the step that is about to be planned: sequence ids, and the tokens that may
        follow theirs (batch.UNKNOWN_DRAFT: the executor's draft model guesses). Only of sequences
        that have an output token; each at most once."""
        ...


class NoSampling:
    """For drivers that draw tokens by themselves."""

    def open(
        self,
        sequence_id: int,
        params: SamplingParams,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        salt: str = "",
    ) -> None:
        """Nothing to keep."""

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Nothing to keep."""

    def close(self, sequence_id: int) -> None:
        """Nothing to forget."""

    def drafts(self) -> Iterable[tuple[int, Sequence[int]]]:
        """None."""
        return ()
