"""The answers of chats: reasoning, tool calls and content told apart while they stream."""

from triptych.services.tokenizer.chat_output.answer_form import answer_form
from triptych.services.tokenizer.chat_output.deltas import (
    Answer,
    Call,
    CallDelta,
    Content,
    Delta,
    Reasoning,
    joined,
)
from triptych.services.tokenizer.chat_output.forms import kept_schemas, tool_form
from triptych.services.tokenizer.chat_output.guesses import guess_parsers
from triptych.services.tokenizer.chat_output.notations import (
    parser_markers,
    reasoning_parser_names,
    tool_parser_names,
)
from triptych.services.tokenizer.chat_output.parser import ChatParser, new_parser
from triptych.services.tokenizer.chat_output.tools import ChoiceMode, ToolChoice, ToolSpec

__all__ = [
    "Answer",
    "Call",
    "CallDelta",
    "ChatParser",
    "ChoiceMode",
    "Content",
    "Delta",
    "Reasoning",
    "ToolChoice",
    "ToolSpec",
    "answer_form",
    "guess_parsers",
    "joined",
    "kept_schemas",
    "new_parser",
    "parser_markers",
    "reasoning_parser_names",
    "tool_form",
    "tool_parser_names",
]
