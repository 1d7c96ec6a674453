"""The bytes of tokens, one by one: joined they are the text; for logprobs of prompt and output."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripted_models import T1_BOS, T1_EOS, T1_IM_START, write_t1_tokenizer, write_t2_tokenizer
from triptych.services.runtime.model_files import ModelFiles
from triptych.services.tokenizer.detokenizer import IncrementalDetokenizer
from triptych.services.tokenizer.pieces import prompt_pieces
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer

TEXTS = st.lists(
    st.one_of(
        st.text(max_size=4),
        st.sampled_from(["hello", " world", "ok", "DEF", "世界", "🙂", " ", "<|im_start|>", "<s>"]),
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def t1() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_t1_tokenizer(Path(folder), ["DEF", "世界"], add_bos=True)
        return load_tokenizer(ModelFiles("folder", Path(folder), "t1"))


@pytest.fixture(scope="module")
def t2() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_t2_tokenizer(Path(folder))
        return load_tokenizer(ModelFiles("folder", Path(folder), "t2"))


@given(TEXTS)
def test_a_text_prompt_is_spelled_by_its_tokens(t1: Tokenizer, text: str) -> None:
    """Also where it spells special tokens, which the text of an answer would leave out."""
    ids = t1.encode(text)
    pieces = prompt_pieces(t1, ids, text, skip_special_tokens=True)
    assert len(pieces) == len(ids)
    assert b"".join(pieces) == text.encode()


@given(TEXTS.filter(lambda text: "<s>" not in text))
def test_a_text_prompt_of_sentencepiece(t2: Tokenizer, text: str) -> None:
    pieces = prompt_pieces(t2, t2.encode(text), text, skip_special_tokens=True)
    assert b"".join(pieces) == text.encode()


@given(st.lists(st.sampled_from([0xE4, 0xB8, 0x96, 97, 32, T1_IM_START, T1_EOS, 261]), max_size=9))
@pytest.mark.parametrize("skip", [True, False])
def test_a_prompt_of_ids_is_spelled_by_its_tokens(
    t1: Tokenizer, skip: bool, ids: list[int]
) -> None:
    text = t1.decode(ids, skip_special_tokens=skip)
    pieces = prompt_pieces(t1, ids, text, skip_special_tokens=skip)
    assert b"".join(pieces).decode(errors="replace") == text


def test_what_the_prompt_does_not_spell_adds_nothing(t1: Tokenizer) -> None:
    assert prompt_pieces(t1, [T1_BOS, 97], "a", skip_special_tokens=True) == [b"", b"a"]


@given(st.lists(st.integers(0, 319), max_size=12), st.booleans())
def test_the_bytes_of_output_tokens_joined_are_its_text(
    t2: Tokenizer, ids: list[int], skip: bool
) -> None:
    stream = IncrementalDetokenizer(t2, skip_special_tokens=skip)
    text, data = "", b""
    for token_id in ids:
        data += stream.piece(token_id)
        text += stream.push([token_id])
    text += stream.finish()
    assert data.decode(errors="replace") == text


def test_a_byte_token_has_its_own_byte(t2: Tokenizer) -> None:
    stream = IncrementalDetokenizer(t2)
    token_id = 3 + 0xE4
    assert stream.piece(token_id) == b"\xe4"
    assert t2.token_text(token_id) == "\\xe4"
    assert t2.token_text(t2.encode("hello", add_special_tokens=False)[0]) == " hello"
