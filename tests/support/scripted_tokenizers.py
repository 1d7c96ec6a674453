"""T1 and T2, the tokenizers of the scripted models (see scripted_models for the whole picture)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

T1_UNK = 256
T1_BOS = 257
T1_EOS = 258
T1_IM_START = 259
T1_IM_END = 260
T1_FIRST_PIECE = 261
T1_VOCABULARY = 320
_T1_SPECIAL = ("<unk>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")

T2_UNK = 0
T2_BOS = 1
T2_EOS = 2
T2_FIRST_BYTE = 3
T2_VOCABULARY = 320
_T2_SPECIAL = ("<unk>", "<s>", "</s>")
_T2_WORDS = ("▁hello", "▁world", "ok")
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_t1_tokenizer(
    folder: Path, extra_pieces: Sequence[str] = (), *, add_bos: bool = False
) -> dict[str, int]:
    """Writes T1: byte-level BPE without merges, 320 ids. Returns piece -> id of `extra_pieces`.

    Id b < 256 is the byte b. Then come the special tokens (T1_UNK ... T1_IM_END) and, from
    T1_FIRST_PIECE, the plain added tokens `extra_pieces` (at most 59), filled up with
    `<|reserved_k|>`. A piece in text is always read as that one token. Use pieces of ASCII or of
    characters above U+0180: a byte-level decoder reads those between as letters for single bytes.
    With `add_bos` the tokenizer puts <|bos|> before text whose special tokens are wanted.
    """
    letters = _byte_letters()
    room = T1_VOCABULARY - T1_FIRST_PIECE
    if len(extra_pieces) > room:
        raise ValueError(f"extra_pieces: {len(extra_pieces)} given, at most {room}")
    reserved = [f"<|reserved_{k}|>" for k in range(room - len(extra_pieces))]
    plain = [*extra_pieces, *reserved]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            *(_added(T1_UNK + k, text, special=True) for k, text in enumerate(_T1_SPECIAL)),
            *(_added(T1_FIRST_PIECE + k, text, special=False) for k, text in enumerate(plain)),
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": _bos_template("<|bos|>", T1_BOS) if add_bos else None,
        "decoder": {**byte_level, "use_regex": True},
        "model": _bpe({letter: byte for byte, letter in enumerate(letters)}, [], fallback=False),
    }
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "unk_token": "<unk>"}
    _write_tokenizer(folder, tokenizer, {**special, "chat_template": CHATML_TEMPLATE})
    return {piece: T1_FIRST_PIECE + k for k, piece in enumerate(extra_pieces)}


def write_t2_tokenizer(folder: Path, words: Sequence[str] = _T2_WORDS) -> dict[str, int]:
    """Writes T2 as Llama 2 has it: 320 ids, every other character falls back to bytes.

    Ids: <unk>, <s>, </s>, then <0x00>..<0xFF> (T2_FIRST_BYTE + byte), then the pieces. `words` are
    whole pieces, spelled with the word-start marker where they carry one; letters a-z and the
    marker are pieces too. Text gets <s> and a word-start marker in front. Returns piece -> id.
    """
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    pieces: list[str] = list(letters)
    merges: list[list[str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            merge = [word[: end - 1], word[end - 1]]
            if word[:end] not in pieces:
                pieces.append(word[:end])
                merges.append(merge)
    first = T2_FIRST_BYTE + 256
    reserved = [f"<reserved_{k}>" for k in range(T2_VOCABULARY - first - len(pieces))]
    named = [*_T2_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *reserved]
    if len(named) > T2_VOCABULARY:
        raise ValueError(f"words: {len(named)} ids needed, at most {T2_VOCABULARY}")
    ids = {text: k for k, text in enumerate(named)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(k, text, special=True) for k, text in enumerate(_T2_SPECIAL)],
        "normalizer": _sequence(
            "normalizers",
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ),
        "pre_tokenizer": None,
        "post_processor": _bos_template("<s>", T2_BOS),
        "decoder": _sequence(
            "decoders",
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ),
        "model": _bpe(ids, merges, fallback=True),
    }
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write_tokenizer(folder, tokenizer, special)
    return {piece: ids[piece] for piece in pieces}


def _write_tokenizer(
    folder: Path, tokenizer: Mapping[str, object], config: Mapping[str, object]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer.json", tokenizer)
    common = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    write_json(folder / "tokenizer_config.json", {**common, **config})


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes a JSON file as the Hugging Face libraries do."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _added(token_id: int, text: str, *, special: bool) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": text, **flags, "special": special}


def _bpe(
    vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], *, fallback: bool
) -> dict[str, object]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>" if fallback else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fallback,
        "byte_fallback": fallback,
        "ignore_merges": False,
        "vocab": dict(vocabulary),
        "merges": [list(merge) for merge in merges],
    }


def _bos_template(text: str, token_id: int) -> dict[str, object]:
    bos = {"SpecialToken": {"id": text, "type_id": 0}}
    first: dict[str, object] = {"Sequence": {"id": "A", "type_id": 0}}
    second: dict[str, object] = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, {"SpecialToken": {"id": text, "type_id": 1}}, second],
        "special_tokens": {text: {"id": text, "ids": [token_id], "tokens": [text]}},
    }


def _sequence(key: str, *parts: Mapping[str, object]) -> dict[str, object]:
    return {"type": "Sequence", key: list(parts)}


def _byte_letters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (as GPT-2 chose them)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]
