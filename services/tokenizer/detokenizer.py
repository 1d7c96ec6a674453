"""Token ids to text, a few at a time: never half a character, and what was sent never changes.

Most decoders add a fixed byte string per token, apart from the very first one. For those the text
is exact at constant cost per token: bytes are joined and pass one incremental UTF-8 decoder, so the
text is that of the whole output decoded at once, with U+FFFD for what can never be valid. One
difference to the `tokenizers` package is meant: it turns a whole run of byte-fallback tokens into
U+FFFD where one of them is invalid, which no stream could know in time.

Other decoders (WordPiece, CTC, ...) are asked again for a window of tokens.
"""

import codecs
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Protocol

import tokenizers

_MARKER = "▁"
_CONTEXT_TOKENS = 6
_PATIENCE_TOKENS = 16


class FirstPiece(Enum):
    """What becomes of the blank that a SentencePiece vocabulary puts before the first word."""

    AS_IT_IS = auto()
    WITHOUT_BLANK = auto()
    """One leading blank of the whole text is dropped."""
    WITHOUT_MARKERS = auto()
    """All word-start markers of the first token are dropped."""


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The bytes that each token id adds to the text."""

    pieces: "Pieces"
    first: FirstPiece


class Pieces(Protocol):
    """Bytes by token id."""

    def __len__(self) -> int: ...

    def __getitem__(self, token_id: int, /) -> bytes: ...


class DecodesTokens(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def piece_table(self) -> PieceTable | None:
        """None where the decoder does not work piece by piece."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""

    def decode_whole(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The decoder's own answer for these tokens."""


class IncrementalDetokenizer:
    """The text of one output. Joined, the answers of `push` and `finish` are the whole text.

    `prompt_ids` decide only whether the output stands at the start of the text: after a prompt, a
    first word keeps its blank, so that prompt and output can be joined. `as_matched`: it keeps it
    anyhow, since a grammar has counted it. `kept`: special tokens that are never left out.
    """

    def __init__(
        self,
        tokenizer: DecodesTokens,
        *,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        as_matched: bool = False,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        table = tokenizer.piece_table
        skipped = frozenset[int]()
        if skip_special_tokens:
            special = tokenizer.special_token_ids
            skipped = special - kept if kept else special
        self._stream: _PieceText | _WindowText
        if table is not None:
            first = FirstPiece.AS_IT_IS if as_matched else table.first
            self._stream = _PieceText(PieceTable(table.pieces, first), skipped, prompt_ids)
        else:
            # Such a decoder leaves out all of them, or none.
            self._stream = _WindowText(tokenizer, skip_special_tokens and not kept, prompt_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return self._stream.push(token_ids)

    def piece(self, token_id: int) -> bytes:
        """What this token would add if it were pushed next: its bytes, part of a character maybe.

        Empty for a token that is left out of the text. Nothing changes.
        """
        return self._stream.piece(token_id)

    def finish(self) -> str:
        """The rest: bytes of an unfinished character as U+FFFD."""
        return self._stream.finish()


class _PieceText:
    def __init__(
        self, table: PieceTable, skipped: Container[int], prompt_ids: Sequence[int]
    ) -> None:
        self._pieces = table.pieces
        self._size = len(table.pieces)
        self._first = table.first
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = table.first is not FirstPiece.AS_IT_IS and not self._has_text(prompt_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        pieces, size = self._pieces, self._size
        data = bytearray()
        for token_id in token_ids:
            if token_id in self._skipped or not 0 <= token_id < size:
                continue
            data += self._first_piece(pieces[token_id]) if self._at_start else pieces[token_id]
        if data.isascii() and not self._utf8.getstate()[0]:
            return data.decode("ascii")  # nothing is begun and nothing begins
        return self._utf8.decode(bytes(data))

    def piece(self, token_id: int) -> bytes:
        if token_id in self._skipped or not 0 <= token_id < len(self._pieces):
            return b""
        piece = self._pieces[token_id]
        return self._without_blank(piece) if self._at_start else piece

    def finish(self) -> str:
        return self._utf8.decode(b"", True)

    def _has_text(self, token_ids: Sequence[int]) -> bool:
        return any(
            token_id not in self._skipped and self._counts(token_id) for token_id in token_ids
        )

    def _counts(self, token_id: int) -> bool:
        if not 0 <= token_id < len(self._pieces):
            return False
        return self._first is FirstPiece.WITHOUT_MARKERS or bool(self._pieces[token_id])

    def _first_piece(self, piece: bytes) -> bytes:
        if self._first is FirstPiece.WITHOUT_MARKERS or piece:
            self._at_start = False
        return self._without_blank(piece)

    def _without_blank(self, piece: bytes) -> bytes:
        if self._first is FirstPiece.WITHOUT_MARKERS:
            return piece.replace(b" ", b"")
        return piece.removeprefix(b" ")


class _WindowText:
    """Decodes a window twice, with and without the new tokens, and sends the difference."""

    def __init__(
        self, tokenizer: DecodesTokens, skip_special_tokens: bool, prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._sent = len(self._window)

    def push(self, token_ids: Iterable[int]) -> str:
        self._window.extend(token_ids)
        text = self._unsent()
        patient = len(self._window) - self._sent < _PATIENCE_TOKENS
        if not text or (text.endswith("\ufffd") and patient):
            return ""
        return self._send(text)

    def piece(self, token_id: int) -> bytes:
        # A decoder that looks at its neighbours has no bytes of one token: this is the nearest.
        if self._skip and token_id in self._tokenizer.special_token_ids:
            return b""
        return self._tokenizer.decode_whole([token_id], skip_special_tokens=False).encode()

    def finish(self) -> str:
        return self._send(self._unsent())

    def _unsent(self) -> str:
        before = self._decode(self._window[: self._sent])
        return self._decode(self._window)[len(before) :]

    def _send(self, text: str) -> str:
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._sent = len(self._window)
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode_whole(token_ids, skip_special_tokens=self._skip)


class _LazyPieces:
    """Pieces that are made when they are first asked for: few of a vocabulary ever are, and a
    process that is starting has other things to do."""

    def __init__(self, size: int, piece: Callable[[int], bytes]) -> None:
        self._known: list[bytes | None] = [None] * size
        self._piece = piece

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known[token_id]
        if known is None:
            known = self._known[token_id] = self._piece(token_id)
        return known


def build_piece_table(backend: tokenizers.Tokenizer, vocabulary_size: int) -> PieceTable | None:
    """The table of a tokenizer, or None where its decoder has none."""
    decoder: tokenizers.decoders.Decoder | None = backend.decoder
    if decoder is None:  # the package then joins the tokens with blanks
        return None
    shape = json.loads(decoder.__getstate__())
    stages = shape["decoders"] if shape["type"] == "Sequence" else [shape]
    kinds = [stage["type"] for stage in stages]
    spelled: Callable[[str], bytes]
    if kinds == ["ByteLevel"]:
        letters = _byte_letters()
        spelled = partial(_letter_bytes, letters=letters)
        first = FirstPiece.AS_IT_IS
    elif kinds == ["Metaspace"] and stages[0]["replacement"] == _MARKER:
        never = stages[0].get("prepend_scheme") == "never"
        first = FirstPiece.AS_IT_IS if never else FirstPiece.WITHOUT_MARKERS
        if first is FirstPiece.WITHOUT_MARKERS and any(" " in each for each in backend.get_vocab()):
            return None  # a real blank and a marker would look alike in the table
        spelled = _marker_bytes
    else:
        fallback = _fallback_first(stages, kinds)
        if fallback is None:
            return None
        spelled, first = _fallback_bytes, fallback
    return PieceTable(
        _LazyPieces(vocabulary_size, lambda each: spelled(backend.id_to_token(each) or "")), first
    )


def _fallback_first(
    stages: Sequence[Mapping[str, object]], kinds: Sequence[str]
) -> FirstPiece | None:
    """Llama's decoder: marker to blank, byte tokens to bytes, all fused, maybe one blank off."""
    if kinds not in (
        ["Replace", "ByteFallback", "Fuse"],
        ["Replace", "ByteFallback", "Fuse", "Strip"],
    ):
        return None
    if stages[0]["pattern"] != {"String": _MARKER} or stages[0]["content"] != " ":
        return None
    if kinds[-1] != "Strip":
        return FirstPiece.AS_IT_IS
    strip = stages[-1]
    if strip["content"] != " " or strip["start"] not in (0, 1) or strip["stop"] != 0:
        return None
    return FirstPiece.WITHOUT_BLANK if strip["start"] else FirstPiece.AS_IT_IS


def _marker_bytes(token: str) -> bytes:
    return token.replace(_MARKER, " ").encode()


def _fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return _marker_bytes(token)


def _letter_bytes(token: str, letters: Mapping[str, int]) -> bytes:
    """A token is written in byte letters; one with any other character is text as it stands."""
    try:
        return bytes([letters[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_letters() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (as GPT-2 chose them)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
