"""How large a step the device's static buffers hold."""

from dataclasses import dataclass, replace

from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """Counts of a step: tokens, rows, rows of logits, samples, tokens of history; and blocks of
    the longest sequence."""

    tokens: int
    rows: int
    logits: int
    samples: int
    history: int
    blocks: int

    @classmethod
    def usual(cls, *, tokens: int, rows: int, blocks: int) -> "StepCapacity":
        """Of the largest step that a scheduler makes with these limits, and without drafts."""
        return cls(
            tokens=max(tokens, rows),
            rows=rows,
            logits=rows + 32,
            samples=rows + 32,
            history=1 << 14,
            blocks=blocks,
        )

    def holding(self, inputs: StepInputs, device: DeviceInputs | None) -> "StepCapacity":
        """Itself where a step fits, else one that holds it."""
        grown = replace(
            self,
            tokens=max(self.tokens, inputs.num_tokens),
            rows=max(self.rows, inputs.num_rows),
            logits=max(self.logits, inputs.num_logits),
        )
        if device is not None:
            history = len(device.history)
            grown = replace(
                grown,
                samples=max(self.samples, device.num_samples),
                # Histories grow by a token a step: twice as much is not made room for as often.
                history=self.history if history <= self.history else 2 * history,
            )
        return self if grown == self else grown

    def with_tokens(self, tokens: int) -> "StepCapacity":
        """The same for more tokens."""
        return replace(self, tokens=max(self.tokens, tokens))
