"""Suffix decoding: what followed a sequence's last tokens in its own text or in earlier outputs.

The method of Oliaro et al. 2024 ("SuffixDecoding"), with one path instead of a tree of guesses:
agents, batch jobs and templates say again what they have said to others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.engine_core.ngram_drafter import NgramDrafter
from triptych.engine_core.output_store import LONGEST_MATCH, OutputStore, shared_end

STORED_TOKENS = 1 << 16
"""Tokens of earlier outputs that are kept: at most 20 MB."""
STORED_PER_STEP = 512
"""Tokens of ended outputs that are indexed in one step, about."""


@dataclass(frozen=True, slots=True)
class _Source:
    """`kept`: the tokens before that place of the text are in the store, or the prompt's."""

    salt: str
    prompt: int
    kept: int


class SuffixDrafter:
    """A Guesser by prompt lookup and by the outputs of requests of the same salt.

    The longer match guesses, between equals the own text. Outputs are kept when their sequence
    closes; of a sequence that was opened with output tokens, and was so kept before, what is new.
    """

    def __init__(self, shortest: int, longest: int, *, stored_tokens: int = STORED_TOKENS) -> None:
        self._own = NgramDrafter(shortest, longest)
        self._store = OutputStore(shortest, stored_tokens)
        self._allowance = STORED_PER_STEP
        self._sources: dict[int, _Source] = {}

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def store(self) -> OutputStore:
        """The earlier outputs."""
        return self._store

    @property
    def num_indexed(self) -> int:
        """Indexed positions of the open sequences' own texts."""
        return self._own.num_indexed

    def open(
        self, sequence_id: int, prompt_ids: Sequence[int], output_ids: Sequence[int], salt: str
    ) -> None:
        """A sequence runs."""
        self.close(sequence_id)
        self._own.open(sequence_id, prompt_ids, output_ids, salt)
        prompt = len(prompt_ids)
        self._sources[sequence_id] = _Source(salt, prompt, prompt + len(output_ids))

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """One more token for each."""
        self._own.append(sequence_ids, token_ids)
        self._allowance = STORED_PER_STEP

    def close(self, sequence_id: int) -> None:
        """A sequence runs no more; its output is kept."""
        source = self._sources.pop(sequence_id, None)
        if source is None:
            return
        ids = self._own.token_ids(sequence_id)
        if len(ids) > source.kept:
            # With what matches begin with, where the rest of the output was kept before.
            self._store.add(source.salt, ids[max(source.prompt, source.kept - LONGEST_MATCH) :])
        self._own.close(sequence_id)

    def guess(self, sequence_id: int, most: int) -> Sequence[int]:
        """What followed the longest match of the text's last tokens."""
        text = self._own.text(sequence_id)
        if text is None:
            return ()
        self._allowance -= self._store.work(self._allowance)
        own = text.find()
        stored = self._store.find(self._sources[sequence_id].salt, text.token_ids)
        if own is None:
            return self._store.continuation(stored, most) if stored is not None else ()
        if stored is not None and stored.length >= own.length:
            tail = text.token_ids[-LONGEST_MATCH:]
            if stored.length > shared_end(text.token_ids, own.position, tail, own.length):
                return self._store.continuation(stored, most)
        return text.continuation(own.position, most)
