"""What calls look like in each notation, as formats of a structural tag (see tag_formats)."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.services.tokenizer.chat_output import (
    deepseek_v3,
    hermes,
    llama3_json,
    mistral,
    pythonic,
)
from triptych.services.tokenizer.chat_output.python_form import python_calls
from triptych.services.tokenizer.structured_output.strict_json import Json

Format = dict[str, Json]


@dataclass(frozen=True, slots=True)
class CallTexts:
    """The calls that there may be: name and format of the arguments of each tool. `only_one`: at
    most one of them."""

    tools: Sequence[tuple[str, dict[str, Json]]]
    only_one: bool

    def tags(self, begin: str, end: str) -> list[Json]:
        """One tag for each tool; NAME in `begin` stands for its name."""
        return [
            _tag(begin.replace("NAME", name), _schema(schema), end) for name, schema in self.tools
        ]

    def separated(self, begin: str, end: str, separator: str) -> Format:
        """One or more of these tags."""
        return {
            "type": "tags_with_separator", "tags": self.tags(begin, end), "separator": separator,
            "at_least_one": True, "stop_after_first": self.only_one,
        }  # fmt: skip

    def triggered(self, triggers: Sequence[str], tags: list[Json]) -> Format:
        """Text, in which a tag may begin anywhere."""
        return {
            "type": "triggered_tags", "triggers": list(triggers), "tags": tags,
            "stop_after_first": self.only_one,
        }  # fmt: skip


def calls_format(parser: str, calls: CallTexts, *, needed: bool) -> Format:
    """Calls and nothing else, or, unless `needed`, text with and without calls."""
    match parser:
        case "hermes":
            begin, end = f'{hermes.BEGIN}\n{{"name": "NAME", "arguments": ', f"}}\n{hermes.END}"
            if needed:
                return calls.separated(begin, end, "\n")
            return calls.triggered([hermes.BEGIN], calls.tags(begin, end))
        case "llama3_json":
            only = calls.separated('{"name": "NAME", "parameters": ', "}", "; ")
            return only if needed else _or_text(only, "{", llama3_json.TAG)
        case "mistral":
            return _mistral(calls, needed=needed)
        case "pythonic":
            only = python_calls(calls.tools, only_one=calls.only_one)
            return only if needed else _or_text(only, r"\[", pythonic.BEGIN)
        case "deepseek_v3" | "deepseek_v31":
            return _deepseek(calls, fenced=parser == "deepseek_v3", needed=needed)
    raise ValueError(f"no form for the calls of {parser!r:.80}")


def _mistral(calls: CallTexts, *, needed: bool) -> Format:
    array = _tag(
        f"{mistral.TAG}[", calls.separated('{"name": "NAME", "arguments": ', "}", ", "), "]"
    )
    begin = f"{mistral.TAG}NAME{mistral.ARGUMENTS}"
    if needed:
        return {"type": "or", "elements": [array, calls.separated(begin, "", "")]}
    return calls.triggered([mistral.TAG], [array, *calls.tags(begin, "")])


def _deepseek(calls: CallTexts, *, fenced: bool, needed: bool) -> Format:
    kind = f"{deepseek_v3.KIND}{deepseek_v3.SEPARATOR}" if fenced else ""
    behind_name = f"\n{deepseek_v3.FENCE_BEGIN}\n" if fenced else deepseek_v3.SEPARATOR
    begin = f"{deepseek_v3.CALL_BEGIN}{kind}NAME{behind_name}"
    end = (f"\n{deepseek_v3.FENCE_END}" if fenced else "") + deepseek_v3.CALL_END
    inner = calls.separated(begin, end, "\n" if fenced else "")
    whole = _tag(deepseek_v3.CALLS_BEGIN, inner, deepseek_v3.CALLS_END)
    if needed:
        return whole
    # The parser takes a call also where the tag around all of them is left out.
    triggers = [deepseek_v3.CALLS_BEGIN, deepseek_v3.CALL_BEGIN]
    return calls.triggered(triggers, [whole, *calls.tags(begin, end)])


def _or_text(calls: Format, first: str, tag: str) -> Format:
    """Calls without a tag are all of the text, or it does not begin like one: `first`, as in a
    class of a regular expression. Calls that come later, with a tag, are ruled out."""
    text: Json = {
        "type": "sequence",
        "elements": [
            {"type": "regex", "pattern": rf"[^\s<{first}]"},
            {"type": "any_text", "excludes": [tag]},
        ],
    }
    return {"type": "or", "elements": [calls, text, {"type": "const_string", "value": ""}]}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _schema(schema: dict[str, Json]) -> Format:
    return {"type": "json_schema", "json_schema": schema}
