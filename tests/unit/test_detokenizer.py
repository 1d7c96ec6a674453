from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from scripted_models import (
    T1_BOS,
    T1_IM_END,
    T2_BOS,
    T2_EOS,
    T2_FIRST_BYTE,
    write_t1_tokenizer,
    write_t2_tokenizer,
)
from triptych.services.runtime.model_files import ModelFiles
from triptych.services.tokenizer.detokenizer import IncrementalDetokenizer
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer
from triptych.services.tokenizer.tokenizer_parts import TokenizerParts


@pytest.fixture
def t1(tmp_path: Path) -> Tokenizer:
    write_t1_tokenizer(tmp_path, ["DEF", "世界"])
    return load_tokenizer(ModelFiles("folder", tmp_path, "t1"))


@pytest.fixture
def t2(tmp_path: Path) -> Tokenizer:
    write_t2_tokenizer(tmp_path)
    return load_tokenizer(ModelFiles("folder", tmp_path, "t2"))


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True, prompt: Sequence[int] = ()
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prompt_ids=prompt)
    return [*(detokenizer.push([each]) for each in ids), detokenizer.finish()]


def reference(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def t2_ids(folder: Path, *pieces: str) -> list[int]:
    ids = [reference(folder).token_to_id(piece) for piece in pieces]
    return [each for each in ids if each is not None]


def test_a_character_is_sent_once_and_whole(t1: Tokenizer) -> None:
    ids = [*"A 世".encode(), 0xE4, *b"ab"]
    assert stream(t1, ids) == ["A", " ", "", "", "世", "", "\ufffda", "b", ""]


@pytest.mark.parametrize(
    "data",
    [
        b"\xf0\x9f",
        b"\xff\xc3(\xe4\xb8\xad",
        b"\xf0\x9f\x99\x82",
        b"\xc3\xc3\xa9",
        b"\x80",
        b"\xed\xa0\x80",
    ],
)
def test_bytes_that_are_no_text_become_replacement_characters(t1: Tokenizer, data: bytes) -> None:
    text = data.decode("utf-8", errors="replace")
    assert "".join(stream(t1, list(data))) == text
    assert t1.decode(list(data)) == text


def test_an_unfinished_character_is_held_and_flushed_at_the_end(t1: Tokenizer) -> None:
    assert stream(t1, [0xF0, 0x9F]) == ["", "", "\ufffd"]


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|im_end|>b")])
def test_special_token_in_the_middle(t1: Tokenizer, skip: bool, text: str) -> None:
    ids = [ord("a"), T1_IM_END, ord("b")]
    assert "".join(stream(t1, ids, skip=skip)) == text
    assert t1.decode(ids, skip_special_tokens=skip) == text


def test_special_tokens_are_left_out_by_default(t1: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(t1)
    assert detokenizer.push([ord("a"), T1_IM_END]) == "a"
    assert t1.decode([T1_BOS, ord("a")]) == "a"


def test_a_skipped_special_token_inside_a_character_does_not_break_it(t1: Tokenizer) -> None:
    assert "".join(stream(t1, [0xE4, T1_IM_END, 0xB8, 0xAD])) == "中"


def test_added_pieces_of_several_characters(t1: Tokenizer, tmp_path: Path) -> None:
    pieces = [reference(tmp_path).token_to_id(piece) for piece in ("DEF", "世界")]
    assert "".join(stream(t1, [each for each in pieces if each is not None])) == "DEF世界"


def test_ids_outside_the_vocabulary_add_nothing(t1: Tokenizer) -> None:
    assert stream(t1, [ord("a"), 10**9, -1]) == ["a", "", "", ""]
    assert t1.token_bytes(10**9) == b""


def test_first_word_keeps_its_blank_after_a_prompt(t2: Tokenizer, tmp_path: Path) -> None:
    prompt = [T2_BOS, *t2_ids(tmp_path, "▁hello")]
    for out in (["▁world"], ["ok"], ["ok", "▁world"], ["▁", "ok"]):
        ids = t2_ids(tmp_path, *out)
        whole = reference(tmp_path).decode(prompt + ids)
        before = reference(tmp_path).decode(prompt)
        assert "".join(stream(t2, ids, prompt=prompt)) == whole.removeprefix(before)


def test_what_a_grammar_matched_keeps_its_blank(t2: Tokenizer, tmp_path: Path) -> None:
    detokenizer = IncrementalDetokenizer(t2, prompt_ids=[T2_BOS], as_matched=True)
    assert detokenizer.push(t2_ids(tmp_path, "▁hello", "▁world")) == " hello world"


@pytest.mark.parametrize("prompt", [[], [T2_BOS]])
def test_first_word_of_all_text_loses_its_blank(
    t2: Tokenizer, tmp_path: Path, prompt: list[int]
) -> None:
    ids = t2_ids(tmp_path, "▁hello", "▁world")
    assert "".join(stream(t2, ids, prompt=prompt)) == "hello world"
    assert t2.decode(ids) == "hello world"


@pytest.mark.parametrize("skip", [True, False])
def test_blank_after_a_special_token_as_the_reference_has_it(
    t2: Tokenizer, tmp_path: Path, skip: bool
) -> None:
    for first in ([T2_EOS], [], t2_ids(tmp_path, "ok"), [T2_EOS, T2_BOS]):
        ids = [*first, *t2_ids(tmp_path, "▁world"), T2_EOS, *t2_ids(tmp_path, "▁hello", "ok")]
        text = reference(tmp_path).decode(ids, skip_special_tokens=skip)
        assert "".join(stream(t2, ids, skip=skip)) == text
        assert t2.decode(ids, skip_special_tokens=skip) == text


def test_byte_fallback(t2: Tokenizer, tmp_path: Path) -> None:
    ids = [T2_FIRST_BYTE + byte for byte in "中".encode()]
    assert stream(t2, ids, prompt=t2_ids(tmp_path, "ok")) == ["", "", "中", ""]
    assert t2.decode(ids) == reference(tmp_path).decode(ids) == "中"
    assert "".join(stream(t2, [ids[0], *t2_ids(tmp_path, "ok")])) == "\ufffdok"


def bare(decoder: decoders.Decoder | None, vocabulary: dict[str, int]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(TokenizerParts(backend, len(vocabulary), None, (), 0, {}, None))


def test_metaspace_decoder_drops_the_markers_of_the_first_token_only() -> None:
    words = {"[UNK]": 0, "▁▁a": 1, "▁b": 2, "c": 3}
    for scheme in ("always", "first", "never"):
        tokenizer = bare(decoders.Metaspace(prepend_scheme=scheme), words)
        for ids in ([1, 2, 3], [3, 1], [2]):
            text = tokenizer.decode_whole(ids, skip_special_tokens=True)
            assert "".join(stream(tokenizer, ids)) == text
            assert tokenizer.decode(ids) == text


def test_other_decoders_are_asked_for_a_window() -> None:
    words = {"[UNK]": 0, "play": 1, "##ing": 2, "now": 3}
    for decoder in (decoders.WordPiece(cleanup=False), None):
        tokenizer = bare(decoder, words)
        assert tokenizer.piece_table is None
        ids = [1, 2, 3] * 20
        text = tokenizer.decode_whole(ids, skip_special_tokens=True)
        assert "".join(stream(tokenizer, ids)) == text == tokenizer.decode(ids)
        assert stream(tokenizer, [2], prompt=[1])[0] == text[4 : text.index("now") - 1]
