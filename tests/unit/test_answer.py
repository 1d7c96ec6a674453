"""A request's answer: choices, best_of, logprobs beside their tokens, echo; without sockets."""

import asyncio
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from byte_tokenizer import EOS, byte_detokenizer
from triptych.engine_core.errors import InvalidRequest, SlowReader, Unavailable
from triptych.engine_core.step import FinishReason
from triptych.services.tokenizer import pieces
from triptych.services.tokenizer.answer import AnswerStream
from triptych.services.tokenizer.pieces import Piece, PromptPart, RequestUsage
from triptych.services.tokenizer.validation import OutputParams
from triptych.services.transport.step_outputs import TokenLogprobs

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def logprobs_of(token: int, top: int = 0, logprob: float | None = None) -> TokenLogprobs:
    ids = array("I", range(token, token + top))
    value = -float(token) / 256 if logprob is None else logprob
    return TokenLogprobs(value, 1, ids, array("f", [-float(each) for each in ids]))


def answer_of(params: OutputParams, prompt: PromptPart | None = None) -> AnswerStream:
    count = max(params.n, params.best_of)
    return AnswerStream(params, prompt or PromptPart(), [byte_detokenizer() for _ in range(count)])


def feed(answer: AnswerStream, choice: int, tokens: Sequence[int], last: int = 0) -> bool:
    """Whether the choice wants no more."""
    satisfied = False
    for index, token in enumerate(tokens):
        finish = last if index == len(tokens) - 1 else 0
        satisfied = answer.choices[choice].accept(token, finish, logprobs_of(token))
    answer.choices[choice].wake()
    return satisfied


def drained(answer: AnswerStream) -> list[Piece]:
    found = []
    while (piece := answer.take()) is not None:
        found.append(piece)
    return found


def test_choices_keep_apart_and_end_once() -> None:
    answer = answer_of(OutputParams(n=3, best_of=3), PromptPart([1, 2]))
    assert answer.take() is None
    feed(answer, 1, b"bb")
    feed(answer, 0, b"a")
    assert [(p.index, p.text) for p in drained(answer)] == [(1, "bb"), (0, "a")]
    feed(answer, 2, b"c", LENGTH)
    feed(answer, 1, [EOS], STOP)
    ends = drained(answer)
    assert [(p.index, p.finish, p.completion_tokens) for p in ends] == [
        (2, LENGTH, 1), (1, STOP, 3)
    ]  # fmt: skip
    assert all(p.usage is None for p in ends)
    feed(answer, 0, b"z", LENGTH)
    (last,) = drained(answer)
    assert (last.index, last.text, last.finish) == (0, "z", LENGTH)
    assert last.usage == RequestUsage(2, 6, 0)


def test_a_stop_string_ends_its_choice_only() -> None:
    answer = answer_of(OutputParams(n=2, best_of=2, stop=("bc",)))
    assert feed(answer, 0, b"abcd")
    assert not feed(answer, 1, b"ab")
    (first,) = [p for p in drained(answer) if p.index == 0]
    assert (first.text, first.finish, first.stop_string) == ("a", STOP, "bc")
    assert feed(answer, 1, b"c")
    (second,) = drained(answer)
    assert (second.finish, second.usage) == (STOP, RequestUsage(0, 6, 0))


def test_the_first_error_is_the_requests() -> None:
    answer = answer_of(OutputParams(n=2, best_of=2))
    feed(answer, 0, b"a", LENGTH)
    answer.choices[1].fail(Unavailable("gone"))
    answer.choices[1].wake()
    assert answer.take() is not None
    with pytest.raises(Unavailable):
        answer.take()


def test_cancel_ends_all_that_run() -> None:
    answer = answer_of(OutputParams(n=3, best_of=3))
    feed(answer, 0, b"a", LENGTH)
    feed(answer, 1, b"bb")
    answer.cancel()
    ends = {p.index: (p.finish, p.text) for p in drained(answer)}
    assert ends == {0: (LENGTH, "a"), 1: (ABORT, "bb"), 2: (ABORT, "")}


def test_the_first_start_counts_as_cached() -> None:
    answer = answer_of(OutputParams(n=2, best_of=2), PromptPart([1] * 9))
    answer.choices[0].started(4)
    answer.choices[1].started(8)
    feed(answer, 0, b"a", LENGTH)
    feed(answer, 1, b"b", LENGTH)
    assert drained(answer)[-1].usage == RequestUsage(9, 2, 4)


def test_best_of_waits_for_all_and_ranks_by_mean_logprob() -> None:
    answer = answer_of(OutputParams(n=2, best_of=4, max_unread_tokens=1))
    for choice, (values, text) in enumerate(
        [((-3.0, -1.0), b"aa"), ((-1.0, -1.5, -1.0), b"bbb"), ((-9.0,), b"c"), ((-2.0,), b"d")]
    ):
        assert drained(answer) == []
        for index, (value, token) in enumerate(zip(values, text, strict=True)):
            finish = LENGTH if index == len(values) - 1 else 0
            answer.choices[choice].accept(token, finish, logprobs_of(token, logprob=value))
            answer.choices[choice].wake()
    best = drained(answer)
    assert [(p.index, p.text, p.score) for p in best] == [(0, "bbb", -3.5 / 3), (1, "aa", -2.0)]
    assert not any(p.logprobs for p in best)  # they were not asked for
    assert best[-1].usage == RequestUsage(0, 7, 0)
    assert answer.take() is None


def test_best_of_fails_at_once() -> None:
    answer = answer_of(OutputParams(n=1, best_of=2))
    answer.choices[1].fail(Unavailable("gone"))
    with pytest.raises(Unavailable):
        answer.take()


def test_best_of_cancelled() -> None:
    answer = answer_of(OutputParams(n=1, best_of=2))
    feed(answer, 1, b"a")
    answer.cancel()
    (piece,) = drained(answer)
    assert (piece.text, piece.finish, piece.usage) == ("a", ABORT, RequestUsage(0, 1, 0))


def test_a_beams_score_comes_with_its_end() -> None:
    answer = answer_of(OutputParams(n=2, best_of=2))
    for choice in (0, 1):
        answer.choices[choice].accept(97, 0)
        answer.choices[choice].scored(-choice - 0.5)
        answer.choices[choice].accept(98, LENGTH)
        answer.choices[choice].wake()
    assert [(p.text, p.score) for p in drained(answer)] == [("ab", -0.5), ("ab", -1.5)]


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    out, at = [], 0
    for size in sizes:
        out.append(data[at : at + size])
        at += size
    return [*out, data[at:]]


@given(
    st.text(max_size=12).map(str.encode),
    st.binary(max_size=3),
    st.lists(st.integers(0, 5), max_size=8),
    st.sampled_from([(), ("b",), ("zz",), ("é",)]),
)
def test_logprobs_stand_beside_their_tokens(
    text: bytes, torn: bytes, sizes: list[int], stop: tuple[str, ...]
) -> None:
    """However tokens arrive: as many entries as ids, with the token's own bytes."""
    answer = answer_of(OutputParams(logprobs=2, stop=stop))
    data = text + torn + b"."
    found = []
    accepted = 0
    for portion in cut(data, sizes):
        for token in portion:
            accepted += 1
            finish = LENGTH if accepted == len(data) else 0
            answer.choices[0].accept(token, finish, logprobs_of(token, 2))
        answer.choices[0].wake()
        found += drained(answer)
    assert found[-1].finish is not None
    ids = [i for p in found for i in p.token_ids]
    rows = [row for p in found for row in p.logprobs]
    for piece in found:
        assert [row.token_id for row in piece.logprobs] == piece.token_ids
    assert bytes(ids) == b"".join(row.data for row in rows) == data[: len(ids)]
    assert all(row.logprobs is not None and row.logprobs.top_ids[0] == row.token_id for row in rows)
    joined = "".join(p.text for p in found)
    if found[-1].stop_string is None:
        assert joined == data.decode(errors="replace")
    else:
        assert joined + found[-1].stop_string == bytes(ids).decode(errors="replace")


def test_logprobs_come_where_text_is_held_back() -> None:
    answer = answer_of(OutputParams(logprobs=0, token_ids=False))
    feed(answer, 0, "é".encode()[:1])
    (piece,) = drained(answer)
    assert (piece.text, [row.data for row in piece.logprobs]) == ("", [b"\xc3"])


def test_a_special_token_that_is_left_out_has_no_bytes() -> None:
    answer = answer_of(OutputParams(logprobs=0))
    feed(answer, 0, [97, EOS], STOP)
    (piece,) = drained(answer)
    assert [row.data for row in piece.logprobs] == [b"a", b""]


def prompt_of(text: bytes) -> PromptPart:
    return PromptPart(list(text), text.decode(), [bytes([token]) for token in text])


def test_echo() -> None:
    answer = answer_of(OutputParams(n=2, best_of=2, echo=True, logprobs=1), prompt_of(b"abc"))
    answer.choices[0].prompt_logprobs(1, [logprobs_of(token) for token in b"bc"])
    assert answer.take() is None
    feed(answer, 0, b"x", LENGTH)
    feed(answer, 1, b"y", LENGTH)
    for piece, last in zip(drained(answer), "xy", strict=True):
        assert piece.text == "abc" + last
        assert bytes(piece.token_ids) == b"abc" + last.encode()
        assert b"".join(row.data for row in piece.logprobs) == piece.text.encode()
        assert [row.logprobs is None for row in piece.logprobs] == [True, False, False, False]
        assert piece.completion_tokens == piece.new_tokens == 1


def test_echo_is_not_searched_for_stop_strings_nor_late() -> None:
    params = OutputParams(echo=True, stop=("bx",), max_unread_tokens=1)
    answer = answer_of(params, prompt_of(b"ab"))
    answer.choices[0].wake()
    assert not feed(answer, 0, b"x")
    assert drained(answer)[0].text == "abx"


def test_prompt_logprobs_come_once_and_whole() -> None:
    answer = answer_of(OutputParams(n=2, best_of=2, prompt_logprobs=0), prompt_of(b"abcd"))
    answer.choices[0].prompt_logprobs(1, [logprobs_of(98)])
    answer.choices[0].prompt_logprobs(1, [logprobs_of(98), logprobs_of(99)])  # computed again
    answer.choices[0].prompt_logprobs(3, [logprobs_of(100)])
    feed(answer, 1, b"x")
    feed(answer, 0, b"y")
    first, second = drained(answer)
    rows = first.prompt_logprobs
    assert [row.logprobs.logprob if row.logprobs else None for row in rows] == [
        None, -98 / 256, -99 / 256, -100 / 256
    ]  # fmt: skip
    assert not second.prompt_logprobs


@pytest.mark.parametrize(("position", "count"), [(0, 1), (1, 3), (3, 1), (9, 1)])
def test_prompt_logprobs_of_positions_that_are_not_there(position: int, count: int) -> None:
    with pytest.raises(InvalidRequest):
        prompt_of(b"abc").add(position, [logprobs_of(1)] * count)


def test_many_alternatives_come_in_several_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_ALTERNATIVES", 10)
    answer = answer_of(OutputParams(logprobs=4, prompt_logprobs=4), prompt_of(b"abcde"))
    answer.choices[0].prompt_logprobs(1, [logprobs_of(token, 4) for token in b"bcde"])
    for token, finish in zip(b"vwxyz", (0, 0, 0, 0, LENGTH), strict=True):
        answer.choices[0].accept(token, finish, logprobs_of(token, 4))
    answer.choices[0].wake()
    found = drained(answer)
    assert len(found) == 6
    for piece in found:
        assert [row.token_id for row in piece.logprobs] == piece.token_ids
        rows = (*piece.logprobs, *piece.prompt_logprobs)
        assert sum(1 + 4 for row in rows if row.logprobs) <= 10
    assert b"".join(bytes(p.token_ids) for p in found) == b"vwxyz"
    assert bytes(row.token_id for p in found for row in p.prompt_logprobs) == b"abcde"
    assert [p.finish for p in found] == [None] * 5 + [LENGTH]
    assert "".join(p.text for p in found) == "vwxyz"
    assert sum(p.new_tokens for p in found) == 5


def test_unread_alternatives_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.services.tokenizer.stream.MAX_UNREAD_ALTERNATIVES", 10)
    choice = answer_of(OutputParams(logprobs=6)).choices[0]
    choice.wake()
    assert not choice.accept(1, 0, logprobs_of(1, 6))
    assert choice.accept(1, 0, logprobs_of(1, 6))
    with pytest.raises(SlowReader, match="10 logprobs"):
        choice.take()


def test_next_waits_for_a_wake() -> None:
    async def scenario() -> None:
        answer = answer_of(OutputParams(n=2, best_of=2))
        waiting = asyncio.create_task(answer.next())
        await asyncio.sleep(0)
        answer.choices[1].accept(97, 0)
        assert not waiting.done()
        answer.choices[1].wake()
        piece = await waiting
        assert (piece.index, piece.text) == (1, "a")

    asyncio.run(scenario())
