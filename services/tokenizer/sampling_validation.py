"""The sampling half of a raw request, checked: engine_core's SamplingParams.

Bounds of numbers are SamplingParams' own; here is what depends on the model, on text, on presence,
or on other fields. Every refusal is an InvalidRequest named as on the wire.
"""

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import replace

from google.protobuf.message import Message

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.sampling_params import (
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_PROCESSORS,
    MAX_STOP_TOKEN_IDS,
    NO_LOGPROBS,
    BeamParams,
    ExternalSampler,
    SamplingParams,
)
from triptych.services.tokenizer.bad_words import Encode, bad_words
from triptych.services.tokenizer.validation import ServedModel, check_token_ids
from triptych.services.transport.wire import EARLY_STOPPING, external_sampler
from triptych.v1 import common_pb2

ALL_LOGPROBS = -1
"""As a wish for logprobs: of the whole vocabulary."""

MAX_PROCESSOR_NAME_BYTES = 128
MAX_PROCESSOR_ARGUMENT_BYTES = 4096

_FLOAT32 = struct.Struct("<f")
_FLOAT32_DIGITS = 9  # as many tell any two of them apart
_PREFIX = "sampling_params"
_FIELDS = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_BEAM_FIELDS = {
    "beam_width": "beam.width",
    "length_penalty": "beam.length_penalty",
    "early_stopping": "beam.early_stopping",
}
_NOT_BESIDE_BEAM: Mapping[str, tuple[float, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "top_n_sigma": (0.0,),
}
"""What filters or tempers a distribution, with the values that do not."""
_NOT_BESIDE_EXTERNAL: Mapping[str, tuple[float, ...]] = {
    **_NOT_BESIDE_BEAM,
    "temperature": (1.0,),
    "min_tokens": (0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "no_repeat_ngram_size": (0,),
    "n": (1,),
    "best_of": (1,),
    "logprobs": (),
    "beam": (),
    "allowed_token_ids": (),
    "structured_output": (),
}
"""What is the business of whoever draws the tokens, with the values that leave it to him; beside
lists, which must be empty."""
_LISTS_OF_A_DRAW = ("logit_bias", "bad_words", "bad_words_token_ids", "logits_processors")


def sampling_params(
    raw: common_pb2.SamplingParams,
    model: ServedModel,
    default_seed: int | None,
    encode: Encode,
    *,
    echo: bool = False,
) -> SamplingParams:
    """Everything but the bound that depends on the prompt, and the grammar: see `with_prompt`.

    `default_seed` is the seed of requests that bring none; None draws one. `echo`: the prompt's
    tokens are reported with the output's. `n` of the result is how many are drawn (best_of). Raises
    InvalidRequest.
    """
    size = model.vocabulary_size
    external = _external(raw)
    stops = _stop_token_ids(raw, model)
    drawn, held = _choices(raw)
    logprobs = core_logprobs(wished_logprobs(raw, "logprobs", model), size)
    prompt_logprobs = core_logprobs(wished_logprobs(raw, "prompt_logprobs", model), size)
    try:
        return SamplingParams(
            max_tokens=raw.max_tokens if raw.HasField("max_tokens") else model.max_model_len,
            min_tokens=raw.min_tokens,
            temperature=_float(raw, "temperature", 1.0),
            top_k=min(raw.top_k, size) if external is None else 0,
            top_p=_float(raw, "top_p", 1.0),
            min_p=_float(raw, "min_p", 0.0),
            typical_p=_float(raw, "typical_p", 1.0),
            top_n_sigma=_float(raw, "top_n_sigma", 0.0),
            repetition_penalty=_float(raw, "repetition_penalty", 1.0),
            presence_penalty=_float(raw, "presence_penalty", 0.0),
            frequency_penalty=_float(raw, "frequency_penalty", 0.0),
            # Nothing as long as the context can occur twice in it.
            no_repeat_ngram_size=min(raw.no_repeat_ngram_size, model.max_model_len),
            seed=_seed(raw, default_seed),
            stop_token_ids=stops,
            logit_bias=_logit_bias(raw, size),
            allowed_token_ids=_allowed_token_ids(raw, size),
            bad_words=bad_words(raw, size, encode),
            processors=_processors(raw),
            logprobs=max(logprobs, 0) if held else logprobs,
            prompt_logprobs=max(prompt_logprobs, logprobs if echo else NO_LOGPROBS),
            n=drawn,
            beam=_beam(raw),
            external=external,
        )
    except InvalidRequest as error:
        raise wire_named(error) from error


def with_prompt(params: SamplingParams, max_tokens: int, grammar: str = "") -> SamplingParams:
    """The parameters with the bound that the prompt leaves, and with what takes time to check.

    Raises InvalidRequest.
    """
    if params.max_tokens == max_tokens and params.grammar == grammar:
        return params
    try:
        return replace(params, max_tokens=max_tokens, grammar=grammar)
    except InvalidRequest as error:
        raise wire_named(error) from error


def wished_logprobs(raw: common_pb2.SamplingParams, field: str, model: ServedModel) -> int | None:
    """How many alternatives the client wants to see; ALL_LOGPROBS, or None for no logprobs.

    `field`: "logprobs" or "prompt_logprobs". Raises InvalidRequest.
    """
    if not raw.HasField("prompt_logprobs" if field == "prompt_logprobs" else "logprobs"):
        return None
    wished: int = raw.prompt_logprobs if field == "prompt_logprobs" else raw.logprobs
    most = model.max_logprobs
    if wished < ALL_LOGPROBS:
        raise InvalidRequest(f"{_PREFIX}.{field}", f"{wished} is below {ALL_LOGPROBS}")
    asked = model.vocabulary_size if wished == ALL_LOGPROBS else wished
    if most != ALL_LOGPROBS and asked > most:
        meant = f"{wished}, the whole vocabulary of {asked}," if wished < 0 else f"{wished}"
        raise InvalidRequest(f"{_PREFIX}.{field}", f"{meant} is above max_logprobs {most}")
    return wished


def core_logprobs(wished: int | None, vocabulary_size: int) -> int:
    """The core's number for a wish."""
    if wished is None:
        return NO_LOGPROBS
    return vocabulary_size if wished == ALL_LOGPROBS else min(wished, vocabulary_size)


def choices_wished(raw: common_pb2.SamplingParams) -> tuple[int, int]:
    """(n, best_of), defaults filled in, not checked."""
    n = raw.n if raw.HasField("n") else 1
    return n, raw.best_of if raw.HasField("best_of") else n


def _choices(raw: common_pb2.SamplingParams) -> tuple[int, bool]:
    """How many are drawn, and whether some of them are dropped in the end."""
    n, best_of = choices_wished(raw)
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"{_PREFIX}.n", f"{n} is not within 1 and {MAX_CHOICES}")
    if not n <= best_of <= MAX_CHOICES:
        raise InvalidRequest(
            f"{_PREFIX}.best_of", f"{best_of} is not within n {n} and {MAX_CHOICES}"
        )
    return best_of, best_of > n


def _beam(raw: common_pb2.SamplingParams) -> BeamParams | None:
    if not raw.HasField("beam"):
        return None
    given = _given(raw)
    for field, harmless in _NOT_BESIDE_BEAM.items():
        if field in given and given[field] not in harmless:
            raise InvalidRequest(field, f"{given[field]} beside beam: beam search does not sample")
    if raw.HasField("best_of"):
        raise InvalidRequest("best_of", f"{raw.best_of} beside beam: the width says how many")
    if raw.stop:
        raise InvalidRequest("stop", "beside beam: hypotheses have no text before the end")
    if raw.HasField("logprobs"):
        raise InvalidRequest("logprobs", "beside beam: a hypothesis comes with its score alone")
    early_stopping = EARLY_STOPPING.get(raw.beam.early_stopping)
    if early_stopping is None:
        raise InvalidRequest("early_stopping", f"{raw.beam.early_stopping} is none of its values")
    penalised = raw.beam.HasField("length_penalty")
    return BeamParams(
        width=raw.beam.width,
        length_penalty=decimal(raw.beam.length_penalty) if penalised else 1.0,
        early_stopping=early_stopping,
    )


def _given(raw: common_pb2.SamplingParams) -> dict[str, object]:
    """The fields that the request has, by name."""
    return {field.name: value for field, value in raw.ListFields()}


def _external(raw: common_pb2.SamplingParams) -> ExternalSampler | None:
    if not raw.HasField("external_sampler"):
        return None
    given = _given(raw)
    for field, harmless in _NOT_BESIDE_EXTERNAL.items():
        if field in given and given[field] not in harmless:
            raise _beside_external(field, given[field])
    for field in _LISTS_OF_A_DRAW:
        if getattr(raw, field):
            raise _beside_external(field, f"{len(getattr(raw, field))} entries")
    try:
        return external_sampler(raw.external_sampler)
    except InvalidRequest as error:
        raise wire_named(error) from error


def _beside_external(field: str, value: object) -> InvalidRequest:
    if isinstance(value, float):
        value = decimal(value)
    said = "it" if isinstance(value, Message) else value
    return InvalidRequest(
        f"{_PREFIX}.{field}", f"{said} beside external_sampler, whose business that is"
    )


def _stop_token_ids(raw: common_pb2.SamplingParams, model: ServedModel) -> tuple[int, ...]:
    given = tuple(raw.stop_token_ids)
    if len(given) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"{_PREFIX}.stop_token_ids", f"{len(given)} ids, more than {MAX_STOP_TOKEN_IDS}"
        )
    check_token_ids(given, f"{_PREFIX}.stop_token_ids", model.vocabulary_size)
    eos = () if raw.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*given, *eos)))


def _logit_bias(
    raw: common_pb2.SamplingParams, vocabulary_size: int
) -> tuple[tuple[int, float], ...]:
    if len(raw.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            "logit_bias", f"{len(raw.logit_bias)} entries, more than {MAX_LOGIT_BIASES}"
        )
    biases = sorted(raw.logit_bias.items())
    if biases and biases[-1][0] >= vocabulary_size:
        token_id = biases[-1][0]
        raise InvalidRequest(
            f"logit_bias[{token_id}]",
            f"token id {token_id} is not below vocabulary_size {vocabulary_size}",
        )
    return tuple((token_id, decimal(bias)) for token_id, bias in biases)


def _allowed_token_ids(
    raw: common_pb2.SamplingParams, vocabulary_size: int
) -> tuple[int, ...] | None:
    if not raw.HasField("allowed_token_ids"):
        return None
    ids = raw.allowed_token_ids.ids
    if not 1 <= len(ids) <= vocabulary_size:
        raise InvalidRequest(
            "allowed_token_ids", f"{len(ids)} ids is not within 1 and {vocabulary_size}"
        )
    checked = check_token_ids(ids, f"{_PREFIX}.allowed_token_ids.ids", vocabulary_size)
    return tuple(sorted(set(checked)))


def _processors(raw: common_pb2.SamplingParams) -> tuple[tuple[str, str], ...]:
    """Whether there is one of that name, the scheduler knows."""
    processors = raw.logits_processors
    if len(processors) > MAX_PROCESSORS:
        raise InvalidRequest("logits_processors", f"{len(processors)}, more than {MAX_PROCESSORS}")
    for index, each in enumerate(processors):
        field = f"logits_processors[{index}]"
        size = len(each.name.encode())
        if not 1 <= size <= MAX_PROCESSOR_NAME_BYTES:
            raise InvalidRequest(
                f"{field}.name", f"{size} bytes is not within 1 and {MAX_PROCESSOR_NAME_BYTES}"
            )
        _check_json(f"{field}.argument", each.argument)
    return tuple((each.name, each.argument) for each in processors)


def _check_json(field: str, text: str) -> None:
    size = len(text.encode())
    if size > MAX_PROCESSOR_ARGUMENT_BYTES:
        raise InvalidRequest(field, f"{size} bytes, more than {MAX_PROCESSOR_ARGUMENT_BYTES}")
    if not text:
        return
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"it is no JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _seed(raw: common_pb2.SamplingParams, default_seed: int | None) -> int:
    if raw.HasField("seed"):
        return raw.seed
    return default_seed if default_seed is not None else int.from_bytes(os.urandom(8))


def _float(raw: common_pb2.SamplingParams, field: str, default: float) -> float:
    # The stub takes literals only; callers here pass names of optional float fields.
    given = raw.HasField(field)  # type: ignore[arg-type]  # literals only in the stub
    return decimal(getattr(raw, field)) if given else default


def decimal(value: float) -> float:
    """The shortest decimal that is this float32: what the client wrote, and what errors show."""
    bits = _FLOAT32.pack(value)
    for digits in range(1, _FLOAT32_DIGITS):
        rounded = float(f"{value:.{digits}g}")
        try:
            if _FLOAT32.pack(rounded) == bits:
                return rounded
        except OverflowError:  # rounded up past the largest float32
            continue
    return float(f"{value:.{_FLOAT32_DIGITS}g}")


def wire_named(error: InvalidRequest) -> InvalidRequest:
    """With the field's name as the client knows it: the core's own is without its place."""
    field = _BEAM_FIELDS.get(error.field, error.field)
    if re.split(r"[.\[]", field, maxsplit=1)[0] not in _FIELDS:
        return error
    return type(error)(f"{_PREFIX}.{field}", error.description)
