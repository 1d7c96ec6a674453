"""A whole engine core (core_engine.py) whose executor draws tokens, up to two steps in flight.

The device computes a step as soon as it gets it and tells what it drew only when it is asked: until
then nobody knows, though the next step may build on it. A step that is to fail is not computed at
all, and what was to build on it computes nonsense.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from core_engine import Engine, FakeExecutor
from hash_model import COMPLETES, Scored, candidates, is_complete, logprob, next_token
from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.errors import RequestError, Unavailable
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import PREVIOUS_SAMPLE
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.step import Logprobs, StepOutput, StepPlan, StepResult

NUM_SLOTS = 3
HOST_DRAWN = -1
NONSENSE = 0


class SampleInput(NamedTuple):
    """What the device is told of a sample. `row`: HOST_DRAWN where it is not to draw it."""

    row: int
    params: SamplingParams
    choice: int
    num_prompt: int

    def draw(self, context: list[int]) -> int:
        early = len(context) - self.num_prompt < self.params.min_tokens
        return next_token(context, self.params.stop_token_ids if early else (), self.choice)


@dataclass
class Flight:
    """A step that the device has. `drawn`: HOST_DRAWN where it did not draw."""

    plan: StepPlan
    fails: bool
    contexts: list[list[int]]
    drawn: list[int]
    guessed: list[int]


class DrawingExecutor(FakeExecutor):
    """Puts what it drew in the step before where that is asked for."""

    def resolve(self, slot: memoryview, num_tokens: int, previous: list[int]) -> None:
        offset, _ = self._layout.arrays["token_ids"]
        tokens = slot[offset : offset + 4 * num_tokens].cast("i")
        for index, token_id in enumerate(tokens.tolist()):
            if token_id <= PREVIOUS_SAMPLE:
                drawn = previous[PREVIOUS_SAMPLE - token_id]
                assert drawn != HOST_DRAWN, "a step builds on a token that the host draws"
                tokens[index] = drawn

    def empty(self) -> None:
        """Every slot holds something: contexts of nonsense have no holes."""
        self._kv = [NONSENSE if each is None else each for each in self._kv]


@dataclass
class AheadEngine(Engine):
    """`host_seed`: 0 for a device that draws all it can; else the host draws some more."""

    host_seed: int = 0
    flights: list[Flight] = field(default_factory=list)
    aheads: int = 0
    wasted: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.executor: DrawingExecutor = DrawingExecutor(self.shape)
        self._slots = [memoryview(bytearray(len(self.slot))) for _ in range(NUM_SLOTS)]

    def is_host_drawn(self, sequence_id: int, drafted: bool) -> bool:
        params = self.sampler.opened[sequence_id].params
        by_chance = self.host_seed and (sequence_id + self.host_seed) % 3 == 0
        host = drafted or params.grammar == COMPLETES or params.beam is not None
        return bool(host or by_chance)

    def host_drawn(self) -> set[int]:
        """Of the samples of the step in flight."""
        ids, drafts = self.scheduler.samples()[0], self.scheduler.drafts()
        many = [number for number, draft in zip(ids, drafts, strict=True) if draft >= UNKNOWN_DRAFT]
        return {number for number in ids if self.is_host_drawn(number, number in many)}

    def begin(self, *, fails: bool = False) -> StepPlan:
        """Plan a step with none in flight, and send it."""
        plan = self.scheduler.plan()
        if plan:
            self.plan = plan
            ids, rows = self.scheduler.samples()
            assert len(ids) == plan.num_samples
            self._send(plan, list(zip(ids, rows, strict=True)), self.host_drawn(), fails=fails)
        return plan

    def begin_ahead(self, *, fails: bool = False) -> StepPlan:
        """Plan one ahead, and send it if there is any."""
        assert len(self.flights) == 1
        before, free = self._facts(), self.batch.num_free_blocks
        host_drawn = self.host_drawn()
        plan = self.scheduler.plan_ahead(host_drawn)
        assert self._facts() == before, "a step ahead changes nothing that is known"
        if not plan:
            assert self.batch.num_free_blocks == free
            return plan
        ids, rows, previous = self.scheduler.samples_ahead()
        assert len(ids) == plan.num_samples
        assert len(set(ids)) == len(ids), "one sample each"
        old_ids = self.scheduler.samples()[0]
        for number, sample in zip(ids, previous, strict=True):
            assert number not in host_drawn or sample < 0
            assert sample < 0 or old_ids[sample] == number
            assert (sample >= 0) == (number in set(old_ids))
        self.aheads += 1
        still = {n for n in ids if self.is_host_drawn(n, drafted=False)}
        self._send(plan, list(zip(ids, rows, strict=True)), still, fails=fails)
        return plan

    def _facts(self) -> tuple[object, ...]:
        batch = self.batch
        ids = batch.sequence_ids()
        numbers = [SequenceId(number) for number in ids]
        texts = [(batch.token_ids(each), batch.num_computed(each)) for each in numbers]
        return ids, texts, batch.samples(), batch.rows()

    def _send(
        self,
        plan: StepPlan,
        samples: list[tuple[int, int]],
        host_drawn: Collection[int],
        *,
        fails: bool,
    ) -> None:
        slot = self._slots[plan.step_id % NUM_SLOTS]
        self.scheduler.write(plan, slot)
        inputs = [self._input(n, HOST_DRAWN if n in host_drawn else row) for n, row in samples]
        before = self.flights[-1] if self.flights else None
        if fails:
            self.flights.append(Flight(plan, True, [], [NONSENSE] * plan.num_samples, []))
            return
        if before is not None:
            if before.fails:
                self.executor.empty()
            self.executor.resolve(slot, plan.num_tokens, before.drawn)
        contexts = self.executor.run(slot)
        assert len(contexts) == plan.num_logits
        drawn = [HOST_DRAWN if s.row < 0 else s.draw(contexts[s.row]) for s in inputs]
        self.flights.append(Flight(plan, False, contexts, drawn, self.executor.guessed))

    def _input(self, sequence_id: int, row: int) -> SampleInput:
        state = self.sampler.opened[sequence_id]
        return SampleInput(row, state.params, state.choice, state.prompt)

    def end(self, broken: frozenset[int] = frozenset()) -> StepOutput:
        """The oldest step is over; samples in `broken` are not finite."""
        flight = self.flights.pop(0)
        if flight.fails:
            self.flights.insert(0, flight)
            return self.fail(Unavailable("it broke", 100))
        scheduler, contexts = self.scheduler, flight.contexts
        scheduler.fill_drafts(flight.guessed)
        scores = [
            [
                Scored(logprob(context, target), 1, *candidates(context, top, ()))
                for context, target in zip(
                    contexts[score.logits_row : score.logits_row + score.num_positions],
                    targets,
                    strict=True,
                )
            ]
            for score, targets, top in scheduler.scores()
        ]
        tokens, logprobs, complete = self._draw(flight)
        for index in broken & set(range(len(tokens))):
            tokens[index] = -1
            logprobs.pop(index, None)
        result = StepResult(flight.plan.step_id, tokens, logprobs, scores, complete=complete)
        output = scheduler.apply(result)
        self.plan = self.flights[0].plan if self.flights else None
        self.record(output)
        return output

    def _draw(self, flight: Flight) -> tuple[list[int], dict[int, Logprobs], list[int]]:
        """The device's tokens, held against the sampler's own; the host's."""
        ids, rows = self.scheduler.samples()
        drafts, live = self.scheduler.drafts(), set(self.batch.sequence_ids())
        tokens: list[int] = []
        logprobs: dict[int, Logprobs] = {}
        complete: list[int] = []
        ahead: list[int] = []
        for sample, (number, row) in enumerate(zip(ids, rows, strict=True)):
            state, context = self.sampler.opened[number], flight.contexts[row]
            if sample == 0 or drafts[sample - 1] < UNKNOWN_DRAFT:
                ahead = []
            elif tokens[-1] != drafts[sample - 1]:
                tokens.append(-1)
                continue
            if number not in live:
                self.wasted += 1
                tokens.append(max(flight.drawn[sample], 0))
                ahead.append(tokens[-1])
                continue
            assert context == [*state.tokens, *ahead], "KV, batch and sampler have the same text"
            token_id = state.next(context)
            assert flight.drawn[sample] in (HOST_DRAWN, token_id)
            tokens.append(token_id)
            ahead.append(token_id)
            if state.params.logprobs >= 0:
                banned = state.banned(len(context))
                found = candidates(context, state.params.logprobs, banned)
                logprobs[sample] = Scored(logprob(context, token_id), 1, *found)
            if is_complete([*context, token_id], state.params):
                complete.append(sample)
        return tokens, logprobs, complete

    def fail_step(self, error: RequestError) -> None:
        self.fail(error)

    def fail(self, error: RequestError) -> StepOutput:
        """The oldest step is over: it failed."""
        flight = self.flights.pop(0)
        output = self.scheduler.fail_step(error)
        self.record(output)
        self.plan = self.flights[0].plan if self.flights else None
        assert flight.fails or not self.flights, "the device had not failed"
        return output

    def lose(self) -> None:
        self.executor = DrawingExecutor(self.shape)
        self.plan = None
        self.flights.clear()
        self.record(self.scheduler.lost())

    def turn(self, *, ahead: bool) -> bool:
        """A turn of the loop: one step ahead if it may be, then the oldest one's end."""
        if not self.flights and not self.begin():
            return False
        if ahead and len(self.flights) == 1:
            self.begin_ahead()
        self.scheduler.check()
        self.end()
        self.scheduler.check()
        return True

    def run_to_empty(self, max_steps: int = 10_000) -> int:
        steps = 0
        while self.turn(ahead=True):
            steps += 1
            assert steps <= max_steps, "the engine makes no progress"
        return steps
