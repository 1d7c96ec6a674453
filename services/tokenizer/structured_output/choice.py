"""One of several texts."""

from collections.abc import Sequence

from triptych.services.tokenizer.structured_output.llguidance_text import (
    grammar_text,
    lark_literal,
    lark_part,
)
from triptych.services.tokenizer.structured_output.refusal import Refused

MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 64 << 10
MAX_TEXT_BYTES = 8 << 10
"""Of one: for why, see json_schema.MAX_FIXED_BYTES."""


def choice_grammar(texts: Sequence[str]) -> str:
    """The grammar of the choices. Raises Refused."""
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise Refused(f"{len(texts)} texts is not within 1 and {MAX_CHOICES}")
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_CHOICE_BYTES:
        raise Refused(f"{size} bytes together, more than {MAX_CHOICE_BYTES}")
    for index, text in enumerate(texts):
        if not text:
            raise Refused(f"texts[{index}] is empty")
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise Refused(f"texts[{index}]: {len(text.encode())} bytes, more than {MAX_TEXT_BYTES}")
    # One terminal: as many rules side by side would be too many at one place.
    alternatives = " | ".join(map(lark_literal, dict.fromkeys(texts)))
    return grammar_text([lark_part("choice", f"start: CHOICE\nCHOICE: {alternatives}\n")])
