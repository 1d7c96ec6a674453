"""A whole engine core in one process: scheduler, an executor of tokens, a sampler that is a hash.

The executor keeps tokens where keys and values would be and reads contexts back through the block
tables, so a wrong block, a missing copy or a stale hit changes what comes out. It is the draft
model too. The sampler (hash_model.py) draws by a hash of context and choice, after asserting that
the scheduler told it the same tokens.
"""

from dataclasses import dataclass, field
from operator import eq

from hypothesis import strategies as st

import batch_model
from hash_model import (
    COMPLETES,
    NO_GUESSES,
    VOCABULARY,
    HashSampler,
    Scored,
    candidates,
    logprob,
    model_guess,
)
from triptych.engine_core.admission import Limits
from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.errors import RequestError
from triptych.engine_core.ids import RequestId
from triptych.engine_core.layout import (
    DEVICE_HEADER,
    DEVICE_HEADER_OFFSET,
    STEP_HEADER,
    StepLayout,
)
from triptych.engine_core.policy import PolicyName, policy_of
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import BeamParams, SamplingParams
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import FinishReason, Logprobs, StepOutput, StepPlan, StepResult

BatchFactory = batch_model.BatchFactory


@dataclass(frozen=True)
class Shape:
    """A small engine."""

    num_blocks: int = 6
    block_size: int = 2
    max_model_len: int = 14
    max_num_seqs: int = 3
    max_num_batched_tokens: int = 4
    max_num_waiting: int = 8
    extra_logits: int = 0
    long_prefill_token_threshold: int = 0
    watermark_blocks: int = 0
    prefix_caching: bool = True
    policy: PolicyName = "priority"
    guess_seed: int = NO_GUESSES
    num_host_blocks: int = 0
    max_transfers: int = 0

    @property
    def limits(self) -> Limits:
        return Limits(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_waiting=self.max_num_waiting,
            vocabulary_size=VOCABULARY,
            sampleable_vocabulary=VOCABULARY,
            max_num_logits=self.max_num_seqs + self.extra_logits,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            watermark_blocks=self.watermark_blocks,
            prefix_caching=self.prefix_caching,
        )

    @property
    def layout(self) -> StepLayout:
        return StepLayout(
            num_slots=1,
            max_tokens=self.max_num_batched_tokens,
            max_rows=self.max_num_seqs,
            max_blocks_per_row=-(-self.max_model_len // self.block_size),
            max_logits=self.max_num_seqs + self.extra_logits,
            max_transfers=self.max_transfers,
        )


BIG = Shape(num_blocks=64, max_model_len=60, max_num_seqs=8, max_num_batched_tokens=64)


class FakeExecutor:
    """A KV cache of tokens, and the step as an executor reads it from a slot."""

    def __init__(self, shape: Shape) -> None:
        self._layout = shape.layout
        self._block_size = shape.block_size
        self._kv: list[int | None] = [None] * (shape.num_blocks * shape.block_size)
        self._host: list[list[int | None]] = [[] for _ in range(shape.num_host_blocks)]
        self.num_stores = self.num_loads = 0
        self.guessed: list[int] = []

    def run(self, slot: memoryview) -> list[list[int]]:
        """Copy blocks, store the step's tokens; the context of each logits row, in order.
        `guessed`: the tokens that it was to guess."""
        step_id, num_tokens, num_rows, num_logits, num_copies = STEP_HEADER.unpack_from(slot)
        assert step_id > 0
        columns = {name: self._column(slot, name) for name in self._layout.arrays}
        stores, loads, *_ = DEVICE_HEADER.unpack_from(slot, DEVICE_HEADER_OFFSET)
        self._store(columns["store_sources"][:stores], columns["store_targets"][:stores])
        self._load(columns["load_sources"][:loads], columns["load_targets"][:loads])
        self._copy(columns["copy_sources"][:num_copies], columns["copy_targets"][:num_copies])
        starts = columns["row_starts"][: num_rows + 1]
        assert starts[0] == 0
        assert starts[-1] == num_tokens
        kv_slots = columns["slots"][:num_tokens]
        assert len(set(kv_slots)) == num_tokens, "no two tokens of a step share a KV slot"
        for kv_slot, token_id in zip(kv_slots, columns["token_ids"][:num_tokens], strict=True):
            self._kv[kv_slot] = token_id
        contexts: dict[int, list[int]] = {}
        self.guessed = []
        wanted = columns["logits_tokens"][:num_logits]
        assert wanted == sorted(set(wanted))
        for row in range(num_rows):
            length = columns["kv_lengths"][row]
            chunk = starts[row + 1] - starts[row]
            positions = columns["positions"][starts[row] : starts[row + 1]]
            assert positions == list(range(length - chunk, length))
            context = self._context(columns["block_tables"], row, length)
            self._fill(context, kv_slots[starts[row] : starts[row + 1]])
            for token in wanted:
                if starts[row] <= token < starts[row + 1]:
                    contexts[token] = context[: positions[token - starts[row]] + 1]
        return [contexts[token] for token in wanted]

    def _fill(self, context: list[int], kv_slots: list[int]) -> None:
        """The row's unknown tokens, each guessed by those before it."""
        for back, kv_slot in zip(range(len(kv_slots), 0, -1), kv_slots, strict=True):
            if context[-back] == UNKNOWN_DRAFT:
                token_id = model_guess(context[: len(context) - back])
                context[-back] = self._kv[kv_slot] = token_id
                self.guessed.append(token_id)

    def _store(self, sources: list[int], targets: list[int]) -> None:
        size = self._block_size
        for source, target in zip(sources, targets, strict=True):
            self._host[target] = self._kv[source * size : (source + 1) * size]
        self.num_stores += len(targets)

    def _load(self, sources: list[int], targets: list[int]) -> None:
        size = self._block_size
        for source, target in zip(sources, targets, strict=True):
            assert self._host[source], "a block is loaded that nothing was stored to"
            self._kv[target * size : (target + 1) * size] = self._host[source]
        self.num_loads += len(targets)

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        size = self._block_size
        for source, target in zip(sources, targets, strict=True):
            self._kv[target * size : (target + 1) * size] = self._kv[
                source * size : (source + 1) * size
            ]

    def _column(self, slot: memoryview, name: str) -> list[int]:
        offset, shape = self._layout.arrays[name]
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        return slot[offset : offset + 4 * count].cast("i").tolist()

    def _context(self, tables: list[int], row: int, length: int) -> list[int]:
        width = self._layout.max_blocks_per_row
        table = tables[row * width : (row + 1) * width]
        held = table.index(-1) if -1 in table else width
        assert all(block == -1 for block in table[held:])
        context = []
        for position in range(length):
            block = table[position // self._block_size]
            token = self._kv[block * self._block_size + position % self._block_size]
            assert token is not None, "a context has no hole"
            context.append(token)
        return context


def wish(number: int, prompt: int = 2, max_tokens: int = 3, priority: int = 0) -> Request:
    """A plain request whose prompt counts up from its number."""
    tokens = tuple((number + index) % VOCABULARY for index in range(prompt))
    params = SamplingParams(max_tokens=max_tokens)
    return Request(RequestId(number), tokens, params, priority)


@dataclass
class Engine:
    """Scheduler, fake executor and sampler, with a record of what each choice got."""

    shape: Shape = field(default_factory=Shape)
    batch_factory: BatchFactory = PythonBatch

    def __post_init__(self) -> None:
        shape = self.shape
        self.batch = self.batch_factory(
            shape.num_blocks,
            shape.block_size,
            shape.layout,
            shape.prefix_caching,
            shape.num_host_blocks,
        )
        self.sampler = self.new_sampler()
        self.scheduler = Scheduler(shape.limits, self.batch, self.sampler, policy_of(shape.policy))
        self.executor = FakeExecutor(shape)
        self.slot = memoryview(bytearray(shape.layout.slot_bytes))
        self.plan: StepPlan | None = None
        self.outputs: dict[RequestId, list[int]] = {}
        self.endings: dict[RequestId, FinishReason | Exception] = {}
        self.cached: dict[RequestId, int] = {}
        self.prompt_logprobs: dict[RequestId, list[Logprobs]] = {}
        self.logprobs: dict[RequestId, list[Logprobs]] = {}
        self.accepted_drafts = 0

    def new_sampler(self) -> HashSampler:
        return HashSampler(self.shape.guess_seed)

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        for index in range(request.params.n):
            self.outputs[RequestId(request.request_id + index)] = []

    def begin(self) -> StepPlan:
        """Plan a step and write it."""
        plan = self.scheduler.plan()
        if plan:
            self.plan = plan
            self.scheduler.write(plan, self.slot)
        return plan

    def end(self, broken: frozenset[int] = frozenset()) -> StepOutput:
        """Run the step in flight and apply it; samples in `broken` are not finite."""
        assert self.plan is not None
        contexts = self.executor.run(self.slot)
        assert len(contexts) == self.plan.num_logits
        scores = [
            [
                Scored(logprob(context, target), 1, *candidates(context, top, ()))
                for context, target in zip(
                    contexts[score.logits_row : score.logits_row + score.num_positions],
                    targets,
                    strict=True,
                )
            ]
            for score, targets, top in self.scheduler.scores()
        ]
        self.scheduler.fill_drafts(self.executor.guessed)
        drafts = self.scheduler.drafts()
        drawn = self.sampler.draw(contexts, *self.scheduler.samples(), drafts)
        tokens, logprobs, complete = drawn
        for index in broken & set(range(len(tokens))):
            tokens[index] = -1
            logprobs.pop(index, None)
        result = StepResult(self.plan.step_id, tokens, logprobs, scores, complete=complete)
        self.accepted_drafts += sum(map(eq, drafts, tokens))
        output = self.scheduler.apply(result)
        self.plan = None
        self.record(output)
        return output

    def abort(self, request_id: RequestId) -> bool:
        return self.scheduler.abort(request_id)

    def fail_step(self, error: RequestError) -> None:
        self.record(self.scheduler.fail_step(error))
        self.plan = None

    def lose(self) -> None:
        """The executor dies and another, empty one takes its place."""
        self.executor = FakeExecutor(self.shape)
        self.plan = None
        self.record(self.scheduler.lost())

    def record(self, output: StepOutput) -> None:
        for started in output.started:
            assert not self.outputs[started.request_id], "started before its first token"
            assert started.request_id not in self.cached, "started once"
            self.cached[started.request_id] = started.cached_tokens
        for found in output.prompt_logprobs:
            assert not self.outputs[found.request_id], "prompt logprobs before the first token"
            known = self.prompt_logprobs.setdefault(found.request_id, [])
            assert found.position == 1 + len(known), "prompt logprobs in order, each once"
            known.extend(found.logprobs)
        columns = zip(output.request_ids, output.token_ids, output.finishes, strict=True)
        for entry, (number, token_id, finish) in enumerate(columns):
            request_id = RequestId(number)
            assert request_id not in self.endings, "no token after the last"
            assert request_id in self.cached, "a first token comes with a start"
            self.outputs[request_id].append(token_id)
            if entry in output.logprobs:
                self.logprobs.setdefault(request_id, []).append(output.logprobs[entry])
            if finish:
                self.endings[request_id] = FinishReason(finish)
        for failed in output.failed:
            assert failed.request_id not in self.endings, "no error after the end"
            self.endings[failed.request_id] = failed.error

    def run_to_empty(self, max_steps: int = 10_000) -> int:
        """Steps until nothing is left to do, checking after each; how many it took."""
        steps = 0
        if self.plan is not None:
            self.end()
        while self.begin():
            self.scheduler.check()
            self.end()
            self.scheduler.check()
            steps += 1
            assert steps <= max_steps, "the engine makes no progress"
        return steps

    def assert_empty(self) -> None:
        """Everything that requests held has been given back."""
        scheduler = self.scheduler
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_requests == 0
        assert self.batch.num_free_blocks == self.shape.num_blocks
        assert not self.sampler.opened


@st.composite
def params(draw: st.DrawFn, max_tokens: int) -> SamplingParams:
    count = draw(st.integers(1, max_tokens))
    return SamplingParams(
        max_tokens=count,
        min_tokens=draw(st.integers(0, count)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2))),
        n=draw(st.sampled_from([1, 1, 1, 2, 4])),
        prompt_logprobs=draw(st.sampled_from([-1, -1, 0, 2])),
        logprobs=draw(st.sampled_from([-1, -1, 0, 3])),
        grammar=draw(st.sampled_from(["", "", "", COMPLETES])),
    )


@st.composite
def beam_params(draw: st.DrawFn, shape: Shape, room: int) -> SamplingParams | None:
    """A beam search that fits `room` blocks behind the prompt; None when none does."""
    width = draw(st.integers(2, max(2, shape.max_num_seqs)))
    if width > shape.max_num_seqs or width * 2 > room:
        return None
    most = (room // width - 1) * shape.block_size
    count = draw(st.integers(1, max(1, most)))
    return SamplingParams(
        max_tokens=count,
        min_tokens=draw(st.integers(0, count)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2))),
        n=draw(st.integers(1, width)),
        beam=BeamParams(
            width=width,
            length_penalty=draw(st.sampled_from([0.0, 1.0, -0.5, 2.0])),
            early_stopping=draw(st.sampled_from(["true", "false", "never"])),
        ),
    )


@st.composite
def requests(draw: st.DrawFn, number: int, shape: Shape, *, beams: bool = True) -> Request:
    """A request that fits the shape. Ids are `number` * 16: room for its choices. Prompts share
    beginnings often."""
    longest = min(shape.max_model_len, shape.num_blocks * shape.block_size)
    length = draw(st.integers(1, longest - 1))
    stem = draw(st.sampled_from([(1, 2, 3, 4, 5, 6, 1, 2), (1, 2, 3, 5, 5, 6, 1, 2), ()]))
    rest = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=length, max_size=length))
    prompt = (*stem[: draw(st.integers(0, len(stem)))], *rest)[:length]
    chosen = draw(params(longest - length))
    if beams and draw(st.integers(0, 4)) == 0:
        room = shape.num_blocks - -(-length // shape.block_size)
        found = draw(beam_params(shape, room))
        if found is not None and length + found.max_tokens <= longest:
            chosen = found
    return Request(
        RequestId(16 * number),
        prompt,
        chosen,
        priority=draw(st.integers(-1, 1)),
        cache_salt=draw(st.sampled_from(["", "", "a"])),
        tenant=draw(st.sampled_from(["", "x", "y"])),
    )
