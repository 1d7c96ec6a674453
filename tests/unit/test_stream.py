"""One request's output, token by token, without sockets."""

from collections.abc import Sequence

import pytest

from byte_tokenizer import EOS, byte_detokenizer
from triptych.engine_core.errors import InvalidRequest, SlowReader, TooLong, Unavailable
from triptych.engine_core.step import FinishReason
from triptych.services.tokenizer.pieces import Piece, PromptPart
from triptych.services.tokenizer.stream import OutputStream
from triptych.services.tokenizer.validation import OutputParams

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def stream_of(params: OutputParams | None = None) -> OutputStream:
    return OutputStream(params or OutputParams(), byte_detokenizer(), PromptPart(), lambda: None)


def feed(stream: OutputStream, tokens: Sequence[int], last: int = 0) -> list[bool]:
    return [
        stream.accept(token, last if i == len(tokens) - 1 else 0) for i, token in enumerate(tokens)
    ]


def all_of(stream: OutputStream) -> Piece:
    piece = stream.take()
    assert piece is not None
    return piece


def test_pieces_are_what_came_since() -> None:
    stream = stream_of()
    assert stream.take() is None
    feed(stream, b"ab")
    assert all_of(stream) == Piece(text="ab", token_ids=[97, 98])
    assert stream.take() is None
    feed(stream, b"c", LENGTH)
    assert all_of(stream) == Piece("c", [99], LENGTH, 3)


@pytest.mark.parametrize(
    ("core", "wire"),
    [
        (InvalidRequest("beam_width", "64"), "sampling_params.beam.width"),
        (InvalidRequest("allowed_token_ids", "x"), "sampling_params.allowed_token_ids"),
        (InvalidRequest("logits_processors[1].name", "x"), "sampling_params.logits_processors[1]"),
        (TooLong("max_tokens", "x"), "sampling_params.max_tokens"),
        (TooLong("prompt", "x"), "prompt"),
    ],
)
def test_what_the_scheduler_refuses_has_the_wire_name(core: InvalidRequest, wire: str) -> None:
    stream = stream_of()
    stream.fail(core)
    with pytest.raises(type(core)) as refused:
        stream.take()
    assert refused.value.field.removesuffix(".name") == wire
    assert refused.value.description == core.description


@pytest.mark.parametrize("group", [1, 2, 100])
def test_a_stop_string_ends_and_hides_what_follows(group: int) -> None:
    stream = stream_of(OutputParams(stop=("cd",)))
    text, ids = "", list[int]()
    wants_abort = False
    tokens = b"abcdefg"
    for start in range(0, len(tokens), group):
        for token in tokens[start : start + group]:
            wants_abort = stream.accept(token, 0)
        if (piece := stream.take()) is not None:
            text, ids = text + piece.text, ids + piece.token_ids
        if stream.ended:
            break
    assert wants_abort
    assert (text, bytes(ids)) == ("ab", b"abcd")
    assert piece is not None
    assert (piece.finish, piece.completion_tokens, piece.stop_string) == (STOP, 4, "cd")


def test_a_stop_string_on_the_last_allowed_token_is_stop() -> None:
    stream = stream_of(OutputParams(stop=("bc",)))
    feed(stream, b"abc", LENGTH)
    assert all_of(stream) == Piece("a", [97, 98, 99], STOP, 3, stop_string="bc")


def test_the_end_of_sequence_has_no_text_and_no_reason() -> None:
    stream = stream_of(OutputParams(skip_special_tokens=False))
    feed(stream, [97, EOS], STOP)
    assert all_of(stream) == Piece("a", [97, EOS], STOP, 2)


def test_a_stop_token_is_named_and_has_no_text() -> None:
    stream = stream_of(OutputParams(stop_token_ids=frozenset({98})))
    feed(stream, b"ab", STOP)
    assert all_of(stream) == Piece("a", [97, 98], STOP, 2, stop_token_id=98)


def test_held_back_text_comes_out_at_the_end() -> None:
    stream = stream_of(OutputParams(stop=("bcX",)))
    feed(stream, b"abc\xe4\xb8")
    assert all_of(stream).text == "a"
    feed(stream, [EOS], STOP)
    assert all_of(stream).text == "bc\ufffd"


def test_min_tokens_disarms_stop_strings() -> None:
    stream = stream_of(OutputParams(stop=("\n",), min_tokens=4))
    assert feed(stream, b"a\nb\nc") == [False, False, False, True, True]
    assert all_of(stream) == Piece("a\nb", [*b"a\nb\n"], STOP, 4, stop_string="\n")


def test_ids_that_nobody_wants_are_not_kept() -> None:
    stream = stream_of(OutputParams(stop=("aaaaaaaaaa",), token_ids=False, max_unread_tokens=3))
    for _ in range(9):
        assert not stream.accept(97, 0)
        assert stream.take() is None
    feed(stream, b"b", LENGTH)
    assert all_of(stream).text == "a" * 9 + "b"


def test_a_reader_that_does_not_read() -> None:
    stream = stream_of(OutputParams(max_unread_tokens=3))
    assert feed(stream, b"abcdef") == [False] * 6
    assert all_of(stream).text == "abcdef"
    feed(stream, b"a")
    stream.wake()
    assert feed(stream, b"bcd") == [False, False, True]
    assert stream.ended
    with pytest.raises(SlowReader, match="more than 3 tokens"):
        stream.take()


def test_an_end_is_never_lost_to_a_slow_reader() -> None:
    stream = stream_of(OutputParams(max_unread_tokens=3))
    stream.wake()
    feed(stream, b"abcd", LENGTH)
    assert all_of(stream).finish == LENGTH


def test_an_error_ends_and_nothing_follows() -> None:
    stream = stream_of()
    feed(stream, b"ab")
    stream.fail(Unavailable("gone", 5))
    assert stream.accept(99, 0)
    stream.fail(SlowReader("not this"))
    with pytest.raises(Unavailable, match="gone"):
        stream.take()


def test_cancel_ends_with_what_there_is() -> None:
    stream = stream_of(OutputParams(stop=("bX",)))
    feed(stream, b"ab")
    stream.cancel()
    stream.cancel()
    assert all_of(stream) == Piece("ab", [97, 98], ABORT, 2)
    finished = stream_of()
    feed(finished, b"a", LENGTH)
    finished.cancel()
    assert all_of(finished).finish == LENGTH


def test_the_token_with_which_a_grammar_ends_is_text() -> None:
    params = OutputParams(end_token_ids=frozenset((EOS, 98)), stop_token_ids=frozenset((98,)))
    stream = stream_of(params)
    feed(stream, b"ac", STOP)
    assert all_of(stream) == Piece("ac", [97, 99], STOP, 2)
    stream = stream_of(params)
    feed(stream, [97, EOS], STOP)
    assert all_of(stream) == Piece("a", [97, EOS], STOP, 2)
    stream = stream_of(params)
    feed(stream, b"ab", STOP)
    assert all_of(stream) == Piece("a", [97, 98], STOP, 2, stop_token_id=98)
    stream = stream_of(OutputParams(end_token_ids=frozenset((EOS,)), stop=("c",)))
    feed(stream, b"ac", STOP)
    assert all_of(stream) == Piece("a", [97, 99], STOP, 2, stop_string="c")
