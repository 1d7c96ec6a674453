"""Bodies of the HTTP API as gRPC requests: every field, every refusal."""

import json
from typing import Any

import pytest

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.openai_http import chat, completions, responses
from triptych.services.tokenizer.openai_http.body import parsed
from triptych.services.tokenizer.openai_http.chat import ChatCompletionRequest
from triptych.services.tokenizer.openai_http.completions import CompletionRequest
from triptych.services.tokenizer.openai_http.errors import http_error
from triptych.services.tokenizer.openai_http.responses import ResponsesRequest
from triptych.v1 import common_pb2, inference_pb2

Body = dict[str, Any]
USER = {"role": "user", "content": "hi"}


def completion(**body: Any) -> list[inference_pb2.GenerateRequest]:
    fields = parsed(CompletionRequest, json.dumps({"prompt": "hi", **body}).encode())
    return completions.requests_of(fields, "label")[0]


def chatted(**body: Any) -> inference_pb2.ChatRequest:
    fields = parsed(ChatCompletionRequest, json.dumps({"messages": [USER], **body}).encode())
    return chat.request_of(fields, "label")[0]


def responded(**body: Any) -> inference_pb2.ChatRequest:
    fields = parsed(ResponsesRequest, json.dumps({"input": "hi", **body}).encode())
    return responses.request_of(fields, "label")[0]


def refused(make: Any, **body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        make(**body)
    return caught.value


SAMPLING: dict[str, Any] = {
    "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125,
    "typical_p": 0.5, "top_n_sigma": 2.0, "repetition_penalty": 1.5, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "no_repeat_ngram_size": 3, "n": 2, "seed": 5, "stop": ["a", "b"],
    "stop_token_ids": [4, 5], "ignore_eos": True, "include_stop_str_in_output": True,
    "skip_special_tokens": False, "logit_bias": {"3": 1.5, "4": -100}, "bad_words": ["x"],
    "prompt_logprobs": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLING)
def test_each_sampling_field_arrives_and_null_means_absent(name: str) -> None:
    value = SAMPLING[name]
    bare = completion()[0].sampling_params
    for params in (
        completion(**{name: value})[0].sampling_params, chatted(**{name: value}).sampling_params
    ):  # fmt: skip
        found = getattr(params, name)
        if name == "logit_bias":
            assert dict(found) == {3: 1.5, 4: -100.0}
        else:
            assert (list(found) if isinstance(value, list) else found) == value
    assert completion(**{name: None})[0].sampling_params == bare
    assert chatted(**{name: None}).sampling_params == chatted().sampling_params


def test_what_is_called_otherwise() -> None:
    request = completion(
        user="me", request_id="r", cache_salt="s", priority=-3, queue_timeout_ms=7, timeout_ms=9,
        model="m", echo=True, add_special_tokens=False, best_of=3, n=2, logprobs=0,
    )[0]  # fmt: skip
    assert (request.tenant, request.request_id, request.cache_salt) == ("me", "r", "s")
    assert (request.priority, request.queue_timeout_ms, request.timeout_ms) == (-3, 7, 9)
    assert (request.model, request.echo, request.add_special_tokens) == ("m", True, False)
    assert (request.sampling_params.best_of, request.sampling_params.n) == (3, 2)
    assert request.sampling_params.HasField("logprobs")
    assert completion()[0].request_id == "label"
    assert completion()[0].sampling_params.max_tokens == 16
    assert completion(max_tokens=3)[0].sampling_params.max_tokens == 3
    assert completion(seed=-1)[0].sampling_params.seed == (1 << 64) - 1
    assert completion(stop="x")[0].sampling_params.stop == ["x"]
    assert list(completion(allowed_token_ids=[1])[0].sampling_params.allowed_token_ids.ids) == [1]
    assert completion(allowed_token_ids=[])[0].sampling_params.HasField("allowed_token_ids")


def test_prompts_in_all_four_forms() -> None:
    def prompts(prompt: object) -> list[object]:
        return [
            r.text if r.WhichOneof("prompt") == "text" else list(r.token_ids.ids)
            for r in completion(prompt=prompt)
        ]

    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1], [2, 3]]) == [[1], [2, 3]]
    assert prompts(["a", [1]]) == ["a", [1]]
    assert prompts([[]]) == [[]]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "prompt"), (5, "prompt"), ({}, "prompt"), (None, "prompt"), ([-1], "prompt[0]"),
        ([1, 1 << 40], "prompt[1]"), ([1, 1.5], "prompt[1]"), ([True], "prompt[0]"),
        ([[1], [True]], "prompt[1][0]"), ([["a"]], "prompt[0][0]"), ([None], "prompt[0]"),
        (["a"] * 1025, "prompt"),
    ],
)  # fmt: skip
def test_bad_prompts_are_named(prompt: object, field: str) -> None:
    assert refused(completion, prompt=prompt).field == field


@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
     "repetition_penalty", "typical_p", "top_n_sigma"],
)  # fmt: skip
@pytest.mark.parametrize("value", ['"0.7"', "NaN", "Infinity", "1e999", "true", "[1]"])
def test_floats_are_finite_numbers(name: str, value: str) -> None:
    for model, rest in (
        (CompletionRequest, '"prompt":"x"'),
        (ChatCompletionRequest, '"messages":[]'),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parsed(model, f'{{{rest},"{name}":{value}}}'.encode())
        assert caught.value.field == name


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"), ({"n": 1 << 40}, "n"), ({"seed": 1 << 64}, "seed"),
        ({"stop": 5}, "stop"), ({"stop": ["a", 5]}, "stop[1]"), ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"7": None}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"), ({"stream": "yes"}, "stream"),
        ({"stop_token_ids": [1, 1 << 33]}, "stop_token_ids[1]"), ({"top_k": 1 << 31}, "top_k"),
        ({"logprobs": True}, "logprobs"), ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"), ({"suffix": "x"}, "suffix"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"), ({"user": 5}, "user"),
        ({"n": 3, "prompt": ["a"] * 500}, "prompt"), ({"priority": 1 << 31}, "priority"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(body: dict[str, Any], field: str) -> None:
    assert refused(completion, **body).field.partition(".")[0] == field


def test_a_million_wrong_entries_cost_one_error() -> None:
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        assert refused(completion, **{name: [None] * 1_000_000}).field == f"{name}[0]"
    assert refused(chatted, messages=[5] * 100_000).field == "messages[0]"


def test_bodies_that_are_no_json_or_too_deep() -> None:
    for body in (
        b"",
        b"{",
        b'{"prompt":' + b"[" * 100_000,
        b'{"x":' * 100_000,
        b"[]",
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\xff"}',
    ):
        with pytest.raises(InvalidRequest) as caught:
            parsed(CompletionRequest, body)
        assert caught.value.field == "body"


def test_unknown_fields_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert completion(a_field_of_nobody=3) == completion()
    assert next(r for r in caplog.records if "not known" in r.message).__dict__["field"] == (
        "a_field_of_nobody"
    )
    assert len(caplog.records) == 1


# ------------------------------------------------------------------------------------------- chat


def test_content_is_text_or_parts_for_every_role() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("system", "user", "assistant", "tool", "developer"):
        request = chatted(messages=[{"role": role, "content": parts}])
        assert (request.messages[0].role, request.messages[0].content) == (role, "ab")
    contents: list[Body] = [{}, {"content": None}, {"content": ""}, {"content": []}]
    for content in contents:
        assert chatted(messages=[{"role": "assistant", **content}]).messages[0].content == ""


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "messages[0].content[0].type"),
        ({"type": "text"}, "messages[0].content[0].text"),
        ({"text": "x"}, "messages[0].content[0].type"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_name(part: dict[str, Any], field: str) -> None:
    error = refused(chatted, messages=[{"role": "user", "content": [part]}])
    assert error.field == field


def test_tools_and_the_turns_that_used_them() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    request = chatted(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function",
                     "function": {"name": "f", "arguments": '{"city":"x"}'}},
                    {"id": "c2", "function": {"name": "g", "arguments": {"a": 1}}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sun", "name": "f"},
        ],
        tools=[{"type": "function", "function": {
            "name": "f", "description": "d", "parameters": schema, "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        separate_reasoning=False,
    )  # fmt: skip
    assistant, tool = request.messages[1], request.messages[2]
    assert assistant.reasoning == "hm"
    assert [(c.id, c.name, json.loads(c.arguments)) for c in assistant.tool_calls] == [
        ("c1", "f", {"city": "x"}), ("c2", "g", {"a": 1}),
    ]  # fmt: skip
    assert (tool.tool_call_id, tool.content, tool.name) == ("c1", "sun", "f")
    assert (request.tools[0].name, request.tools[0].strict) == ("f", True)
    assert json.loads(request.tools[0].parameters) == schema
    assert request.tool_choice.mode == inference_pb2.ToolChoice.MODE_NAMED
    assert request.tool_choice.name == "f"
    assert request.HasField("parallel_tool_calls")
    assert request.HasField("separate_reasoning")
    assert json.loads(request.chat_template_kwargs) == {
        "enable_thinking": False, "reasoning_effort": "low",
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["none", "auto", "required"])
def test_tool_choice_modes(mode: str) -> None:
    found = chatted(tool_choice=mode).tool_choice.mode
    assert inference_pb2.ToolChoice.Mode.Name(found) == f"MODE_{mode.upper()}"
    assert not chatted().HasField("tool_choice")
    assert not chatted().HasField("parallel_tool_calls")


def test_chat_lengths_and_logprobs() -> None:
    assert not chatted().sampling_params.HasField("max_tokens")
    assert chatted(max_tokens=3).sampling_params.max_tokens == 3
    assert chatted(max_tokens=3, max_completion_tokens=4).sampling_params.max_tokens == 4
    assert chatted(logprobs=True).sampling_params.logprobs == 0
    assert chatted(logprobs=True).sampling_params.HasField("logprobs")
    assert chatted(logprobs=True, top_logprobs=3).sampling_params.logprobs == 3
    assert not chatted(logprobs=False).sampling_params.HasField("logprobs")
    assert refused(chatted, top_logprobs=3).field == "top_logprobs"
    assert refused(chatted, max_completion_tokens=-1).field == "max_completion_tokens"
    assert refused(chatted, chat_template="{{ x }}").field == "chat_template"


# ------------------------------------------------------------------------------------- structured

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def form(**body: Any) -> common_pb2.StructuredOutput:
    completed = completion(**body)[0].sampling_params.structured_output
    assert completed == chatted(**body).sampling_params.structured_output
    return completed


def test_each_way_to_ask_for_a_form() -> None:
    wrapped = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
    }
    schemas: list[Body] = [
        {"response_format": wrapped}, {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"guided_json": SCHEMA},
    ]  # fmt: skip
    for body in schemas:
        assert json.loads(form(**body).json_schema) == SCHEMA
    assert form(response_format={"type": "json_object"}).json_object
    assert form(structured_outputs={"json_object": True}).json_object
    assert form(guided_regex="a+").regex == form(structured_outputs={"regex": "a+"}).regex == "a+"
    assert form(guided_choice=["a", "b"]).choice.texts == ["a", "b"]
    assert form(structured_outputs={"choice": ["a", "b"]}).choice.texts == ["a", "b"]
    assert form(guided_grammar="g").grammar == form(structured_outputs={"grammar": "g"}).grammar
    tag = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    whole = {"type": "structural_tag", **tag}
    for told in (json.dumps(whole), whole):
        made = form(structured_outputs={"structural_tag": told})
        assert json.loads(made.structural_tag) == whole
    assert json.loads(form(response_format=whole).structural_tag) == whole
    spaced = form(guided_json=SCHEMA, guided_whitespace_pattern=" ?")
    assert spaced.whitespace_pattern == " ?"
    assert form(
        structured_outputs={"json": {}, "disable_any_whitespace": True}
    ).disable_any_whitespace


def test_no_form() -> None:
    for body in ({}, {"response_format": {"type": "text"}}, {"response_format": None}):
        assert not completion(**body)[0].sampling_params.HasField("structured_output")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"rex": "a"}}, "structured_outputs.rex"),
        ({"guided_choice": "a"}, "guided_choice"),
    ],
)
def test_forms_that_are_none(body: dict[str, Any], field: str) -> None:
    assert refused(completion, **body).field == field


def test_errors_of_the_core_name_the_fields_of_this_api() -> None:
    def named(field: str, names: Any) -> str | None:
        return http_error(InvalidRequest(field, "is bad"), names).param

    fields = parsed(CompletionRequest, json.dumps({"prompt": "x", "guided_regex": "("}).encode())
    names = completions.requests_of(fields, "")[1]
    assert named("sampling_params.temperature", names) == "temperature"
    assert named("sampling_params.structured_output.regex", names) == "guided_regex"
    assert named("token_ids.ids[3]", names) == "prompt[3]"
    assert named("text", names) == "prompt"
    assert named("tenant", names) == "user"
    assert named("sampling_params.stop[2]", names) == "stop[2]"
    body = {"messages": [USER], "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 9}
    names = chat.request_of(parsed(ChatCompletionRequest, json.dumps(body).encode()), "")[1]
    assert named("sampling_params.max_tokens", names) == "max_completion_tokens"
    assert named("sampling_params.logprobs", names) == "top_logprobs"
    assert named("tools[2].parameters", names) == "tools[2].function.parameters"
    assert named("tools", names) == "tools"
    assert named("messages[1].role", names) == "messages[1].role"


# -------------------------------------------------------------------------------------- responses


def test_responses_input_becomes_messages() -> None:
    request = responded(
        instructions="be brief", max_output_tokens=5, temperature=0.5, seed=3,
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        tools=[{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        reasoning={"effort": "high"},
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "sun"},
            {"type": "message", "role": "assistant",
             "content": [{"type": "output_text", "text": "it is sunny"}]},
        ],
    )  # fmt: skip
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "be brief"), ("user", "hi"), ("assistant", ""), ("tool", "sun"),
        ("assistant", "it is sunny"),
    ]  # fmt: skip
    assert request.messages[2].reasoning == "hm"
    assert [call.id for call in request.messages[2].tool_calls] == ["c", "d"]
    assert request.messages[3].tool_call_id == "c"
    assert request.sampling_params.max_tokens == 5
    assert json.loads(request.sampling_params.structured_output.json_schema) == SCHEMA
    assert (request.tools[0].name, request.tool_choice.name) == ("f", "f")
    assert json.loads(request.chat_template_kwargs) == {"reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)  # fmt: skip
def test_responses_refuses_by_name(body: dict[str, Any], field: str) -> None:
    assert refused(responded, **body).field == field


def test_a_body_of_very_many_parts_is_refused_before_it_is_parsed() -> None:
    for prompt, most in ((b"{},", 60_000), (b'"a",', 200_000), (b"1,", 2_500_000)):
        with pytest.raises(InvalidRequest, match="too many parts") as caught:
            parsed(CompletionRequest, b'{"prompt":"a","x":[' + prompt * most + b"1]}")
        assert caught.value.field == "body"
    # What stands in a text is no part, escaped quotes or not.
    for text in ("[{,}]" * 1_000_000, '"[{,' * 500_000, "\\" * 500_001 + "[{,"):
        assert parsed(CompletionRequest, json.dumps({"prompt": text}).encode()).prompt == text
    ids = [7] * 1_000_000
    assert parsed(CompletionRequest, json.dumps({"prompt": ids}).encode()).prompt == ids


def test_what_the_grammar_of_calls_cannot_keep_is_a_matter_of_the_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [USER], "tools": [tool], "tool_choice": "required"}
    names = chat.request_of(parsed(ChatCompletionRequest, json.dumps(body).encode()), "")[1]
    error = InvalidRequest("sampling_params.structured_output", "leaves no token")
    assert http_error(error, names).param == "tools"


def test_the_name_of_a_tool_that_there_is_not_is_where_it_stands() -> None:
    names = chat.request_of(parsed(ChatCompletionRequest, b'{"messages":[]}'), "")[1]
    for field, param in (
        ("tool_choice.name", "tool_choice.function.name"), ("tool_choice", "tool_choice"),
        ("tools[2].name", "tools[2].function.name"),
    ):  # fmt: skip
        assert http_error(InvalidRequest(field, "no"), names).param == param
