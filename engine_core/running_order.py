"""The open sequences in the order of the policy, and which blocks they are about to compute."""

from collections import Counter
from collections.abc import Iterator, Sequence

from triptych.engine_core.ids import SequenceId
from triptych.engine_core.prefix_cache import block_digest
from triptych.engine_core.running import RunningSequence


class RunningOrder:
    """Sequences by place and by id.

    `_pending` counts, by digest, the whole blocks of which open cached sequences have the tokens
    and which they have not computed.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._order: list[RunningSequence] = []
        self._by_id: dict[SequenceId, RunningSequence] = {}
        self._pending: Counter[bytes] = Counter()

    def __iter__(self) -> Iterator[RunningSequence]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, sequence_id: SequenceId) -> RunningSequence:
        return self._by_id[sequence_id]

    def check_new(self, sequence_id: SequenceId, place: int) -> None:
        """AssertionError unless a sequence of that id can be put in at that place."""
        assert sequence_id not in self._by_id, f"sequence {sequence_id} is open"
        assert 0 <= place <= len(self._order), f"place: {place} of {len(self._order)}"

    def enter(self, sequence: RunningSequence, place: int) -> None:
        """Put a sequence in as the `place`-th."""
        self._order.insert(place, sequence)
        self._by_id[sequence.sequence_id] = sequence
        self._pending.update(self._uncomputed(sequence))

    def leave(self, sequence_id: SequenceId) -> RunningSequence:
        """Take a sequence out: it is closed."""
        sequence = self._by_id.pop(sequence_id)
        self._order.remove(sequence)
        self._settle(self._uncomputed(sequence))
        sequence.closed = True
        return sequence

    def append(self, sequence: RunningSequence, token_id: int) -> None:
        """One token more for an open sequence."""
        sequence.token_ids.append(token_id)
        if sequence.cached and sequence.num_tokens % self._block_size == 0:
            tokens = sequence.token_ids[-self._block_size :]
            sequence.digests.append(block_digest(sequence.digests[-1], tokens))
            self._pending[sequence.digests[-1]] += 1

    def progress(self, sequence: RunningSequence, num_tokens: int) -> range:
        """So many tokens more are computed; the indexes of the blocks that are now full."""
        before = sequence.num_computed // self._block_size
        sequence.num_computed += num_tokens
        after = sequence.num_computed // self._block_size
        if not sequence.closed:
            self._settle(sequence.digests[before + 1 : after + 1])
        return range(before, after)

    def cease_caching(self, sequence: RunningSequence) -> None:
        """The sequence, which may be closed, leaves nothing more in the cache."""
        if not sequence.closed:
            self._settle(self._uncomputed(sequence))
        sequence.cached = False
        sequence.digests = []

    def num_pending(self, digests: Sequence[bytes]) -> int:
        """How many of `digests`, from the first on, somebody is about to compute."""
        count = 0
        while count < len(digests) and self._pending[digests[count]]:
            count += 1
        return count

    def _uncomputed(self, sequence: RunningSequence) -> list[bytes]:
        return sequence.digests[1 + sequence.num_computed // self._block_size :]

    def _settle(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._pending[digest] -= 1
            if self._pending[digest] == 0:
                del self._pending[digest]

    def check(self) -> None:
        """Assert that ids and pending blocks are those of the sequences in order."""
        by_id = {sequence.sequence_id: sequence for sequence in self._order}
        assert self._by_id == by_id, "order: the ids are not those of the sequences in order"
        assert len(by_id) == len(self._order), "order: a sequence is in it twice"
        pending = Counter(d for sequence in self._order for d in self._uncomputed(sequence))
        assert self._pending == pending, "order: pending is not what cached sequences lack"
        assert not any(sequence.closed for sequence in self._order), "order: a closed sequence"
