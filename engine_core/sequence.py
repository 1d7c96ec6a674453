"""A sequence: one choice of a request, or one beam, from when it is accepted to its end.

            admitted            last token, failure, abort
    WAITING --------> RUNNING ----------------------------> FINISHED
       ^  <----------    |                                     ^
       |   preempted,    |                                     |
       |   executor lost                       abort           |
       +-------------------------------------------------------+

There is no prefill phase and no decode phase: a step closes the gap between tokens and computed.
While it runs, its tokens are the batch's; while it waits, they are here.
"""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from triptych.engine_core.batch import SequenceRules
from triptych.engine_core.ids import RequestId
from triptych.engine_core.policy import Key
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import NO_LOGPROBS, SamplingParams


class SequenceState(Enum):
    """Where a sequence stands; only a RUNNING one holds blocks."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class ChoiceGroup:
    """The choices of one request until all have started.

    `leader` computes the prompt; `waiting` are those that are to be forked from it, in order.
    `fresh`: none of them has ever run.
    """

    waiting: list["Sequence"] = field(default_factory=list)
    leader: "Sequence | None" = None
    fresh: bool = True


class Sequence:
    """`index`: which of the request's choices it is. `key`: its place in the order of the policy.

    `tokens` are prompt and output of a WAITING one; `digests` are theirs, once looked up. `fresh`:
    it has never run. `started`: its first output token is out. `num_scored`: prompt positions whose
    logprobs are out. `idle`: it has nothing to compute: a beam that has reported its candidates and
    waits for the others, or an external one that waits for its token. `params`: what its tokens are
    drawn by.
    """

    __slots__ = (
        "digests", "fresh", "group", "idle", "index", "key", "num_cached", "num_scored", "params",
        "request", "sequence_id", "started", "state", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, key: Key, index: int = 0) -> None:
        self.sequence_id = key[-1]
        self.request = request
        self.key = key
        self.index = index
        self.state = SequenceState.WAITING
        self.params: SamplingParams = request.params
        self.tokens = [*request.prompt_token_ids, *request.output_token_ids]
        self.digests: bytes | None = None
        self.group: ChoiceGroup | None = None
        self.num_cached = 0
        self.num_scored = 0
        self.fresh = not request.output_token_ids
        self.started = bool(request.output_token_ids)
        self.idle = False

    @property
    def request_id(self) -> RequestId:
        """The choice's own."""
        return RequestId(self.request.request_id + self.index)

    @property
    def choice(self) -> int:
        """What its noise is keyed by."""
        return self.request.choice + self.index

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def is_beam(self) -> bool:
        """Whether drawn tokens are only candidates."""
        return self.request.params.beam is not None

    @property
    def is_external(self) -> bool:
        """Whether its tokens are drawn outside the engine."""
        return self.request.params.external is not None

    @property
    def is_held(self) -> bool:
        """Whether it takes no token that is drawn in a step, but waits to be given one."""
        return self.is_beam or self.is_external

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt logprobs are wanted that are not out yet. The first choice brings them."""
        wanted = self.request.params.prompt_logprobs >= 0 and self.index == 0
        return wanted and self.num_scored < self.num_prompt - 1

    def rules(self, max_model_len: int, *, cached: bool) -> SequenceRules:
        """What the batch must know of it."""
        params = self.request.params
        return SequenceRules(
            request_id=self.request_id,
            num_prompt=self.num_prompt,
            max_tokens=params.max_tokens,
            max_len=max_model_len,
            stop_token_ids=params.stop_token_ids,
            held=self.is_held,
            score_prompt=self.scores_prompt,
            cached=cached,
        )

    def resumed(self, tokens: list[int]) -> Request:
        """A request that goes on from `tokens`, as a choice of its own.

        Prompt logprobs are out before the first output token; until then they come anew.
        """
        params = replace(self.request.params, n=1)
        if self.index > 0 or len(tokens) > self.num_prompt:
            params = replace(params, prompt_logprobs=NO_LOGPROBS)
        return replace(
            self.request,
            request_id=self.request_id,
            params=params,
            output_token_ids=tuple(tokens[self.num_prompt :]),
            choice=self.choice,
            accepted=True,
        )

    def start(self) -> None:
        """WAITING -> RUNNING; its tokens are the batch's now."""
        assert self.state is SequenceState.WAITING, f"{self!r} cannot start"
        self.state = SequenceState.RUNNING
        self.fresh = False
        self.tokens = []
        self.digests = None

    def requeue(self, tokens: list[int]) -> None:
        """RUNNING -> WAITING; its KV is gone, so everything is to be computed again."""
        assert self.state is SequenceState.RUNNING, f"{self!r} cannot be requeued"
        self.state = SequenceState.WAITING
        self.tokens = tokens

    def finish(self) -> None:
        """WAITING or RUNNING -> FINISHED."""
        assert self.state is not SequenceState.FINISHED, f"{self!r} cannot finish twice"
        self.state = SequenceState.FINISHED
        self.tokens = []

    def __repr__(self) -> str:
        return f"<sequence {self.sequence_id} of {self.request_id} {self.state.name}>"
