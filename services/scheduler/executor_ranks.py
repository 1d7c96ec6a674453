"""An executor as the scheduler knows it: one process, or several ranks that compute steps together.

All ranks read the one step ring; only rank 0's logits are read. A step is over when all ranks have
answered it: then rank 0's word counts, unless it failed on any.
"""

from dataclasses import dataclass

from triptych.services.transport.fd_passing import FdConnection
from triptych.services.transport.ring_layouts import logits_layout, step_layout
from triptych.services.transport.rings import LogitsRing, LogitsView, RingError, StepRing
from triptych.v1 import stage_pb2

Answer = stage_pb2.StepDone | stage_pb2.StepFailed


class BrokenPromise(Exception):
    """A rank said what it cannot mean."""


def size_of(hello: stage_pb2.ExecutorHello) -> int:
    """How many ranks there are of its executor."""
    return hello.tensor_parallel_size or 1


@dataclass(slots=True)
class Rank:
    """One process that has exchanged rings with us."""

    identity: bytes
    connection: FdConnection
    heard: float


class Executor:
    """The ranks that came so far, and the rings between us."""

    def __init__(self, hello: stage_pb2.ExecutorHello, welcome: stage_pb2.ExecutorWelcome) -> None:
        """`hello`: of the first rank that came; all are to be like it. Makes the step ring.

        Raises RingError.
        """
        self.facts = hello.model
        self.welcome = welcome
        self.size = size_of(hello)
        self.draws_tokens = hello.draws_tokens
        self.step_ring = StepRing.create(step_layout(hello.model, welcome), welcome.epoch)
        self.ranks: dict[int, Rank] = {}
        self._logits_ring: LogitsRing | None = None  # rank 0's
        self._answers: dict[int, dict[int, Answer]] = {}  # of steps that some have not answered

    @property
    def complete(self) -> bool:
        """Whether all ranks are there."""
        return len(self.ranks) == self.size

    def objection(self, hello: stage_pb2.ExecutorHello) -> str | None:
        """Why a rank cannot be one of this executor's."""
        if size_of(hello) != self.size:
            return f"tensor_parallel_size: {size_of(hello)}, others have {self.size}"
        if hello.draws_tokens != self.draws_tokens:
            return f"draws_tokens: {hello.draws_tokens}, other ranks say {self.draws_tokens}"
        for field in stage_pb2.ModelFacts.DESCRIPTOR.fields:
            ours, other = getattr(self.facts, field.name), getattr(hello.model, field.name)
            if ours != other:
                return f"{field.name}: {other} of rank {hello.rank}, other ranks have {ours}"
        return None

    def add(self, number: int, rank: Rank, logits_fd: int) -> None:
        """A rank is there, with its logits ring; takes the descriptor over. Raises RingError."""
        layout = logits_layout(self.facts, self.welcome, number)
        ring = LogitsRing.attach(logits_fd, layout, self.welcome.epoch)
        if number == 0:
            self._logits_ring = ring
        else:
            ring.close()  # there is nothing to see
        self.ranks[number] = rank

    def remove(self, number: int) -> Rank:
        """A rank is gone before all were there."""
        if number == 0 and self._logits_ring is not None:
            self._logits_ring.close()
            self._logits_ring = None
        return self.ranks.pop(number)

    def number_of(self, identity: bytes) -> int | None:
        """The rank that has this identity on ZeroMQ."""
        for number, rank in self.ranks.items():
            if rank.identity == identity:
                return number
        return None

    def named(self, number: int, words: str) -> str:
        """What is said of a rank, as what is said of the executor."""
        return words if self.size == 1 else f"rank {number}: {words}"

    def logits(self, slot: int, step_id: int, num_rows: int) -> LogitsView:
        """As LogitsRing.rows. Raises RingError."""
        if self._logits_ring is None:
            raise RingError("there is no logits ring")
        return self._logits_ring.rows(slot, step_id, num_rows)

    def sent(self, step_id: int) -> None:
        """A step goes to all ranks."""
        if self.size > 1:
            self._answers[step_id] = {}

    def answered(self, number: int, answer: Answer) -> Answer | None:
        """A rank's answer to a step: that of the executor where all have answered now.

        Raises BrokenPromise.
        """
        if self.size == 1:
            return answer
        answers = self._answers.get(answer.step_id)
        if answers is None or number in answers:
            raise BrokenPromise(f"it answered step {answer.step_id}, which it was not asked")
        answers[number] = answer
        if len(answers) < self.size:
            return None
        del self._answers[answer.step_id]
        for one, said in sorted(answers.items()):
            if isinstance(said, stage_pb2.StepFailed):
                said.message = f"rank {one}: {said.message}"
                return said
        return answers[0]

    def close(self) -> None:
        """Let go of connections and rings; the ranks see end of file."""
        for rank in self.ranks.values():
            rank.connection.close()
        self.step_ring.close()
        if self._logits_ring is not None:
            self._logits_ring.close()
