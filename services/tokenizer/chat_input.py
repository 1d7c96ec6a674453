"""A chat as clients send it, read into values. Every refusal names the field as on the wire."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.chat_messages import (
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    ChatMessage,
    ChatOptions,
    ChatTool,
    ToolCall,
    check_function_name,
    schema_of,
)
from triptych.services.tokenizer.template_variables import template_variables
from triptych.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class ChatInput:
    """What a prompt is rendered from. `size`: its characters, about."""

    messages: tuple[ChatMessage, ...]
    options: ChatOptions
    size: int

    @property
    def continued(self) -> str:
        """The text that the answer continues."""
        return self.messages[-1].content if self.options.continue_final_message else ""


def chat_input(
    request: inference_pb2.ChatRequest | inference_pb2.TokenizeRequest, *, show_tools: bool = True
) -> ChatInput:
    """Raises InvalidRequest. The messages are checked when they are rendered."""
    tools = tuple(_tools(request.tools))
    options = ChatOptions(
        add_generation_prompt=_opened(request),
        continue_final_message=request.continue_final_message,
        tools=tools if show_tools else (),
        variables=template_variables(request.chat_template_kwargs),
    )
    messages = tuple(map(_message, request.messages))
    if options.continue_final_message:
        _check_continued(messages)
    described = sum(len(each.description) + len(each.parameters) for each in request.tools)
    size = sum(map(_size, messages)) + (described if show_tools else 0)
    return ChatInput(messages, options, size)


def _opened(request: inference_pb2.ChatRequest | inference_pb2.TokenizeRequest) -> bool:
    if not request.HasField("add_generation_prompt"):
        return not request.continue_final_message
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidRequest(
            "continue_final_message", "beside add_generation_prompt, which opens another message"
        )
    return request.add_generation_prompt


def _check_continued(messages: Sequence[ChatMessage]) -> None:
    if messages and messages[-1].tool_calls:
        raise InvalidRequest(
            "continue_final_message", "the last message has tool calls, which nothing continues"
        )


def _message(raw: inference_pb2.ChatMessage) -> ChatMessage:
    calls = tuple(ToolCall(each.id, each.name, each.arguments) for each in raw.tool_calls)
    return ChatMessage(
        raw.role, raw.content, raw.name, calls, raw.tool_call_id, raw.reasoning
    )  # fmt: skip


def _tools(tools: Sequence[inference_pb2.Tool]) -> Iterable[ChatTool]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"{len(tools)} tools, at most {MAX_TOOLS}")
    size = sum(each.ByteSize() for each in tools)
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest("tools", f"{size} bytes, more than {MAX_TOOLS_BYTES}")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        check_function_name(tool.name, f"tools[{index}].name")
        if tool.name in names:
            raise InvalidRequest(f"tools[{index}].name", f"{tool.name} is the name of two tools")
        names.add(tool.name)
        schema = schema_of(tool.parameters, f"tools[{index}].parameters")
        yield ChatTool(tool.name, tool.description, schema)


def _size(message: ChatMessage) -> int:
    calls = sum(len(each.id + each.name) + len(each.arguments) for each in message.tool_calls)
    fixed = len(message.role + message.name + message.tool_call_id)
    return fixed + len(message.content) + len(message.reasoning) + calls
