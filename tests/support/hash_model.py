"""A model and a sampler that are a hash of all tokens so far, and what must come out of them.

The sampler guesses, too, by a hash of the context and a seed: what it will draw, something else,
nothing, or what the executor is to guess.
"""

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.beam_search import BeamSearch
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.step import Logprobs

VOCABULARY = 7
COMPLETES = "completes"
"""As SamplingParams.grammar: some texts are complete (see `is_complete`)."""


class Scored(NamedTuple):
    """A Logprobs."""

    logprob: float
    rank: int
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]


def _hash(context: Sequence[int], choice: int = 0) -> int:
    return zlib.crc32(array("i", [*context, -1 - choice]).tobytes())


def next_token(context: Sequence[int], banned: Sequence[int], choice: int = 0) -> int:
    """The fake model and sampler: a hash of all tokens so far."""
    allowed = [token for token in range(VOCABULARY) if token not in banned]
    return allowed[_hash(context, choice) % len(allowed)]


def logprob(context: Sequence[int], token_id: int) -> float:
    """Of a token after a context, by the fake model; a table that need not sum to 1."""
    return -(_hash([*context, token_id]) % 9973) / 997


def candidates(
    context: Sequence[int], count: int, banned: Sequence[int]
) -> tuple[list[int], list[float]]:
    """The most likely next tokens."""
    ids = [token for token in range(VOCABULARY) if token not in banned]
    ids.sort(key=lambda token_id: (-logprob(context, token_id), token_id))
    return ids[:count], [logprob(context, token_id) for token_id in ids[:count]]


def expected_output(request: Request, choice: int = 0) -> list[int]:
    """What a choice's new output tokens must be, computed alone and in one go."""
    params, tokens = request.params, [*request.prompt_token_ids, *request.output_token_ids]
    num_output, new = len(request.output_token_ids), []
    while True:
        banned = params.stop_token_ids if num_output < params.min_tokens else ()
        token = next_token(tokens, banned, request.choice + choice)
        tokens.append(token)
        new.append(token)
        num_output += 1
        if token in params.stop_token_ids or num_output == params.max_tokens:
            return new
        if is_complete(tokens, params):
            return new


def is_complete(tokens: Sequence[int], params: SamplingParams) -> bool:
    """Whether a text with a last output token ends there, by its grammar."""
    return params.grammar == COMPLETES and _hash([*tokens, 77]) % 6 == 0


def model_guess(context: Sequence[int]) -> int:
    """The draft model's: often what the first choice will get."""
    token_id = next_token(context, ())
    return token_id if _hash([*context, 99]) % 3 else (token_id + 1) % VOCABULARY


def expected_beams(request: Request) -> list[list[int]]:
    """The outputs of a beam search, best first, computed alone."""
    params = request.params
    assert params.beam is not None
    stops, least = params.stop_token_ids, params.min_tokens
    search = BeamSearch(params.beam, params.max_tokens, stops, least)
    while not search.done:
        found = []
        for beam in search.running:
            context = [*request.prompt_token_ids, *beam.tokens]
            found.append(candidates(context, search.candidates_wanted, ()))
        search.advance(found)
    return [list(each.tokens) for each in search.best(params.n)]


@dataclass
class _Open:
    params: SamplingParams
    choice: int
    prompt: int
    tokens: list[int]

    def banned(self, num_tokens: int) -> tuple[int, ...]:
        early = num_tokens - self.prompt < self.params.min_tokens
        return self.params.stop_token_ids if early else ()

    def next(self, tokens: Sequence[int]) -> int:
        """What follows `tokens`, its own and some more."""
        return next_token(tokens, self.banned(len(tokens)), self.choice)


class Drawn(NamedTuple):
    """What StepResult wants."""

    token_ids: list[int]
    logprobs: dict[int, Logprobs]
    complete: list[int]


NO_GUESSES = 0
WRONG_GUESSES = -1


class HashSampler:
    """A SamplingState that draws, and guesses by `guess_seed`."""

    def __init__(self, guess_seed: int = NO_GUESSES) -> None:
        self.opened: dict[int, _Open] = {}
        self._guess_seed = guess_seed

    def open(
        self,
        sequence_id: int,
        params: SamplingParams,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        salt: str = "",
    ) -> None:
        assert sequence_id not in self.opened, "opened twice"
        tokens = [*prompt_ids, *output_ids]
        self.opened[sequence_id] = _Open(params, choice, len(prompt_ids), tokens)

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
            self.opened[sequence_id].tokens.append(token_id)

    def close(self, sequence_id: int) -> None:
        del self.opened[sequence_id]

    def drafts(self) -> list[tuple[int, list[int]]]:
        """Now and then of one that may have none: it is to be passed over."""
        if self._guess_seed == NO_GUESSES:
            return []
        return [(number, self._guess(state)) for number, state in self.opened.items()]

    def _guess(self, state: _Open) -> list[int]:
        chance = _hash([*state.tokens, self._guess_seed])
        wrong = self._guess_seed == WRONG_GUESSES
        length = 3 if wrong else chance % 6
        num_right = 0 if wrong else (0, 1, 2, length, length)[chance // 6 % 5]
        tail_is_unknown = not wrong and chance // 30 % 3 == 0
        guesses: list[int] = []
        while len(guesses) < length:
            token_id = state.next([*state.tokens, *guesses])
            if len(guesses) >= num_right:
                token_id = UNKNOWN_DRAFT if tail_is_unknown else (token_id + 1) % VOCABULARY
            if token_id == UNKNOWN_DRAFT:
                return [*guesses, *[UNKNOWN_DRAFT] * (length - len(guesses))]
            guesses.append(token_id)
        return guesses

    def draw(
        self,
        contexts: list[list[int]],
        sequence_ids: Sequence[int],
        rows: Sequence[int],
        drafts: Sequence[int],
    ) -> Drawn:
        """Sample by sample; those behind a token that is not its draft do not count."""
        drawn = Drawn([], {}, [])
        ahead: list[int] = []
        for sample, (sequence_id, row) in enumerate(zip(sequence_ids, rows, strict=True)):
            if sample == 0 or drafts[sample - 1] < UNKNOWN_DRAFT:
                ahead = []
            elif drawn.token_ids[-1] != drafts[sample - 1]:
                drawn.token_ids.append(-1)
                continue
            state, context = self.opened[sequence_id], contexts[row]
            assert context == [*state.tokens, *ahead], "KV, batch and sampler have the same text"
            token_id = state.next(context)
            drawn.token_ids.append(token_id)
            ahead.append(token_id)
            if state.params.logprobs >= 0:
                banned = state.banned(len(context))
                found = candidates(context, state.params.logprobs, banned)
                drawn.logprobs[sample] = Scored(logprob(context, token_id), 1, *found)
            if is_complete([*context, token_id], state.params):
                drawn.complete.append(sample)
        return drawn
