"""What a step means to beam searches, and how one fails."""

from array import array

from triptych.engine_core.beams import BeamGroups
from triptych.engine_core.errors import NotFinite, RequestError
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.outputs import OutputColumns
from triptych.engine_core.policy import Policy
from triptych.engine_core.roster import Roster
from triptych.engine_core.sequence import Sequence
from triptych.engine_core.step import StepResult
from triptych.engine_core.suspects import Suspects


class BeamSteps:
    """Hands beams what was computed for them; ends searches."""

    def __init__(
        self, beams: BeamGroups, roster: Roster, policy: Policy, suspects: Suspects
    ) -> None:
        self._beams = beams
        self._roster = roster
        self._policy = policy
        self._suspects = suspects

    def take(self, sequence_ids: "array[int]", result: StepResult, columns: OutputColumns) -> None:
        """The candidates of those of a step's samples that are beams."""
        for sample, sequence_id in enumerate(sequence_ids):
            sequence = self._roster.by_id.get(SequenceId(sequence_id))
            if sequence is None or not sequence.is_beam:
                continue
            logprobs = result.logprobs.get(sample)
            if logprobs is None:
                self.fail(sequence, columns, NotFinite("a beam's logits are not finite"))
                continue
            group = self._beams.group_of(sequence)
            over = self._beams.report(sequence, logprobs)
            if not group.candidates:  # all its beams have been computed
                self._suspects.clear(group.wanted)
            for length in self._beams.finish(over, columns) if over is not None else ():
                self._policy.ended(sequence.request, length)

    def fail(self, beam: Sequence, columns: OutputColumns, error: RequestError) -> None:
        """The search that a beam belongs to ends with an error."""
        group = self._beams.group_of(beam)
        self._suspects.clear(group.wanted)
        for _ in range(self._beams.fail(group, columns, error)):
            self._policy.ended(beam.request, 0)
