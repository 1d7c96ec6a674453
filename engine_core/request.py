"""The wish of a client, immutable once accepted."""

from dataclasses import dataclass

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.ids import RequestId
from triptych.engine_core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """Prompt and parameters; everything that a replay needs besides the tokens sampled so far.

    `output_token_ids` are tokens already delivered when a request is resumed on a new scheduler:
    they count as output (positions, max_tokens, min_tokens), never as prompt.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    output_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequest("prompt", "it has no tokens")
        if len(self.output_token_ids) >= self.params.max_tokens:
            raise InvalidRequest("output_token_ids", "the request is already complete")
