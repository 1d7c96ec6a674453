"""A request's answer: its choices as one stream of pieces, with one end and one usage.

Pieces of a choice keep their order; those of different choices come as they come. With best_of,
nothing comes before all choices have ended: then the best `n`, whole, in the order of their mean
logprob (sum / number of sampled tokens; the lower index among equals), numbered anew from 0.
The first error of any choice is the request's end.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from triptych.services.tokenizer.calling import Calling
from triptych.services.tokenizer.detokenizer import IncrementalDetokenizer
from triptych.services.tokenizer.parsed_choices import ParsedChoices
from triptych.services.tokenizer.pieces import Piece, PromptPart, RequestUsage, parts_of
from triptych.services.tokenizer.stream import OutputStream
from triptych.services.tokenizer.validation import OutputParams

_NEVER_LATE = 1 << 62  # held back by ourselves: no reader is slow


class AnswerStream:
    """`choices` are the TokenSinks, one a slot. `on_wake`: as for OutputStream."""

    def __init__(
        self,
        params: OutputParams,
        prompt: PromptPart,
        detokenizers: Sequence[IncrementalDetokenizer],
        on_wake: Callable[[], None] | None = None,
        calling: Calling | None = None,
    ) -> None:
        """One detokenizer for each of `best_of` choices. `calling`: of a chat that is parsed."""
        self._params = params
        self._parsed = ParsedChoices(calling, params) if calling is not None else None
        self._prompt = prompt
        self._woken = asyncio.Event()
        self._on_wake = on_wake or self._woken.set
        self._changed: dict[int, None] = {}
        self._parts: deque[Piece] = deque()
        self._best: deque[Piece] | None = None
        self._open = params.n
        self._begun = False
        own = replace(params, max_unread_tokens=_NEVER_LATE) if params.held else params
        self.choices = [
            OutputStream(own, detokenizer, prompt, partial(self._wake, index))
            for index, detokenizer in enumerate(detokenizers)
        ]

    def cancel(self) -> None:
        """End every choice as the client wished, with what there is."""
        for index, choice in enumerate(self.choices):
            choice.cancel()
            self._wake(index)

    def take(self) -> Piece | None:
        """The next piece; None when there is none now. Raises the error that ended the request.

        After the piece that carries `usage` there is none.
        """
        if self._parts:
            return self._parts.popleft()
        piece = self._take_sorted()
        if piece is None:
            return None
        if not self._begun and self._params.prompt_logprobs is not None:
            piece.prompt_logprobs = self._prompt.logged()
        self._begun = True
        if piece.finish is not None:
            self._open -= 1
            if not self._open:
                piece.usage = self._usage()
        if not (piece.logprobs or piece.prompt_logprobs):
            return piece
        first, *rest = parts_of(piece)
        self._parts.extend(rest)
        return first

    @property
    def has_more(self) -> bool:
        """False when `take` would find nothing."""
        return bool(self._parts or self._changed or self._best)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed; 0 before the first piece."""
        return self._prompt.cached_tokens or 0

    async def next(self) -> Piece:
        """Wait for the next piece. Raises the error that ended the request."""
        while True:
            self._woken.clear()
            piece = self.take()
            if piece is not None:
                return piece
            await self._woken.wait()

    def _wake(self, index: int) -> None:
        self._changed[index] = None
        self._on_wake()

    def _take_sorted(self) -> Piece | None:
        """The next one with something in it once calls and reasoning are told from text."""
        while True:
            piece = self._take_best() if self._params.held else self._take_changed()
            if piece is None or self._parsed is None or self._parsed.parse(piece):
                return piece

    def _take_changed(self) -> Piece | None:
        while self._changed:
            index = next(iter(self._changed))
            del self._changed[index]  # it gives all that it has
            piece = self.choices[index].take()
            if piece is not None:
                piece.index = index
                return piece
        return None

    def _take_best(self) -> Piece | None:
        if self._best is None:
            for choice in self.choices:
                choice.check()
            if not all(choice.ended for choice in self.choices):
                return None
            self._best = deque(self._ranked())
        return self._best.popleft() if self._best else None

    def _ranked(self) -> list[Piece]:
        ranked = sorted(self.choices, key=lambda choice: -choice.mean_logprob)
        pieces = []
        for index, choice in enumerate(ranked[: self._params.n]):
            piece = choice.take()
            assert piece is not None, "it has ended and nothing was taken before"
            piece.index, piece.score = index, choice.mean_logprob
            pieces.append(piece)
        return pieces

    def _usage(self) -> RequestUsage:
        return RequestUsage(
            prompt_tokens=len(self._prompt.token_ids),
            completion_tokens=sum(choice.completion_tokens for choice in self.choices),
            cached_tokens=self.cached_tokens,
        )
