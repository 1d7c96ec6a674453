"""Raw requests to validated ones: what a request is, its prompt, its length and its labels.

Sampling parameters are checked in sampling_validation, what becomes of the output in
output_validation; nothing behind the three checks again. Every refusal is an InvalidRequest (or
TooLong, UnknownModel) that names the field as on the wire, the value and the bound. One rule for
lengths, as in engine_core.admission: prompt + max_tokens <= max_model_len, and <= what the KV cache
can hold.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.engine_core.errors import InvalidRequest, TooLong, UnknownModel
from triptych.engine_core.request import MAX_CACHE_SALT_BYTES, MAX_TENANT_BYTES
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.tokenizer.calling import Calling
from triptych.services.transport.wire import submit_of
from triptych.v1 import common_pb2, inference_pb2, stage_pb2

MAX_REQUEST_ID_BYTES = 128
# What Tokenize and Detokenize take in: several times what a prompt may have, so that a client can
# see by how much its text is too long, and yet no call computes for long.
SIZE_PER_TOKEN = 64
LEAST_SIZE = 1 << 18

# u32 [n] in the machine's byte order. Not numpy's: this process starts sooner without it.
if TYPE_CHECKING:
    TokenArray = array[int]
else:
    TokenArray = array
_U32 = "I"


def token_array(token_ids: Iterable[int]) -> TokenArray:
    """The ids as u32 [n]. Raises OverflowError for one that does not fit."""
    return array(_U32, token_ids)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Bounds that a request must keep. `names`: what it may call the model, the first is ours."""

    names: tuple[str, ...]
    vocabulary_size: int
    max_model_len: int
    max_sequence_len: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int = 20
    """Most alternatives that a request may ask for; -1: the vocabulary."""


@dataclass(frozen=True, slots=True)
class OutputParams:
    """What becomes of the sampled tokens: text, stop strings, and what the client wants to see.

    `stop_token_ids` are those to name as stop_reason; the end-of-sequence ids are not. `n` choices
    of `best_of` drawn ones are delivered. `logprobs` and `prompt_logprobs`: how many alternatives
    the client sees, None for no logprobs, -1 for the vocabulary's. `echo`: the prompt comes first.
    `end_token_ids`: which tokens say only that the text ends, and are no part of it; another may be
    its last part, where a grammar lets nothing follow. None: every token that ends it.
    """

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    end_token_ids: frozenset[int] | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    text: bool = True
    token_ids: bool = True
    max_unread_tokens: int = 4096
    n: int = 1
    best_of: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False

    @property
    def held(self) -> bool:
        """Whether nothing is delivered before all choices have ended."""
        return self.best_of > self.n


@dataclass(frozen=True, slots=True)
class Routing:
    """What the scheduler is told beside prompt and parameters. Time-outs 0: the engine's."""

    label: str = ""
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    queue_timeout_ms: int = 0
    timeout_ms: int = 0


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that can run. `prompt` is u32 [n], n >= 1; `text` is its text, for echo only.

    `calling`: how the answers of a chat are read, where they are not just text. `arrived`:
    time.monotonic() when it came in, for measuring.
    """

    prompt: TokenArray
    params: SamplingParams
    output: OutputParams
    routing: Routing = Routing()
    text: str = ""
    calling: Calling | None = None
    arrived: float = 0.0

    def submit(self) -> stage_pb2.Submit:
        """The message to the scheduler, its slot not yet chosen."""
        prompt = self.prompt
        if sys.byteorder == "big":
            prompt = prompt[:]
            prompt.byteswap()
        submit = submit_of(prompt.tobytes(), self.params, self.routing.label)
        submit.priority = self.routing.priority
        submit.cache_salt = self.routing.cache_salt
        submit.tenant = self.routing.tenant
        submit.queue_timeout_ms = self.routing.queue_timeout_ms
        submit.timeout_ms = self.routing.timeout_ms
        return submit


def check_model(name: str, names: Sequence[str]) -> None:
    """An exact match; empty means the one model. Raises UnknownModel."""
    if name and name not in names:
        raise UnknownModel(name, tuple(names))


def routing(request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest) -> Routing:
    """The request's labels, priority and time-outs. Raises InvalidRequest."""
    _check_bytes("request_id", request.request_id, MAX_REQUEST_ID_BYTES)
    _check_bytes("cache_salt", request.cache_salt, MAX_CACHE_SALT_BYTES)
    _check_bytes("tenant", request.tenant, MAX_TENANT_BYTES)
    for name in ("queue_timeout_ms", "timeout_ms"):
        if request.HasField(name) and getattr(request, name) < 1:
            raise InvalidRequest(name, "0 is below 1")
    return Routing(
        label=request.request_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        queue_timeout_ms=request.queue_timeout_ms,
        timeout_ms=request.timeout_ms,
    )


def _check_bytes(name: str, text: str, most: int) -> None:
    size = len(text.encode())
    if size > most:
        raise InvalidRequest(name, f"{size} bytes, more than {most}")


def check_token_ids(
    token_ids: Sequence[int] | TokenArray, field: str, vocabulary_size: int
) -> TokenArray:
    """The ids as u32 [n]. Raises InvalidRequest for one at or above `vocabulary_size`."""
    ids = token_ids if isinstance(token_ids, array) else token_array(token_ids)
    if ids and max(ids) >= vocabulary_size:
        index, worst = next(each for each in enumerate(ids) if each[1] >= vocabulary_size)
        raise InvalidRequest(
            f"{field}[{index}]",
            f"token id {worst} is not below vocabulary_size {vocabulary_size}",
        )
    return ids


def check_size(size: int, field: str, max_model_len: int) -> None:
    """`size`: characters of a text to tokenize, or ids to detokenize. Raises InvalidRequest."""
    most = max(LEAST_SIZE, SIZE_PER_TOKEN * max_model_len)
    if size > most:
        unit = "ids" if field == "token_ids" else "characters"
        raise InvalidRequest(field, f"{size} {unit}, at most {most} are taken in one call")


def check_prompt_length(
    length: int, field: str, params: common_pb2.SamplingParams, model: ServedModel
) -> int:
    """The request's max_tokens, by default all that is left. Raises InvalidRequest or TooLong."""
    if length == 0:
        raise InvalidRequest(field, "the prompt has no tokens, at least 1 is needed")
    given = params.max_tokens if params.HasField("max_tokens") else None
    asked = f"a prompt of {length} tokens with max_tokens {given or 'unset'}"
    if length >= model.max_model_len:
        raise TooLong(
            field, f"{asked}: the prompt must be shorter than max_model_len {model.max_model_len}"
        )
    if given is not None and length + given > model.max_model_len:
        raise TooLong(
            "sampling_params.max_tokens",
            f"{asked} makes {length + given}, above max_model_len {model.max_model_len}",
        )
    if length + (given or 1) > model.max_sequence_len:
        raise TooLong(
            "sampling_params.max_tokens" if length < model.max_sequence_len else field,
            f"{asked} makes {length + (given or 1)}, above the {model.max_sequence_len} tokens"
            f" that the KV cache can hold",
        )
    return given if given is not None else model.max_sequence_len - length
