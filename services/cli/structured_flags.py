"""The flags of `generate` and `chat` that say what the answer must match."""

import argparse
from pathlib import Path

from triptych.services.runtime.command_line import LineParser
from triptych.services.runtime.lifecycle import StartupError
from triptych.v1 import common_pb2

_MARKS = frozenset("{:\n")
"""What a schema or a grammar has, and the name of a file has not, as a rule."""


def add_structured_flags(parser: LineParser) -> None:
    """One form at most."""
    group = parser.add_argument_group("Structured output", "What the answer must match: one of")
    add = group.add_mutually_exclusive_group().add_argument
    add("--json-schema", metavar="FILE|TEXT", help="a JSON Schema")
    add("--json-object", action="store_true", help="any JSON object")
    add("--regex", metavar="PATTERN", help="a regular expression for the whole answer")
    add("--grammar", metavar="FILE|TEXT", help="a grammar: Lark, or GBNF with a rule root")
    add("--choice", action="append", metavar="TEXT", help="one of several; may be repeated")
    add("--structural-tag", metavar="FILE|TEXT", help="text with tagged parts, as JSON")


def set_structured_output(params: common_pb2.SamplingParams, given: argparse.Namespace) -> None:
    """Set the form that was given. Raises StartupError for a file that cannot be read."""
    if given.json_schema is not None:
        text = _file_or_text("--json-schema", given.json_schema)
        params.structured_output.json_schema = text
    if given.json_object:
        params.structured_output.json_object = True
    if given.regex is not None:
        params.structured_output.regex = given.regex
    if given.grammar is not None:
        params.structured_output.grammar = _file_or_text("--grammar", given.grammar)
    if given.choice is not None:
        params.structured_output.choice.texts.extend(given.choice)
    if given.structural_tag is not None:
        text = _file_or_text("--structural-tag", given.structural_tag)
        params.structured_output.structural_tag = text


def _file_or_text(flag: str, value: str) -> str:
    """What a file holds, if there is one of that name; else the value itself."""
    if _MARKS & set(value):
        return value
    try:
        return Path(value).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise StartupError(f"{flag}: {value!r} cannot be read: {reason}") from error
