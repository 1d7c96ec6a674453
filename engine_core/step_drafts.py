"""Guesses on their way: from the SamplingState into a step, and from the executor when it is
computed."""

from collections.abc import Iterable

from triptych.engine_core.batch import UNKNOWN_DRAFT, Batch
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.roster import Roster
from triptych.engine_core.sampling import SamplingState


class StepDrafts:
    """Of the step that is planned next, or in flight."""

    def __init__(
        self, roster: Roster, batch: Batch, sampling: SamplingState, vocabulary_size: int
    ) -> None:
        self._roster = roster
        self._batch = batch
        self._sampling = sampling
        self._vocabulary_size = vocabulary_size

    def tell(self) -> bool:
        """Tell the batch what is guessed; whether there is anything."""
        any_guess = False
        for sequence_id, token_ids in self._sampling.drafts():
            sequence = self._roster.by_id.get(SequenceId(sequence_id))
            if sequence is not None and sequence.started and not sequence.is_held:
                most = max(token_ids, default=UNKNOWN_DRAFT)
                assert most < self._vocabulary_size, f"token id {most} was guessed"
                self._batch.draft(sequence.sequence_id, token_ids)
                any_guess = any_guess or len(token_ids) > 0
        return any_guess

    def fill(self, token_ids: Iterable[int]) -> None:
        """What the executor guessed. ValueError, with nothing filled, unless these are as many
        tokens as were left to it."""
        filled, size = list(token_ids), self._vocabulary_size
        if max(filled, default=0) >= size:
            raise ValueError(f"drafts: token id {max(filled)} is not below {size}")
        self._batch.fill_drafts(filled)
