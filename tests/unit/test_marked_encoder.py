"""The copy of a tokenizer that reads marks: the same model in memory, or a copy by way of text."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from triptych.services.tokenizer.special_marks import MarkedEncoder, SpecialMarks, _another

_TEXTS = st.text(alphabet="ab<|>xyé ", max_size=30)


def byte_level(*added: AddedToken) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: token_id for token_id, text in enumerate([*letters, "ab", "<x>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<x>", normalized=False, special=True)])
    backend.add_tokens(list(added))
    return backend


def with_a_gap() -> Tokenizer:
    """A file may give its added tokens any ids; adding them again gives others."""
    text = byte_level(AddedToken("<y>", normalized=False)).to_str()
    first = max(byte_level(AddedToken("<y>", normalized=False)).get_vocab().values())
    return Tokenizer.from_str(text.replace(f'"id":{first},', f'"id":{first + 9},'))


@given(text=_TEXTS)
def test_the_copy_encodes_as_a_copy_by_way_of_text(text: str) -> None:
    backend = byte_level(AddedToken("<y>", normalized=False, lstrip=True))
    copy, by_text = _another(backend), Tokenizer.from_str(backend.to_str())
    for each in (copy, by_text):
        each.encode_special_tokens = True
    assert copy.encode(text).ids == by_text.encode(text).ids


def test_additions_to_the_copy_stay_there() -> None:
    backend = byte_level()
    _another(backend).add_tokens(["zzz"])
    assert backend.token_to_id("zzz") is None
    assert "zzz" not in backend.get_vocab()


def test_ids_of_added_tokens_are_kept_whatever_they_are() -> None:
    backend = with_a_gap()
    shown = {token_id: str(token) for token_id, token in backend.get_added_tokens_decoder().items()}
    copy = _another(backend)
    assert {i: str(token) for i, token in copy.get_added_tokens_decoder().items()} == shown


def test_truncation_is_kept() -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    assert _another(backend).encode("abcdef").ids == backend.encode("abcdef").ids
    assert len(_another(backend).encode("abcdef").ids) == 3


def test_marks_become_special_tokens_and_spellings_stay_text() -> None:
    backend = byte_level(AddedToken("<y>", normalized=False, special=True))
    spellings = {text: backend.token_to_id(text) or 0 for text in ("<x>", "<y>")}
    marks = SpecialMarks(spellings)
    encoder = MarkedEncoder(backend, marks)
    assert encoder.encode(marks.marked("<y>")) == [spellings["<y>"]]
    assert spellings["<y>"] not in encoder.encode("<y>")
