"""A request's choice of tools as a form of its answer, in the notation that the parser reads."""

import json
from collections.abc import Iterator, Mapping, Sequence

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.chat_output.call_formats import CallTexts, calls_format
from triptych.services.tokenizer.chat_output.notations import notation_named
from triptych.services.tokenizer.chat_output.thought_formats import behind_thought
from triptych.services.tokenizer.chat_output.tools import ChoiceMode, ToolChoice, ToolSpec
from triptych.services.tokenizer.structured_output.refusal import Refused
from triptych.services.tokenizer.structured_output.strict_json import Json, parse_json, written_json
from triptych.v1 import common_pb2

_NO_ARGUMENTS = '{"type": "object", "properties": {}, "additionalProperties": false}'
_ANY: Mapping[str, Json] = {"type": "object"}


def tool_form(
    tools_parser: str,
    tools: Sequence[ToolSpec],
    choice: ToolChoice,
    parallel: bool,
    *,
    reasoning_parser: str | None = None,
    prompt_tail: str = "",
    continued: str = "",
) -> common_pb2.StructuredOutput | None:
    """The form that keeps the choice; None where there is nothing to keep.

    REQUIRED and NAMED: calls and nothing else, NAMED exactly one. AUTO, where a tool is strict or
    not `parallel`: any text, but what begins like a call is one, and only of tools that there are;
    the arguments of strict tools match their schemas, those of others are objects. With a
    reasoning parser, a thought may, or must, come first, as `new_parser` reads it.

    Raises InvalidRequest naming the tool's field for a schema that is none (see `kept_schemas` for
    those that cannot be kept), and ValueError for a parser that there is not.
    """
    notation_named(tools_parser)
    if choice.mode is ChoiceMode.NONE or not tools:
        return None
    needed = choice.mode is not ChoiceMode.AUTO
    if not needed and parallel and not any(tool.strict for tool in tools):
        return None
    callable_tools = [
        (tool.name, _arguments(tool, index) if needed or tool.strict else dict(_ANY))
        for index, tool in _callable(tools, choice)
    ]
    if not callable_tools:
        raise InvalidRequest("tool_choice.name", f"there is no tool {choice.name!r:.80}")
    only_one = choice.mode is ChoiceMode.NAMED or not parallel
    wanted = calls_format(tools_parser, CallTexts(callable_tools, only_one), needed=needed)
    if reasoning_parser is not None:
        wanted = behind_thought(wanted, reasoning_parser, prompt_tail, continued) or wanted
    document = {"type": "structural_tag", "format": wanted}
    return common_pb2.StructuredOutput(structural_tag=json.dumps(document, ensure_ascii=False))


def kept_schemas(
    tools: Sequence[ToolSpec], choice: ToolChoice
) -> Iterator[tuple[str, common_pb2.StructuredOutput]]:
    """The schemas that `tool_form` keeps, each as a form of its own, by the field that has it: to
    find the one that is refused. Raises InvalidRequest."""
    for index, tool in _callable(tools, choice):
        if tool.strict or choice.mode is not ChoiceMode.AUTO:
            schema = written_json(_arguments(tool, index))
            yield f"tools[{index}].parameters", common_pb2.StructuredOutput(json_schema=schema)


def _callable(tools: Sequence[ToolSpec], choice: ToolChoice) -> Iterator[tuple[int, ToolSpec]]:
    """The tools that the choice leaves, by their places."""
    for index, tool in enumerate(tools):
        if choice.mode is not ChoiceMode.NAMED or tool.name == choice.name:
            yield index, tool


def _arguments(tool: ToolSpec, index: int) -> dict[str, Json]:
    """The schema of a tool's arguments, an object. Whether it can be kept is the checker's to say:
    that takes time. Raises InvalidRequest."""
    try:
        schema = parse_json(tool.parameters or _NO_ARGUMENTS)
        if not isinstance(schema, dict) or schema.setdefault("type", "object") != "object":
            raise Refused('it must be a schema of type "object"')
    except Refused as refused:
        raise InvalidRequest(f"tools[{index}].parameters", str(refused)) from refused
    return schema
