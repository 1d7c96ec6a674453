"""Whether the model may call functions in its answer, and which parsers read the answer.

tool_choice    tools      what happens
none           any        no parser of calls: what the model writes is text
auto           some       calls are read from the text; strict tools are kept by masking
required       some       at least one call, by masking
named          the one    one call of it, by masking
"""

import secrets
from dataclasses import dataclass, field

from triptych.engine_core.errors import InvalidRequest
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.tokenizer.chat_output import (
    ChatParser,
    ChoiceMode,
    ToolChoice,
    ToolSpec,
    guess_parsers,
    new_parser,
    parser_markers,
    reasoning_parser_names,
    tool_parser_names,
)
from triptych.v1 import inference_pb2

AUTO = "auto"
NONE = "none"
_CALL_ID_BYTES = 12
_NO_CHOICE = ToolChoice(ChoiceMode.NONE)
_MASKED = (ChoiceMode.REQUIRED, ChoiceMode.NAMED)
_MODES = {
    inference_pb2.ToolChoice.MODE_NONE: ChoiceMode.NONE,
    inference_pb2.ToolChoice.MODE_AUTO: ChoiceMode.AUTO,
    inference_pb2.ToolChoice.MODE_REQUIRED: ChoiceMode.REQUIRED,
    inference_pb2.ToolChoice.MODE_NAMED: ChoiceMode.NAMED,
}


@dataclass(frozen=True, slots=True)
class ParserNames:
    """Those of the served model."""

    tools: str | None = None
    reasoning: str | None = None

    @property
    def markers(self) -> frozenset[str]:
        """The texts that the parsers must see, though they be special tokens."""
        return parser_markers(self.tools, self.reasoning)


def parsers_of(tools: str, reasoning: str, chat_template: str) -> ParserNames:
    """From the settings; "auto" is what the template says. Raises StartupError."""
    guessed_tools, guessed_reasoning = guess_parsers(chat_template)
    return ParserNames(
        _chosen("tool_call_parser", tools, guessed_tools, tuple(tool_parser_names())),
        _chosen("reasoning_parser", reasoning, guessed_reasoning, tuple(reasoning_parser_names())),
    )


def _chosen(key: str, value: str, guessed: str | None, known: tuple[str, ...]) -> str | None:
    match value:
        case "auto":
            return guessed
        case "none":
            return None
        case _ if value in known:
            return value
        case _:
            names = ", ".join((AUTO, NONE, *sorted(known)))
            raise StartupError(f"{key}: {value!r:.80} is none of {names}")


@dataclass(frozen=True, slots=True)
class Calling:
    """How the answers of a request are read. `tools`: those that it may call."""

    names: ParserNames = field(default_factory=ParserNames)
    separate: bool = True
    """Whether thoughts are told from text."""
    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice = _NO_CHOICE
    parallel: bool = True
    prompt_tail: str = ""
    """The end of the prompt."""
    continued: str = ""

    @property
    def read(self) -> ParserNames:
        """The parsers that this request's answers may need."""
        return ParserNames(self.names.tools if self.tools else None, self.names.reasoning)

    @property
    def has_text(self) -> bool:
        """Whether an answer may hold text: not where calls are masked, but for thoughts. What
        looks like text there is a part of a call that was cut."""
        thoughts = self.names.reasoning is not None and not self.separate
        return thoughts or self.choice.mode not in _MASKED

    @property
    def ends_with_calls(self) -> bool:
        """Whether calls are why an answer ends. One that was named is what was asked for."""
        return self.choice.mode is not ChoiceMode.NAMED

    def new_parser(self) -> ChatParser:
        """For one choice."""
        return new_parser(
            self.names.tools if self.tools else None,
            self.names.reasoning if self.separate else None,
            self.tools,
            hex_digits=lambda: secrets.token_hex(_CALL_ID_BYTES),
            prompt_tail=self.prompt_tail,
            continued=self.continued,
        )


def calling_of(request: inference_pb2.ChatRequest, names: ParserNames) -> Calling:
    """What a request's tools and choice ask for. Raises InvalidRequest."""
    separate = request.separate_reasoning or not request.HasField("separate_reasoning")
    choice = _choice(request)
    if choice.mode is ChoiceMode.NONE:
        return Calling(names, separate, choice=choice)
    if names.tools is None:
        raise InvalidRequest(
            "tools",
            "no tool parser is known for this model: set tool_call_parser of the service, or"
            " tool_choice none",
        )
    raw = request.sampling_params
    if raw.HasField("structured_output"):
        raise InvalidRequest(
            "sampling_params.structured_output", "beside tools: set tool_choice none, or leave it"
        )
    if raw.HasField("beam") and choice.mode in _MASKED:
        raise InvalidRequest("tool_choice", "beside beam: hypotheses are not masked by it")
    if raw.HasField("external_sampler") and choice.mode in _MASKED:
        raise InvalidRequest(
            "tool_choice", "beside external_sampler: its draws are not masked by it"
        )
    tools = tuple(
        ToolSpec(each.name, each.description, each.parameters, each.strict)
        for each in request.tools
    )
    parallel = request.parallel_tool_calls or not request.HasField("parallel_tool_calls")
    return Calling(names, separate, tools, choice, parallel)


def _choice(request: inference_pb2.ChatRequest) -> ToolChoice:
    raw, field = request.tool_choice, "tool_choice"
    if raw.mode and raw.mode not in _MODES:
        raise InvalidRequest(f"{field}.mode", f"{raw.mode} is none of its values")
    default = ChoiceMode.AUTO if request.tools else ChoiceMode.NONE
    mode = _MODES.get(raw.mode, default)
    if mode is ChoiceMode.NAMED:
        if raw.name not in {each.name for each in request.tools}:
            raise InvalidRequest(f"{field}.name", f"{raw.name!r:.80} is the name of no tool")
        return ToolChoice(mode, raw.name)
    if raw.name:
        raise InvalidRequest(f"{field}.name", "it goes with the mode NAMED only")
    if not request.tools:
        if mode is ChoiceMode.REQUIRED:
            raise InvalidRequest(field, "REQUIRED without tools")
        return _NO_CHOICE
    return ToolChoice(mode)
