"""The choices of a request share its prompt: one computes it, the others are forked from that one.

Choices for which there is no place at that moment wait on, and find the prompt in the prefix cache
when they run. When a choice gets its first token, its answer starts.
"""

from array import array
from bisect import insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from triptych.engine_core.ids import SequenceId
from triptych.engine_core.request import Request
from triptych.engine_core.roster import Roster
from triptych.engine_core.sequence import ChoiceGroup, Sequence
from triptych.engine_core.step import Started


class Choices:
    """Which choices compute a prompt, and which others wait for that."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._leading: dict[SequenceId, ChoiceGroup] = {}  # by leader, while it computes the prompt
        self._unstarted: dict[SequenceId, Sequence] = {}  # running, without an output token yet

    def begin(self, request: Request, rank: float) -> list[Sequence]:
        """A waiting sequence for each choice."""
        first = self._roster.new_id()
        sequences = [Sequence(request, (rank, first, first))]
        for index in range(1, request.params.n):
            sequences.append(Sequence(request, (rank, first, self._roster.new_id()), index))
        if len(sequences) > 1:
            group = ChoiceGroup(waiting=list(sequences))
            for sequence in sequences:
                sequence.group = group
        for sequence in sequences:
            self._roster.enqueue(sequence)
        return sequences

    def is_led(self, sequence: Sequence) -> bool:
        """Whether another choice is computing the prompt of this one."""
        group = sequence.group
        return group is not None and group.leader is not None and not sequence.started

    @property
    def any_led(self) -> bool:
        """Whether some choice computes a prompt that others wait for."""
        return bool(self._leading)

    def started(self, sequence: Sequence, cached: int) -> None:
        """It runs, `cached` tokens are computed; if others wait for its prompt, it leads them."""
        if not sequence.started:
            sequence.num_cached = cached
            if not sequence.is_held:
                self._unstarted[sequence.sequence_id] = sequence
        group = sequence.group
        if group is None:
            return
        group.fresh = False
        if sequence.started:
            return
        group.waiting.remove(sequence)
        if group.leader is None and group.waiting:
            group.leader = sequence
            self._leading[sequence.sequence_id] = group

    def stopped(self, sequence: Sequence, *, waits: bool) -> None:
        """It was preempted (and waits again), or ended."""
        self._unstarted.pop(sequence.sequence_id, None)
        group = sequence.group
        if group is None:
            return
        if group.leader is sequence:
            group.leader = None
            del self._leading[sequence.sequence_id]
        if waits and not sequence.started:
            insort(group.waiting, sequence, key=attrgetter("key"))
        elif not waits and sequence in group.waiting:
            group.waiting.remove(sequence)

    def fork(self, samples: Callable[[], Iterable[int]]) -> None:
        """The siblings of each leader that completes its prompt in the planned step run with it.

        `samples`: the sequences that sample in that step.
        """
        if not self._leading:
            return
        for sequence_id in [each for each in samples() if each in self._leading]:
            group = self._leading.pop(SequenceId(sequence_id))
            leader, group.leader = group.leader, None
            assert leader is not None, "a group that is led has a leader"
            while group.waiting and not self._roster.full:
                sibling = group.waiting.pop(0)
                self._roster.withdraw(sibling)
                self._roster.fork(leader, sibling)
                sibling.num_cached = sibling.num_prompt - 1
                self._unstarted[sibling.sequence_id] = sibling

    def first_tokens(self, sequence_ids: "array[int]") -> list[Started]:
        """These have got a token: those whose first it is."""
        found: list[Started] = []
        if not self._unstarted:
            return found
        for sequence_id in list(filter(self._unstarted.__contains__, sequence_ids)):
            sequence = self._unstarted.pop(SequenceId(sequence_id))
            sequence.started = True
            found.append(Started(sequence.request_id, sequence.num_cached))
        return found

    def check(self) -> None:
        """Assert that leaders run and lead, and that who is to be forked waits. For tests."""
        for sequence_id, group in self._leading.items():
            assert group.leader is self._roster.by_id.get(sequence_id), "a leader runs"
            assert group.waiting or group.leader is not None, "a leader leads"
        assert set(self._unstarted) <= set(self._roster.by_id), "who has not started runs"
        for sequence in (*self._roster.running, *self._roster.waiting):
            if sequence.group is not None:
                waits = all(each in self._roster.waiting for each in sequence.group.waiting)
                assert waits, "choices to be forked wait"
