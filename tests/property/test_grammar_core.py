"""StepSampler under a real Scheduler: with forced text and guesses, preemptions and a lost step,
each output is what the sequence draws alone, one token at a time."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafted_draws import LogitsOf, Result, Wish, random_script, run
from grammar_sources import EOS, OTHER_EOS, SMALL_VOCABULARY, SmallGrammars
from random_grammars import Form, forms
from triptych.engine_core.admission import Limits
from triptych.engine_core.batch import Batch
from triptych.engine_core.ids import RequestId, SequenceId
from triptych.engine_core.layout import StepLayout
from triptych.engine_core.policy import policy_of
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import FinishReason, StepOutput, StepResult
from triptych.kernels.core import Batch as NativeBatch
from triptych.services.scheduler.running_grammars import LAST
from triptych.services.scheduler.sampler import StepSampler, new_sampler

SOURCE = SmallGrammars(forcing=False)
PROMPT = (1, 2)
ABORTED = "aborted"
LAYOUT = StepLayout(1, 64, 4, 16, 24)
LIMITS = Limits(
    max_model_len=60,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_num_waiting=99,
    vocabulary_size=SMALL_VOCABULARY,
    sampleable_vocabulary=SMALL_VOCABULARY,
    max_num_logits=24,
    long_prefill_token_threshold=0,
    watermark_blocks=0,
    prefix_caching=True,
)


class Parrot:
    """A drafter that knows the answers of an earlier run, and errs now and then."""

    def __init__(self, answers: dict[int, list[int]], seed: int) -> None:
        self._answers = answers
        self._rng = np.random.default_rng(seed)
        self._output: dict[int, list[int]] = {}
        self._whose: dict[int, int] = {}
        self.heard = 0

    def open(
        self, sequence_id: int, prompt_ids: Sequence[int], output_ids: Sequence[int], salt: str
    ) -> None:
        assert tuple(prompt_ids) == PROMPT
        self._output[sequence_id] = list(output_ids)
        self._whose[sequence_id] = int(salt)

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
            self._output[sequence_id].append(token_id)

    def close(self, sequence_id: int) -> None:
        del self._output[sequence_id]

    def propose(self, sequence_id: int) -> Sequence[int]:
        answer, output = self._answers[self._whose[sequence_id]], self._output[sequence_id]
        assert output
        assert answer[: len(output)] == output
        guess = answer[len(output) : len(output) + int(self._rng.integers(0, 5))]
        return [*guess, *self._rng.integers(0, SMALL_VOCABULARY, 1).tolist()]

    def verified(self, sequence_id: int, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted
        assert sequence_id in self._output
        self.heard += 1


class ScriptedCore:
    """A scheduler whose executor is a script."""

    def __init__(self, batch: Batch, sampler: StepSampler, logits_of: LogitsOf) -> None:
        self._batch, self._sampler, self._logits_of = batch, sampler, logits_of
        self.scheduler = Scheduler(LIMITS, batch, sampler, policy_of("fcfs"))
        self._slot = memoryview(bytearray(LAYOUT.slot_bytes))
        self.results: dict[int, Result] = {}

    def submit(self, number: int, params: SamplingParams) -> None:
        request = Request(
            request_id=RequestId(number),
            prompt_token_ids=PROMPT,
            params=params,
            cache_salt=str(number),
        )
        self.scheduler.submit(request)
        self.results[number] = Result([])

    def step(self, *, lose: bool, abort: int) -> None:
        """`abort`: a request that is given up while the step is in flight, if it still runs."""
        plan = self.scheduler.plan()
        assert plan
        self.scheduler.write(plan, self._slot)
        ids, rows = self.scheduler.samples()
        drafts = self.scheduler.drafts()
        self._sampler.prepare(ids, drafts)
        if lose:
            assert not self.scheduler.lost().failed
            return
        numbers = self._numbers
        texts = {each: self._batch.token_ids(SequenceId(each)) for each in ids}
        if self.scheduler.abort(RequestId(abort)):
            self.results[abort].finish = ABORTED
        logits = np.zeros((max(plan.num_logits, 1), SMALL_VOCABULARY), np.float32)
        guessed: list[int] = []
        for sequence_id, row, draft in zip(ids, rows, drafts, strict=True):
            logits[row] = self._logits_of(numbers[sequence_id], [*texts[sequence_id], *guessed])
            guessed = [] if draft == LAST else [*guessed, draft]
        drawn = self._sampler.draw(logits, ids, rows, drafts)
        result = StepResult(
            plan.step_id, drawn.token_ids, drawn.logprobs, (), drawn.errors, drawn.complete
        )
        self._take(self.scheduler.apply(result))

    @property
    def _numbers(self) -> dict[int, int]:
        roster = self.scheduler._roster
        return {int(each): int(found.request_id) for each, found in roster.by_id.items()}

    def _take(self, output: StepOutput) -> None:
        for number, token, finish in zip(
            output.request_ids, output.token_ids, output.finishes, strict=True
        ):
            result = self.results[number]
            assert not result.finish
            result.token_ids.append(token)
            if finish:
                result.finish = FinishReason(finish).name.lower()
        for failed in output.failed:
            self.results[failed.request_id].finish = str(failed.error)


@pytest.mark.parametrize("impl", ["native", "python"])
@settings(max_examples=40)
@given(found=st.lists(forms, min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_outputs_are_those_of_sequences_alone(impl: str, found: list[Form], seed: int) -> None:
    rng = np.random.default_rng(seed)
    script = random_script(seed, SMALL_VOCABULARY)
    wishes = [_params(rng, each) for each in [*(form.grammar for form in found), "", ""]]
    inner = new_sampler("native", SMALL_VOCABULARY, processed_logprobs=False)
    alone = {
        number: run(StepSampler(inner, {}, SOURCE), [Wish(number, params)], script)[number]
        for number, params in enumerate(wishes)
    }
    parrot = Parrot({number: each.token_ids for number, each in alone.items()}, seed)
    sampler = StepSampler(inner, {}, SOURCE, parrot)
    num_blocks = int(rng.integers(11, 15))
    made = (NativeBatch if impl == "native" else PythonBatch)(num_blocks, 4, LAYOUT, True)
    core = ScriptedCore(cast(Batch, made), sampler, script)
    for number, params in enumerate(wishes):
        core.submit(number, params)
    steps, lose = 0, False
    while not all(each.finish for each in core.results.values()):
        abort = int(rng.integers(len(wishes))) if rng.random() < 0.02 else -1
        lose = not lose and bool(rng.random() < 0.1)  # two in a row look like somebody's fault
        core.step(lose=lose, abort=abort)
        core.scheduler.check()
        steps += 1
        assert steps < 2000
    for number, result in core.results.items():
        if result.finish == ABORTED:
            assert result.token_ids == alone[number].token_ids[: len(result.token_ids)]
        else:
            assert result == alone[number]
    core.scheduler.plan()  # who left in flight is closed
    assert inner.open_sequences == 0
    assert sampler.num_grammars == 0
    assert not sampler._ahead


def _params(rng: np.random.Generator, grammar: str) -> SamplingParams:
    return SamplingParams(
        max_tokens=int(rng.choice([1, 7, 40])),
        min_tokens=int(rng.integers(0, 2)),
        temperature=float(rng.choice([0.0, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 1.2])),
        frequency_penalty=float(rng.choice([0.0, 0.4])),
        seed=int(rng.integers(0, 2**63)),
        stop_token_ids=((EOS, OTHER_EOS), ())[int(rng.integers(0, 2))],
        grammar=grammar,
    )
