"""The grammars of the running sequences, and the masks of the step in flight.

    open / close                   with the tokens so far: after a fork, a preemption, a replay
    forced, legal                  guesses for the next step
    prepare                        masks, computed while the executor computes
    mask, take                     while the step's tokens are drawn
    append                         the core's word for it

A mask that was not prepared is computed when it is asked for, from the tokens so far: preparing
saves time and decides nothing.

Masks are computed by one call for each matcher. llguidance's LLExecutor computes those of many on
threads; for 32 sequences on two cores it was no faster, three times slower where masks are quick,
and the executor needs the cores meanwhile.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.errors import RequestError
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.scheduler.grammar_state import LONGEST_FORCED, GrammarSource, GrammarState

LAST = UNKNOWN_DRAFT - 1
"""In Batch.drafts(): no draft is behind this sample, the next one is another sequence's."""
_FORCED_BYTES = 8 * LONGEST_FORCED
_LONGEST_SEARCH = 0.005
"""Seconds a step for text that must follow; what is not searched then is later."""
_FIRST_ROWS = 16
_LONGEST_AHEAD = 0.005
"""Seconds for the masks behind one sequence's guesses; usual ones take a tenth of it."""


@dataclass(slots=True)
class Mask:
    """uint32 words; bit id % 32 of word id / 32 is set where the id may follow. `withheld`: ids
    that might, but would end the output before its time."""

    words: NDArray[np.uint32]
    withheld: list[int]

    def withhold(self, token_ids: Sequence[int]) -> None:
        """These may not follow, for now."""
        for token_id in token_ids:
            bit = np.uint32(1 << (token_id & 31))
            if self.words[token_id >> 5] & bit:
                self.words[token_id >> 5] ^= bit
                self.withheld.append(token_id)

    def release(self) -> bool:
        """What was withheld may follow after all; False if nothing was."""
        for token_id in self.withheld:
            self.words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        released = bool(self.withheld)
        self.withheld.clear()
        return released


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The mask that holds for a sequence when it has so many tokens, `guessed` the last ones.
    `seconds`: what it took, as far as the state does not know."""

    state: GrammarState
    num_tokens: int
    guessed: list[int]
    mask: Mask
    seconds: float = 0.0


class RunningGrammars:
    """Used by the loop's thread only. Nothing here raises for what a grammar does: `error` says why
    a sequence must end."""

    def __init__(self, source: GrammarSource) -> None:
        self._source = source
        self._states: dict[int, GrammarState] = {}
        self._prepared: dict[int, _Prepared] = {}
        self._searched = 0.0
        self._rows_used = 0
        self._reserve(0)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    # ------------------------------------------------------------------ sequences

    def open(self, sequence_id: int, params: SamplingParams, output_ids: Sequence[int]) -> None:
        """A sequence that has a grammar runs, with these tokens."""
        self._states[sequence_id] = GrammarState(self._source, params, output_ids)
        if not len(self._rows):  # the vocabulary comes before the first grammar, but after us
            self._reserve(_FIRST_ROWS)

    def close(self, sequence_id: int) -> None:
        """A sequence runs no more. Nothing if it has no grammar."""
        self._states.pop(sequence_id, None)

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """One more output token for each: known already, if it was taken here. Those without a
        grammar are passed over."""
        for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
            state = self._states.get(sequence_id)
            if state is None:
                continue
            if state.ahead:
                state.ahead -= 1
            else:
                state.take(token_id)

    def error(self, sequence_id: int) -> RequestError | None:
        """Why a sequence must end; None while it need not."""
        return self._states[sequence_id].error

    # ------------------------------------------------------------------ guesses

    def forced(self, sequence_id: int) -> list[int]:
        """Tokens of the text that must follow; it may be drawn cut otherwise."""
        state = self._states[sequence_id]
        if self._searched > _LONGEST_SEARCH:
            return []
        began = time.thread_time()
        text = state.forced(_FORCED_BYTES + 1)
        self._searched += time.thread_time() - began
        if not text:
            return []
        end = min(len(text), _FORCED_BYTES)
        while 0 < end < len(text) and text[end] & 0xC0 == 0x80:  # within a character
            end -= 1
        return self._source.greedy_tokens(text[:end])[: state.most_forced]

    def verified(self, sequence_id: int, drafted: int, accepted: int) -> None:
        """What became of forced tokens: as many are guessed next time as have proved right, and
        one more, or twice as many if all have."""
        state = self._states[sequence_id]
        if accepted < drafted:
            state.most_forced = accepted + 1
        else:
            state.most_forced = min(LONGEST_FORCED, max(state.most_forced, 2 * drafted))

    def legal(self, sequence_id: int, token_ids: Sequence[int]) -> list[int]:
        """The first of these tokens, as many as may follow one after another."""
        return self._states[sequence_id].legal(token_ids)

    # ------------------------------------------------------------------ the step in flight

    def prepare(self, sequence_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """Compute the masks of a step's samples, behind the drafts too as far as they are legal."""
        self.forget_masks()
        if not self._states:
            return
        first, states = 0, self._states
        for sample, draft in enumerate(drafts):
            if draft != LAST:
                continue
            state = states.get(sequence_ids[first])
            if state is not None and state.error is None:
                self._prepare(state, first, drafts[first:sample])
            first = sample + 1

    def _prepare(self, state: GrammarState, first: int, drafts: Sequence[int]) -> None:
        mask = self._mask_of(state)
        if mask is None:
            return
        num_tokens, matcher = len(state.output_ids), state.matcher
        self._prepared[first] = _Prepared(state, num_tokens, [], mask)
        if not drafts or matcher is None:
            return
        # What a copy cannot do, the sequence may never come to: its error does not count.
        ahead = matcher.deep_copy()
        began = last = time.thread_time()
        for count, guess in enumerate(drafts, 1):
            if not state.is_known(guess) or not ahead.consume_token(guess) or ahead.is_stopped():
                return
            row = self._next_row()
            ahead.unsafe_compute_mask_ptr(self._address + row * self._row_bytes, self._row_bytes)
            if ahead.is_error():
                return
            mask = Mask(self._rows[row], [])
            mask.withhold(state.withheld(num_tokens + count))
            guessed = list(drafts[:count])
            now = time.thread_time()
            self._prepared[first + count] = _Prepared(
                state, num_tokens + count, guessed, mask, now - last
            )
            last = now
            if now - began > _LONGEST_AHEAD:
                return  # the rest when it is asked for, one by one: the guesses may be wrong

    def mask(self, sample: int, sequence_id: int) -> Mask | None:
        """What may follow a sequence's tokens; None where it must end with an error."""
        state = self._states[sequence_id]
        if state.error is not None:
            return None
        found = self._prepared.get(sample)
        if (
            found is not None
            and found.state is state
            and found.num_tokens == len(state.output_ids)
            and (not found.guessed or state.output_ids[-len(found.guessed) :] == found.guessed)
        ):
            return found.mask if state.spend(found.seconds) else None
        return self._mask_of(state)

    def take(self, sequence_id: int, token_id: int) -> bool:
        """A token was drawn, of which the core will hear later. Whether nothing but the end may
        follow; ask for `error` then."""
        state = self._states[sequence_id]
        complete = state.take(token_id)
        if state.error is None:
            state.ahead += 1
        return complete

    def forget_masks(self) -> None:
        """The step is over: the masks' memory is free for the next one."""
        self._prepared.clear()
        self._rows_used = 0
        self._searched = 0.0

    # ------------------------------------------------------------------ memory

    def _mask_of(self, state: GrammarState) -> Mask | None:
        row = self._next_row()
        if not state.mask_into(self._address + row * self._row_bytes, self._row_bytes):
            return None
        mask = Mask(self._rows[row], [])
        mask.withhold(state.withheld(len(state.output_ids)))
        return mask

    def _next_row(self) -> int:
        if self._rows_used == len(self._rows):
            self._reserve(2 * len(self._rows))  # masks in use keep the memory that they are in
        self._rows_used += 1
        return self._rows_used - 1

    def _reserve(self, rows: int) -> None:
        self._row_bytes = -(-self._source.vocabulary_size // 32) * 4
        self._rows: NDArray[np.uint32] = np.zeros((rows, self._row_bytes // 4), np.uint32)
        self._address = int(self._rows.ctypes.data)
        self._rows_used = 0
