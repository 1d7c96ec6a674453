"""The wish of a client, immutable once accepted."""

from dataclasses import dataclass

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.ids import RequestId
from triptych.engine_core.sampling_params import SamplingParams

MAX_CACHE_SALT_BYTES = 256
MAX_TENANT_BYTES = 128


@dataclass(frozen=True, slots=True)
class Request:
    """Prompt and parameters; everything that a replay needs besides the tokens sampled so far.

    Its `params.n` choices are known outside as request_id, request_id + 1, ...: each ends with an
    event of its own and can be aborted alone. Their noise is keyed by choice, choice + 1, ...

    `output_token_ids` are tokens already delivered when a choice is resumed on a new scheduler:
    they count as output (positions, max_tokens, min_tokens), never as prompt. A resumed request has
    one choice.

    `accepted`: a scheduler that is gone had accepted it, so no bound of the queue refuses it now.

    `cache_salt` separates prefix caches: only requests with the same one share blocks. `tenant` is
    who pays, for the fair policy.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    output_token_ids: tuple[int, ...] = ()
    choice: int = 0
    cache_salt: str = ""
    tenant: str = ""
    accepted: bool = False

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequest("prompt", "it has no tokens")
        if len(self.output_token_ids) >= self.params.max_tokens:
            raise InvalidRequest("output_token_ids", "the request is already complete")
        if self.output_token_ids and self.params.n != 1:
            raise InvalidRequest("output_token_ids", "a resumed request has one choice")
        for field, most in (("cache_salt", MAX_CACHE_SALT_BYTES), ("tenant", MAX_TENANT_BYTES)):
            size = len(getattr(self, field).encode())
            if size > most:
                raise InvalidRequest(field, f"{size} bytes, more than {most}")

    def choices(self) -> list[RequestId]:
        """What its choices are known as outside."""
        return [RequestId(self.request_id + index) for index in range(self.params.n)]
