"""Tensors of the Open Inference Protocol: whatever contradicts itself is refused by name."""

import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine_core.errors import InvalidRequest
from triptych.kserve import inference_pb2 as kserve_pb2
from triptych.services.tokenizer.interop.kserve_tensors import (
    MAX_ID_BYTES,
    read_inference,
    renamed,
    written,
)
from triptych.services.tokenizer.interop.whole_answers import WholeAnswers
from triptych.v1 import common_pb2, inference_pb2

Tensor = tuple[str, str, list[int], bytes]


def request(*tensors: Tensor, **fields: Any) -> kserve_pb2.ModelInferRequest:
    answer = kserve_pb2.ModelInferRequest(model_name="m", **fields)
    for name, datatype, shape, raw in tensors:
        answer.inputs.add(name=name, datatype=datatype, shape=shape)
        answer.raw_input_contents.append(raw)
    return answer


def element(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def params(text: bytes) -> Tensor:
    return ("sampling_parameters", "BYTES", [1], element(text))


TEXT: Tensor = ("text_input", "BYTES", [1], element(b"hello"))


def test_the_same_by_contents_and_by_raw_bytes() -> None:
    by_contents = kserve_pb2.ModelInferRequest(model_name="m")
    tensor = by_contents.inputs.add(name="input_ids", datatype="INT64", shape=[1, 3])
    tensor.contents.int64_contents.extend([3, 2, 1])
    raw = request(("input_ids", "INT64", [1, 3], struct.pack("<3q", 3, 2, 1)))
    assert read_inference(by_contents) == read_inference(raw)
    assert list(read_inference(raw).request.token_ids.ids) == [3, 2, 1]


def test_parameters_and_the_prompt_in_front() -> None:
    found = read_inference(request(TEXT, params(b'{"top_k": 3, "stop": ["x"]}')))
    assert (found.request.sampling_params.top_k, found.request.echo) == (3, True)
    assert list(found.request.sampling_params.stop) == ["x"]
    streamed = read_inference(request(TEXT, ("stream", "BOOL", [1], b"\1")))
    assert (streamed.stream, streamed.request.echo) == (True, False)


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ([], "inputs"),
        ([TEXT, TEXT], "inputs"),
        ([TEXT, ("input_ids", "INT32", [1], b"\0\0\0\0")], "inputs"),
        ([("prompt", "BYTES", [1], element(b"x"))], "inputs"),
        ([("text_input", "BYTES", [2], element(b"x") * 2)], "text_input"),
        ([("text_input", "BYTES", [2], element(b"x"))], "text_input"),
        ([("text_input", "BYTES", [1], b"\1\0")], "text_input"),
        ([("text_input", "BYTES", [1], struct.pack("<I", 2**32 - 1))], "text_input"),
        ([("text_input", "BYTES", [1], element(b"\xff"))], "text_input"),
        ([("text_input", "FP32", [1], b"\0\0\0\0")], "text_input"),
        ([("input_ids", "INT32", [1], b"\0\0\0")], "input_ids"),
        ([("input_ids", "INT32", [1], struct.pack("<i", -1))], "input_ids"),
        ([("input_ids", "INT64", [1], struct.pack("<q", 2**40))], "input_ids"),
        ([TEXT, ("stream", "BOOL", [2], b"\1\1")], "stream"),
        ([TEXT, params(b"{")], "sampling_parameters"),
        ([TEXT, params(b"[" * 999)], "sampling_parameters"),
        ([TEXT, params(b'{"n": "x"}')], "sampling_parameters"),
        ([TEXT, params(b'{"logprobs": 1}')], "sampling_parameters.logprobs"),
        ([TEXT, params(b'{"promptLogprobs": 0}')], "sampling_parameters.prompt_logprobs"),
        ([("text_input", "BYTES", [-1, -1], element(b"x"))], "text_input"),
        ([("text_input", "BYTES", [2**62] * 9, element(b"x"))], "text_input"),
        ([("input_ids", "INT32", [1] * 9, b"\0\0\0\0")], "input_ids"),
        ([("input_ids", "INT32", [0, 2**62], b"\0\0\0\0")], "input_ids"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_named(tensors: list[Tensor], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_inference(request(*tensors))
    assert caught.value.field == field


def test_raw_contents_of_some_inputs_only() -> None:
    asked = request(TEXT)
    asked.inputs.add(name="stream", datatype="BOOL", shape=[1])
    with pytest.raises(InvalidRequest, match="raw_input_contents"):
        read_inference(asked)


@given(st.binary(max_size=64), st.sampled_from(["BYTES", "INT32", "INT64", "BOOL", "UINT64"]))
def test_any_bytes_are_read_or_refused(raw: bytes, datatype: str) -> None:
    for name in ("text_input", "input_ids", "stream", "sampling_parameters"):
        with suppress(InvalidRequest):
            read_inference(request((name, datatype, [1], raw), TEXT))


def test_outputs() -> None:
    piece = inference_pb2.GenerateResponse(
        text="ä", token_ids=[7, 8], finish_reason=common_pb2.FINISH_REASON_STOP
    )
    answer = written(request(TEXT, id="q"), "m", ("text_output", "output_ids"), [piece])
    assert [(o.name, o.datatype, list(o.shape)) for o in answer.outputs] == [
        ("text_output", "BYTES", [1]),
        ("output_ids", "INT32", [2]),
    ]
    assert list(answer.raw_output_contents) == [element("ä".encode()), struct.pack("<2i", 7, 8)]
    assert (answer.id, answer.model_name) == ("q", "m")


@pytest.mark.parametrize(
    ("outputs", "refused"),
    [
        (["output_ids"], True),  # of two choices, known before anything is computed
        (["text_output", "text_output"], True),
        (["text_output", "tokens"], True),
        (["finish_reason", "text_output"], False),
    ],
)
def test_outputs_that_cannot_be_are_refused_first(outputs: list[str], refused: bool) -> None:
    asked = request(TEXT, params(b'{"n": 2}'))
    for name in outputs:
        asked.outputs.add(name=name)
    if not refused:
        assert read_inference(asked).outputs == tuple(outputs)
        return
    with pytest.raises(InvalidRequest) as caught:
        read_inference(asked)
    assert caught.value.field == "outputs"


def test_an_id_is_a_label_of_whole_characters() -> None:
    label = read_inference(request(TEXT, id="aä" * 100)).request.request_id
    assert ("aä" * 100).startswith(label)
    assert 126 <= len(label.encode()) <= 128
    with pytest.raises(InvalidRequest) as caught:
        read_inference(request(TEXT, id="ä" * (MAX_ID_BYTES // 2 + 1)))
    assert caught.value.field == "id"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("token_ids.ids[3]", "input_ids[3]"),
        ("token_ids", "input_ids"),
        ("text", "text_input"),
        ("sampling_params.stop[1]", "sampling_parameters.stop[1]"),
        ("model_version", "model_version"),
    ],
)
def test_refusals_name_the_tensor(ours: str, theirs: str) -> None:
    error = renamed(InvalidRequest(ours, "why"))
    assert (error.field, error.description) == (theirs, "why")


def test_choices_are_joined_up_to_a_size() -> None:
    whole = WholeAnswers(400)
    for index, text, reason in ((1, "x", 0), (0, "a", 0), (1, "y", 2), (0, "ä" * 8, 1)):
        piece = inference_pb2.GenerateResponse(index=index, text=text, token_ids=[7])
        piece.finish_reason = common_pb2.FinishReason.ValueType(reason)
        whole.add(piece)
    first, second = whole.joined()
    assert (first.text, first.token_ids[:], first.finish_reason) == ("a" + "ä" * 8, [7, 7], 1)
    assert (second.text, second.index, second.finish_reason) == ("xy", 1, 2)
    with pytest.raises(InvalidRequest, match="max_message_bytes 400"):
        whole.add(inference_pb2.GenerateResponse(text="a" * 300))
