"""Speculative decoding: guesses of the tokens that come next, to be computed before they are drawn.

A guess decides nothing. It is computed together with a sequence's own token, and taken as far as
the very same tokens are drawn (Leviathan et al. 2023, with the sampler's noise fixed by position):
a good guesser makes an output come sooner, a bad one costs time, neither changes it.

A Guesser knows what may come; a Drafter also how much of it is worth computing. `AdaptiveDrafter`
makes one of the other (draft_lengths.py).
"""

from collections.abc import Sequence
from typing import Protocol

from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.draft_lengths import DraftLengths


class Drafter(Protocol):
    """Guesses for running sequences. Sequences that are not open here get none."""

    def open(
        self, sequence_id: int, prompt_ids: Sequence[int], output_ids: Sequence[int], salt: str
    ) -> None:
        """A sequence runs, with these tokens. What is learned from its text serves only those of
        the same `salt`."""
        ...

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """One more output token for each, in order; a sequence may be named several times. Those
        that are not open are passed over. What is proposed between two calls is of one step."""
        ...

    def close(self, sequence_id: int) -> None:
        """A sequence runs no more. Nothing if it is not open."""
        ...

    def propose(self, sequence_id: int) -> Sequence[int]:
        """What may follow a sequence's tokens, for the step to come; empty for no guess.

        All UNKNOWN_DRAFT where the executor's draft model is to guess.
        """
        ...

    def verified(self, sequence_id: int, drafted: int, accepted: int) -> None:
        """What became of the last proposal: `drafted` of its tokens were computed, the first
        `accepted` of them taken. Not called, or with 0 and 0, where none was computed."""
        ...


class Guesser(Protocol):
    """What may come next. Sequences that are not open here are passed over."""

    def open(
        self, sequence_id: int, prompt_ids: Sequence[int], output_ids: Sequence[int], salt: str
    ) -> None:
        """As Drafter.open."""
        ...

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """As Drafter.append."""
        ...

    def close(self, sequence_id: int) -> None:
        """As Drafter.close."""
        ...

    def guess(self, sequence_id: int, most: int) -> Sequence[int]:
        """At most `most` (>= 1) tokens that may follow an open sequence's."""
        ...


class AdaptiveDrafter:
    """A Drafter: a Guesser, asked for as many tokens as DraftLengths finds worth computing."""

    def __init__(self, guesser: Guesser, lengths: DraftLengths) -> None:
        self._guesser = guesser
        self._lengths = lengths

    def open(
        self, sequence_id: int, prompt_ids: Sequence[int], output_ids: Sequence[int], salt: str
    ) -> None:
        """A sequence runs."""
        self._guesser.open(sequence_id, prompt_ids, output_ids, salt)
        self._lengths.open(sequence_id)

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """The step is over: one more output token for each."""
        self._guesser.append(sequence_ids, token_ids)
        self._lengths.begin_step()

    def close(self, sequence_id: int) -> None:
        """A sequence runs no more."""
        self._guesser.close(sequence_id)
        self._lengths.close(sequence_id)

    def propose(self, sequence_id: int) -> Sequence[int]:
        """What may follow; empty for no guess, and where guesses have kept failing."""
        most = self._lengths.most(sequence_id)
        if most == 0:
            return ()
        guess = self._guesser.guess(sequence_id, most)
        self._lengths.proposed(len(guess))
        return guess

    def verified(self, sequence_id: int, drafted: int, accepted: int) -> None:
        """What became of the last proposal."""
        self._lengths.verified(sequence_id, drafted, accepted)


class ModelGuesser:
    """The executor's draft model guesses: here is only how many tokens."""

    def open(
        self, sequence_id: int, prompt_ids: Sequence[int], output_ids: Sequence[int], salt: str
    ) -> None:
        """Nothing to keep."""

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Nothing to keep."""

    def close(self, sequence_id: int) -> None:
        """Nothing to forget."""

    def guess(self, sequence_id: int, most: int) -> Sequence[int]:
        """`most` unknown tokens."""
        return [UNKNOWN_DRAFT] * most
