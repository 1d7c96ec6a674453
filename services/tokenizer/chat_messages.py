"""A chat as values, checked, and as the variables that its template sees.

The shapes are OpenAI's, as `apply_chat_template` has them: a tool is {"type": "function",
"function": {...}}, the arguments of a call are an object. Where templates differ in what they take
(the arguments as text, no content as none), the form says so.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.bounded_json import Json, JsonBounds, NoJson, read_json

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128
"""Of one message."""
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 20
"""Together. They are read on the event loop."""
MAX_ID_BYTES = 256

FUNCTION_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SCHEMA_BOUNDS = JsonBounds(256 << 10, 96)
_ARGUMENTS_BOUNDS = JsonBounds(1 << 20, 96)  # no context holds more; parsing holds the loop


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant's turn made. `arguments` is JSON text as a rule."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. A template sees what is empty of the last four not at all."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ChatTool:
    """A function that the model may call. `parameters`: the schema, an object."""

    name: str
    description: str
    parameters: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What is rendered beside the messages. `variables` are checked already."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: tuple[ChatTool, ...] = ()
    variables: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnForm:
    """What a template takes turns with tool calls as."""

    arguments_as_text: bool = False
    none_for_no_content: bool = False


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidRequest naming the field."""
    if not messages:
        raise InvalidRequest("messages", "is empty; at least 1 message is needed")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"{len(messages)} messages, at most {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        # Roles may become part of a special token, so they are never free text.
        if not _ROLE.fullmatch(message.role):
            raise InvalidRequest(
                f"messages[{index}].role",
                f"{message.role!r:.80} is not 1 to 64 letters, digits or any of _ . -",
            )
        _check_calls(message, f"messages[{index}]")


def _check_calls(message: ChatMessage, field: str) -> None:
    if len(message.tool_call_id.encode()) > MAX_ID_BYTES:
        raise InvalidRequest(f"{field}.tool_call_id", f"more than {MAX_ID_BYTES} bytes")
    if len(message.tool_calls) > MAX_TOOL_CALLS:
        raise InvalidRequest(
            f"{field}.tool_calls", f"{len(message.tool_calls)} calls, at most {MAX_TOOL_CALLS}"
        )
    for index, call in enumerate(message.tool_calls):
        place = f"{field}.tool_calls[{index}]"
        check_function_name(call.name, f"{place}.name")
        if len(call.id.encode()) > MAX_ID_BYTES:
            raise InvalidRequest(f"{place}.id", f"more than {MAX_ID_BYTES} bytes")


def check_function_name(name: str, field: str) -> None:
    """Raises InvalidRequest."""
    if not FUNCTION_NAME.fullmatch(name):
        raise InvalidRequest(field, f"{name!r:.80} is not 1 to 64 letters, digits or any of _ . -")


def schema_of(parameters: str, field: str) -> Mapping[str, Json]:
    """A tool's parameters from their JSON text; nothing means none. Raises InvalidRequest."""
    if not parameters.strip():
        return {"type": "object", "properties": {}}
    try:
        schema = read_json(parameters, _SCHEMA_BOUNDS)
    except NoJson as error:
        raise InvalidRequest(field, str(error)) from error
    if not isinstance(schema, dict):
        raise InvalidRequest(field, "it must be a JSON object")
    return schema


def turn_of(
    message: ChatMessage, form: TurnForm, guarded: Callable[[str], str]
) -> dict[str, object]:
    """What a template sees of a message. `guarded` is applied to every text from outside."""
    turn: dict[str, object] = {"role": message.role, "content": guarded(message.content)}
    if message.name:
        turn["name"] = guarded(message.name)
    if message.tool_calls:
        turn["tool_calls"] = [_call_of(each, form, guarded) for each in message.tool_calls]
        if not message.content and form.none_for_no_content:
            turn["content"] = None
    if message.tool_call_id:
        turn["tool_call_id"] = guarded(message.tool_call_id)
    if message.reasoning:  # gpt-oss's templates know it by the other name
        turn["reasoning_content"] = turn["thinking"] = guarded(message.reasoning)
    return turn


def tool_of(tool: ChatTool, guarded: Callable[[str], str]) -> dict[str, object]:
    """What a template sees of a tool."""
    function: dict[str, object] = {"name": guarded(tool.name)}
    if tool.description:
        function["description"] = guarded(tool.description)
    function["parameters"] = guarded_json(dict(tool.parameters), guarded)
    return {"type": "function", "function": function}


def guarded_json(value: Json, guarded: Callable[[str], str]) -> Json:
    """A value with `guarded` applied to every text in it, names too."""
    match value:
        case str():
            return guarded(value)
        case list():
            return [guarded_json(each, guarded) for each in value]
        case dict():
            return {guarded(name): guarded_json(each, guarded) for name, each in value.items()}
        case _:
            return value


def _call_of(call: ToolCall, form: TurnForm, guarded: Callable[[str], str]) -> dict[str, object]:
    arguments: Json = call.arguments
    if form.arguments_as_text:
        arguments = guarded(call.arguments or "{}")
    else:
        arguments = guarded_json(_decoded(call.arguments), guarded)
    described = {"id": guarded(call.id)} if call.id else {}
    function = {"name": guarded(call.name), "arguments": arguments}
    return {**described, "type": "function", "function": function}


def _decoded(arguments: str) -> Json:
    """As an object; what is no JSON stays as the model wrote it."""
    if not arguments.strip():
        return {}
    try:
        return read_json(arguments, _ARGUMENTS_BOUNDS)
    except NoJson:
        return arguments
