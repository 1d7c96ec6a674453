"""Collects what a step meant to requests, in the columns of StepOutput."""

from array import array
from collections.abc import Mapping, Sequence

from triptych.engine_core.batch import FINISH_NOT_FINITE, Outcome
from triptych.engine_core.beam_search import Hypothesis
from triptych.engine_core.errors import NotFinite, RequestError
from triptych.engine_core.ids import RequestId
from triptych.engine_core.step import (
    Failed,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    Started,
    StepOutput,
    StepResult,
)

_NOT_FINITE = "the logits of an output token are not finite, or leave none to draw"

NOBODY = -1
"""In Outcome.request_ids."""


_LEAST_SCORE = -3.4028234663852886e38
"""Of a float32, which it is on the wire."""


class OutputColumns:
    """Of one step. The batch's own columns are taken over as they are where all of them count."""

    def __init__(self, step_id: int) -> None:
        self._step_id = step_id
        self._request_ids: array[int] = array("q")
        self._token_ids: array[int] = array("i")
        self._finishes: array[int] = array("B")
        self._logprobs: Mapping[int, Logprobs] = {}
        self._scores: dict[int, float] = {}
        self.started: list[Started] = []
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.failed: list[Failed] = []

    def take(
        self, outcome: Outcome, sequence_ids: "array[int]", result: StepResult
    ) -> tuple["array[int]", "array[int]"]:
        """The tokens of a step, before all else. Returns the sequences that got one, and them: a
        sequence for each of its tokens, in order."""
        logprobs, samples = result.logprobs, outcome.samples
        columns = outcome.request_ids, outcome.token_ids, outcome.finishes
        failed = FINISH_NOT_FINITE in outcome.finishes if outcome.finished else False
        if not failed and NOBODY not in outcome.request_ids:
            self._request_ids, self._token_ids, self._finishes = columns
            if len(samples) == len(sequence_ids):
                self._logprobs = logprobs
                return sequence_ids, outcome.token_ids
            if logprobs:
                entries = ((entry, logprobs.get(sample)) for entry, sample in enumerate(samples))
                self._logprobs = {entry: found for entry, found in entries if found is not None}
            return array("q", [sequence_ids[sample] for sample in samples]), outcome.token_ids
        appended: array[int] = array("q")
        kept: dict[int, Logprobs] = {}
        for sample, request_id, token_id, finish in zip(samples, *columns, strict=True):
            if request_id == NOBODY:
                continue
            if finish == FINISH_NOT_FINITE:
                error = result.errors.get(sample) or NotFinite(_NOT_FINITE)
                self.fail(RequestId(request_id), error)
                continue
            if sample in logprobs:
                kept[len(self._request_ids)] = logprobs[sample]
            appended.append(sequence_ids[sample])
            self.token(request_id, token_id, finish)
        self._logprobs = kept
        return appended, self._token_ids[:]

    def hypothesis(self, request_id: RequestId, found: Hypothesis, stops: Sequence[int]) -> None:
        """A beam's output, whole."""
        last = len(found.tokens) - 1
        for index, token_id in enumerate(found.tokens):
            reason = FinishReason.STOP if token_id in stops else FinishReason.LENGTH
            self.token(request_id, token_id, reason if index == last else 0)
        self._scores[len(self._request_ids) - 1] = max(found.score, _LEAST_SCORE)

    def token(self, request_id: int, token_id: int, finish: int) -> None:
        """One more entry."""
        self._request_ids.append(request_id)
        self._token_ids.append(token_id)
        self._finishes.append(finish)

    def fail(self, request_id: RequestId, error: RequestError) -> None:
        """A choice ends with an error."""
        self.failed.append(Failed(request_id, error))

    def output(self) -> StepOutput:
        """All of it."""
        return StepOutput(
            step_id=self._step_id,
            request_ids=self._request_ids,
            token_ids=self._token_ids,
            finishes=self._finishes,
            logprobs=self._logprobs,
            scores=self._scores,
            started=self.started,
            prompt_logprobs=self.prompt_logprobs,
            failed=self.failed,
        )
