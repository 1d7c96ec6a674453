"""Private marks that stand for special tokens, so that text from outside can never become one.

A prompt is built by a template, which may write special tokens, around text that may not. The
template is compiled with a mark wherever it spells a special token. The rendered text then goes
through a copy of the tokenizer in which only the marks are special: the same spelling anywhere
else is encoded as the ordinary text that it is. A mark holds a random number of 128 bits, drawn
when the process starts; it never leaves the process, so nobody can write one.
"""

import re
import secrets
from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken

from triptych.services.tokenizer.encoding import encoded

_NONCE_DIGITS = 39  # 128 bits


class SpecialMarks:
    """The marks of one tokenizer. `nothing` and `end_of_content` are two more that stand for no
    token: what guards a spelling, and where a message that is left open ends.

    Marks are digits only, so that trim, upper, tojson and the like leave them alone.
    """

    def __init__(self, spellings: Mapping[str, int]) -> None:
        nonce = str(secrets.randbits(128)).zfill(_NONCE_DIGITS)
        by_length = sorted(spellings, key=len, reverse=True)
        self._marks = {text: f"{nonce}{index:06d}" for index, text in enumerate(by_length)}
        self._texts = {mark: text for text, mark in self._marks.items()}
        self._spelled = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        self._marked = re.compile(rf"{nonce}\d{{6}}")
        self.nothing = f"{nonce}999999"
        self.end_of_content = f"{nonce}999998"

    def marked(self, text: str) -> str:
        """With a mark for every special token that the text spells, the longest first."""
        return self._spelled.sub(lambda match: self._marks[match[0]], text)

    def guarded(self, text: str) -> str:
        """With every spelling of a special token interrupted, so that `marked` leaves it alone."""
        return self._spelled.sub(lambda match: f"{match[0][:1]}{self.nothing}{match[0][1:]}", text)

    def without_guards(self, text: str) -> str:
        """What `guarded` put in, taken out again."""
        return text.replace(self.nothing, "")

    def spelled_out(self, text: str) -> str:
        """The text as people may see it: special tokens for their marks."""
        return self._marked.sub(lambda match: self._texts.get(match[0], ""), text)

    def spells_any(self, text: str) -> bool:
        """Whether a special token is spelled in the text (a mark does not count)."""
        return self._spelled.search(text) is not None

    def items(self) -> list[tuple[str, str]]:
        """Pairs of a special token's text and its mark."""
        return list(self._marks.items())


class MarkedEncoder:
    """A copy of a tokenizer that reads marks as special tokens and special tokens as text."""

    def __init__(self, backend: tokenizers.Tokenizer, marks: SpecialMarks) -> None:
        self._backend = _another(backend)
        self._backend.encode_special_tokens = True
        self._marks = marks
        added = {
            token.content: (token_id, token)
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        ids: dict[str, int] = {}
        copies: list[AddedToken] = []
        for text, mark in marks.items():
            ids[mark], token = added[text]
            copies.append(
                AddedToken(
                    mark,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,  # special ones are text here
                )
            )
        self._backend.add_tokens([*copies, AddedToken(marks.nothing, normalized=False)])
        self._special: dict[int, int] = {}
        for mark, token_id in ids.items():
            self._special[self._id(mark)] = token_id
        self._nothing = self._id(marks.nothing)
        self._never = frozenset(ids.values())

    def encode(self, text: str, may_appear: int | None = None) -> list[int]:
        """Token ids; no special token but the marked ones, and `may_appear` (the unknown token).

        Raises ValueError where the vocabulary has no other way to write a special token's text.
        """
        ids = encoded(self._backend, text)
        if self._leaks(ids, may_appear):  # Unigram vocabularies hold special tokens as pieces
            guarded = self._marks.guarded(text)
            ids = encoded(self._backend, guarded)
            if self._leaks(ids, may_appear):
                raise ValueError("the text of a special token cannot be encoded as plain text")
        special, nothing = self._special, self._nothing
        return [special.get(each, each) for each in ids if each != nothing]

    def _leaks(self, ids: list[int], may_appear: int | None) -> bool:
        return any(each in self._never and each != may_appear for each in ids)

    def _id(self, mark: str) -> int:
        token_id = self._backend.token_to_id(mark)
        assert token_id is not None
        return token_id


def _another(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer with the same model and the same added tokens; later additions are its own.

    The model itself, which nothing changes, is one in memory. A copy by way of text costs as much
    as all else that reads a vocabulary; it is left for tokenizers whose added tokens have ids that
    adding them again does not give, or that cut or pad.
    """
    copy = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(copy, part, value)
    added = backend.get_added_tokens_decoder()
    copy.add_tokens([token for _, token in sorted(added.items())])
    same = _shown(copy.get_added_tokens_decoder()) == _shown(added)
    if not same or backend.truncation is not None or backend.padding is not None:
        return tokenizers.Tokenizer.from_str(backend.to_str())
    return copy


def _shown(added: Mapping[int, AddedToken]) -> dict[int, str]:
    return {token_id: repr(token) for token_id, token in added.items()}
