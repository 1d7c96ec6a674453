"""A sequence: the tokens of a request so far, and how many of them the executor has computed.

            admitted            last token, failure, abort
    WAITING --------> RUNNING ----------------------------> FINISHED
       ^  <----------    |                                     ^
       |   preempted,    |                                     |
       |   executor lost                       abort           |
       +-------------------------------------------------------+

There is no prefill phase and no decode phase: a step closes the gap between tokens and computed.
"""

from enum import Enum, auto

from triptych.engine_core.ids import SequenceId
from triptych.engine_core.request import Request


class SequenceState(Enum):
    """Where a sequence stands; only a RUNNING one holds blocks."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Invariants: 0 <= num_computed < num_tokens until finished; WAITING has computed nothing."""

    __slots__ = ("num_computed", "num_prompt", "request", "sequence_id", "state", "tokens")

    def __init__(self, sequence_id: SequenceId, request: Request) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.state = SequenceState.WAITING
        self.tokens = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.num_computed = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Output tokens so far, those of a resumed request's past included."""
        return len(self.tokens) - self.num_prompt

    def start(self) -> None:
        """WAITING -> RUNNING."""
        assert self.state is SequenceState.WAITING, f"{self!r} cannot start"
        self.state = SequenceState.RUNNING

    def requeue(self) -> None:
        """RUNNING -> WAITING; its KV is gone, so everything is to be computed again."""
        assert self.state is SequenceState.RUNNING, f"{self!r} cannot be requeued"
        self.state = SequenceState.WAITING
        self.num_computed = 0

    def finish(self) -> None:
        """WAITING or RUNNING -> FINISHED."""
        assert self.state is not SequenceState.FINISHED, f"{self!r} cannot finish twice"
        self.state = SequenceState.FINISHED

    def __repr__(self) -> str:
        progress = f"{self.num_computed}/{self.num_tokens}"
        return f"<sequence {self.sequence_id} {self.state.name} computed {progress}>"
