"""The step ahead: what is planned while the executor computes the step before, if anything.

So that a device which draws tokens by itself never waits for the scheduler. It is what everybody
who runs would get next; nobody's place changes by it. Unknown tokens stay in the step: what the
core tells of a sequence, and what can be found of it in the cache, is what has been drawn and
applied. Who ends with the step before has one row in vain.
"""

from collections.abc import Collection

from triptych.engine_core.admission import Limits
from triptych.engine_core.batch import Batch
from triptych.engine_core.beams import BeamGroups
from triptych.engine_core.choices import Choices
from triptych.engine_core.entrance import Entrance
from triptych.engine_core.external import ExternalSequences
from triptych.engine_core.roster import Roster
from triptych.engine_core.step import StepPlan
from triptych.engine_core.suspects import Suspects


class StepAhead:
    """Plans it."""

    def __init__(
        self,
        limits: Limits,
        batch: Batch,
        roster: Roster,
        entrance: Entrance,
        choices: Choices,
        obstacles: tuple[Suspects | BeamGroups | ExternalSequences, ...],
    ) -> None:
        """There is no step ahead while one of the `obstacles` is not empty."""
        self._limits = limits
        self._batch = batch
        self._roster = roster
        self._entrance = entrance
        self._choices = choices
        self._obstacles = obstacles

    def plan(self, step_id: int, host_drawn: Collection[int]) -> StepPlan:
        """Empty where somebody who waits might enter, or a trial or a beam search goes on, or a
        token may come from outside: these are the business of a step with nothing before it. Also
        where blocks lack: nobody is preempted."""
        if not self._is_wanted():
            return StepPlan(step_id, 0, 0, 0, 0)
        limits = self._limits
        extent = self._batch.plan_ahead(
            host_drawn,
            limits.max_num_batched_tokens,
            limits.long_prefill_token_threshold or limits.max_num_batched_tokens,
            limits.max_num_logits,
        )
        sequence_ids, _, _ = self._batch.samples_ahead()
        if extent.num_rows:
            self._roster.step_ahead()
            self._choices.fork(lambda: sequence_ids)  # nobody can: who leads just ceases to
        return StepPlan(
            step_id, extent.num_rows, extent.num_tokens, len(sequence_ids), extent.num_logits
        )

    def _is_wanted(self) -> bool:
        return not (self._entrance.is_open or any(self._obstacles))
