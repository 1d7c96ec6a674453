"""What of a VllmEngine.Generate must fit one message, checked before anything is computed.

The contract has a prompt's logprobs in one message, once for every choice, and without `stream` all
logprobs of a choice: no limit of triptych.v1, which tells them in parts, holds for these.
"""

from dataclasses import dataclass

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.output_validation import MAX_HELD
from triptych.services.tokenizer.sampling_validation import ALL_LOGPROBS
from triptych.services.tokenizer.validation import ValidRequest

_ID = 5  # bytes of an id, at most
_LOGGED = 16 + _ID  # of a token with its own logprob, without alternatives
_ALTERNATIVE = 4 + _ID


@dataclass(frozen=True, slots=True)
class LargestMessage:
    """`max_bytes`: of a message to a client."""

    max_bytes: int
    vocabulary_size: int

    def check(self, valid: ValidRequest, *, stream: bool) -> None:
        """Raises InvalidRequest, with the contract's name of the field."""
        output, n = valid.output, valid.output.n
        prompt, sampled = len(valid.prompt), valid.params.max_tokens
        size = self._checked("prompt_logprobs", output.prompt_logprobs, prompt, n, 0)
        if not stream:
            self._checked("logprobs", output.logprobs, sampled, n, size + _ID * sampled)

    def _checked(self, name: str, wished: int | None, tokens: int, n: int, others: int) -> int:
        if wished is None:
            return others
        alternatives = self.vocabulary_size if wished == ALL_LOGPROBS else wished
        size = others + tokens * (_LOGGED + alternatives * _ALTERNATIVE)
        what = f"{name} {wished} of {tokens} tokens"
        if size > self.max_bytes:
            raise InvalidRequest(
                f"sampling_params.{name}",
                f"{what} make a message of {size} bytes, above max_message_bytes {self.max_bytes}",
            )
        if (kept := n * tokens * (1 + alternatives)) > MAX_HELD:
            raise InvalidRequest(
                f"sampling_params.{name}",
                f"{what} and n {n} make {kept} alternatives, more than {MAX_HELD}",
            )
        return size
