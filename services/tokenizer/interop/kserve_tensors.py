"""Tensors of the Open Inference Protocol: what the text model reads of them, and what it answers.

Names are those of Triton's vLLM backend, so that its clients work unchanged:

    in    text_input BYTES [1] | input_ids INT32/INT64/UINT32 [n] or [1, n]
          sampling_parameters BYTES [1] (JSON, the fields of triptych.v1.SamplingParams)
          stream BOOL [1], exclude_input_in_output BOOL [1]
    out   text_output BYTES [n], finish_reason BYTES [n]; output_ids INT32 [k] where asked for and
          n is 1
"""

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf import json_format

from triptych.engine_core.errors import InvalidRequest
from triptych.kserve import inference_pb2 as kserve_pb2
from triptych.services.tokenizer.sampling_validation import choices_wished
from triptych.services.tokenizer.validation import MAX_REQUEST_ID_BYTES
from triptych.v1 import common_pb2, inference_pb2

OUTPUTS = ("text_output", "finish_reason", "output_ids")
INPUTS = {
    "text_input": "BYTES",
    "input_ids": "INT32",
    "sampling_parameters": "BYTES",
    "stream": "BOOL",
    "exclude_input_in_output": "BOOL",
}
_INTEGERS = {"INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q"}
_CONTENTS = {
    "INT32": "int_contents",
    "UINT32": "uint_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "BOOL": "bool_contents",
}
_MOST_JSON_BYTES = 1 << 20
_MOST_DIMENSIONS = 8
MAX_ID_BYTES = 1024
"""Of a request's id, which every answer repeats."""
_LOGPROBS = ("logprobs", "prompt_logprobs")
_TENSORS = (
    (re.compile(r"^token_ids(\.ids)?"), "input_ids"),
    (re.compile(r"^(text|prompt)\b"), "text_input"),
    (re.compile(r"^sampling_params\b"), "sampling_parameters"),
)
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Inference:
    """A ModelInferRequest, read. `outputs`: what it asks for; empty: text and finish reason."""

    request: inference_pb2.GenerateRequest
    stream: bool
    outputs: tuple[str, ...]


def renamed(error: InvalidRequest) -> InvalidRequest:
    """A refusal of the GenerateRequest, with the name of the tensor that said so."""
    field = error.field
    for ours, theirs in _TENSORS:
        field = ours.sub(theirs, field)
    return InvalidRequest(field, error.description)


def read_inference(request: kserve_pb2.ModelInferRequest) -> Inference:
    """Raises InvalidRequest, which names the tensor."""
    name = request.id.encode()
    if len(name) > MAX_ID_BYTES:
        raise InvalidRequest("id", f"{len(name)} bytes, more than {MAX_ID_BYTES}")
    outputs = _outputs(request)
    texts, numbers = _tensors(request)
    label = name[:MAX_REQUEST_ID_BYTES].decode(errors="ignore")  # for logs only: cut, not refused
    answer = inference_pb2.GenerateRequest(model=request.model_name, request_id=label)
    if ("text_input" in texts) == ("input_ids" in numbers):
        raise InvalidRequest("inputs", "exactly one of text_input and input_ids is needed")
    if "text_input" in texts:
        answer.text = _text("text_input", texts)
    else:
        ids = numbers["input_ids"]
        if min(ids, default=0) < 0 or max(ids, default=0) >= 1 << 32:
            raise InvalidRequest("input_ids", "an id is not within 0 and 4294967295")
        answer.token_ids.ids.extend(ids)
    if "sampling_parameters" in texts:
        answer.sampling_params.CopyFrom(_sampling_params(_text("sampling_parameters", texts)))
    stream = _truth("stream", numbers, default=False)
    excluded = _truth("exclude_input_in_output", numbers, default=stream)
    answer.echo = not excluded
    if "output_ids" in outputs and not stream and choices_wished(answer.sampling_params)[0] > 1:
        raise InvalidRequest("outputs", "output_ids: of one choice only (n 1), or with stream")
    if "output_ids" not in outputs:
        answer.output_format = inference_pb2.OUTPUT_FORMAT_TEXT
    return Inference(answer, stream, outputs)


def written(
    request: kserve_pb2.ModelInferRequest,
    name: str,
    outputs: Sequence[str],
    pieces: Sequence[inference_pb2.GenerateResponse],
) -> kserve_pb2.ModelInferResponse:
    """The tensors of one or more pieces, one for each choice; `name` is the model's."""
    answer = kserve_pb2.ModelInferResponse(model_name=name, model_version="1", id=request.id)
    for output in outputs or OUTPUTS[:2]:
        tensor = answer.outputs.add(name=output, datatype="BYTES", shape=[len(pieces)])
        match output:
            case "text_output":
                raw = _bytes_tensor(piece.text.encode() for piece in pieces)
            case "finish_reason":
                raw = _bytes_tensor(_reason(piece).encode() for piece in pieces)
            case _:
                (piece,) = pieces  # read_inference has seen to it
                ids = piece.token_ids
                tensor.datatype, tensor.shape[:] = "INT32", [len(ids)]
                raw = struct.pack(f"<{len(ids)}i", *ids)
        answer.raw_output_contents.append(raw)
    return answer


def _outputs(request: kserve_pb2.ModelInferRequest) -> tuple[str, ...]:
    names: list[str] = []
    for output in request.outputs:
        if output.name not in OUTPUTS or output.name in names:
            known = ", ".join(OUTPUTS)
            raise InvalidRequest(
                "outputs", f"{output.name!r:.100} is not one of {known}, or is there twice"
            )
        names.append(output.name)
    return tuple(names)


def _reason(piece: inference_pb2.GenerateResponse) -> str:
    name: str = common_pb2.FinishReason.Name(piece.finish_reason)
    reason = name.removeprefix("FINISH_REASON_").lower()
    return "" if reason == "unspecified" else reason


def _tensors(
    request: kserve_pb2.ModelInferRequest,
) -> tuple[dict[str, Sequence[bytes]], dict[str, Sequence[int]]]:
    """The inputs by name: those of datatype BYTES, and the others."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest(
            "raw_input_contents", f"{len(raw)} of them for {len(request.inputs)} inputs"
        )
    texts: dict[str, Sequence[bytes]] = {}
    numbers: dict[str, Sequence[int]] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in INPUTS or name in texts or name in numbers:
            known = ", ".join(INPUTS)
            raise InvalidRequest(
                "inputs", f"{name!r:.100} is not one of {known}, or is there twice"
            )
        _check_datatype(tensor)
        _check_shape(tensor)
        values: Sequence[bytes] | Sequence[int]
        if tensor.datatype == "BYTES":
            values = texts[name] = (
                _read_bytes(name, raw[index]) if raw else tensor.contents.bytes_contents
            )
        else:
            values = numbers[name] = (
                _read_numbers(name, tensor.datatype, raw[index])
                if raw
                else getattr(tensor.contents, _CONTENTS[tensor.datatype])
            )
        if math.prod(tensor.shape) != len(values):
            shape = list(tensor.shape)
            raise InvalidRequest(name, f"shape {shape!s:.100} of {len(values)} elements")
    return texts, numbers


def _check_shape(tensor: kserve_pb2.ModelInferRequest.InferInputTensor) -> None:
    """Before its product is made, which would be a number of as many digits as there are bytes."""
    shape = tensor.shape
    if len(shape) > _MOST_DIMENSIONS:
        raise InvalidRequest(
            tensor.name, f"a shape of {len(shape)} dimensions, more than {_MOST_DIMENSIONS}"
        )
    if min(shape, default=0) < 0:
        raise InvalidRequest(tensor.name, f"shape {list(shape)!s:.100} has a negative dimension")
    if INPUTS[tensor.name] != "INT32" and (elements := math.prod(shape)) != 1:
        needed = "1 is needed: a message is one request"
        raise InvalidRequest(tensor.name, f"{elements} elements, {needed}")


def _check_datatype(tensor: kserve_pb2.ModelInferRequest.InferInputTensor) -> None:
    wanted = INPUTS[tensor.name]
    fits = tensor.datatype in _INTEGERS if wanted == "INT32" else tensor.datatype == wanted
    if not fits:
        raise InvalidRequest(tensor.name, f"datatype {tensor.datatype!r:.20}, not {wanted}")


def _read_numbers(name: str, datatype: str, raw: bytes) -> Sequence[int]:
    if datatype == "BOOL":
        return [int(byte != 0) for byte in raw]
    code = _INTEGERS[datatype]
    size = struct.calcsize(f"<{code}")
    if len(raw) % size:
        raise InvalidRequest(name, f"{len(raw)} bytes are no whole number of {datatype}")
    return struct.unpack(f"<{len(raw) // size}{code}", raw)


def _read_bytes(name: str, raw: bytes) -> list[bytes]:
    """The one element; of more, as many as tell that it is not alone."""
    values: list[bytes] = []
    at = 0
    while at < len(raw) and len(values) < 2:
        if at + _LENGTH.size > len(raw):
            raise InvalidRequest(name, "its bytes end within a length")
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if at + length > len(raw):
            raise InvalidRequest(name, f"an element of {length} bytes is longer than what is there")
        values.append(raw[at : at + length])
        at += length
    return values


def _bytes_tensor(values: Iterator[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(value)) + value for value in values)


def _truth(name: str, numbers: Mapping[str, Sequence[int]], *, default: bool) -> bool:
    (value,) = numbers.get(name, (default,))
    return bool(value)


def _text(name: str, texts: Mapping[str, Sequence[bytes]]) -> str:
    (value,) = texts[name]
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, "it is not UTF-8") from error


def _sampling_params(text: str) -> common_pb2.SamplingParams:
    name = "sampling_parameters"
    if len(text) > _MOST_JSON_BYTES:
        raise InvalidRequest(name, f"{len(text)} characters, the bound is {_MOST_JSON_BYTES}")
    params = common_pb2.SamplingParams()
    if not text.strip():
        return params
    try:
        json_format.Parse(text, params, max_recursion_depth=16)
    except json_format.ParseError as error:
        raise InvalidRequest(name, f"{str(error)[:200]}") from error
    for described, _ in params.ListFields():
        if (field := described.name) in _LOGPROBS:
            raise InvalidRequest(f"{name}.{field}", "no output tensor has logprobs")
    return params
