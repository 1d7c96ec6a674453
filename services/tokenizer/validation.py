"""Raw requests to validated ones: the only place where what a client sends is checked.

Every refusal is an InvalidRequest (or TooLong, UnknownModel) that names the field as on the wire,
the value and the bound. Nothing behind this module checks again. One rule for lengths, as in
engine_core.admission: prompt + max_tokens <= max_model_len, and <= what the KV cache can hold.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from triptych.engine_core.errors import InvalidRequest, TooLong, UnknownModel
from triptych.engine_core.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from triptych.services.transport.wire import submit_of
from triptych.v1 import common_pb2, inference_pb2, stage_pb2

MAX_REQUEST_ID_BYTES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
# What Tokenize and Detokenize take in: several times what a prompt may have, so that a client can
# see by how much its text is too long, and yet no call computes for long.
SIZE_PER_TOKEN = 64
LEAST_SIZE = 1 << 18

TokenArray = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Bounds that a request must keep. `names`: what it may call the model, the first is ours."""

    names: tuple[str, ...]
    vocabulary_size: int
    max_model_len: int
    max_sequence_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputParams:
    """What becomes of the sampled tokens: text, stop strings, and what the client wants to see.

    `stop_token_ids` are those to name as stop_reason; the end-of-sequence ids are not.
    """

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    text: bool = True
    token_ids: bool = True
    max_unread_tokens: int = 4096


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that can run. `prompt` is u32 [n], n >= 1; `label` is for logs."""

    label: str
    prompt: TokenArray
    params: SamplingParams
    output: OutputParams

    def submit(self) -> stage_pb2.Submit:
        """The message to the scheduler, its slot not yet chosen."""
        prompt = self.prompt.astype("<u4", copy=False).tobytes()
        return submit_of(prompt, self.params, self.label)


def check_model(name: str, names: Sequence[str]) -> None:
    """An exact match; empty means the one model. Raises UnknownModel."""
    if name and name not in names:
        raise UnknownModel(name, tuple(names))


def check_request_id(request_id: str) -> str:
    """The label as it came. Raises InvalidRequest."""
    size = len(request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise InvalidRequest("request_id", f"{size} bytes, more than {MAX_REQUEST_ID_BYTES}")
    return request_id


def check_token_ids(
    token_ids: Sequence[int] | TokenArray, field: str, vocabulary_size: int
) -> TokenArray:
    """The ids as u32 [n]. Raises InvalidRequest for one at or above `vocabulary_size`."""
    array = np.asarray(token_ids, np.uint32)
    if array.size and int(array.max()) >= vocabulary_size:
        index = int(np.argmax(array >= vocabulary_size))
        raise InvalidRequest(
            f"{field}[{index}]",
            f"token id {int(array[index])} is not below vocabulary_size {vocabulary_size}",
        )
    return array


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


def sampling_params(
    raw: common_pb2.SamplingParams, model: ServedModel, default_seed: int | None
) -> SamplingParams:
    """Everything but the bound that depends on the prompt: an unset max_tokens is provisional.

    `default_seed` is the seed of requests that bring none; None draws one. Raises InvalidRequest.
    """
    given = tuple(raw.stop_token_ids)
    if len(given) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "sampling_params.stop_token_ids", f"{len(given)} ids, more than {MAX_STOP_TOKEN_IDS}"
        )
    check_token_ids(given, "sampling_params.stop_token_ids", model.vocabulary_size)
    eos = () if raw.ignore_eos else model.eos_token_ids
    try:
        return SamplingParams(
            max_tokens=raw.max_tokens if raw.HasField("max_tokens") else model.max_model_len,
            min_tokens=raw.min_tokens,
            temperature=_decimal(raw.temperature) if raw.HasField("temperature") else 1.0,
            top_k=min(raw.top_k, model.vocabulary_size),
            top_p=_decimal(raw.top_p) if raw.HasField("top_p") else 1.0,
            min_p=_decimal(raw.min_p),
            seed=_seed(raw, default_seed),
            stop_token_ids=tuple(dict.fromkeys((*given, *eos))),
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"sampling_params.{error.field}", error.description) from error


def output_params(
    raw: common_pb2.SamplingParams,
    output_format: int,
    model: ServedModel,
    max_unread_tokens: int,
) -> OutputParams:
    """The text-level half of the parameters. Raises InvalidRequest."""
    _check_stop_strings(raw.stop)
    if output_format not in inference_pb2.OutputFormat.values():
        known = ", ".join(str(value) for value in inference_pb2.OutputFormat.values())
        raise InvalidRequest("output_format", f"{output_format} is none of {known}")
    eos = () if raw.ignore_eos else model.eos_token_ids
    return OutputParams(
        stop=tuple(dict.fromkeys(raw.stop)),
        stop_token_ids=frozenset(raw.stop_token_ids) - frozenset(eos),
        include_stop=raw.include_stop_str_in_output,
        skip_special_tokens=(
            raw.skip_special_tokens if raw.HasField("skip_special_tokens") else True
        ),
        min_tokens=raw.min_tokens,
        text=output_format != inference_pb2.OUTPUT_FORMAT_TOKEN_IDS,
        token_ids=output_format != inference_pb2.OUTPUT_FORMAT_TEXT,
        max_unread_tokens=max_unread_tokens,
    )


def with_max_tokens(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """The parameters with the bound that the prompt leaves. Raises InvalidRequest."""
    try:
        return replace(params, max_tokens=max_tokens)
    except InvalidRequest as error:
        raise InvalidRequest(f"sampling_params.{error.field}", error.description) from error


def _check_stop_strings(stop: Sequence[str]) -> None:
    field = "sampling_params.stop"
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(field, f"{len(stop)} strings, more than {MAX_STOP_STRINGS}")
    for index, text in enumerate(stop):
        size = len(text.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            raise InvalidRequest(
                f"{field}[{index}]",
                f"{size} bytes is not within 1 and {MAX_STOP_STRING_BYTES}",
            )


def _seed(raw: common_pb2.SamplingParams, default_seed: int | None) -> int:
    if raw.HasField("seed"):
        return raw.seed
    return default_seed if default_seed is not None else int.from_bytes(os.urandom(8))


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32: what the client wrote, and what errors show."""
    return float(str(np.float32(value)))
