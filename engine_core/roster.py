"""Who runs and who waits, in the order of the policy; keeps the batch and the sampler in step.

The only place where a sequence changes its state: what runs is open in the batch and in the
sampler, what waits is in neither.
"""

from bisect import bisect_left, insort

from triptych.engine_core.admission import Limits
from triptych.engine_core.batch import Batch, SequenceRules
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.policy import Key
from triptych.engine_core.sampling import SamplingState
from triptych.engine_core.sequence import Sequence, SequenceState


def _key(sequence: Sequence) -> Key:
    return sequence.key


class Roster:
    """Sequences that have not ended. `waiting` and `running` are read by others, changed here."""

    def __init__(self, limits: Limits, batch: Batch, sampling: SamplingState) -> None:
        self._limits = limits
        self._batch = batch
        self._sampling = sampling
        self._next_id = 0
        self._closing: list[SequenceId] = []  # the sampler may still be asked for their tokens
        self._closing_ahead: list[SequenceId] | None = None  # likewise, in the step ahead
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.by_id: dict[SequenceId, Sequence] = {}  # the running ones

    @property
    def full(self) -> bool:
        """Whether as many run as may."""
        return len(self.running) >= self._limits.max_num_seqs

    def new_id(self) -> SequenceId:
        """An id that none has had."""
        self._next_id += 1
        return SequenceId(self._next_id - 1)

    def enqueue(self, sequence: Sequence) -> None:
        """A WAITING sequence takes its place."""
        insort(self.waiting, sequence, key=_key)

    def start(self, sequence: Sequence, spare_blocks: int) -> int:
        """WAITING -> RUNNING. How many tokens were found in the cache; -1 where blocks lack."""
        place = self._place(sequence)
        tokens, prompt = sequence.tokens, sequence.num_prompt
        rules = self._rules(sequence, cached=sequence.digests is not None)
        cached = self._batch.open(
            sequence.sequence_id, tokens, sequence.digests or b"", rules, place, spare_blocks
        )
        if cached >= 0:
            del self.waiting[self._index(sequence)]
            self._enter(sequence, place, tokens[prompt:])
        return cached

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child`, which waits for nothing but this and is not enqueued, runs beside `parent`."""
        place = self._place(child)
        rules = self._rules(child, cached=True)
        self._batch.fork(parent.sequence_id, child.sequence_id, rules, place)
        output = self._batch.token_ids(child.sequence_id)[child.num_prompt :]
        self._enter(child, place, output)

    def withdraw(self, sequence: Sequence) -> None:
        """A WAITING sequence leaves the queue, to be forked."""
        del self.waiting[self._index(sequence)]

    def append(self, sequence: Sequence, token_id: int) -> None:
        """The next token of a held sequence, between two steps."""
        if sequence.state is SequenceState.RUNNING:
            self._batch.append(sequence.sequence_id, token_id)
            self._sampling.append([sequence.sequence_id], [token_id])
        else:
            sequence.tokens.append(token_id)
            sequence.digests = None

    def tokens(self, sequence: Sequence) -> list[int]:
        """Prompt and output so far; a copy."""
        if sequence.state is SequenceState.RUNNING:
            return self._batch.token_ids(sequence.sequence_id)
        return sequence.tokens.copy()

    def preempt(self, sequence: Sequence) -> None:
        """A RUNNING sequence gives everything back and waits again."""
        del self.running[self._place(sequence)]
        tokens = self._batch.token_ids(sequence.sequence_id)
        self._batch.close(sequence.sequence_id)
        self._leave(sequence)
        sequence.requeue(tokens)
        if not sequence.idle:
            self.enqueue(sequence)

    def drop(self, sequence: Sequence) -> None:
        """A sequence ends, whatever its state."""
        if sequence.state is SequenceState.RUNNING:
            self._batch.close(sequence.sequence_id)
            self.ended(sequence)
            return
        if not sequence.idle:
            self.withdraw(sequence)
        sequence.finish()

    def ended(self, sequence: Sequence) -> None:
        """A RUNNING sequence has ended; the batch knows."""
        del self.running[self._place(sequence)]
        self._leave(sequence)
        sequence.finish()

    def step_ahead(self) -> None:
        """There is a step behind the one in flight, which may have tokens of those that leave."""
        self._closing_ahead = []

    def step_over(self) -> None:
        """Nobody asks any more for tokens of sequences that left before the step that was in flight
        alone, or of two the older one."""
        for sequence_id in self._closing:
            self._sampling.close(sequence_id)
        self._closing, self._closing_ahead = self._closing_ahead or [], None

    def _place(self, sequence: Sequence) -> int:
        return bisect_left(self.running, sequence.key, key=_key)

    def _index(self, sequence: Sequence) -> int:
        index = bisect_left(self.waiting, sequence.key, key=_key)
        assert self.waiting[index] is sequence, f"{sequence!r} is not in its place"
        return index

    def _rules(self, sequence: Sequence, *, cached: bool) -> SequenceRules:
        limits = self._limits
        return sequence.rules(limits.max_model_len, cached=cached and limits.prefix_caching)

    def _enter(self, sequence: Sequence, place: int, output: list[int]) -> None:
        self.running.insert(place, sequence)
        self.by_id[sequence.sequence_id] = sequence
        self._sampling.open(
            sequence.sequence_id,
            sequence.params,
            sequence.choice,
            sequence.request.prompt_token_ids,
            output,
            sequence.request.cache_salt,
        )
        sequence.start()

    def _leave(self, sequence: Sequence) -> None:
        del self.by_id[sequence.sequence_id]
        closing = self._closing if self._closing_ahead is None else self._closing_ahead
        closing.append(sequence.sequence_id)

    def check(self) -> None:
        """Assert the order and the agreement with the batch; each invariant names itself."""
        for name, sequences in (("running", self.running), ("waiting", self.waiting)):
            keys = [sequence.key for sequence in sequences]
            assert keys == sorted(set(keys)), f"{name} sequences are in order, each once"
        assert len(self.running) <= self._limits.max_num_seqs, "at most max_num_seqs run"
        assert {s.state for s in self.waiting} <= {SequenceState.WAITING}, "who waits is WAITING"
        assert {s.state for s in self.running} <= {SequenceState.RUNNING}, "who runs is RUNNING"
        ids = [sequence.sequence_id for sequence in self.running]
        assert list(self.by_id) == ids or sorted(self.by_id) == sorted(ids), "by_id has who runs"
        assert self._batch.sequence_ids() == ids, "the batch runs the same, in the same order"
