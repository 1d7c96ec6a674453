"""One batch, or both twins, asked the same."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from batch_model import BatchFactory, BatchShape, facts
from triptych.engine_core.batch import Batch
from triptych.engine_core.ids import SequenceId

Answer = TypeVar("Answer")


class Lockstep:
    """Each with a slot of its own."""

    def __init__(self, shape: BatchShape, factories: Sequence[BatchFactory]) -> None:
        self.shape = shape
        layout = shape.layout
        self.batches = [
            factory(
                shape.num_blocks,
                shape.block_size,
                layout,
                shape.prefix_caching,
                shape.num_host_blocks,
            )
            for factory in factories
        ]
        self.slots = [memoryview(bytearray(layout.slot_bytes)) for _ in self.batches]

    def ask(self, call: Callable[[Batch], Answer]) -> Answer:
        """What all twins answer, or raise."""
        answers, errors = [], []
        for batch in self.batches:
            try:
                answers.append(call(batch))
            except (AssertionError, KeyError, OverflowError, ValueError) as error:
                errors.append(error)
        if errors:
            types = {type(error) for error in errors}
            assert len(types) == 1, f"twins raise {types}"
            assert not answers, f"one twin raised {errors[0]!r}, another answered {answers[0]}"
            raise errors[0]
        assert all(answer == answers[0] for answer in answers), f"twins differ: {answers}"
        return answers[0]

    def facts(self) -> tuple[object, ...]:
        """Everything that can be seen from outside."""
        return self.ask(facts)

    def table(self, number: int) -> list[int]:
        return self.ask(lambda b: b.table(SequenceId(number)))
