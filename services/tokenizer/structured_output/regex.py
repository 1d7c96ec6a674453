"""A regular expression for the whole text, in Rust's syntax."""

from triptych.services.tokenizer.structured_output.llguidance_text import grammar_text, lark_part
from triptych.services.tokenizer.structured_output.refusal import Refused

MAX_REGEX_BYTES = 16 << 10


def regex_grammar(pattern: str) -> str:
    """The grammar of an expression. Raises Refused; whether it compiles, the compiler says."""
    return grammar_text([lark_part("regex", f"start: {lark_regex(pattern)}\n")])


def lark_regex(pattern: str) -> str:
    """The expression as a Lark terminal. Raises Refused: empty or too long."""
    if not pattern:
        raise Refused("it is empty")
    size = len(pattern.encode())
    if size > MAX_REGEX_BYTES:
        raise Refused(f"{size} bytes, more than {MAX_REGEX_BYTES}")
    return f"/{_escaped(pattern)}/"


def _escaped(pattern: str) -> str:
    """With what would end the terminal written otherwise: slashes and line breaks."""
    written: list[str] = []
    characters = iter(pattern)
    for character in characters:
        match character:
            case "\\":
                follower = next(characters, "")
                if not follower:
                    raise Refused("it ends with half an escape")
                written.append("\\n" if follower == "\n" else f"\\{follower}")
            case "/":
                written.append("\\/")
            case "\n":
                written.append("\\n")
            case "\r":
                written.append("\\r")
            case _:
                written.append(character)
    return "".join(written)
