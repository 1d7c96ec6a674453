"""The parsers by the names that other engines have for them too."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from triptych.services.tokenizer.chat_output import (
    deepseek_v3,
    hermes,
    llama3_json,
    mistral,
    pythonic,
)
from triptych.services.tokenizer.chat_output.reading import Reading
from triptych.services.tokenizer.chat_output.reasoning import ThoughtStyle
from triptych.services.tokenizer.chat_output.source import Steps


@dataclass(frozen=True, slots=True)
class Notation:
    """How a family of models writes calls. `markers`: texts, often special tokens, that `read`
    must see. `id_form`: a call's id, of 24 hexadecimal digits."""

    read: Callable[[Reading], Steps[None]]
    markers: frozenset[str]
    id_form: Callable[[str], str] = "call_{}".format


def _nine_digits(digits: str) -> str:
    """Mistral's templates refuse ids of any other length."""
    return digits[-9:]


_DEEPSEEK = Notation(
    deepseek_v3.read_deepseek_v3,
    frozenset(
        {
            deepseek_v3.CALLS_BEGIN,
            deepseek_v3.CALLS_END,
            deepseek_v3.CALL_BEGIN,
            deepseek_v3.CALL_END,
            deepseek_v3.SEPARATOR,
        }
    ),
)

NOTATIONS: Final[Mapping[str, Notation]] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "hermes": Notation(hermes.read_hermes, frozenset({hermes.BEGIN, hermes.END})),
    "llama3_json": Notation(llama3_json.read_llama3_json, frozenset({llama3_json.TAG})),
    "mistral": Notation(
        mistral.read_mistral,
        frozenset({mistral.TAG, mistral.ARGUMENTS, mistral.CALL_ID}),
        _nine_digits,
    ),
    "pythonic": Notation(pythonic.read_pythonic, frozenset({pythonic.BEGIN, pythonic.END})),
}
"""`qwen` is hermes; deepseek_v3 and deepseek_v31 read both of DeepSeek's, and force their own."""

STYLES: Final[Mapping[str, ThoughtStyle]] = {
    "deepseek_r1": ThoughtStyle(unopened=True),
    "mistral": ThoughtStyle({"[THINK]": "[/THINK]"}),
    "qwen3": ThoughtStyle(),
    "think": ThoughtStyle(
        {
            "<think>": "</think>",
            "<thinking>": "</thinking>",
            "<thought>": "</thought>",
            "<reasoning>": "</reasoning>",
        }
    ),
}


def notation_named(name: str) -> Notation:
    """Raises ValueError with the names that there are."""
    try:
        return NOTATIONS[name]
    except KeyError:
        raise ValueError(f"no tool parser {name!r:.80}; there are {', '.join(NOTATIONS)}") from None


def style_named(name: str) -> ThoughtStyle:
    """Raises ValueError with the names that there are."""
    try:
        return STYLES[name]
    except KeyError:
        raise ValueError(
            f"no reasoning parser {name!r:.80}; there are {', '.join(STYLES)}"
        ) from None


def tool_parser_names() -> tuple[str, ...]:
    """In alphabetical order."""
    return tuple(NOTATIONS)


def reasoning_parser_names() -> tuple[str, ...]:
    """In alphabetical order."""
    return tuple(STYLES)


def parser_markers(tools_parser: str | None, reasoning_parser: str | None) -> frozenset[str]:
    """Texts that these parsers must see, also where they are special tokens. Raises ValueError."""
    markers: frozenset[str] = frozenset()
    if tools_parser is not None:
        markers |= notation_named(tools_parser).markers
    if reasoning_parser is not None:
        for start, end in style_named(reasoning_parser).tags.items():
            markers |= {start, end}
    return markers
