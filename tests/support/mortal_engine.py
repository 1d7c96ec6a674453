"""An engine whose executor dies: of what it computes, or of something outside.

A poison is a token of a choice's text: each step that computes it, or one behind it, kills the
executor. Drafts do not count.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from core_engine import Engine, FakeExecutor
from hash_model import expected_output
from triptych.engine_core.handover import take_over
from triptych.engine_core.ids import RequestId
from triptych.engine_core.policy import policy_of
from triptych.engine_core.request import Request
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.sequence import Sequence
from triptych.engine_core.step import StepOutput, StepPlan


@dataclass(frozen=True)
class Poison:
    """The token at `position` in the text of choice `index`: of all, if it is in the prompt."""

    request: Request
    position: int
    index: int = 0

    @property
    def victims(self) -> set[RequestId]:
        """The choices that are not computed without it."""
        known = len(self.request.prompt_token_ids) + len(self.request.output_token_ids)
        if self.position < known or self.request.params.beam is not None:
            return set(self.request.choices())
        return {RequestId(self.request.request_id + self.index)}

    def outputs(self) -> dict[RequestId, list[int]]:
        """What those get who must end of it. None of a search, for which this is not known here."""
        request = self.request
        if request.params.beam is not None:
            return {}
        before = self.position - len(request.prompt_token_ids) - len(request.output_token_ids)
        found = {}
        for request_id in self.victims:
            output = expected_output(request, request_id - request.request_id)
            if before + 1 < len(output):  # its last token is not computed any more
                found[request_id] = output[: before + 1] if before >= 0 else []
        return found

    def kills(self, sequence: Sequence, end: int) -> bool:
        """Whether a row with the sequence's tokens below `end` does."""
        return end > self.position and not self.victims.isdisjoint(computed_for(sequence))


def computed_for(sequence: Sequence) -> set[RequestId]:
    """The choices that want what a row of this sequence computes."""
    return {sequence.request_id} if sequence.started else set(sequence.request.choices())


@dataclass
class MortalEngine(Engine):
    """`deaths`: executors that died of each poison. `unlucky`: whom one must take for a killer,
    because executors died computing it and then, from outside, another one that computed nothing
    else, with no token between."""

    poisons: list[Poison] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.deaths: Counter[Poison] = Counter()
        self.unlucky: set[RequestId] = set()
        self._hits: Counter[RequestId] = Counter()  # deaths since the last token
        self._rows: list[tuple[Sequence, int]] = []

    def begin(self) -> StepPlan:
        plan = super().begin()
        self._rows.clear()
        for row in self.batch.rows() if plan else ():
            sequence = self.scheduler._roster.by_id[row.sequence_id]
            own = len(self.batch.token_ids(row.sequence_id))
            self._rows.append((sequence, min(own, row.start + row.num_tokens)))
        return plan

    def end(self, broken: frozenset[int] = frozenset()) -> StepOutput:
        fatal = [poison for poison in self.poisons if any(poison.kills(*row) for row in self._rows)]
        if not fatal:
            output = super().end(broken)
            for request_id in output.request_ids:
                del self._hits[RequestId(request_id)]
            return output
        self.deaths.update(fatal)
        self._hit()
        self.lose()
        return StepOutput(0)

    def lose_from_outside(self) -> None:
        """The executor is killed, whatever it computes."""
        if self.plan is not None:
            units = {frozenset(computed_for(sequence)) for sequence, _ in self._rows}
            if len(units) == 1:
                self.unlucky |= {each for each in units.pop() if self._hits[each]}
            self._hit()
        self.lose()

    def _hit(self) -> None:
        self._hits.update(set().union(*(computed_for(sequence) for sequence, _ in self._rows)))

    def move(self, num_blocks: int) -> None:
        """Executor and core give way to others, with a pool of another size."""
        before = self.scheduler
        self.lose_from_outside()
        shape = self.shape = replace(self.shape, num_blocks=num_blocks)
        self.batch = self.batch_factory(
            num_blocks, shape.block_size, shape.layout, shape.prefix_caching
        )
        self.sampler, self.executor = self.new_sampler(), FakeExecutor(shape)
        self.scheduler = Scheduler(
            shape.limits, self.batch, self.sampler, policy_of(shape.policy), before.suspects
        )
        self.record(take_over(self.scheduler, before))
        for request_id, output in self.outputs.items():
            if not output:
                self.prompt_logprobs.pop(request_id, None)  # they come anew


def ended_with(engine: Engine, *errors: type[Exception]) -> set[RequestId]:
    """The choices that ended with one of these."""
    return {each for each, ending in engine.endings.items() if isinstance(ending, errors)}


def all_outputs(poisons: Iterable[Poison]) -> dict[RequestId, list[int]]:
    """Who must end of one of them, and with what."""
    return {each: output for poison in poisons for each, output in poison.outputs().items()}
