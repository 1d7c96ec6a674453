"""The sampler of a scheduler process: the kernels' one, fitted to the core, with what goes before
it (plug-ins, grammars) and behind it (guesses of what comes next, and what became of them).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.drafting import Drafter
from triptych.engine_core.errors import NotSupported
from triptych.engine_core.sampling_params import SamplingParams
from triptych.kernels.sampler_params import (
    NO_TOKEN,
    SamplerParams,
    SamplerProtocol,
    TokenLogprobs,
)
from triptych.services.scheduler.device_sampling import DeviceSampling
from triptych.services.scheduler.grammar_state import GrammarSource
from triptych.services.scheduler.logits_processors import (
    ProcessorFactory,
    Row,
    RunningProcessors,
)
from triptych.services.scheduler.running_grammars import LAST, RunningGrammars
from triptych.services.scheduler.verification import (
    DrawnStep,
    StepLogits,
    Verification,
    nothing_left,
)


def new_sampler(
    impl: Literal["native", "python"], vocabulary_size: int, *, processed_logprobs: bool
) -> SamplerProtocol:
    """The C++ sampler, or its plain meaning: they draw the same tokens."""
    if impl == "native":
        from triptych.kernels.cpu.sampler import Sampler as Native

        return Native(vocabulary_size, processed_logprobs=processed_logprobs)
    from triptych.kernels.reference.sampler import Sampler as Plain

    return Plain(vocabulary_size, processed_logprobs=processed_logprobs)


class StepSampler:
    """A SamplingState (engine_core.sampling) that also draws. Used by the loop's thread only.

    A step: drafts, prepare, draw, append. Tokens that are accepted while drawing are known here
    before the core tells them; `_ahead` says how many of each sequence's, for the kernels' sampler.
    """

    def __init__(
        self,
        sampler: SamplerProtocol,
        factories: Mapping[str, ProcessorFactory],
        grammars: GrammarSource | None = None,
        drafter: Drafter | None = None,
        device: DeviceSampling | None = None,
    ) -> None:
        """`device`: what an executor's device needs that draws tokens itself."""
        self._sampler = sampler
        self.device = device
        self._processors = RunningProcessors(factories)
        self._grammars = RunningGrammars(grammars) if grammars is not None else None
        self._drafter = drafter
        self._params: dict[int, SamplingParams] = {}
        self._ahead: dict[int, int] = {}
        self._guessed_for: dict[int, None] = {}  # those with an output token, in order
        self._unstarted: set[int] = set()  # to be guessed for, without an output token yet
        self._proposed: set[int] = set()  # whose drafts of this step are the drafter's
        self._forced: set[int] = set()  # whose drafts of this step are forced text

    @property
    def num_grammars(self) -> int:
        """Running sequences that have a grammar."""
        return len(self._grammars) if self._grammars is not None else 0

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest for plug-ins that are not loaded, or arguments they refuse."""
        if params.grammar and self._grammars is None:
            raise NotSupported("structured output is not available here")
        self._processors.make(params)

    # ------------------------------------------------------------------ sequences

    def open(
        self,
        sequence_id: int,
        params: SamplingParams,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        salt: str = "",
    ) -> None:
        """A sequence runs, with these tokens."""
        self._sampler.open(sequence_id, _sampler_params(params, choice), prompt_ids, output_ids)
        self._params[sequence_id] = params
        if self.device is not None:
            self.device.open(sequence_id, params, choice, prompt_ids, output_ids)
        if params.grammar:
            assert self._grammars is not None, "checked before: a grammar is never left out"
            self._grammars.open(sequence_id, params, output_ids)
        if params.processors:
            self._processors.open(sequence_id, params, prompt_ids, output_ids)
        # Plug-ins are foreign code that may count its calls; beams, and who draws outside, choose
        # by themselves.
        if params.processors or params.beam is not None or params.external is not None:
            return
        if self._drafter is not None:
            self._drafter.open(sequence_id, prompt_ids, output_ids, salt)
        if self._drafter is not None or params.grammar:
            if output_ids:
                self._guessed_for[sequence_id] = None
            else:
                self._unstarted.add(sequence_id)

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """One more output token for each; several for one that had drafts, in order."""
        if self.device is not None:
            self.device.append(sequence_ids, token_ids)
        if self._drafter is not None:
            self._drafter.append(sequence_ids, token_ids)
        if self._grammars:
            self._grammars.append(sequence_ids, token_ids)
        if self._processors:
            self._processors.append(sequence_ids, token_ids)
        if self._unstarted:
            for sequence_id in self._unstarted.intersection(sequence_ids):
                self._unstarted.remove(sequence_id)
                self._guessed_for[sequence_id] = None
        if self._ahead:
            sequence_ids, token_ids = self._unknown(sequence_ids, token_ids)
        self._sampler.append(sequence_ids, token_ids)

    def _unknown(
        self, sequence_ids: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Of tokens that the core tells, those that the kernels' sampler does not have yet."""
        ids, tokens = [], []
        for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
            ahead = self._ahead.get(sequence_id, 0)
            if ahead:
                self._ahead[sequence_id] = ahead - 1
            else:
                ids.append(sequence_id)
                tokens.append(token_id)
        self._ahead = {each: count for each, count in self._ahead.items() if count}
        return ids, tokens

    def close(self, sequence_id: int) -> None:
        """A sequence runs no more."""
        self._sampler.close(sequence_id)
        if self.device is not None:
            self.device.close(sequence_id)
        del self._params[sequence_id]
        self._ahead.pop(sequence_id, None)
        self._guessed_for.pop(sequence_id, None)
        self._unstarted.discard(sequence_id)
        self._proposed.discard(sequence_id)
        self._forced.discard(sequence_id)
        self._processors.close(sequence_id)
        if self._grammars is not None:
            self._grammars.close(sequence_id)
        if self._drafter is not None:
            self._drafter.close(sequence_id)

    # ------------------------------------------------------------------ a step

    def drafts(self) -> Iterable[tuple[int, Sequence[int]]]:
        """Guesses for the step to be planned: forced text first, else the drafter's."""
        self._proposed.clear()
        self._forced.clear()
        if not self._guessed_for:
            return ()
        found: list[tuple[int, Sequence[int]]] = []
        for sequence_id in self._guessed_for:
            tokens = self._guess(sequence_id)
            if tokens:
                found.append((sequence_id, tokens))
        return found

    def _guess(self, sequence_id: int) -> Sequence[int]:
        grammars = self._grammars
        restricted = grammars is not None and sequence_id in grammars
        if grammars is not None and restricted:
            forced = grammars.forced(sequence_id)
            if forced:
                self._forced.add(sequence_id)
                return forced
        if self._drafter is None:
            return ()
        tokens = self._drafter.propose(sequence_id)
        if grammars is not None and restricted:
            if UNKNOWN_DRAFT in tokens:
                # Masks are made before the draft model has spoken: it is not asked again.
                self._drafter.close(sequence_id)
                return ()
            tokens = grammars.legal(sequence_id, tokens)
        if tokens:
            self._proposed.add(sequence_id)
        return tokens

    def prepare(self, sequence_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """Compute the grammars' masks for the step in flight, while the executor computes it."""
        if self._grammars:
            self._grammars.prepare(sequence_ids, drafts)

    def draw(
        self,
        logits: Row,
        sequence_ids: Sequence[int],
        logits_rows: Sequence[int],
        drafts: Sequence[int],
    ) -> DrawnStep:
        """A token for each sample of the step.

        `logits`: float32 [rows, vocabulary], a view into the logits ring. `drafts`: as the core's.
        """
        step = StepLogits(logits, sequence_ids, logits_rows)
        if not (self._grammars or self._processors) and max(drafts, default=LAST) == LAST:
            return self._draw_plain(step)
        verification = Verification(
            self._sampler, self._params, self._grammars, self._processors, step
        )
        for sequence_id, count in verification.verify(drafts).items():
            self._ahead[sequence_id] = self._ahead.get(sequence_id, 0) + count
        if self._grammars is not None:
            self._grammars.forget_masks()
        if self._proposed or self._forced:
            self._tell_guessers(sequence_ids, drafts, verification.drawn.token_ids)
        return verification.drawn

    def _draw_plain(self, step: StepLogits) -> DrawnStep:
        drawn = self._sampler.draw(step.matrix, step.sequence_ids, step.rows)
        result = DrawnStep(drawn.token_ids.tolist(), drawn.logprobs)
        if NO_TOKEN in result.token_ids:
            for sample, token_id in enumerate(result.token_ids):
                if token_id == NO_TOKEN:
                    params = self._params[step.sequence_ids[sample]]
                    error = nothing_left(self._sampler, step.matrix, step.rows[sample], params)
                    if error is not None:
                        result.errors[sample] = error
        return result

    def _tell_guessers(
        self, sequence_ids: Sequence[int], drafts: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """What became of the guesses."""
        first = 0
        for sample, draft in enumerate(drafts):
            if draft != LAST:
                continue
            sequence_id, drafted = sequence_ids[first], sample - first
            if drafted:
                end = first
                while end < sample and token_ids[end] == drafts[end]:
                    end += 1
                if sequence_id in self._proposed and self._drafter is not None:
                    self._drafter.verified(sequence_id, drafted, end - first)
                elif sequence_id in self._forced and self._grammars is not None:
                    self._grammars.verified(sequence_id, drafted, end - first)
            first = sample + 1

    def score(
        self, logits: Row, logits_rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[TokenLogprobs | None]:
        """Logprobs of given tokens, for prompt logprobs; None where logits are not finite."""
        return self._sampler.score(logits, logits_rows, token_ids, top)


def _sampler_params(params: SamplingParams, choice: int) -> SamplerParams:
    # A grammar's mask has the stop ids' bits cleared instead, and knows where it cannot be so.
    masks_stops = params.min_tokens > 0 and not params.grammar
    # Somebody else draws: what is drawn here only tells whether the logits are finite.
    temperature = params.temperature if params.external is None else 0.0
    return SamplerParams(
        temperature=temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        top_n_sigma=params.top_n_sigma,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        seed=params.seed,
        choice=choice,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        masked_token_ids=params.stop_token_ids if masks_stops else (),
        mask_until=params.min_tokens if masks_stops else 0,
        logprobs=params.logprobs,
    )
