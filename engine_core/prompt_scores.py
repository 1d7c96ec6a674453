"""Prompt logprobs: which rows of logits are for them, and what was computed from those.

Each position comes once, however often its sequence is computed anew by this core. Another core
that goes on with its request begins again: whoever hears them puts them where they go.
"""

from triptych.engine_core.batch import Batch, Score
from triptych.engine_core.outputs import OutputColumns
from triptych.engine_core.roster import Roster
from triptych.engine_core.sequence import Sequence
from triptych.engine_core.step import PromptLogprobs, StepResult


class PromptScores:
    """Of the step in flight."""

    def __init__(self, roster: Roster, batch: Batch) -> None:
        self._roster = roster
        self._batch = batch

    def wanted(self) -> list[tuple[Score, tuple[int, ...], int]]:
        """The logits rows, the tokens that followed them, and how many of the most likely tokens
        are wanted beside each."""
        found = []
        for score in self._batch.scores():
            sequence = self._roster.by_id.get(score.sequence_id)
            if sequence is not None:
                begin, prompt = score.position + 1, sequence.request.prompt_token_ids
                targets = prompt[begin : begin + score.num_positions]
                found.append((score, targets, sequence.request.params.prompt_logprobs))
        return found

    def take(self, result: StepResult, columns: OutputColumns) -> list[Sequence]:
        """What was computed goes out; returns the sequences whose logits are not finite."""
        failed = []
        for (score, _, _), found in zip(self.wanted(), result.scores, strict=True):
            sequence = self._roster.by_id[score.sequence_id]
            known = sequence.num_scored - score.position
            logprobs = [each for each in found[max(known, 0) :] if each is not None]
            if len(logprobs) < score.num_positions - max(known, 0):
                failed.append(sequence)
            elif logprobs:
                position = score.position + max(known, 0) + 1
                sequence.num_scored += len(logprobs)
                columns.prompt_logprobs.append(
                    PromptLogprobs(sequence.request_id, position, logprobs)
                )
        return failed
