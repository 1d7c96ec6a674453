import tempfile
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from scripted_models import T1_VOCABULARY, T2_VOCABULARY, write_t1_tokenizer, write_t2_tokenizer
from triptych.services.runtime.model_files import ModelFiles
from triptych.services.tokenizer.detokenizer import IncrementalDetokenizer
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer

TEXTS = st.lists(
    st.one_of(
        st.text(max_size=6).map(lambda text: text.encode()),
        st.sampled_from(["世", "界", "🙂", "é", "a", " "]).map(lambda text: text.encode()),
        st.binary(max_size=3),
        st.just(b"\xe4"),
    ),
    max_size=12,
).map(b"".join)
GROUPS = st.lists(st.integers(1, 4), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def t1() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_t1_tokenizer(Path(folder), ["DEF", "世界"])
        return load_tokenizer(ModelFiles("folder", Path(folder), "t1"))


@pytest.fixture(scope="module")
def t2() -> tuple[Tokenizer, tokenizers.Tokenizer]:
    with tempfile.TemporaryDirectory() as folder:
        write_t2_tokenizer(Path(folder))
        reference = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
        return load_tokenizer(ModelFiles("folder", Path(folder), "t2")), reference


def streamed(
    tokenizer: Tokenizer, ids: list[int], groups: list[int], *, skip: bool, prompt: list[int]
) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prompt_ids=prompt)
    text, at, turn = "", 0, 0
    while at < len(ids):
        size = groups[turn % len(groups)]
        delta = detokenizer.push(ids[at : at + size])
        text, at, turn = text + delta, at + size, turn + 1
        assert not any("\ud800" <= character <= "\udfff" for character in delta)
    return text + detokenizer.finish()


@settings(max_examples=500)
@given(TEXTS, GROUPS)
def test_joined_deltas_are_the_replacement_decoding_of_all_bytes(
    t1: Tokenizer, data: bytes, groups: list[int]
) -> None:
    text = data.decode("utf-8", errors="replace")
    assert streamed(t1, list(data), groups, skip=True, prompt=[]) == text
    assert t1.decode(list(data)) == text


@given(st.lists(st.integers(0, T1_VOCABULARY - 1), max_size=40), GROUPS, st.booleans())
def test_joined_deltas_are_the_reference_decoding_of_byte_level_tokens(
    t1: Tokenizer, ids: list[int], groups: list[int], skip: bool
) -> None:
    text = t1.decode_whole(ids, skip_special_tokens=skip)
    assert streamed(t1, ids, groups, skip=skip, prompt=[]) == text
    assert t1.decode(ids, skip_special_tokens=skip) == text


# Byte pieces only where they make up whole characters: the reference spoils a run with a bad byte.
UNITS = st.lists(
    st.one_of(
        st.sampled_from("é世🙂").map(lambda character: [3 + byte for byte in character.encode()]),
        st.sampled_from([0, 1, 2, *range(3 + 256, T2_VOCABULARY)]).map(lambda each: [each]),
    ),
    max_size=12,
).map(lambda units: [each for unit in units for each in unit])


@given(UNITS, UNITS, GROUPS, st.booleans())
def test_prompt_and_output_join_as_the_reference_decodes_them(
    t2: tuple[Tokenizer, tokenizers.Tokenizer],
    prompt: list[int],
    ids: list[int],
    groups: list[int],
    skip: bool,
) -> None:
    tokenizer, reference = t2
    whole = reference.decode(prompt + ids, skip_special_tokens=skip)
    before = streamed(tokenizer, prompt, [1], skip=skip, prompt=[])
    assert before == reference.decode(prompt, skip_special_tokens=skip)
    after = streamed(tokenizer, ids, groups, skip=skip, prompt=prompt)
    assert before + after == whole
    assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
        ids, skip_special_tokens=skip
    )
