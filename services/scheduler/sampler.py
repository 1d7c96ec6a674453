"""Which sampler draws the tokens of a step; both read the logits in place and agree on tokens."""

from typing import Literal, Protocol

from triptych.kernels.sample_columns import SampleTuple
from triptych.services.transport.rings import LogitsView


class SampleRows(Protocol):
    """`sample_rows` of kernels.cpu.sampler or of kernels.reference.sampler."""

    def __call__(
        self, logits: LogitsView, rows: list[SampleTuple], vocabulary_size: int
    ) -> list[int]:
        """One token id below `vocabulary_size` for each row; -1 where logits are not finite.

        `logits`: float32 [len(rows), at least vocabulary_size], a view into the logits ring.
        """
        ...


def sampler_of(impl: Literal["native", "python"]) -> SampleRows:
    """The C++ sampler, or its plain meaning."""
    if impl == "native":
        from triptych.kernels.cpu.sampler import sample_rows as native

        return native
    from triptych.kernels.reference.sampler import sample_rows as plain

    return plain
