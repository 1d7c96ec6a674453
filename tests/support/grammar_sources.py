"""Grammars over a small vocabulary, for tests: ASCII, some longer pieces and a character in two
bytes; two ends of sequence, and two tokens for the blank.

source = SmallGrammars()
source.matcher(regex("a{2,3}"))
"""

import json
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from triptych.engine_core.errors import InvalidRequest
from triptych.services.scheduler.grammar_compiler import unforced

EOS = 128
OTHER_EOS = 129
PIECES = (
    b'{"', b'":', b'",', b'"}', b"true", b"false", b"null", b"ab", b"abc", b"aa", b"bb", b"ba",
    b"10", b"[]", b"name", b"],", b"cab", b" ", b'["',
    b"\xc3", b"\xa9", b"\xc3\xa9",
)  # fmt: skip
SMALL_VOCABULARY = 130 + len(PIECES)


class Tokens:
    """What llguidance asks of a tokenizer: longest pieces first."""

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], special_ids: Sequence[int], eos: int) -> None:
        self.tokens = list(pieces)
        self.special_token_ids = list(special_ids)
        self.eos_token_id = eos
        special = set(special_ids)
        self._ids = {piece: i for i, piece in enumerate(pieces) if piece and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids, at = [], 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + size])
                if token is not None:
                    ids.append(token)
                    at += size
                    break
            else:
                at += 1  # a byte that no token has
        return ids


class TokenGrammars:
    """A GrammarSource that compiles whatever it is asked for.

    `forcing`: of text that must follow, only one cut into tokens may.
    """

    def __init__(
        self,
        tokens: Tokens,
        eos_ids: Sequence[int],
        limits: LLParserLimits | None = None,
        *,
        forcing: bool = True,
    ) -> None:
        self._forcing = forcing
        self.tokens = tokens
        self.limits = limits
        self.eos_token_ids = tuple(eos_ids)
        self.vocabulary_size = len(tokens.tokens)
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(tokens), n_vocab=len(tokens.tokens), eos_token=list(eos_ids)
        )
        self.refused: set[str] = set()
        self.num_renewed = 0

    def matcher(self, grammar: str) -> LLMatcher:
        if grammar in self.refused:
            raise InvalidRequest("structured_output", "the grammar is gone")
        form = grammar if self._forcing else unforced(grammar)
        matcher = LLMatcher(self.tokenizer, form, log_level=0, limits=self.limits)
        if matcher.is_error():
            raise InvalidRequest("structured_output", matcher.get_error())
        return matcher

    def renewed(self, grammar: str) -> LLMatcher:
        self.num_renewed += 1
        return self.matcher(grammar)

    def greedy_tokens(self, text: bytes) -> list[int]:
        return self.tokens(text)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens.tokens[token_id]

    def text(self, token_ids: Sequence[int]) -> str:
        """Without ends of sequence."""
        kept = [each for each in token_ids if each not in self.eos_token_ids]
        return b"".join(self.tokens.tokens[each] for each in kept).decode(errors="replace")


def small_tokens() -> Tokens:
    ascii_bytes = [bytes([each]) for each in range(128)]
    return Tokens([*ascii_bytes, b"<eos>", b"<end>", *PIECES], (EOS, OTHER_EOS), EOS)


class SmallGrammars(TokenGrammars):
    """Over SMALL_VOCABULARY."""

    def __init__(self, limits: LLParserLimits | None = None, *, forcing: bool = True) -> None:
        super().__init__(small_tokens(), (EOS, OTHER_EOS), limits, forcing=forcing)


def regex(pattern: str) -> str:
    return json.dumps({"grammars": json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]})


def schema(value: object) -> str:
    """Without white space."""
    options = {"x-guidance": {"whitespace_flexible": False}}
    wanted = {**value, **options} if isinstance(value, dict) else value
    return json.dumps({"grammars": [{"json_schema": wanted}]})


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})
