"""How the tokens of one sequence are chosen and where it stops: validated, token level only.

Text-level parameters (stop strings, skipping special tokens) live in the tokenizer service.
"""

import math
from dataclasses import dataclass

from triptych.engine_core.errors import InvalidRequest

MAX_TEMPERATURE = 100.0
MAX_STOP_TOKEN_IDS = 128
"""Of the caller's; the model's end-of-sequence ids come on top."""
MAX_EOS_TOKEN_IDS = 32
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Bounds hold from construction on; a value outside raises InvalidRequest naming the field.

    temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off. `stop_token_ids` contains
    the end-of-sequence ids unless the request ignores them. Until `min_tokens` tokens are out, the
    stop ids are masked: they cannot be sampled (as in vLLM).
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"{self.max_tokens} is below 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                "min_tokens", f"{self.min_tokens} is not within 0 and max_tokens {self.max_tokens}"
            )
        _within("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        if self.top_k < -1:
            raise InvalidRequest("top_k", f"{self.top_k} is below -1")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequest("seed", f"{self.seed} is not an unsigned 64-bit number")
        most = MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS
        if len(self.stop_token_ids) > most:
            raise InvalidRequest(
                "stop_token_ids", f"{len(self.stop_token_ids)} ids, more than {most}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, whatever the seed."""
        return self.temperature == 0.0


def _within(field: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails: every comparison with NaN is false.
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(field, f"{value} is not within {low:g} and {high:g}")
