"""Chat messages and tools of OpenAI's API as those of gRPC.

Content is a text or a list of parts, the same for every role; text parts are joined, other kinds
refused by name. null and absent content are empty.
"""

from typing import Annotated, Literal

from pydantic import Field, JsonValue
from pydantic_core import to_json

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.openai_http.body import Body
from triptych.v1 import inference_pb2

_TEXT_PARTS = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal",
    "thinking": "thinking", "reasoning_text": "text", "summary_text": "text",
}  # fmt: skip


class Part(Body):
    """A part of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


Content = str | Annotated[list[str | Part], Field(fail_fast=True)]


class CalledFunction(Body):
    """What an earlier turn called."""

    name: str
    arguments: str | dict[str, JsonValue] | None = None


class Call(Body):
    """A tool call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Body):
    """One turn."""

    role: str
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(default=None, description="what the assistant thought")
    reasoning: str | None = None


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | bool | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionTool(Body):
    """The same, as the Responses API has it."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | bool | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


Messages = Annotated[list[Message], Field(fail_fast=True)]
Tools = Annotated[list[Tool], Field(fail_fast=True)]

_MODES = {
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "auto": inference_pb2.ToolChoice.MODE_AUTO,
    "required": inference_pb2.ToolChoice.MODE_REQUIRED,
}


def text_of(content: Content | None, field: str) -> str:
    """The joined text. Raises InvalidRequest for a part that is none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{field}[{index}]") for index, part in enumerate(content))


def message_of(message: Message, field: str) -> inference_pb2.ChatMessage:
    """One turn. Raises InvalidRequest."""
    turn = inference_pb2.ChatMessage(
        role=message.role,
        content=text_of(message.content, f"{field}.content"),
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )
    for call in message.tool_calls or ():
        turn.tool_calls.add(
            id=call.id or "",
            name=call.function.name,
            arguments=_arguments(call.function.arguments),
        )
    return turn


def tool_of(function: Function | FunctionTool) -> inference_pb2.Tool:
    """One tool."""
    tool = inference_pb2.Tool(name=function.name, description=function.description or "")
    if function.parameters is not None:
        tool.parameters = to_json(function.parameters, inf_nan_mode="strings").decode()
    if function.strict is not None:
        tool.strict = function.strict
    return tool


def fill_choice(
    choice: str | NamedTool | NamedFunction | None, request: inference_pb2.ChatRequest
) -> None:
    """Set tool_choice. null leaves it to the service: auto where there are tools."""
    if choice is None:
        return
    if isinstance(choice, str):
        request.tool_choice.mode = _MODES[choice]
        return
    request.tool_choice.mode = inference_pb2.ToolChoice.MODE_NAMED
    request.tool_choice.name = (
        choice.function.name if isinstance(choice, NamedTool) else choice.name
    )


def _part_text(part: str | Part, field: str) -> str:
    if isinstance(part, str):
        return part
    name = _TEXT_PARTS.get(part.type)
    if name is None:
        raise InvalidRequest(f"{field}.type", f"{part.type!r:.40} is not supported, text only")
    text = getattr(part, name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.{name}", "is missing")
    return text


def _arguments(arguments: str | dict[str, JsonValue] | None) -> str:
    if isinstance(arguments, str):
        return arguments
    return to_json(arguments or {}, inf_nan_mode="strings").decode()
