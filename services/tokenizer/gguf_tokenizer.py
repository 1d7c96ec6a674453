"""The tokenizer that GGUF metadata describes: `tokenizer.ggml.*`, as llama.cpp reads it.

Two kinds: "gpt2" is byte-level BPE with merges, "llama" is SentencePiece BPE, whose merges follow
from the scores. Which words BPE may not cross is named by `tokenizer.ggml.pre` (see
pre_tokenizers). Control tokens are special; user-defined ones are read whole wherever they stand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import cast

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from triptych.services.runtime.gguf_file import GgufFile, open_gguf
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.tokenizer.pre_tokenizers import build_pre_tokenizer, word_rules
from triptych.services.tokenizer.tokenizer_parts import TokenizerParts, around_text

_MARKER = "▁"
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format spells it so
    "pad_token": "padding_token_id",
}
# Where the file names no end-of-turn token, one with such a spelling is meant (llama.cpp's list).
_END_OF_TURN = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<EOT>", "[EOT]",
)  # fmt: skip


class _Kind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id, with their kinds and scores; all of equal length."""

    tokens: Sequence[str]
    kinds: Sequence[float]
    scores: Sequence[float]
    ids: dict[str, int]


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Raises StartupError naming the file and the key that is missing, broken or not supported."""
    file = open_gguf(path)
    try:
        return _read(file)
    except StartupError as error:
        message = str(error)
        raise StartupError(message if str(path) in message else f"{path}: {message}") from error


def _read(file: GgufFile) -> TokenizerParts:
    kind = file.text("tokenizer.ggml.model")
    vocabulary = _vocabulary(file)
    if kind == "gpt2":
        rules = word_rules(file.text("tokenizer.ggml.pre") or "default")
        backend = _model(file, vocabulary, ignore_merges=rules.ignore_merges)
        backend.pre_tokenizer = build_pre_tokenizer(rules)
        backend.decoder = decoders.ByteLevel()
        add_bos = rules.add_bos
    elif kind == "llama":
        backend = _sentencepiece(file, vocabulary)
        add_bos = True
    else:
        raise StartupError(
            f"tokenizer.ggml.model {kind!r:.40} is not supported (gpt2 and llama are)"
        )
    _add_tokens(backend, vocabulary)
    named = _named_ids(file, len(vocabulary.tokens))
    _add_around(backend, file, vocabulary, named, add_bos)
    return TokenizerParts(
        backend=backend,
        vocabulary_size=len(vocabulary.tokens),
        bos_token_id=named.get("bos_token"),
        eos_token_ids=_eos_ids(file, vocabulary, named),
        unk_token_id=named.get("unk_token"),
        special_tokens={name: vocabulary.tokens[each] for name, each in named.items()},
        chat_template=file.text("tokenizer.chat_template") or None,
        tool_template=file.text("tokenizer.chat_template.tool_use") or None,
    )


def _vocabulary(file: GgufFile) -> _Vocabulary:
    tokens = _strings(file, "tokenizer.ggml.tokens")
    if not all(tokens):
        tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
    if not tokens:
        raise StartupError("tokenizer.ggml.tokens is missing: the file holds no tokenizer")
    kinds = _numbers(file, "tokenizer.ggml.token_type") or [int(_Kind.NORMAL)] * len(tokens)
    scores = _numbers(file, "tokenizer.ggml.scores") or [0.0] * len(tokens)
    for key, column in (("token_type", kinds), ("scores", scores)):
        if len(column) != len(tokens):
            raise StartupError(
                f"tokenizer.ggml.{key} has {len(column)} entries for {len(tokens)} tokens"
            )
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    return _Vocabulary(tokens, kinds, scores, ids)


def _model(file: GgufFile, vocabulary: _Vocabulary, *, ignore_merges: bool) -> tokenizers.Tokenizer:
    lines = _strings(file, "tokenizer.ggml.merges")
    merges = [(left, right) for left, _, right in [line.partition(" ") for line in lines]]
    if not all(left and right for left, right in merges):
        broken = next(line for line, pair in zip(lines, merges, strict=True) if not all(pair))
        raise StartupError(f"tokenizer.ggml.merges: {broken!r:.80} is not a pair")
    if not merges:
        raise StartupError("tokenizer.ggml.merges is missing")
    return _bpe(vocabulary.ids, merges, ignore_merges=ignore_merges)


def _sentencepiece(file: GgufFile, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Text between special tokens gets a blank in front (as llama.cpp, and the "legacy" form of
    transformers); a character that is no piece falls back to its bytes."""
    unknown = file.integer("tokenizer.ggml.unknown_token_id")
    ids = vocabulary.ids
    backend = _bpe(
        ids,
        _merges_from_scores(vocabulary),
        unk_token=vocabulary.tokens[unknown]
        if unknown is not None and unknown < len(ids)
        else None,
        fuse_unk=True,
        byte_fallback="<0x00>" in ids,
    )
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    replace = normalizers.Replace(" ", _MARKER)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_MARKER), replace]) if prefix else replace
    )
    stages = [decoders.Replace(_MARKER, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([*stages, *strip])
    return backend


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first, as transformers' converter."""
    normal = {
        token: token_id
        for token_id, (token, kind) in enumerate(
            zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        )
        if kind in (_Kind.NORMAL, _Kind.UNUSED)
    }
    ranked: list[tuple[float, int, str, str]] = []
    for token, token_id in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-vocabulary.scores[token_id], token_id, left, right))
    return [(left, right) for _, _, left, right in sorted(ranked)]


def _bpe(
    ids: dict[str, int], merges: Sequence[tuple[str, str]], **options: bool | str | None
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as error:  # the package raises nothing narrower
        raise StartupError(f"tokenizer.ggml.merges: {error}") from error


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    special: list[AddedToken] = []
    whole: list[AddedToken] = []
    normal = int(_Kind.NORMAL)  # nearly all are, and comparing with an enum's member is slow
    for token_id in [at for at, kind in enumerate(vocabulary.kinds) if kind != normal]:
        token, kind = vocabulary.tokens[token_id], vocabulary.kinds[token_id]
        if kind in (_Kind.CONTROL, _Kind.UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _Kind.USER_DEFINED:
            whole.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(whole)


def _named_ids(file: GgufFile, vocabulary_size: int) -> dict[str, int]:
    named: dict[str, int] = {}
    for name, key in _NAMED.items():
        token_id = file.integer(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if not 0 <= token_id < vocabulary_size:
            raise StartupError(
                f"tokenizer.ggml.{key} {token_id} is not below the vocabulary's {vocabulary_size}"
            )
        named[name] = token_id
    return named


def _add_around(
    backend: tokenizers.Tokenizer,
    file: GgufFile,
    vocabulary: _Vocabulary,
    named: Mapping[str, int],
    add_bos: bool,
) -> None:
    def wanted(name: str, default: bool) -> tuple[str, int] | None:
        flag = file.metadata.get(f"tokenizer.ggml.add_{name}", default)
        token_id = named.get(name)
        return (vocabulary.tokens[token_id], token_id) if flag and token_id is not None else None

    bos, eos = wanted("bos_token", add_bos), wanted("eos_token", False)
    if bos or eos:
        backend.post_processor = around_text(bos, eos)


def _eos_ids(file: GgufFile, vocabulary: _Vocabulary, named: Mapping[str, int]) -> tuple[int, ...]:
    found = [named["eos_token"]] if "eos_token" in named else []
    size = len(vocabulary.tokens)
    ends = [file.integer(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    found += [each for each in ends if each is not None and 0 <= each < size]
    if ends[0] is None:
        ids = vocabulary.ids
        harmony = "<|return|>" in ids  # there, <|end|> ends a message but not the answer
        found += [
            ids[text]
            for text in _END_OF_TURN
            if text in ids
            and vocabulary.kinds[ids[text]] == _Kind.CONTROL
            and not (harmony and text == "<|end|>")
        ]
    return tuple(dict.fromkeys(found))


def _strings(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key, [])
    if not isinstance(value, list):
        raise StartupError(f"{key} is not an array of strings")
    # An array has one type of elements, so the first one tells.
    texts = cast(list[str], value)
    if value and not isinstance(value[0], str):
        raise StartupError(f"{key} is not an array of strings")
    return texts


def _numbers(file: GgufFile, key: str) -> list[float]:
    value = file.metadata.get(key, [])
    if not isinstance(value, list):
        raise StartupError(f"{key} is not an array of numbers")
    if value and not isinstance(value[0], int | float):
        raise StartupError(f"{key} is not an array of numbers")
    return cast(list[float], value)
