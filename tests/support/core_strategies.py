"""Drives the scheduler without processes: a fake executor, a fake model, hypothesis strategies.

The fake executor reads steps from slot bytes and keeps a token in each KV slot instead of key and
value, so whatever goes wrong in paging (a wrong slot, a shared or stale block) changes the context
that the fake model hashes, and with it the output.
"""

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from triptych.engine_core.admission import Limits
from triptych.engine_core.errors import RequestError
from triptych.engine_core.ids import RequestId
from triptych.engine_core.layout import STEP_HEADER, StepLayout
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import Event, Failed, FinishReason, StepPlan, StepResult, Token
from triptych.engine_core.twins import Twins, python_twins

VOCABULARY = 7
TwinsFactory = Callable[[int, int, StepLayout], Twins]


@dataclass(frozen=True)
class Shape:
    """A small engine."""

    num_blocks: int = 6
    block_size: int = 2
    max_model_len: int = 14
    max_num_seqs: int = 3
    max_num_batched_tokens: int = 4
    max_num_waiting: int = 8

    @property
    def limits(self) -> Limits:
        return Limits(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_waiting=self.max_num_waiting,
            vocabulary_size=VOCABULARY,
            sampleable_vocabulary=VOCABULARY,
        )

    @property
    def layout(self) -> StepLayout:
        return StepLayout(
            num_slots=1,
            max_tokens=self.max_num_batched_tokens,
            max_rows=self.max_num_seqs,
            max_blocks_per_row=-(-self.max_model_len // self.block_size),
        )


def next_token(context: Sequence[int], banned: Sequence[int]) -> int:
    """The fake model and sampler: a hash of all tokens so far."""
    allowed = [token for token in range(VOCABULARY) if token not in banned]
    return allowed[zlib.crc32(array("i", context).tobytes()) % len(allowed)]


def expected_output(request: Request) -> list[int]:
    """What the request's new output tokens must be, computed alone and in one go."""
    params, tokens = request.params, [*request.prompt_token_ids, *request.output_token_ids]
    num_output, new = len(request.output_token_ids), []
    while True:
        banned = params.stop_token_ids if num_output < params.min_tokens else ()
        token = next_token(tokens, banned)
        tokens.append(token)
        new.append(token)
        num_output += 1
        if token in params.stop_token_ids or num_output == params.max_tokens:
            return new


class FakeExecutor:
    """A KV cache of tokens, and the step as an executor reads it from a slot."""

    def __init__(self, shape: Shape) -> None:
        self._layout = shape.layout
        self._block_size = shape.block_size
        self._kv: list[int | None] = [None] * (shape.num_blocks * shape.block_size)

    def run(self, slot: memoryview) -> list[list[int]]:
        """Store the step's tokens; the context of each row with logits, in logits row order."""
        step_id, num_tokens, num_rows, num_samples, _ = STEP_HEADER.unpack_from(slot)
        assert step_id > 0
        columns = {name: self._column(slot, name) for name in self._layout.arrays}
        starts = columns["row_starts"][: num_rows + 1]
        assert starts[0] == 0
        assert starts[-1] == num_tokens
        kv_slots = columns["slots"][:num_tokens]
        assert len(set(kv_slots)) == num_tokens, "no two tokens of a step share a KV slot"
        for kv_slot, token_id in zip(kv_slots, columns["token_ids"][:num_tokens], strict=True):
            self._kv[kv_slot] = token_id
        contexts: dict[int, list[int]] = {}
        for row in range(num_rows):
            length = columns["kv_lengths"][row]
            chunk = starts[row + 1] - starts[row]
            positions = columns["positions"][starts[row] : starts[row + 1]]
            assert positions == list(range(length - chunk, length))
            if (logits_row := columns["logits_rows"][row]) >= 0:
                contexts[logits_row] = self._context(columns["block_tables"], row, length)
        assert sorted(contexts) == list(range(num_samples))
        return [contexts[index] for index in range(num_samples)]

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


@dataclass
class Engine:
    """Scheduler, fake executor and sampler, with a record of what each request got."""

    shape: Shape = field(default_factory=Shape)
    twins: TwinsFactory = python_twins

    def __post_init__(self) -> None:
        layout = self.shape.layout
        pair = self.twins(self.shape.num_blocks, self.shape.block_size, layout)
        self.kv_cache = pair.kv_cache
        self.scheduler = Scheduler(self.shape.limits, pair.kv_cache, pair.step_writer)
        self.executor = FakeExecutor(self.shape)
        self.slot = memoryview(bytearray(layout.slot_bytes))
        self.plan: StepPlan | None = None
        self.outputs: dict[RequestId, list[int]] = {}
        self.endings: dict[RequestId, FinishReason | Exception] = {}

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self.outputs[request.request_id] = []

    def begin(self) -> StepPlan:
        """Plan a step and write it."""
        plan = self.scheduler.plan()
        if plan:
            self.plan = plan
            self.scheduler.write(plan, self.slot)
        return plan

    def end(self, broken: frozenset[int] = frozenset()) -> list[Event]:
        """Run the step in flight and apply it; logits rows in `broken` are not finite."""
        assert self.plan is not None
        contexts = self.executor.run(self.slot)
        sample_rows = self.scheduler.sample_rows(self.plan)
        tokens = tuple(
            -1 if index in broken else next_token(context, row.banned)
            for index, (context, row) in enumerate(zip(contexts, sample_rows, strict=True))
        )
        events = self.scheduler.apply(StepResult(self.plan.step_id, tokens))
        self.plan = None
        self.record(events)
        return events

    def abort(self, request_id: RequestId) -> bool:
        return self.scheduler.abort(request_id)

    def fail_step(self, error: RequestError) -> None:
        self.record(self.scheduler.fail_step(error))
        self.plan = None

    def lose(self) -> None:
        """The executor dies and another, empty one takes its place."""
        self.executor = FakeExecutor(self.shape)
        self.plan = None
        self.scheduler.lost()

    def record(self, events: Sequence[Event]) -> None:
        for event in events:
            assert event.request_id not in self.endings, "no event after the last"
            match event:
                case Token(request_id, token_id, finish):
                    self.outputs[request_id].append(token_id)
                    if finish is not None:
                        self.endings[request_id] = finish
                case Failed(request_id, error):
                    self.endings[request_id] = error

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


@st.composite
def params(draw: st.DrawFn, max_tokens: int) -> SamplingParams:
    count = draw(st.integers(1, max_tokens))
    return SamplingParams(
        max_tokens=count,
        min_tokens=draw(st.integers(0, count)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2))),
    )


@st.composite
def requests(draw: st.DrawFn, request_id: int, shape: Shape) -> Request:
    """A request that the shape can hold, resumed or new."""
    bound = min(shape.max_model_len, shape.num_blocks * shape.block_size)
    prompt = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=bound - 1))
    chosen = draw(params(bound - len(prompt)))
    ids = st.integers(0, VOCABULARY - 1)
    return Request(
        RequestId(request_id),
        tuple(prompt),
        chosen,
        priority=draw(st.sampled_from((0, 0, 0, -1, 1))),
        output_token_ids=tuple(draw(st.lists(ids, max_size=min(2, chosen.max_tokens - 1)))),
    )
