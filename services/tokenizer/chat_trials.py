"""Chats that a template is tried on when the process starts, and what can be learned from them."""

from dataclasses import dataclass

from triptych.services.tokenizer.chat_messages import (
    ChatMessage,
    ChatOptions,
    ChatTool,
    ToolCall,
    TurnForm,
)


@dataclass(frozen=True, slots=True)
class Trial:
    """A chat that is rendered at start-up, to learn what the template does."""

    messages: tuple[ChatMessage, ...]
    options: ChatOptions


def _trial(*roles: str) -> Trial:
    return Trial(tuple(ChatMessage(role, "words") for role in roles), ChatOptions())


TRIALS = (
    _trial("user"),
    _trial("system", "user", "assistant", "user"),
    _trial("user", "assistant", "tool"),
)
_ARGUMENT = "argumentname"
_CALL = ToolCall("callident", "functionname", f'{{"{_ARGUMENT}": "itsvalue"}}')
_CALLED = (
    ChatMessage("user", "words"),
    ChatMessage("assistant", "", tool_calls=(_CALL,)),
    ChatMessage("tool", "result", name=_CALL.name, tool_call_id=_CALL.id),
)
_TOOL = ChatTool(  # another one, so that the call is not found in what describes the tools
    "toolname",
    "what it does",
    {
        "type": "object",
        "properties": {"its_parameter": {"type": "string", "description": "what it is"}},
        "required": ["its_parameter"],
    },
)
TRIALS_OF_CALLS = (
    Trial(_CALLED, ChatOptions(tools=(_TOOL,))),
    Trial(_CALLED[:2], ChatOptions(tools=(_TOOL,))),
)
# OpenAI's first. Some templates write an empty turn beside the calls where the content is not none.
FORMS = (
    TurnForm(none_for_no_content=True),
    TurnForm(),
    TurnForm(arguments_as_text=True, none_for_no_content=True),
    TurnForm(arguments_as_text=True),
)


def shows_the_call(text: str) -> bool:
    """Whether a rendered trial has the call whole: its name, and its arguments as JSON or as the
    template's own notation, not as Python would write an object or none."""
    if f"'{_ARGUMENT}'" in text or "None" in text:
        return False
    return _CALL.name in text and _ARGUMENT in text
