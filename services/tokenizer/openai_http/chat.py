"""/v1/chat/completions: its request as a ChatRequest, and the responses to that as its answer."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, JsonValue
from pydantic_core import to_json

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.openai_http.logprobs import ChatLogprobs, Json, prompt_logprobs
from triptych.services.tokenizer.openai_http.messages import (
    Messages,
    NamedTool,
    Tools,
    fill_choice,
    message_of,
    tool_of,
)
from triptych.services.tokenizer.openai_http.sampling import (
    NAMES,
    SamplingFields,
    check_stream,
    fill_routing,
    fill_sampling,
    put,
)
from triptych.services.tokenizer.openai_http.sse import DONE, event
from triptych.services.tokenizer.openai_http.structured import StructuredFields, fill_structured
from triptych.services.tokenizer.openai_http.usage import UsageSum, finish_reason, stop_reason
from triptych.v1 import inference_pb2

Response = inference_pb2.ChatResponse


class ChatCompletionRequest(SamplingFields, StructuredFields):
    """The assistant's next turn of a conversation."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "audio": "answers are text",
        "chat_template": "the model's own template is used",
        "documents": "documents are not supported; put them into a message",
        "echo": "a chat is not echoed",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "truncate_prompt_tokens": "prompts are never cut; send a shorter one",
        "web_search_options": "this engine does not search",
    }

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(default=None, description="wins over max_tokens")
    best_of: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    separate_reasoning: bool | None = Field(
        default=None, description="deliver what the model thinks as reasoning_content"
    )
    reasoning_effort: str | None = Field(default=None, description="for templates that know it")


def request_of(
    fields: ChatCompletionRequest, label: str
) -> tuple[inference_pb2.ChatRequest, Mapping[str, str]]:
    """The ChatRequest, and what errors call its fields. Raises InvalidRequest."""
    check_stream(fields)
    request = inference_pb2.ChatRequest()
    params = request.sampling_params
    fill_sampling(fields, params)
    most = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    put(params, "max_tokens", getattr(fields, most), most)
    if not fields.use_beam_search:
        put(params, "best_of", fields.best_of)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InvalidRequest("top_logprobs", "only with logprobs true")
    if fields.logprobs:
        put(params, "logprobs", fields.top_logprobs or 0, "top_logprobs")
    form = fill_structured(fields, params)
    fill_routing(fields, request, label)
    for index, message in enumerate(fields.messages):
        request.messages.append(message_of(message, f"messages[{index}]"))
    request.tools.extend(tool_of(each.function) for each in fields.tools or ())
    fill_choice(fields.tool_choice, request)
    for name in (
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
        "separate_reasoning",
    ):
        put(request, name, getattr(fields, name))
    request.chat_template_kwargs = _template_kwargs(fields)
    names = {
        **NAMES, "max_tokens": most, "logprobs": "top_logprobs",
        "structured_output": form or "tools",  # without one of its own, that of the calls
        "tools": "tools[].function.", "tool_choice.name": "tool_choice.function.name",
    }  # fmt: skip
    return request, names


class ChatReply:
    """The answer of one request: whole, or (`stream`) as events."""

    def __init__(self, fields: ChatCompletionRequest, identity: Json) -> None:
        """`identity`: id, created and model."""
        self._fields = fields
        self._usage = UsageSum()
        self._counted = bool(fields.stream_options and fields.stream_options.include_usage)
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        self._identity = {"object": kind, **identity}
        self._choices: dict[int, _Choice] = {}
        self._begun: set[int] = set()
        self._logprobs = ChatLogprobs(as_ids=bool(fields.return_tokens_as_token_ids))
        self._head = b"data: " + to_json({**self._identity, "choices": []})[:-2] + b'{"index":'
        self._tail = b'},"logprobs":null,"finish_reason":null}]'
        self._tail += b',"usage":null}\n\n' if self._counted else b"}\n\n"

    def add(self, _prompt: int, response: Response) -> bytes:
        """Take the next response; the events that it makes."""
        self._usage.add(response.usage)
        if not self._fields.stream:
            self._choice(response.index).add(response)
            return b""
        plain = not (response.finish_reason or response.logprobs or response.reasoning
                     or response.tool_calls or self._fields.return_token_ids)  # fmt: skip
        if plain and response.index in self._begun:
            if not response.text:
                return b""
            return b"%s%d%s%s%s" % (
                self._head, response.index, b',"delta":{"content":', to_json(response.text),
                self._tail,
            )  # fmt: skip
        return self._full_events(response)

    def end(self) -> bytes:
        """The whole answer, or the end of the stream."""
        if self._fields.stream:
            if not self._counted:
                return DONE
            return event({**self._identity, "choices": [], "usage": self._usage.as_json()}) + DONE
        choices = [self._choices[index].as_json() for index in sorted(self._choices)]
        answer: Json = {**self._identity, "choices": choices, "usage": self._usage.as_json()}
        if self._fields.prompt_logprobs is not None:
            rows = [row for each in self._choices.values() for row in each.prompt_logprobs]
            answer["prompt_logprobs"] = rows or None
        return to_json(answer)

    def _full_events(self, response: Response) -> bytes:
        """The delta, unless it is empty, then the end with an empty one."""
        delta = self._delta(response)
        events = b""
        if delta or response.logprobs or self._fields.return_token_ids:
            choice: Json = {"index": response.index, "delta": delta, "logprobs": None}
            if response.logprobs:
                choice["logprobs"] = {"content": self._logprobs.rows(response.logprobs)}
            choice["finish_reason"] = None
            if self._fields.return_token_ids:
                choice["token_ids"] = list(response.token_ids)
            events += self._event(choice)
        if response.finish_reason:
            end: Json = {"index": response.index, "delta": {}, "logprobs": None}
            end["finish_reason"] = finish_reason(response)
            end["stop_reason"] = stop_reason(response)
            events += self._event(end)
        return events

    def _delta(self, response: Response) -> Json:
        delta: Json = {}
        if response.index not in self._begun:
            self._begun.add(response.index)
            delta = {"role": "assistant", "content": ""}
        if response.reasoning:
            delta["reasoning_content"] = response.reasoning
        if response.text:
            delta["content"] = response.text
        if response.tool_calls:
            delta["tool_calls"] = [_call_delta(each) for each in response.tool_calls]
        return delta

    def _event(self, choice: Json) -> bytes:
        data = {**self._identity, "choices": [choice]}
        return event(data | {"usage": None} if self._counted else data)

    def _choice(self, index: int) -> "_Choice":
        if index not in self._choices:
            self._choices[index] = _Choice(index, self._fields, self._logprobs)
        return self._choices[index]


class _Choice:
    """One choice, as it grows."""

    def __init__(self, index: int, fields: ChatCompletionRequest, logprobs: ChatLogprobs) -> None:
        self._index = index
        self._fields = fields
        self._shape = logprobs
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls = Calls()
        self._token_ids: list[int] = []
        self._logged: list[object] = []
        self.prompt_logprobs: list[Json | None] = []
        self._last = Response()

    def add(self, response: Response) -> None:
        self._text.append(response.text)
        self._reasoning.append(response.reasoning)
        for each in response.tool_calls:
            self._calls.add(each)
        if self._fields.return_token_ids:
            self._token_ids.extend(response.token_ids)
        self._logged.extend(self._shape.rows(response.logprobs))
        self.prompt_logprobs.extend(prompt_logprobs(response.prompt_logprobs))
        self._last = response

    def as_json(self) -> Json:
        text, calls = "".join(self._text), self._calls.as_json()
        message: Json = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice: Json = {
            "index": self._index,
            "message": message,
            "logprobs": {"content": self._logged} if self._fields.logprobs else None,
            "finish_reason": finish_reason(self._last),
            "stop_reason": stop_reason(self._last),
        }
        if self._fields.return_token_ids:
            choice["token_ids"] = self._token_ids
        return choice


class Calls:
    """Tool calls, put together from their pieces."""

    def __init__(self) -> None:
        self._calls: dict[int, inference_pb2.ToolCall] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, delta: inference_pb2.ToolCallDelta) -> None:
        """The next piece of one."""
        if delta.index not in self._calls:
            self._calls[delta.index] = inference_pb2.ToolCall(id=delta.id, name=delta.name)
            self._arguments[delta.index] = []
        self._arguments[delta.index].append(delta.arguments)

    def as_json(self) -> list[Json]:
        """In their order."""
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(self._arguments[index])},
            }
            for index, call in sorted(self._calls.items())
        ]


def _call_delta(delta: inference_pb2.ToolCallDelta) -> Json:
    if not delta.id:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.index,
        "id": delta.id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }


def _template_kwargs(fields: ChatCompletionRequest) -> str:
    kwargs = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", fields.reasoning_effort)
    return to_json(kwargs, inf_nan_mode="strings").decode() if kwargs else ""
