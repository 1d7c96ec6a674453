"""Whether a grammar compiles, and begins: asked of llguidance, over single bytes.

Only the checker's process imports this: what compiles here may take memory and time without end,
or crash.
"""

import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from triptych.services.tokenizer.structured_output.refusal import Refused, shown
from triptych.services.tokenizer.structured_output.strict_json import written_json
from triptych.services.transport.grammar_limits import grammar_limits

_EOS = 256
_NOTHING_FITS = "NoExtensionBias"
_MEANINGS = (
    (_NOTHING_FITS, "no text matches it"),
    ("no forced bytes", "no text matches it"),
    ("initial lexer configuration", "its regular expressions are too complex"),
    ("too many lexer states", "its regular expressions are too complex"),
    ("oneOf constraints", "oneOf is not supported where two of its schemas may match one document"),
    ("ParserTooComplex", "it is too complex"),
    ("Too many items", "it is too complex, or has no end"),
    ("items; max is", "it is too complex: too many alternatives at one place"),
)


class _Bytes:
    """A vocabulary of the 256 bytes and an end."""

    eos_token_id = _EOS
    bos_token_id: int | None = None
    tokens: Sequence[bytes] = [*(bytes([value]) for value in range(256)), b"<|end|>"]
    special_token_ids: Sequence[int] = [_EOS]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


_TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def byte_matcher(grammar: str) -> LLMatcher:
    """At its beginning; token ids are byte values, and 256 for the end."""
    return LLMatcher(_TOKENIZER, grammar, log_level=0, limits=grammar_limits())


def check_compiles(grammar: str) -> None:
    """Compile a grammar and compute what may come first, and behind what must.

    Raises Refused with one line.
    """
    error = _error(grammar)
    if error:
        raise Refused(_one_line(error))


def is_empty(lark: str) -> bool:
    """Whether no text matches, not even the empty one. Raises Refused for what does not compile."""
    error = _error(written_json({"grammars": [{"lark_grammar": lark}]}))
    if error and not error.startswith(_NOTHING_FITS):
        raise Refused(_one_line(error))
    return bool(error)


def _error(grammar: str) -> str:
    matcher = byte_matcher(grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error() and (forced := matcher.compute_ff_bytes()):
        # Such as a brace, behind which an object has too many properties to choose from.
        matcher.consume_tokens(list(forced))
        matcher.compute_bitmask()
    return matcher.get_error() if matcher.is_error() else ""


def _one_line(error: str) -> str:
    """What an error says, without the library's dumps and drawings of where."""
    for sign, meaning in _MEANINGS:
        if sign in error:
            return meaning
    lines = [line.strip() for line in error.partition("<state>")[0].splitlines()]
    line = next((each for each in lines if each and not each.startswith("<")), "it cannot be kept")
    # A regular expression's parser draws the place over several lines and says why in the last.
    reasons = [each.removeprefix("error: ") for each in lines if each.startswith("error: ")]
    if reasons:
        place = line.removesuffix("regex parse error:").rstrip(": ")
        line = f"{place or 'invalid regex'}: {reasons[0]}"
    line = line.partition("; following special tokens")[0]
    return shown(re.sub(r"\s+", " ", line))
