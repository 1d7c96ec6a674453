"""What the scheduler needs of a sampler: to be told which sequences run and what they were given.

The sampler itself, which reads logits, is the kernels' (kernels/sampler_params.py); whoever builds
a Scheduler fits it to this.
"""

from collections.abc import Sequence
from typing import Protocol

from triptych.engine_core.sampling_params import SamplingParams


class SamplingState(Protocol):
    """A sequence is open from when it runs until it ceases to, or until the step is over in which
    it ceased to."""

    def open(
        self,
        sequence_id: int,
        params: SamplingParams,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """A sequence runs, with these tokens."""
        ...

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """One more output token for each."""
        ...

    def close(self, sequence_id: int) -> None:
        """A sequence runs no more."""
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
    ) -> None:
        """Nothing to keep."""

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Nothing to keep."""

    def close(self, sequence_id: int) -> None:
        """Nothing to forget."""
