"""How the tokens of a request are chosen: the values, their bounds, and what each field means.

Names, defaults and meanings are vLLM's where it has the field; docs/sampling.md has the order in
which they apply. The tokenizer process checks what depends on text, this module all else.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from triptych.engine_core.errors import InvalidRequest

MAX_TEMPERATURE = 100.0
MAX_STOP_TOKEN_IDS = 128
MAX_EOS_TOKEN_IDS = 32
MAX_SEED = 2**64 - 1
MAX_CHOICES = 128
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_TOP_N_SIGMA = 1000.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_PROCESSORS = 8
MAX_BEAM_WIDTH = 64
MAX_GRAMMAR_BYTES = 1 << 20
NO_LOGPROBS = -1

EarlyStopping = Literal["true", "false", "never"]

_CHANGES_LOGITS: dict[str, object] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "logit_bias": (),
    "allowed_token_ids": None,
    "bad_words": (),
    "processors": (),
    "grammar": "",
}
"""Fields that change which tokens are likely, with the values that do not."""

_DRAWS: dict[str, object] = {
    "n": 1,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "logprobs": NO_LOGPROBS,
    "beam": None,
}
"""Fields that say how a token is drawn, or what of the draw is told, with values that do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Beam search in place of sampling, as transformers' `generate(num_beams=width)`.

    A finished hypothesis scores sum of logprobs / length ** length_penalty. `early_stopping`:
    "true" ends at `width` finished ones; "false" when no running beam can beat the worst of them
    by the running beam's present score; "never" when none can at any length.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "false"

    def __post_init__(self) -> None:
        if not 2 <= self.width <= MAX_BEAM_WIDTH:
            raise InvalidRequest("beam_width", f"{self.width} is not within 2 and {MAX_BEAM_WIDTH}")
        _within("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping not in ("true", "false", "never"):
            raise InvalidRequest("early_stopping", f"{self.early_stopping!r} is none of its values")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalSampler:
    """Somebody outside the engine draws the tokens: the holder of `lease` (u64, not 0), to whom
    `tag` (u64) says which request it is."""

    lease: int
    tag: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.lease <= MAX_SEED:
            raise InvalidRequest("external_sampler.lease", f"{self.lease} is no lease")
        if not 0 <= self.tag <= MAX_SEED:
            raise InvalidRequest("external_sampler.tag", f"{self.tag} is no unsigned 64-bit number")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Bounds hold from construction on; a value outside raises InvalidRequest naming the field.

    temperature 0 is greedy; top_k 0 or -1, top_p 1, min_p 0, typical_p 1, top_n_sigma 0,
    repetition_penalty 1, presence_penalty 0, frequency_penalty 0, no_repeat_ngram_size 0 are off.
    `stop_token_ids` contains the end-of-sequence ids unless the request ignores them. Until
    `min_tokens` tokens are out, the stop ids are masked: they cannot be sampled (as in vLLM).
    `logit_bias` ascends by id, each id once. `allowed_token_ids` None allows all. `logprobs` and
    `prompt_logprobs`: so many most likely tokens beside the token itself, NO_LOGPROBS for nothing.
    `processors`: (name, argument) of plug-ins that the scheduler has loaded. `grammar`: what the
    output must match, as a grammar in llguidance's JSON form; empty: nothing. It goes before every
    other wish: an output ends where it can only end, whatever `min_tokens` says, and stop ids are
    not masked where nothing else may follow. `n` choices share the prompt; choice i draws with
    noise of its own. `external`: who draws the tokens, from the model's own logits; None: the
    engine.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    processors: tuple[tuple[str, str], ...] = ()
    grammar: str = ""
    logprobs: int = NO_LOGPROBS
    prompt_logprobs: int = NO_LOGPROBS
    n: int = 1
    beam: BeamParams | None = None
    external: ExternalSampler | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"{self.max_tokens} is below 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                "min_tokens", f"{self.min_tokens} is not within 0 and max_tokens {self.max_tokens}"
            )
        self._check_numbers()
        self._check_lists()
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidRequest("n", f"{self.n} is not within 1 and {MAX_CHOICES}")
        if self.external is not None:
            self._check_off(_DRAWS, "an external sampler, whose business it is")
            self._check_off(_CHANGES_LOGITS, "an external sampler, whose business it is")
        if self.beam is not None:
            # Hypotheses compete by the model's own probabilities: nothing may change the logits.
            if self.n > self.beam.width:
                raise InvalidRequest("n", f"{self.n} is above beam_width {self.beam.width}")
            self._check_off(_CHANGES_LOGITS, "beam search, which does without it")

    def _check_off(self, fields: dict[str, object], beside: str) -> None:
        for field, off in fields.items():
            if (value := getattr(self, field)) != off:
                raise InvalidRequest(field, f"{value} beside {beside}")

    def _check_numbers(self) -> None:
        _within("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("typical_p", self.typical_p, 0.0, 1.0)
        _within("top_n_sigma", self.top_n_sigma, 0.0, MAX_TOP_N_SIGMA)
        _within("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _within("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _within("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty", "0 is not above 0")
        if self.top_k < -1:
            raise InvalidRequest("top_k", f"{self.top_k} is below -1")
        if self.no_repeat_ngram_size < 0:
            raise InvalidRequest("no_repeat_ngram_size", f"{self.no_repeat_ngram_size} is below 0")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequest("seed", f"{self.seed} is not an unsigned 64-bit number")
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) < NO_LOGPROBS:
                raise InvalidRequest(field, f"{getattr(self, field)} is below {NO_LOGPROBS}")

    def _check_lists(self) -> None:
        _at_most("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS)
        _at_most("logit_bias", self.logit_bias, MAX_LOGIT_BIASES)
        ids = [token_id for token_id, _ in self.logit_bias]
        if ids != sorted(set(ids)):
            raise InvalidRequest("logit_bias", "its ids do not ascend, each once")
        for token_id, bias in self.logit_bias:
            _within(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "it is empty: no token could be drawn")
        _at_most("bad_words", self.bad_words, MAX_BAD_WORDS)
        for index, word in enumerate(self.bad_words):
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    f"bad_words[{index}]",
                    f"{len(word)} tokens is not within 1 and {MAX_BAD_WORD_TOKENS}",
                )
        _at_most("processors", self.processors, MAX_PROCESSORS)
        size = len(self.grammar.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest("grammar", f"{size} bytes, more than {MAX_GRAMMAR_BYTES}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, whatever the seed."""
        return self.temperature == 0.0


def _within(field: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails: every comparison with NaN is false.
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(field, f"{value} is not within {low:g} and {high:g}")


def _at_most(field: str, values: Iterable[object], most: int) -> None:
    count = len(tuple(values))
    if count > most:
        raise InvalidRequest(field, f"{count} entries, more than {most}")
