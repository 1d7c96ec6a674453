"""From the rows of a step to token ids, by either sampler; the logits are read in place."""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from triptych.engine_core.step import SampleRow
from triptych.kernels.sample_columns import SampleColumns
from triptych.services.transport.rings import LogitsView


class SampleFunction(Protocol):
    """`sample` of kernels.cpu.sampler or of kernels.reference.sampler."""

    def __call__(
        self, logits: LogitsView, columns: SampleColumns, vocabulary_size: int
    ) -> NDArray[np.int32]:
        """One token per row, -1 for a row without one."""


class StepSampler:
    """Draws the tokens of a step by one of the two samplers; they give the same tokens."""

    def __init__(self, function: SampleFunction) -> None:
        self._function = function

    @classmethod
    def of(cls, impl: Literal["native", "python"]) -> "StepSampler":
        """The C++ sampler, or its plain meaning."""
        if impl == "native":
            from triptych.kernels.cpu.sampler import sample as native

            return cls(native)
        from triptych.kernels.reference.sampler import sample as plain

        return cls(plain)

    def sample(
        self, logits: LogitsView, rows: Sequence[SampleRow], vocabulary_size: int
    ) -> tuple[int, ...]:
        """One token id below `vocabulary_size` for each of `rows`; -1 where logits are not finite.

        `logits`: float32 [len(rows), at least vocabulary_size], a view into the logits ring; it is
        passed on as it is.
        """
        if not rows:
            return ()
        temperature, top_k, top_p, min_p, seed, choice, position, banned = zip(*rows, strict=True)
        columns = SampleColumns.of(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            choice=choice,
            position=position,
            banned=banned,
        )
        return tuple(self._function(logits, columns, vocabulary_size).tolist())
