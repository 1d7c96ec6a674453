"""Chats over gRPC, joined."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from triptych.v1 import common_pb2, inference_pb2

NONE = inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_NONE)
AUTO = inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_AUTO)
REQUIRED = inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_REQUIRED)

CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = inference_pb2.Tool(
    name="get_weather", description="The weather", parameters=json.dumps(CITY_SCHEMA)
)
NOW = inference_pb2.Tool(name="now", description="The time of day")


def named(name: str) -> inference_pb2.ToolChoice:
    return inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_NAMED, name=name)


def user(content: str) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(role="user", content=content)


def hermes_call(name: str, arguments: object) -> str:
    """A call as Hermes' and Qwen's models write it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def chat_request(
    *tools: inference_pb2.Tool,
    content: str = "hi",
    choice: inference_pb2.ToolChoice | None = None,
    **params: object,
) -> inference_pb2.ChatRequest:
    request = inference_pb2.ChatRequest(
        messages=[user(content)],
        tools=tools,
        sampling_params=common_pb2.SamplingParams(**params),  # type: ignore[arg-type]  # test input
    )
    if choice is not None:
        request.tool_choice.CopyFrom(choice)
    return request


@dataclass
class Called:
    """A call, its pieces joined."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Turn:
    """One choice's answer, joined; checks what a stream may hold as it grows."""

    text: str = ""
    reasoning: str = ""
    calls: list[Called] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: int = 0
    finish: str = ""
    stop_string: str = ""

    def add(self, response: inference_pb2.ChatResponse) -> None:
        assert not self.finish, "nothing follows the last response"
        self.text += response.text
        self.reasoning += response.reasoning
        self.ids += response.token_ids
        self.logprobs += len(response.logprobs)
        for delta in response.tool_calls:
            if delta.index == len(self.calls):
                assert delta.id, "the first piece has an id"
                assert delta.name, "and a name"
                self.calls.append(Called(delta.id, delta.name))
            else:
                assert delta.index == len(self.calls) - 1, "calls come one after the other"
                assert not delta.id, "id and name come once"
                assert not delta.name, "id and name come once"
            self.calls[delta.index].arguments += delta.arguments
        if response.finish_reason:
            name = common_pb2.FinishReason.Name(response.finish_reason)
            self.finish = name.removeprefix("FINISH_REASON_")
            self.stop_string = response.stop_string

    def called(self) -> list[tuple[str, object]]:
        """Names with decoded arguments."""
        return [(each.name, json.loads(each.arguments)) for each in self.calls]


def joined(responses: Iterable[inference_pb2.ChatResponse]) -> list[Turn]:
    """The choices of an answer."""
    turns: dict[int, Turn] = {}
    for response in responses:
        turns.setdefault(response.index, Turn()).add(response)
    return [turns[index] for index in sorted(turns)]
