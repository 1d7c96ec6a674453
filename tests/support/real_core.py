"""The engine without its processes: real scheduler, batch, sampler and backend, one after another.

    core = RealCore(backend, CoreShape(num_blocks=40))
    answers = core.run([request, ...])

What services do around them (rings, sockets, text) is left out; a step's inputs and logits go
through memory in the rings' layout. Several cores may use one backend in turn; `spoil` it between
them, so that what an earlier one left in the KV cache is wrong and shows if it is read.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from triptych.engine_core.admission import Limits
from triptych.engine_core.batch import UNKNOWN_DRAFT, Batch
from triptych.engine_core.drafting import Drafter
from triptych.engine_core.ids import RequestId
from triptych.engine_core.layout import STEP_HEADER, StepLayout
from triptych.engine_core.policy import PolicyName, policy_of
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.request import Request
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import FinishReason, Logprobs, StepOutput, StepPlan, StepResult
from triptych.kernels.core import Batch as NativeBatch
from triptych.services.executor.backend import Backend
from triptych.services.executor.step_inputs import StepInputs
from triptych.services.scheduler.logits_processors import ProcessorFactory
from triptych.services.scheduler.sampler import StepSampler, new_sampler

MAX_STEPS = 20_000


@dataclass(frozen=True)
class CoreShape:
    """A scheduler's settings. `num_blocks` at most the backend's; None: all of them."""

    num_blocks: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    extra_logits: int = 16
    long_prefill_token_threshold: int = 0
    watermark_blocks: int = 0
    prefix_caching: bool = True
    max_num_waiting: int = 4096
    policy: PolicyName = "priority"
    impl: Literal["native", "python"] = "native"
    processed_logprobs: bool = False


class LogprobBits(NamedTuple):
    """Logprobs at one position so that equal means equal in every bit."""

    logprob: bytes
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: bytes


@dataclass
class Answer:
    """What a choice got, as far as it may not depend on anything but its request."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobBits | None] = field(default_factory=list)
    prompt_logprobs: list[LogprobBits] = field(default_factory=list)
    score: bytes = b""
    finish: str = ""
    values: list[Logprobs] = field(default_factory=list, compare=False)
    cached_tokens: int = field(default=-1, compare=False)


def bits(logprobs: Logprobs) -> LogprobBits:
    return LogprobBits(
        struct.pack("<d", logprobs.logprob),
        logprobs.rank,
        tuple(int(token_id) for token_id in logprobs.top_ids),
        np.asarray(logprobs.top_logprobs, np.float32).tobytes(),
    )


def choices_of(request: Request) -> list[RequestId]:
    """The ids under which its choices are known."""
    return [RequestId(request.request_id + index) for index in range(request.params.n)]


class RealCore:
    """Checks in passing that every choice ends once, and starts before its first token."""

    def __init__(
        self,
        backend: Backend,
        shape: CoreShape,
        *,
        sampleable: int | None = None,
        processors: Mapping[str, ProcessorFactory] | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        facts = backend.facts
        self.shape = shape
        self._backend = backend
        num_blocks = facts.num_blocks if shape.num_blocks is None else shape.num_blocks
        assert num_blocks <= facts.num_blocks
        max_logits = shape.max_num_seqs + shape.extra_logits
        width = -(-facts.max_model_len // facts.block_size)
        self._layout = StepLayout(
            1, shape.max_num_batched_tokens, shape.max_num_seqs, width, max_logits
        )
        vocabulary = facts.vocabulary_size
        sampleable = vocabulary if sampleable is None else sampleable
        limits = Limits(
            max_model_len=facts.max_model_len,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_num_waiting=shape.max_num_waiting,
            vocabulary_size=vocabulary,
            sampleable_vocabulary=sampleable,
            max_num_logits=max_logits,
            long_prefill_token_threshold=shape.long_prefill_token_threshold,
            watermark_blocks=shape.watermark_blocks,
            prefix_caching=shape.prefix_caching,
        )
        self._sampler = new_sampler(
            shape.impl, sampleable, processed_logprobs=shape.processed_logprobs
        )
        self.sampler = StepSampler(self._sampler, processors or {}, drafter=drafter)
        self.batch = _new_batch(shape, num_blocks, facts.block_size, self._layout)
        self.scheduler = Scheduler(limits, self.batch, self.sampler, policy_of(shape.policy))
        self._slot = memoryview(bytearray(self._layout.slot_bytes))
        self._logits: npt.NDArray[np.float32] = np.empty((max_logits, vocabulary), np.float32)
        self._open: set[RequestId] = set()
        self.answers: dict[RequestId, Answer] = {}
        self.steps = 0
        backend.reserve(shape.max_num_batched_tokens)

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Raises what the scheduler raises."""
        self.sampler.check(request.params)
        self.scheduler.submit(request)
        for choice in choices_of(request):
            self.answers[choice] = Answer(len(request.prompt_token_ids))
            self._open.add(choice)

    def abort(self, request_id: RequestId) -> bool:
        self._open.discard(request_id)
        return self.scheduler.abort(request_id)

    def lose_executor(self) -> bool:
        """It is gone with a step in flight and all that was in its KV cache; False: no step was."""
        plan = self.begin()
        if plan:
            assert not self.scheduler.lost().failed, "a loss from outside is nobody's fault"
            spoil(self._backend)
        return bool(plan)

    def take_over(self, other: "RealCore") -> None:
        """Go on with what another one has not ended, from its tokens."""
        self.answers, self._open = other.answers, other._open
        for answer in self.answers.values():
            if not answer.token_ids:
                answer.prompt_logprobs.clear()  # they come anew
        for request in other.scheduler.resumable():
            self.scheduler.submit(request)

    def run(
        self,
        requests: Sequence[Request],
        *,
        arrivals: Sequence[int] | None = None,
        between: Callable[["RealCore", int], None] | None = None,
    ) -> dict[RequestId, Answer]:
        """Answers to all choices. Request i comes before step arrivals[i] (default: all at once),
        counted from here; `between` is called before each step, with its number. What was submitted
        or taken over before is brought to its end too."""
        due = sorted(
            zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0]
        )
        if requests and not self._open:
            self.answers = {}
        step = 0
        while due or self._open:
            while due and (due[0][0] <= step or not self._open):
                self.submit(due.pop(0)[1])
            if between is not None:
                between(self, step)
            self.step()
            step += 1
            assert step < MAX_STEPS, "the engine makes no progress"
        return self.answers

    def assert_empty(self) -> None:
        """Everything that requests held has been given back."""
        scheduler = self.scheduler
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_requests == 0
        assert self.batch.num_free_blocks == self.batch.num_blocks
        scheduler.check()
        assert not self.begin(), "nothing is left to do"
        assert self._sampler.open_sequences == 0

    # ------------------------------------------------------------------ a step

    def step(self) -> bool:
        """Plan, execute, draw, apply. False where there was nothing to do."""
        plan = self.begin()
        if plan:
            self.end(plan)
        return bool(plan)

    def begin(self) -> StepPlan:
        """The step is in flight, unless empty."""
        plan = self.scheduler.plan()
        if plan:
            self.scheduler.write(plan, self._slot)
            self.steps += 1
        return plan

    def end(self, plan: StepPlan) -> StepOutput:
        """The executor computes the step in flight; its meaning is taken in."""
        self._guess(plan)
        inputs = StepInputs.view(self._slot, self._layout)
        self._backend.execute(inputs, self._logits)
        logits = self._logits[: plan.num_logits]
        scores = [
            self.sampler.score(
                logits,
                range(score.logits_row, score.logits_row + score.num_positions),
                targets,
                top,
            )
            for score, targets, top in self.scheduler.scores()
        ]
        if plan.num_samples:
            samples, drafts = self.scheduler.samples(), self.scheduler.drafts()
            drawn = self.sampler.draw(logits, *samples, drafts)
            result = StepResult(
                plan.step_id,
                drawn.token_ids,
                drawn.logprobs,
                scores,
                drawn.errors,
                drawn.complete,
            )
        else:
            result = StepResult(plan.step_id, (), scores=scores)
        output = self.scheduler.apply(result)
        self._take(output)
        return output

    def _guess(self, plan: StepPlan) -> None:
        """The executor's draft model: the token before, again."""
        offset, _ = self._layout.arrays["token_ids"]
        tokens = np.frombuffer(self._slot, np.int32, plan.num_tokens, offset)
        unknown = np.flatnonzero(tokens == UNKNOWN_DRAFT)
        for at in unknown:
            tokens[at] = tokens[at - 1]
        self.scheduler.fill_drafts(tokens[unknown].tolist())

    def _take(self, output: StepOutput) -> None:
        for started in output.started:
            answer = self.answers[started.request_id]
            assert answer.cached_tokens == -1, "started once"
            answer.cached_tokens = started.cached_tokens
            assert 0 <= started.cached_tokens < answer.prompt_tokens
        for scored in output.prompt_logprobs:
            answer = self.answers[scored.request_id]
            assert not answer.token_ids, "prompt logprobs come before the first token"
            assert scored.position == 1 + len(answer.prompt_logprobs), "in order, each once"
            answer.prompt_logprobs += [bits(each) for each in scored.logprobs]
        self._take_tokens(output)
        for failed in output.failed:
            self._end(failed.request_id, f"{type(failed.error).__name__}: {failed.error}")

    def _take_tokens(self, output: StepOutput) -> None:
        columns = zip(output.request_ids, output.token_ids, output.finishes, strict=True)
        for entry, (number, token_id, finish) in enumerate(columns):
            request_id = RequestId(number)
            answer = self.answers[request_id]
            assert answer.cached_tokens >= 0, "a first token comes with a start"
            assert not answer.finish, "no token after the last"
            answer.token_ids.append(token_id)
            logprobs = output.logprobs.get(entry)
            answer.logprobs.append(None if logprobs is None else bits(logprobs))
            if logprobs is not None:
                answer.values.append(logprobs)
            if entry in output.scores:
                answer.score = struct.pack("<d", output.scores[entry])
            if finish:
                self._end(request_id, FinishReason(finish).name)

    def _end(self, request_id: RequestId, how: str) -> None:
        answer = self.answers[request_id]
        assert not answer.finish, "a choice ends once"
        answer.finish = how
        self._open.discard(request_id)


def _new_batch(shape: CoreShape, num_blocks: int, block_size: int, layout: StepLayout) -> Batch:
    if shape.impl == "python":
        return PythonBatch(num_blocks, block_size, layout, shape.prefix_caching)
    return cast(Batch, NativeBatch(num_blocks, block_size, layout, shape.prefix_caching))


def spoil(backend: Backend, token_id: int = 0) -> None:
    """Leave the keys and values of one token, again and again, in every block of the cache."""
    facts = backend.facts
    size, last = facts.block_size, facts.num_blocks - 1
    layout = StepLayout(1, size, max(1, last), 1, 1)
    slot = memoryview(bytearray(layout.slot_bytes))

    def write(name: str, values: Sequence[int]) -> None:
        offset, _ = layout.arrays[name]
        slot[offset : offset + 4 * len(values)] = np.array(values, np.int32).tobytes()

    logits = np.empty((1, facts.vocabulary_size), np.float32)
    for num_tokens, copies in ((size, 0), (1, last)):
        STEP_HEADER.pack_into(slot, 0, 1, num_tokens, 1, 0, copies)
        write("token_ids", [token_id] * num_tokens)
        write("positions", range(num_tokens))
        write("slots", range(last * size, last * size + num_tokens))
        write("row_starts", [0, num_tokens])
        write("kv_lengths", [num_tokens])
        write("copy_sources", [last] * copies)
        write("copy_targets", range(copies))
        write("block_tables", [last])
        backend.execute(StepInputs.view(slot, layout), logits)


def total_cached(answers: Iterable[Answer]) -> int:
    """Prompt tokens that were found in the cache."""
    return sum(max(0, answer.cached_tokens) for answer in answers)
