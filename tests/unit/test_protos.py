"""What every reader of the protos may count on, beyond what `buf lint` checks."""

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

from triptych.engine_core.step import FinishReason
from triptych.v1 import common_pb2, control_pb2, inference_pb2, stage_pb2

FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (common_pb2, control_pb2, inference_pb2, stage_pb2)
)


def messages() -> Iterator[Descriptor]:
    waiting = [message for file in FILES for message in file.message_types_by_name.values()]
    while waiting:
        message = waiting.pop()
        yield message
        waiting.extend(message.nested_types)


def enums() -> list[EnumDescriptor]:
    top = [enum for file in FILES for enum in file.enum_types_by_name.values()]
    return top + [enum for message in messages() for enum in message.enum_types]


@pytest.mark.parametrize("enum", enums(), ids=lambda enum: enum.name)
def test_the_zero_value_is_unspecified(enum: EnumDescriptor) -> None:
    zero = enum.values_by_number[0].name
    assert zero.endswith("_UNSPECIFIED")
    prefix = zero.removesuffix("UNSPECIFIED")
    assert all(value.name.startswith(prefix) for value in enum.values)


def test_every_scalar_sampling_parameter_tells_unset_from_zero() -> None:
    fields = common_pb2.SamplingParams.DESCRIPTOR.fields
    scalars = [field for field in fields if not field.is_repeated]
    assert len(scalars) >= 10
    assert [field.name for field in scalars if not field.has_presence] == []
    lists = {field.name for field in fields if field.is_repeated}
    assert lists == {
        "stop", "stop_token_ids", "logit_bias", "bad_words", "bad_words_token_ids",
        "logits_processors",
    }  # fmt: skip


def test_booleans_of_requests_default_to_what_unset_means() -> None:
    """A default of true needs presence: otherwise the client's silence would read as false."""
    for message in messages():
        if message.name.endswith("Request"):
            for field in message.fields:
                if field.type == FieldDescriptor.TYPE_BOOL:
                    assert field.has_presence, f"{message.full_name}.{field.name}"


def test_finish_reasons_have_one_numbering() -> None:
    wire = {name.removeprefix("FINISH_REASON_"): n for name, n in common_pb2.FinishReason.items()}
    assert wire.pop("UNSPECIFIED") == 0
    numbers = {reason.value for reason in FinishReason}
    assert wire.pop("TOOL_CALLS") not in numbers, "the engine does not know of tools"
    assert wire == {reason.name: reason.value for reason in FinishReason}


def test_step_outputs_travel_in_columns() -> None:
    columns = {
        field.name for field in stage_pb2.StepOutputs.DESCRIPTOR.fields
        if field.type == FieldDescriptor.TYPE_BYTES
    }  # fmt: skip
    assert columns >= {"slots", "token_ids", "finish_reasons"}


def test_the_stage_messages_stay_off_the_public_contract() -> None:
    assert {file.name for file in inference_pb2.DESCRIPTOR.dependencies} == {
        common_pb2.DESCRIPTOR.name
    }
    methods = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    assert {"Generate", "Chat", "Tokenize", "Detokenize", "ListModels", "Session"} <= set(methods)
