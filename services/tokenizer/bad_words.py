"""Bad words as the sequences of token ids that must not be drawn."""

from collections.abc import Callable, Iterator

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from triptych.services.tokenizer.validation import TokenArray, check_token_ids
from triptych.v1 import common_pb2

MAX_BAD_WORD_STRINGS = 128
MAX_BAD_WORD_BYTES = 4096
"""Of all of them together: they are encoded on the event loop."""

Encode = Callable[[str], list[int]]
"""Token ids of a text, without special tokens around it."""


def bad_words(
    raw: common_pb2.SamplingParams, vocabulary_size: int, encode: Encode
) -> tuple[tuple[int, ...], ...]:
    """Every sequence once. Raises InvalidRequest."""
    if not (raw.bad_words or raw.bad_words_token_ids):
        return ()
    words = [
        _checked(ids, field, vocabulary_size)
        for field, ids in (*_spelled(raw, encode), *_given(raw))
    ]
    words = list(dict.fromkeys(words))
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            "sampling_params.bad_words_token_ids",
            f"{len(words)} sequences with those of bad_words, more than {MAX_BAD_WORDS}",
        )
    return tuple(words)


def _spelled(raw: common_pb2.SamplingParams, encode: Encode) -> Iterator[tuple[str, list[int]]]:
    name = "sampling_params.bad_words"
    count, size = len(raw.bad_words), sum(len(word.encode()) for word in raw.bad_words)
    if count > MAX_BAD_WORD_STRINGS:
        raise InvalidRequest(name, f"{count} words, more than {MAX_BAD_WORD_STRINGS}")
    if size > MAX_BAD_WORD_BYTES:
        raise InvalidRequest(name, f"{size} bytes together, more than {MAX_BAD_WORD_BYTES}")
    for index, word in enumerate(raw.bad_words):
        field = f"{name}[{index}]"
        if not word.strip():
            raise InvalidRequest(field, "the word is empty or blank")
        try:
            for ids in _spellings(word, encode):
                yield field, ids
        except InvalidRequest as error:
            raise InvalidRequest(field, error.description) from error


def _spellings(word: str, encode: Encode) -> Iterator[list[int]]:
    """As vLLM: without a blank in front, and with one where that makes another first token."""
    plain = encode(word.lstrip())
    blank = encode(" " + word.lstrip())
    yield plain
    if plain and len(blank) == len(plain) and blank[0] != plain[0]:
        yield blank


def _given(raw: common_pb2.SamplingParams) -> Iterator[tuple[str, TokenArray | list[int]]]:
    name = "sampling_params.bad_words_token_ids"
    count = len(raw.bad_words_token_ids)
    if count > MAX_BAD_WORDS:
        raise InvalidRequest(name, f"{count} sequences, more than {MAX_BAD_WORDS}")
    for index, message in enumerate(raw.bad_words_token_ids):
        yield f"{name}[{index}]", list(message.ids[: MAX_BAD_WORD_TOKENS + 1])


def _checked(ids: TokenArray | list[int], field: str, vocabulary_size: int) -> tuple[int, ...]:
    if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
        count = f"more than {MAX_BAD_WORD_TOKENS}" if len(ids) else "0"
        raise InvalidRequest(field, f"{count} tokens, 1 to {MAX_BAD_WORD_TOKENS} are taken")
    return tuple(check_token_ids(ids, field, vocabulary_size).tolist())
