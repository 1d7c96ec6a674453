"""Sequences whose tokens somebody outside the engine draws (sampling_params.ExternalSampler).

The batch holds them, as it does beams: a step computes their logits, and they wait until the token
comes (`idle`). It is appended between two steps, whatever the sequence does by then: it may have
been preempted, or be computed anew because the executor was lost.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from triptych.engine_core.batch import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, NOT_FINITE
from triptych.engine_core.errors import NotFinite
from triptych.engine_core.ids import RequestId, SequenceId
from triptych.engine_core.outputs import OutputColumns
from triptych.engine_core.roster import Roster
from triptych.engine_core.sequence import Sequence, SequenceState
from triptych.engine_core.step import Started


class ExternalSample(NamedTuple):
    """Sample `sample` of the step in flight is for the holder of `lease`: the token at `position`
    among the choice's output tokens."""

    sample: int
    request_id: RequestId
    lease: int
    tag: int
    position: int


class ExternalSequences:
    """All of them that have not ended."""

    def __init__(self, roster: Roster, max_model_len: int) -> None:
        self._roster = roster
        self._max_model_len = max_model_len
        self._live: dict[RequestId, Sequence] = {}
        self._num_output: dict[RequestId, int] = {}  # of the live ones

    def __bool__(self) -> bool:
        return bool(self._live)

    @property
    def num_idle(self) -> int:
        """Those that wait for their token. O(sequences)."""
        return sum(sequence.idle for sequence in self._live.values())

    def begin(self, sequence: Sequence) -> None:
        """An external sequence waits to run."""
        self._live[sequence.request_id] = sequence
        self._num_output[sequence.request_id] = len(sequence.request.output_token_ids)

    def ended(self, sequence: Sequence) -> None:
        """A sequence is no more; it need not be external."""
        if self._live.pop(sequence.request_id, None) is not None:
            del self._num_output[sequence.request_id]

    # ------------------------------------------------------------------ a step

    def samples(self, sequence_ids: Iterable[int]) -> list[ExternalSample]:
        """The external ones among the samples of the step in flight."""
        found = []
        for sample, sequence in self._among(sequence_ids):
            external = sequence.params.external
            assert external is not None, "it would not be among them"
            position = self._num_output[sequence.request_id]
            found.append(
                ExternalSample(sample, sequence.request_id, external.lease, external.tag, position)
            )
        return found

    def computed(
        self, sequence_ids: Iterable[int], drawn: Items[int], columns: OutputColumns
    ) -> list[Sequence]:
        """A step with these samples is over: the external ones among them wait for their tokens.
        Those without finite logits (`drawn` is NOT_FINITE) fail, and are returned to be dropped."""
        failed = []
        for sample, sequence in self._among(sequence_ids):
            if drawn[sample] == NOT_FINITE:
                error = NotFinite("the logits of an output token are not finite")
                columns.fail(sequence.request_id, error)
                failed.append(sequence)
            else:
                sequence.idle = True
        return failed

    def _among(self, sequence_ids: Iterable[int]) -> Iterable[tuple[int, Sequence]]:
        for sample, sequence_id in enumerate(sequence_ids):
            sequence = self._roster.by_id.get(SequenceId(sequence_id))
            if sequence is not None and sequence.is_external:
                yield sample, sequence

    # ------------------------------------------------------------------ between two steps

    def take(
        self, drawn: Iterable[tuple[RequestId, int]], columns: OutputColumns
    ) -> list[Sequence]:
        """Tokens have come. Returns the sequences that end with theirs, to be dropped; a token for
        one that has ended already, or ends here, is nobody's."""
        ended: dict[RequestId, Sequence] = {}
        for request_id, token_id in drawn:
            sequence = self._live.get(request_id)
            if sequence is None or request_id in ended:
                continue
            self._num_output[request_id] += 1
            if not sequence.started:
                sequence.started = True
                columns.started.append(Started(request_id, sequence.num_cached))
            finish = self._finish(sequence, token_id)
            columns.token(request_id, token_id, finish)
            self._roster.append(sequence, token_id)
            if finish != FINISH_NONE:
                ended[request_id] = sequence
            elif sequence.idle:
                sequence.idle = False
                if sequence.state is SequenceState.WAITING:
                    self._roster.enqueue(sequence)
        return list(ended.values())

    def resting(self, request_ids: Iterable[RequestId]) -> Iterable[Sequence]:
        """Those of these that hold a place while they wait for their token."""
        for request_id in request_ids:
            sequence = self._live.get(request_id)
            if sequence is not None and sequence.idle and sequence.state is SequenceState.RUNNING:
                yield sequence

    def _finish(self, sequence: Sequence, token_id: int) -> int:
        """As RunningSequence.finish, of one that need not run."""
        params, num_output = sequence.params, self._num_output[sequence.request_id]
        if token_id in params.stop_token_ids:
            return FINISH_STOP
        full = sequence.num_prompt + num_output >= self._max_model_len
        return FINISH_LENGTH if full or num_output >= params.max_tokens else FINISH_NONE

    def check(self, by_request: Mapping[RequestId, Sequence]) -> None:
        """Assert that these are the external ones of all live choices. For tests."""
        external = {each: s for each, s in by_request.items() if s.is_external}
        assert self._live == external, "the live external choices, no others"
        for request_id, sequence in self._live.items():
            tokens = len(self._roster.tokens(sequence)) - sequence.num_prompt
            assert tokens == self._num_output[request_id], f"{sequence!r}: {tokens} output tokens"
            queued = sequence in self._roster.waiting
            waits = sequence.state is SequenceState.WAITING
            assert queued == (waits and not sequence.idle), f"{sequence!r}: idle or in the queue"
