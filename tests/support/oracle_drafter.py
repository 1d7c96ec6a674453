"""A drafter that knows how texts go on, and says so, now and then, or something else."""

from collections.abc import Sequence
from random import Random

from triptych.engine_core.batch import UNKNOWN_DRAFT


class OracleDrafter:
    """A Drafter. `texts`: prompts with their outputs; of those that begin as a sequence does one
    is guessed from, which may be another choice's."""

    def __init__(self, texts: Sequence[Sequence[int]], source: Random, sampleable: int) -> None:
        self._texts = [list(text) for text in texts]
        self._source = source
        self._sampleable = sampleable
        self._tokens: dict[int, list[int]] = {}
        self.drafted = 0
        self.accepted = 0

    def open(
        self, sequence_id: int, prompt_ids: Sequence[int], output_ids: Sequence[int], salt: str
    ) -> None:
        self._tokens[sequence_id] = [*prompt_ids, *output_ids]

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
            if sequence_id in self._tokens:
                self._tokens[sequence_id].append(token_id)

    def close(self, sequence_id: int) -> None:
        self._tokens.pop(sequence_id, None)

    def propose(self, sequence_id: int) -> list[int]:
        source, tokens = self._source, self._tokens[sequence_id]
        known = [text for text in self._texts if text[: len(tokens)] == tokens]
        text = source.choice(known) if known else tokens
        guess = text[len(tokens) : len(tokens) + source.randint(0, 5)]
        if guess and source.random() < 0.3:
            guess[source.randrange(len(guess))] = source.randrange(self._sampleable)
        unknown = source.choice((0, 0, 0, 1, 2))
        return [*guess, *[UNKNOWN_DRAFT] * unknown]

    def verified(self, sequence_id: int, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
