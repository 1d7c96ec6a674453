"""Chats with tools that the tokenizer service does not take, and why."""

import json
from pathlib import Path

import grpc
import pytest

from chat_bench import chat, loaded, script_of
from chat_calls import NONE, REQUIRED, WEATHER, chat_request, hermes_call, named
from chat_templates import HERMES, TEMPLATES
from tokenizer_bench import bench, fields_of, refused, run, status_of
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.tokenizer.server import LoadedModel
from triptych.v1 import common_pb2, inference_pb2

CALL = hermes_call("get_weather", {"city": "Paris"})


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded(tmp_path_factory.mktemp("hermes"), HERMES)


def edited(**fields: object) -> inference_pb2.ChatRequest:
    request = chat_request(WEATHER)
    request.MergeFrom(inference_pb2.ChatRequest(**fields))  # type: ignore[arg-type]  # test input
    return request


def without_tools(**fields: object) -> inference_pb2.ChatRequest:
    request = edited(**fields)
    del request.tools[:]
    return request


DEEP = "[" * 50 + "]" * 50
SCHEMA = common_pb2.SamplingParams(structured_output=common_pb2.StructuredOutput(json_object=True))
OUTSIDE = common_pb2.SamplingParams(external_sampler=common_pb2.ExternalSampler(lease=1))
BEAM = common_pb2.SamplingParams(beam=common_pb2.BeamSearch(width=2))
REFUSALS = [
    (without_tools(tool_choice=REQUIRED), "tool_choice"),
    (without_tools(tool_choice=named("get_weather")), "tool_choice.name"),
    (edited(tool_choice=named("other")), "tool_choice.name"),
    (edited(tool_choice=inference_pb2.ToolChoice(name="get_weather")), "tool_choice.name"),
    (edited(tools=[WEATHER]), "tools[1].name"),
    (edited(tools=[inference_pb2.Tool(name="a b")]), "tools[1].name"),
    (edited(tools=[inference_pb2.Tool(name="a", parameters="{")]), "tools[1].parameters"),
    (edited(tools=[inference_pb2.Tool(name="a", parameters="[]")]), "tools[1].parameters"),
    (edited(tools=[inference_pb2.Tool(name=f"f{k}") for k in range(128)]), "tools"),
    (edited(tools=[inference_pb2.Tool(name="a", description="x" * (1 << 20))]), "tools"),
    (edited(sampling_params=SCHEMA), "sampling_params.structured_output"),
    (edited(sampling_params=BEAM, tool_choice=REQUIRED), "tool_choice"),
    (edited(sampling_params=OUTSIDE, tool_choice=REQUIRED), "tool_choice"),
    (edited(chat_template_kwargs="{"), "chat_template_kwargs"),
    (edited(chat_template_kwargs="[]"), "chat_template_kwargs"),
    (edited(chat_template_kwargs=f'{{"a": {DEEP}}}'), "chat_template_kwargs"),
    (edited(chat_template_kwargs='{"chat_template": "{{ 1 }}"}'), "chat_template_kwargs"),
    (edited(chat_template_kwargs='{"tokenize": false}'), "chat_template_kwargs"),
    (edited(chat_template_kwargs='{"messages": []}'), "chat_template_kwargs"),
    (edited(chat_template_kwargs='{"tools": []}'), "chat_template_kwargs"),
    (edited(chat_template_kwargs='{"add_generation_prompt": 1}'), "chat_template_kwargs"),
    (edited(chat_template_kwargs='{"bos_token": "x"}'), "chat_template_kwargs"),
    (edited(chat_template_kwargs=json.dumps({"a": "x" * 70_000})), "chat_template_kwargs"),
    (
        edited(continue_final_message=True, add_generation_prompt=True),
        "continue_final_message",
    ),
    (
        edited(
            continue_final_message=True,
            messages=[
                inference_pb2.ChatMessage(
                    role="assistant", tool_calls=[inference_pb2.ToolCall(name="now")]
                )
            ],
        ),
        "continue_final_message",
    ),
    (
        edited(
            messages=[
                inference_pb2.ChatMessage(
                    role="assistant", tool_calls=[inference_pb2.ToolCall(name="<|im_end|>")]
                )
            ]
        ),
        "messages[1].tool_calls[0].name",
    ),
    (
        edited(messages=[inference_pb2.ChatMessage(role="tool", tool_call_id="x" * 300)]),
        "messages[1].tool_call_id",
    ),
]


def test_refusals_name_the_field(hermes: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(hermes, tmp_path, script_of("x")) as b:
            for request, field in REFUSALS:
                error = await refused(chat(b, request))
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, field
                assert fields_of(status_of(error)) == [field]
            assert b.scheduler.submits == []
            kept = edited(sampling_params=SCHEMA, tool_choice=NONE)
            await chat(b, kept)
            assert b.scheduler.submits[0].params.grammar

    run(scenario)


def test_a_schema_that_cannot_be_kept_is_refused_where_it_must_be(
    hermes: LoadedModel, tmp_path: Path
) -> None:
    odd = inference_pb2.Tool(name="odd", parameters='{"type": "object", "not": {}}')

    async def scenario() -> None:
        async with bench(hermes, tmp_path, script_of("x")) as b:
            await chat(b, chat_request(odd))
            error = await refused(chat(b, chat_request(odd, choice=REQUIRED)))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert fields_of(status_of(error)) == ["tools[0].parameters"]
            odd.strict = True
            error = await refused(chat(b, chat_request(WEATHER, odd)))
            assert fields_of(status_of(error)) == ["tools[1].parameters"]
            await chat(b, chat_request(WEATHER, odd, choice=named("get_weather")))

    run(scenario)


def test_tools_without_a_parser_are_refused(tmp_path: Path) -> None:
    model = loaded(tmp_path / "model", TEMPLATES["items"])

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", script_of(CALL)) as b:
            error = await refused(chat(b, chat_request(WEATHER)))
            assert fields_of(status_of(error)) == ["tools"]
            assert "tool_call_parser" in str(error.details())
            (turn,) = await chat(b, chat_request(WEATHER, choice=NONE))
            assert turn.text == CALL
        async with bench(model, tmp_path / "run", script_of(CALL), tool_call_parser="hermes") as b:
            (turn,) = await chat(b, chat_request(WEATHER))
            assert turn.finish == "TOOL_CALLS"
        with pytest.raises(StartupError, match="tool_call_parser: 'other' is none of auto, none"):
            async with bench(model, tmp_path / "run", b"", tool_call_parser="other"):
                pass

    run(scenario)
