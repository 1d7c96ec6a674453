"""One step's tokens, drawn in waves: how drafts are verified without a change to any output.

First the next token of every sequence is drawn; then, of those whose token is their first draft,
the one behind it; and so on. Each is drawn as if it were the only one, after the tokens before it
are known to penalties and grammar, with the noise of its own position: so the tokens are those of
drawing one by one (Leviathan et al. 2023, where the same token is drawn instead of accepted at
random; sampling by position makes that exact).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from triptych.engine_core.errors import InvalidRequest, RequestError
from triptych.engine_core.sampling_params import SamplingParams
from triptych.kernels.sampler_params import NO_TOKEN, SamplerProtocol, TokenLogprobs
from triptych.services.scheduler.grammar_state import FIELD
from triptych.services.scheduler.logits_processors import Row, RunningProcessors
from triptych.services.scheduler.running_grammars import LAST, Mask, RunningGrammars

_NEUTRAL: dict[str, object] = {
    "allowed_token_ids": None,
    "bad_words": (),
    "no_repeat_ngram_size": 0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "logit_bias": (),
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "processors": (),
}
"""Fields that can leave nothing to draw, likeliest first, with the values that cannot."""
_WIRE_NAMES = {"processors": "logits_processors"}


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """What was drawn for each sample of a step; NO_TOKEN where nothing was, or nothing counts
    because an earlier token of the sequence was not its draft.

    `logprobs`: by sample, of those that ask for them. `errors`: by sample, why no token was drawn,
    where that is not for the model's logits. `complete`, ascending: samples whose token ends its
    sequence, because no other may follow.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, RequestError] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepLogits:
    """A step's samples: sample i is of sequence_ids[i], from row rows[i] of `matrix`, float32
    [rows, vocabulary]."""

    matrix: Row
    sequence_ids: Sequence[int]
    rows: Sequence[int]


class Verification:
    """Draws the samples of one step, a wave at a time."""

    def __init__(
        self,
        sampler: SamplerProtocol,
        params: dict[int, SamplingParams],
        grammars: RunningGrammars | None,
        processors: RunningProcessors,
        logits: StepLogits,
    ) -> None:
        self._sampler = sampler
        self._params = params
        self._grammars = grammars
        self._processors = processors
        self._logits = logits
        self.drawn = DrawnStep([NO_TOKEN] * len(logits.sequence_ids))

    def verify(self, drafts: Sequence[int]) -> dict[int, int]:
        """Draw all samples that count; how many tokens the kernels' sampler was given, by
        sequence."""
        ids, tokens = self._logits.sequence_ids, self.drawn.token_ids
        wave = [i for i in range(len(ids)) if i == 0 or drafts[i - 1] == LAST]
        accepted: dict[int, int] = {}
        while wave:
            self.draw(wave)
            taken = [i for i in wave if tokens[i] == drafts[i] != NO_TOKEN and self._goes_on(i)]
            if taken:
                self._sampler.append([ids[i] for i in taken], [tokens[i] for i in taken])
                for i in taken:
                    accepted[ids[i]] = accepted.get(ids[i], 0) + 1
            wave = [i + 1 for i in taken]
        self.drawn.complete.sort()
        return accepted

    def _goes_on(self, sample: int) -> bool:
        stops = self._params[self._logits.sequence_ids[sample]].stop_token_ids
        return self.drawn.token_ids[sample] not in stops and sample not in self.drawn.complete

    def draw(self, samples: Sequence[int]) -> None:
        """Draw these samples, of which no two are of one sequence."""
        ids, logits = self._logits.sequence_ids, self._logits
        masks: dict[int, Mask] = {}
        changed: list[int] = []
        plain: list[int] = []
        for i in samples:
            if self._grammars and ids[i] in self._grammars:
                mask = self._grammars.mask(i, ids[i])
                if mask is None:
                    self._fail(i, self._grammars.error(ids[i]))
                    continue
                masks[i] = mask
            (changed if ids[i] in self._processors else plain).append(i)
        self._draw_from(logits.matrix, plain, [logits.rows[i] for i in plain], masks)
        if changed:
            rows = np.stack([logits.matrix[logits.rows[i]] for i in changed])
            for row, i in zip(rows, changed, strict=True):
                error = self._processors.change(ids[i], row)
                if error is not None:
                    self._fail(i, error)
            left = [(i, at) for at, i in enumerate(changed) if i not in self.drawn.errors]
            self._draw_from(rows, [i for i, _ in left], [at for _, at in left], masks)

    def _draw_from(
        self, matrix: Row, samples: list[int], rows: list[int], masks: dict[int, Mask]
    ) -> None:
        if not samples:
            return
        tokens = self.drawn.token_ids
        self._ask_kernels(matrix, samples, rows, masks)
        again = [
            at
            for at, i in enumerate(samples)
            if tokens[i] == NO_TOKEN and i in masks and masks[i].release()
        ]
        if again:  # nothing but an end may follow: now it may come
            self._ask_kernels(
                matrix, [samples[at] for at in again], [rows[at] for at in again], masks
            )
        for i, row in zip(samples, rows, strict=True):
            if tokens[i] == NO_TOKEN:
                params = self._params[self._logits.sequence_ids[i]]
                error = nothing_left(self._sampler, matrix, row, params)
                if error is not None:
                    self._fail(i, error)
            elif i in masks:
                self._take(i)

    def _ask_kernels(
        self, matrix: Row, samples: list[int], rows: list[int], masks: dict[int, Mask]
    ) -> None:
        ids = [self._logits.sequence_ids[i] for i in samples]
        words = [masks[i].words if i in masks else None for i in samples] if masks else None
        drawn = self._sampler.draw(matrix, ids, rows, words)
        for i, token in zip(samples, drawn.token_ids.tolist(), strict=True):
            self.drawn.token_ids[i] = token
        for at, logprobs in drawn.logprobs.items():
            self.drawn.logprobs[samples[at]] = logprobs

    def _take(self, sample: int) -> None:
        """Tell the grammar of a token."""
        assert self._grammars is not None, "there is a mask"
        sequence_id = self._logits.sequence_ids[sample]
        if self._grammars.take(sequence_id, self.drawn.token_ids[sample]):
            self.drawn.complete.append(sample)
        elif (error := self._grammars.error(sequence_id)) is not None:
            self._fail(sample, error)

    def _fail(self, sample: int, error: RequestError | None) -> None:
        assert error is not None, "what fails says why"
        self.drawn.token_ids[sample] = NO_TOKEN
        self.drawn.logprobs.pop(sample, None)
        self.drawn.errors[sample] = error


def nothing_left(
    sampler: SamplerProtocol, matrix: Row, row: int, params: SamplingParams
) -> RequestError | None:
    """Why nothing was drawn from a row; None if the row itself is not finite."""
    if sampler.score(matrix, [row], [0], 0)[0] is None:
        return None
    active = [name for name, off in _NEUTRAL.items() if getattr(params, name) != off]
    if params.grammar and "min_tokens" in active:
        active.remove("min_tokens")  # it gives way
    suspects = [_WIRE_NAMES.get(name, name) for name in active]
    together = ", ".join(suspects)
    if params.grammar:
        beside = f" beside {together}" if together else ""
        return InvalidRequest(FIELD, f"leaves no token to draw{beside}")
    if not suspects:
        return None
    return InvalidRequest(suspects[0], f"no token can be drawn any more with {together}")
