"""What the grammar of one running sequence lets follow.

The matcher is llguidance's: it is given every token, in order, and answers with a bit mask of the
tokens that may follow. It never raises: it goes into an error state for good, and its masks then
have the end of sequence alone, without a word. So its state is asked for after every call, and a
sequence whose matcher failed gets no further mask: it ends, and nothing is drawn unmasked.

Matchers of one grammar share the states of its lexer, of which there may be so many and no more:
the texts of others can use them up. Then a sequence goes on with a matcher that is compiled anew.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from triptych.engine_core.errors import InvalidRequest, RequestError
from triptych.engine_core.sampling_params import SamplingParams

if TYPE_CHECKING:  # loaded with the first grammar
    from llguidance import LLMatcher

FIELD = "structured_output"
MOST_SECONDS = 0.015
"""Of the processor, for one token: the loop's thread serves all sequences. Usual schemas take 1 ms
at most, at 49,152 tokens. An ambiguous grammar takes longer with every token, and is cut off before
it is a burden to others."""
MEAN_SECONDS = 0.0015
"""For a token, when MOST_SECONDS more have been spent: many such grammars run side by side."""
USUAL_VOCABULARY = 49_152
"""Tokens for which these seconds were chosen: masks of larger vocabularies may take as much more
time as these have more tokens."""
LONGEST_FORCED = 32
"""Tokens of forced text that are guessed at once: each costs a row of logits."""
_USED_UP = "lexer error: too many"
"""In the error of a matcher whose lexer may have no further states, or expressions that they stand
for, which it shares with all matchers of its grammar (its stop reason says less)."""
_LONGEST_REASON = 300
_AT_THE_END = ("NoExtension", "EndOfSentence")
"""Stop reasons that mean: all of the output matches, and no more can follow."""


class GrammarSource(Protocol):
    """Where compiled grammars come from. One thread."""

    def matcher(self, grammar: str) -> "LLMatcher":
        """A matcher at its beginning, the caller's own. RequestError where the grammar is not there
        or does not compile."""
        ...

    def renewed(self, grammar: str) -> "LLMatcher":
        """As `matcher`, compiled anew: no state of its lexer is used up."""
        ...

    def greedy_tokens(self, text: bytes) -> list[int]:
        """Tokens that have these bytes, longest first."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What a token of the vocabulary is in the middle of a text."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that a matcher takes for the end of the output."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """How many tokens there are; a mask has so many bits, in words of 32."""
        ...


class GrammarState:
    """The tokens so far, and the matcher that has taken them.

    `error`: why the sequence must end. `ahead`: how many of the tokens the core has not told yet.
    `most_forced`: how many tokens of forced text are worth guessing.
    """

    __slots__ = ("_before_min", "_forced", "_forced_said", "_grammar", "_ignored_ends",
                 "_min_tokens", "_scale", "_seconds_left", "_size", "_source", "ahead", "error",
                 "matcher", "most_forced", "output_ids")  # fmt: skip

    def __init__(
        self, source: GrammarSource, params: SamplingParams, output_ids: Sequence[int]
    ) -> None:
        self._source = source
        self._grammar = params.grammar
        self._size = source.vocabulary_size
        stops = params.stop_token_ids
        ends = [each for each in source.eos_token_ids if each not in stops]
        self._ignored_ends = self._known(ends)
        self._before_min = self._known([*stops, *ends])
        self._min_tokens = params.min_tokens
        self._scale = max(1.0, self._size / USUAL_VOCABULARY)
        self._seconds_left = MOST_SECONDS * self._scale
        self._forced = b""  # text that must follow, of which so many bytes have
        self._forced_said = 0
        self.output_ids = list(output_ids)
        self.ahead = 0
        self.most_forced = LONGEST_FORCED
        self.error: RequestError | None = None
        self.matcher: LLMatcher | None = None
        try:
            self.matcher = source.matcher(params.grammar)
        except RequestError as error:
            self.error = error
            return
        if not all(map(self.is_known, self.output_ids)):
            self.fail("the output so far has a token that the vocabulary has not")
        elif self.output_ids and not self.matcher.consume_tokens(self.output_ids):
            self._renew()

    def is_known(self, token_id: int) -> bool:
        """Whether it is in the vocabulary."""
        return 0 <= token_id < self._size

    def _known(self, token_ids: list[int]) -> tuple[int, ...]:
        return tuple(filter(self.is_known, token_ids))

    def withheld(self, position: int) -> tuple[int, ...]:
        """Tokens that end an output and may not yet, unless nothing else may follow: the stop ids
        until min_tokens are out, ends of sequence that are ignored always."""
        return self._before_min if position < self._min_tokens else self._ignored_ends

    def mask_into(self, address: int, num_bytes: int) -> bool:
        """Write the mask of what may follow to memory. False where the sequence must end."""
        matcher = self.matcher
        if matcher is None or self.error is not None:
            return False
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(address, num_bytes)
        if matcher.is_error():
            renewed = self._renew()
            if renewed is None:
                return False
            began = time.thread_time()  # of the token, not of what others used up
            renewed.unsafe_compute_mask_ptr(address, num_bytes)
            if renewed.is_error():
                self.fail(renewed.get_error())
                return False
        return self._in_time(began)

    def take(self, token_id: int) -> bool:
        """The next token is out. Whether nothing but the end may follow; `error` is set where it
        does not match, or the matcher exceeds a limit."""
        matcher = self.matcher
        if matcher is None or self.error is not None:
            return False
        assert self.is_known(token_id), "a mask has tokens of the vocabulary only"
        began = time.thread_time()
        if not matcher.consume_token(token_id):
            matcher = self._renew()
            began = time.thread_time()
            if matcher is None or not matcher.consume_token(token_id):
                if matcher is not None:
                    self.fail(matcher.get_error())
                return False
        self.output_ids.append(token_id)
        self._say(token_id)
        most, mean = MOST_SECONDS * self._scale, MEAN_SECONDS * self._scale
        self._seconds_left = min(most, self._seconds_left + mean)
        if not self._in_time(began) or not matcher.is_stopped():
            return False
        reason = matcher.stop_reason()
        if reason in _AT_THE_END:
            return True
        self.fail(matcher.get_error() or reason)
        return False

    def _in_time(self, began: float) -> bool:
        return self.spend(time.thread_time() - began)

    def spend(self, seconds: float) -> bool:
        """So much was spent on a token. False where that is too much: the sequence must end."""
        self._seconds_left -= seconds
        if self._seconds_left >= 0:
            return True
        most, mean = MOST_SECONDS * self._scale, MEAN_SECONDS * self._scale
        if seconds > most:
            what = f"a token took {seconds:.3f} s, more than {most:.3f}"
        else:
            what = f"its tokens take more than {mean:.4f} s each"
        self.fail(f"{what}: it is too ambiguous")
        return False

    def _renew(self) -> "LLMatcher | None":
        """The matcher has failed: another one at the same token, if that can help."""
        assert self.matcher is not None, "there was one"
        reason = self.matcher.get_error()
        if _USED_UP not in reason:
            self.fail(reason)
            return None
        try:
            renewed = self._source.renewed(self._grammar)
        except RequestError as error:
            self.error = error
            return None
        if self.output_ids and not renewed.consume_tokens(self.output_ids):
            self.fail(renewed.get_error())
            return None
        self.matcher = renewed
        return renewed

    def legal(self, token_ids: Sequence[int]) -> list[int]:
        """The first of these tokens, as many as may follow one after another."""
        known = []
        for token_id in token_ids:
            if not self.is_known(token_id):  # such a token would end the matcher
                break
            known.append(token_id)
        matcher = self.matcher
        if not known or matcher is None or self.error is not None:
            return []
        # On a copy (a few microseconds): limits that only a guess exceeds must not end the matcher.
        return known[: matcher.deep_copy().validate_tokens(known)]

    def forced(self, most: int) -> bytes:
        """At most so many bytes of the text that must follow; none where there is a choice."""
        if self.matcher is None or self.error is not None:
            return b""
        if self._forced_said == len(self._forced):
            # Takes the longer the more must follow (6 ms for 255 KiB), so not at every token.
            self._forced, self._forced_said = self.matcher.compute_ff_bytes(), 0
        return self._forced[self._forced_said : self._forced_said + most]

    def _say(self, token_id: int) -> None:
        """A token is out: part of what must follow has."""
        if self._forced:
            text = self._source.token_bytes(token_id)
            if self._forced.startswith(text, self._forced_said):
                self._forced_said += len(text)
            else:  # it goes on behind it
                self._forced, self._forced_said = b"", 0

    def fail(self, reason: str) -> None:
        """The sequence must end. The first line of what the matcher says is for people."""
        lines = reason.strip().splitlines() or ["unknown reason"]
        self.error = InvalidRequest(
            FIELD,
            f"cannot be kept after {len(self.output_ids)} output tokens:"
            f" {lines[0][:_LONGEST_REASON]}",
        )
