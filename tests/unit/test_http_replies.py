"""gRPC's responses as the answers of the HTTP API: tools, thoughts, logprobs, Responses events."""

import json
from typing import Any

import pytest

from http_bench import data_of, events
from triptych.engine_core.errors import (
    DeadlinePassed,
    DuplicateId,
    FatalRequest,
    InvalidRequest,
    NotFinite,
    NotSupported,
    QueueFull,
    RequestError,
    SlowReader,
    TooLong,
    Unavailable,
    UnknownModel,
)
from triptych.services.tokenizer.openai_http.body import parsed
from triptych.services.tokenizer.openai_http.chat import ChatCompletionRequest, ChatReply
from triptych.services.tokenizer.openai_http.completions import CompletionReply, CompletionRequest
from triptych.services.tokenizer.openai_http.errors import http_error
from triptych.services.tokenizer.openai_http.responses import ResponsesRequest
from triptych.services.tokenizer.openai_http.responses_reply import ResponsesReply
from triptych.v1 import common_pb2, inference_pb2

IDENTITY: dict[str, object] = {"id": "x-1", "created": 5, "model": "m"}
Response = inference_pb2.ChatResponse
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def delta(**fields: Any) -> inference_pb2.ToolCallDelta:
    return inference_pb2.ToolCallDelta(**fields)


CALLING = [
    Response(reasoning="so "),
    Response(reasoning="then"),
    Response(text="I ask."),
    Response(tool_calls=[delta(index=0, id="c0", name="f", arguments='{"a"')]),
    Response(tool_calls=[delta(index=0, arguments=":1}"),
                         delta(index=1, id="c1", name="g", arguments="{}")]),
    Response(
        finish_reason=common_pb2.FINISH_REASON_TOOL_CALLS,
        usage=common_pb2.Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=1),
    ),
]  # fmt: skip
PLAIN = [
    Response(text="a"),
    Response(
        text="b", stop_string="b", finish_reason=STOP, usage=common_pb2.Usage(prompt_tokens=1)
    ),
]


def chat_answer(responses: list[Response], **body: Any) -> str:
    body = {"messages": [], **body}
    reply = ChatReply(parsed(ChatCompletionRequest, json.dumps(body).encode()), IDENTITY)
    return (b"".join(reply.add(0, each) for each in responses) + reply.end()).decode()


def responses_answer(responses: list[Response], **body: Any) -> str:
    body = {"input": "x", **body}
    reply = ResponsesReply(parsed(ResponsesRequest, json.dumps(body).encode()), IDENTITY)
    return (b"".join(reply.add(0, each) for each in responses) + reply.end()).decode()


def test_calls_and_thoughts_in_a_whole_answer() -> None:
    choice = json.loads(chat_answer(CALLING))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I ask.", "so then")
    assert message["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    only = json.loads(chat_answer(CALLING[3:]))["choices"][0]["message"]
    assert only["content"] is None
    assert "reasoning_content" not in only


def test_calls_and_thoughts_in_a_stream() -> None:
    chunks = events(chat_answer(CALLING, stream=True))
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "reasoning_content": "so "}
    assert deltas[1] == {"reasoning_content": "then"}
    assert deltas[2] == {"content": "I ask."}
    calls = [call for each in deltas for call in each.get("tool_calls", ())]
    assert calls == [
        {"index": 0, "id": "c0", "type": "function",
         "function": {"name": "f", "arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ":1}"}},
        {"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]  # fmt: skip
    assert deltas[-1] == {}
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_the_short_way_to_an_event_writes_what_the_long_one_would() -> None:
    """Plain pieces of text are not made from objects; they must look as if they were."""
    text = 'quote " and \\ and \n and é世 \u2028 '
    for usage in (False, True):
        options = {"stream": True, "stream_options": {"include_usage": usage}}
        chunks = events(chat_answer([PLAIN[0], Response(text=text), PLAIN[1]], **options))
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        whole: dict[str, object] = {
            "object": "chat.completion.chunk", **IDENTITY, "choices": [choice],
        }  # fmt: skip
        assert chunks[1] == whole | ({"usage": None} if usage else {})
        body = json.dumps({"prompt": "x", **options}).encode()
        reply = CompletionReply(parsed(CompletionRequest, body), IDENTITY)
        made = data_of(reply.add(2, inference_pb2.GenerateResponse(text=text)).decode())
        choice = {"index": 2, "text": text, "logprobs": None, "finish_reason": None}
        whole = {"object": "text_completion", **IDENTITY, "choices": [choice]}
        assert made == [whole | ({"usage": None} if usage else {})]


def test_a_stop_string_is_the_stop_reason() -> None:
    assert json.loads(chat_answer(PLAIN))["choices"][0]["stop_reason"] == "b"
    assert events(chat_answer(PLAIN, stream=True))[-1]["choices"][0]["stop_reason"] == "b"
    by_id = [Response(stop_token_id=7, finish_reason=STOP)]
    assert json.loads(chat_answer(by_id))["choices"][0]["stop_reason"] == 7


def test_prompt_logprobs_and_those_of_a_vocabulary() -> None:
    row = common_pb2.TokenLogprob(token_id=65, token=b"A", text="A", logprob=-1, rank=2)
    row.top.add(token_id=66, token=b"B", text="B", logprob=-0.5)
    first = common_pb2.TokenLogprob(token_id=64, token=b"@", text="@")
    response = inference_pb2.GenerateResponse(prompt_logprobs=[first, row], finish_reason=LENGTH)
    body = json.dumps({"prompt": "x", "prompt_logprobs": 1, "logprobs": -1}).encode()
    reply = CompletionReply(parsed(CompletionRequest, body), IDENTITY)
    every = common_pb2.TokenLogprob(token_id=1, token=b"\x01", text="\\x01", logprob=-0.25)
    every.vocabulary_logprobs.extend([float("-inf"), -0.25])
    reply.add(0, inference_pb2.GenerateResponse(logprobs=[every]))
    reply.add(0, response)
    choice = json.loads(reply.end())["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {"66": {"logprob": -0.5, "rank": 1, "decoded_token": "B"},
         "65": {"logprob": -1.0, "rank": 2, "decoded_token": "A"}},
    ]  # fmt: skip
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:0": -9999.0, "token_id:1": -0.25}]


def test_the_events_of_a_response_build_it() -> None:
    whole = json.loads(responses_answer(CALLING))
    assert [item["type"] for item in whole["output"]] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert whole["output"][2]["arguments"] == '{"a":1}'
    assert whole["usage"]["total_tokens"] == 7
    made = data_of(responses_answer(CALLING, stream=True))
    assert [each["sequence_number"] for each in made] == list(range(len(made)))
    assert [made[0]["type"], made[1]["type"], made[-1]["type"]] == [
        "response.created", "response.in_progress", "response.completed",
    ]  # fmt: skip

    def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in item.items() if key != "id"} for item in items]

    streamed = made[-1]["response"]
    assert without_ids(streamed["output"]) == without_ids(whole["output"])
    done = [each["item"] for each in made if each["type"] == "response.output_item.done"]
    assert done == streamed["output"]
    for index, item in enumerate(streamed["output"]):
        pieces = [each["delta"] for each in made
                  if each["type"].endswith(".delta") and each["output_index"] == index]  # fmt: skip
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(pieces) == text


def test_a_response_that_is_cut_or_empty() -> None:
    cut = json.loads(responses_answer([Response(text="a", finish_reason=LENGTH)]))
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    empty = json.loads(responses_answer([Response(finish_reason=STOP)]))
    assert empty["output"][0]["content"][0]["text"] == ""
    made = data_of(responses_answer([Response(finish_reason=LENGTH)], stream=True))
    assert made[-1]["type"] == "response.incomplete"


def every_error() -> list[type[RequestError]]:
    found, todo = [], [RequestError]
    while todo:
        found.append(todo.pop())
        todo += found[-1].__subclasses__()
    return [each for each in found if each.__module__ == RequestError.__module__]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("f", "x"), 400, "invalid_value"),
        (TooLong("f", "x"), 400, "context_length_exceeded"),
        (NotSupported("x"), 400, "not_supported"),
        (UnknownModel("x", ("y",)), 404, "model_not_found"),
        (DuplicateId("x"), 409, "duplicate_id"), (QueueFull("x", 1), 429, "queue_full"),
        (SlowReader("x"), 429, "slow_reader"), (Unavailable("x", 2001), 503, "unavailable"),
        (DeadlinePassed("x"), 504, "deadline_passed"), (NotFinite("x"), 500, "request_failed"),
        (FatalRequest("x"), 500, "fatal_request"),
    ],
)  # fmt: skip
def test_the_table_of_errors(error: RequestError, status: int, code: str) -> None:
    made = http_error(error)
    assert (made.status, made.code) == (status, code)
    assert json.loads(made.body())["error"]["message"]
    assert made.headers().get("retry-after") == {429: "1", 503: "3"}.get(
        status if code != "slow_reader" else 0
    )


def test_every_error_of_the_core_has_a_row() -> None:
    rows = {InvalidRequest, TooLong, NotSupported, UnknownModel, DuplicateId, QueueFull, SlowReader,
            Unavailable, DeadlinePassed, NotFinite, FatalRequest}  # fmt: skip
    assert {each.__name__ for each in every_error()} - {each.__name__ for each in rows} == {
        "RequestError", "NoRoom",
    }  # fmt: skip


def test_what_nobody_foresaw_is_told_by_an_id_only(caplog: pytest.LogCaptureFixture) -> None:
    made = http_error(ValueError("secret"))
    assert (made.status, made.code) == (500, "internal_error")
    assert "secret" not in made.message
    assert "internal error" in caplog.text


def test_errors_are_short_and_strict_json() -> None:
    made = http_error(InvalidRequest("f" * 5000, "\ud800" + "x" * 5000))
    found = json.loads(made.body(), parse_constant=lambda _: pytest.fail("no constant"))
    assert len(found["error"]["message"]) <= 1024
    assert len(found["error"]["param"]) <= 128
