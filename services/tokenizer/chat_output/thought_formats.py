"""What may, or must, come before an answer's form: a thought, as formats of a structural tag."""

from triptych.services.tokenizer.chat_output.call_formats import Format
from triptych.services.tokenizer.chat_output.notations import style_named
from triptych.services.tokenizer.chat_output.reasoning import Thinking, thinking_at
from triptych.services.tokenizer.structured_output.strict_json import Json

_GAP = r"[ \n]{0,4}"
"""What models write between a thought and what comes after it."""


def behind_thought(
    wanted: Format, reasoning_parser: str, prompt_tail: str, continued: str
) -> Format | None:
    """The format behind the thought that `new_parser` would read; None where there is none to come.

    Raises ValueError for a parser that there is not.
    """
    style = style_named(reasoning_parser)
    thinking, inside = thinking_at(style, prompt_tail, continued)
    gap: Json = {"type": "regex", "pattern": _GAP}
    match thinking:
        case Thinking.INSIDE:
            return {"type": "sequence", "elements": [_thought("", inside), gap, wanted]}
        case Thinking.OVER:
            return None
        case Thinking.POSSIBLE:
            thoughts: list[Json] = [
                {"type": "sequence", "elements": [_thought(start, end), gap]}
                for start, end in style.tags.items()
            ]
            nothing: Json = {"type": "const_string", "value": ""}
            first: Json = {"type": "or", "elements": [*thoughts, nothing]}
            return {"type": "sequence", "elements": [first, wanted]}


def _thought(start: str, end: str) -> Json:
    return {"type": "tag", "begin": start, "content": {"type": "any_text"}, "end": end}
