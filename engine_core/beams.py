"""Beam search over running sequences: each running beam is a sequence that only reports candidates.

When all beams of a group have reported, the search picks the extensions; sequences are forked,
extended or dropped accordingly. Nothing goes out before the search is over. A beam that lost its
blocks in between waits with its tokens, and is computed again when it is extended.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from triptych.engine_core.beam_search import BeamSearch, Candidates, Extension, Hypothesis
from triptych.engine_core.errors import InvalidRequest, RequestError
from triptych.engine_core.ids import RequestId
from triptych.engine_core.outputs import OutputColumns
from triptych.engine_core.request import Request
from triptych.engine_core.roster import Roster
from triptych.engine_core.sequence import Sequence, SequenceState
from triptych.engine_core.step import Logprobs, Started


@dataclass(slots=True, eq=False)
class BeamGroup:
    """One search: `sequences[i]` is running beam i. `wanted`: choices that nobody has aborted;
    choice i is the i-th best hypothesis."""

    request: Request
    rank: float
    search: BeamSearch
    sequences: list[Sequence]
    wanted: set[RequestId]
    candidates: dict[Sequence, Candidates] = field(default_factory=dict)

    def results(self) -> Iterator[tuple[RequestId, Hypothesis | None]]:
        """The hypotheses of the choices that are wanted; None where there are fewer."""
        best = self.search.best(self.request.params.n)
        for index, request_id in enumerate(self.request.choices()):
            if request_id in self.wanted:
                yield request_id, best[index] if index < len(best) else None


class BeamGroups:
    """All searches that are not over."""

    def __init__(self, roster: Roster, vocabulary_size: int) -> None:
        self._roster = roster
        self._vocabulary_size = vocabulary_size
        self._by_request: dict[RequestId, BeamGroup] = {}  # by each wanted choice
        self._by_sequence: dict[Sequence, BeamGroup] = {}

    def __bool__(self) -> bool:
        return bool(self._by_sequence)

    @property
    def num_requests(self) -> int:
        """Choices that are wanted."""
        return len(self._by_request)

    def begin(self, request: Request, rank: float) -> None:
        """A search begins with one sequence, the prompt's."""
        params = request.params
        assert params.beam is not None, "not a beam search"
        search = BeamSearch(
            params.beam, params.max_tokens, params.stop_token_ids, params.min_tokens
        )
        group = BeamGroup(request, rank, search, [], set())
        first = self._roster.new_id()
        root = self._sequence(group, Sequence(request, (rank, first, first)))
        group.sequences.append(root)
        self._roster.enqueue(root)
        for request_id in request.choices():
            group.wanted.add(request_id)
            self._by_request[request_id] = group

    def find(self, request_id: RequestId) -> BeamGroup | None:
        """The search one of whose choices has this id."""
        return self._by_request.get(request_id)

    def abort(self, group: BeamGroup, request_id: RequestId) -> None:
        """One choice is not wanted any more; with the last one the search ends."""
        group.wanted.discard(request_id)
        del self._by_request[request_id]
        if not group.wanted:
            self.end(group)

    def group_of(self, sequence: Sequence) -> BeamGroup:
        """The search that a beam belongs to."""
        return self._by_sequence[sequence]

    def groups(self) -> list[BeamGroup]:
        """All, in the order in which they came."""
        return list(dict.fromkeys(self._by_request.values()))

    def report(self, sequence: Sequence, drawn: Logprobs) -> BeamGroup | None:
        """A beam's candidates have been computed. Returns its search if that is over with it."""
        group = self._by_sequence[sequence]
        group.candidates[sequence] = drawn.top_ids, drawn.top_logprobs
        sequence.idle = True
        if len(group.candidates) < len(group.sequences):
            return None
        extensions = group.search.advance([group.candidates[each] for each in group.sequences])
        group.candidates.clear()
        self._extend(group, extensions)
        return group if group.search.done else None

    def finish(self, group: BeamGroup, columns: OutputColumns) -> list[int]:
        """A search is over: the wanted hypotheses go out. How many tokens each of them has."""
        lengths, stops = [], group.request.params.stop_token_ids
        for request_id, hypothesis in group.results():
            if hypothesis is None:
                reason = "the beam search found fewer hypotheses"
                columns.fail(request_id, InvalidRequest("n", reason))
            else:
                columns.started.append(Started(request_id, 0))
                columns.hypothesis(request_id, hypothesis, stops)
            lengths.append(len(hypothesis.tokens) if hypothesis else 0)
        self.end(group)
        return lengths

    def fail(self, group: BeamGroup, columns: OutputColumns, error: RequestError) -> int:
        """A search ends with an error. For how many choices."""
        count = len(group.wanted)
        for request_id in group.wanted:
            columns.fail(request_id, error)
        self.end(group)
        return count

    def end(self, group: BeamGroup) -> None:
        """A search is over: its sequences end."""
        for sequence in group.sequences:
            del self._by_sequence[sequence]
            self._roster.drop(sequence)
        for request_id in group.wanted:
            del self._by_request[request_id]
        group.sequences.clear()
        group.wanted = set()

    def _extend(self, group: BeamGroup, extensions: list[Extension]) -> None:
        """The sequences of the beams that go on, in the search's order.

        Forks before anything is appended: they take the parent as it is. The last child of a parent
        is the parent's own sequence.
        """
        parents = group.sequences
        last = {extension.parent: i for i, extension in enumerate(extensions)}
        sequences: list[Sequence] = []
        for i, extension in enumerate(extensions):
            parent = parents[extension.parent]
            if i == last[extension.parent]:
                sequences.append(parent)
            else:
                sequences.append(self._child(group, parent))
        for sequence, extension in zip(sequences, extensions, strict=True):
            sequence.idle = False
            self._roster.append(sequence, extension.token_id)
            if sequence.state is SequenceState.WAITING:
                self._roster.enqueue(sequence)
        for index, parent in enumerate(parents):
            if index not in last:
                del self._by_sequence[parent]
                self._roster.drop(parent)
        group.sequences = sequences

    def _child(self, group: BeamGroup, parent: Sequence) -> Sequence:
        key = (*parent.key[:2], self._roster.new_id())
        child = self._sequence(group, Sequence(group.request, key))
        child.fresh = False  # its search runs, whether there is a place for this beam now or not
        if parent.state is SequenceState.RUNNING and not self._roster.full:
            self._roster.fork(parent, child)
        else:
            child.tokens = self._roster.tokens(parent)
        return child

    def _sequence(self, group: BeamGroup, sequence: Sequence) -> Sequence:
        """What a beam asks of the sampler: candidates, nothing else."""
        wanted = min(group.search.candidates_wanted, self._vocabulary_size)
        sequence.params = replace(
            group.request.params, temperature=0.0, logprobs=wanted, min_tokens=0, n=1, beam=None
        )
        self._by_sequence[sequence] = group
        return sequence

    def check(self) -> None:
        """Assert that maps, groups and roster agree. For tests."""
        grouped = {each: group for group in self.groups() for each in group.sequences}
        assert self._by_sequence == grouped, "every beam belongs to the search that names it"
        for group in self.groups():
            assert len(group.sequences) == len(group.search.running), "a sequence for each beam"
            assert set(group.candidates) == {s for s in group.sequences if s.idle}, "idle: reported"
