"""A told-again answer goes on behind what was received, however either is cut, or is refused."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engine import told
from triptych.client.answer import Answer
from triptych.client.api import ChatResponse, FinishReason, GenerateResponse, ResumeMismatch
from triptych.client.received import Received
from triptych.v1 import common_pb2, inference_pb2

TEXT = "naïve ☃ answer"


def cuts(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, length - 1), unique=True).map(sorted)


def taken(
    received: Received[GenerateResponse], responses: Sequence[GenerateResponse]
) -> list[GenerateResponse]:
    return [new for each in responses if (new := received.take(each)) is not None]


@given(cuts(len(TEXT)), cuts(len(TEXT)), st.integers(0, 14))
def test_any_break_and_any_cuts_give_the_answer_once(
    first: list[int], second: list[int], breaks_after: int
) -> None:
    received: Received[GenerateResponse] = Received()
    pieces = taken(received, told(TEXT, *first)[:breaks_after])
    if not received.complete:
        received.again()
        pieces += taken(received, told(TEXT, *second))
    answer = Answer()
    for piece in pieces:
        answer.add(piece)
    assert answer.text == TEXT
    assert answer.token_ids == [*map(ord, TEXT)]
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [
        FinishReason.FINISH_REASON_LENGTH
    ]
    assert received.complete


@pytest.mark.parametrize(
    ("before", "again", "named"),
    [
        ("abcd", "abXd", "text: item 2 was 'c', told again it is 'X'"),
        ("abcd", "abc", "text: 4 items were received, told again it ends after 3"),
    ],
)
def test_another_answer_is_refused(before: str, again: str, named: str) -> None:
    received: Received[GenerateResponse] = Received()
    taken(received, told(before, end=False))
    received.again()
    with pytest.raises(ResumeMismatch, match=named):
        taken(received, told(again, 1))


def test_token_ids_are_compared_where_the_text_is_the_same() -> None:
    received: Received[GenerateResponse] = Received()
    received.take(GenerateResponse(text="ab", token_ids=[1, 2]))
    received.again()
    with pytest.raises(ResumeMismatch, match="token_ids: item 1 was 2, told again it is 3"):
        received.take(GenerateResponse(text="ab", token_ids=[1, 3]))


def test_a_choice_that_had_ended_ends_once() -> None:
    """And the usage comes, though it hangs on the end of that choice this time."""
    received: Received[GenerateResponse] = Received()
    first = told("abc", index=1)
    first[-1].ClearField("usage")
    taken(received, [*first, *told("xy", end=False, index=0)])
    received.again()
    again = told("xyz", index=0)
    again[-1].ClearField("usage")
    new = taken(received, [*again, *told("abc", 1, index=1)])
    assert [(each.index, each.text) for each in new] == [(0, "z"), (1, "")]
    assert new[0].finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert new[1].finish_reason == FinishReason.FINISH_REASON_UNSPECIFIED
    assert new[1].usage.completion_tokens == 3


def test_another_end_is_refused() -> None:
    received: Received[GenerateResponse] = Received()
    first = told("abc")[0]
    first.ClearField("usage")
    received.take(first)
    received.again()
    first.finish_reason = common_pb2.FINISH_REASON_STOP
    with pytest.raises(ResumeMismatch, match="was FINISH_REASON_LENGTH"):
        received.take(first)


def test_reasoning_logprobs_and_tool_calls_go_on_too() -> None:
    def response(reasoning: str, call_id: str, arguments: str, *ids: int) -> ChatResponse:
        call = inference_pb2.ToolCallDelta(id=call_id, name="f", arguments=arguments)
        logprobs = [common_pb2.TokenLogprob(token_id=each) for each in ids]
        return ChatResponse(reasoning=reasoning, logprobs=logprobs, tool_calls=[call])

    received: Received[ChatResponse] = Received()
    received.take(response("so", "call_1", '{"a', 1, 2))
    received.again()
    # The id is drawn anew by the engine: the caller has the first one.
    new = received.take(response("so be", "call_2", '{"a": 1}', 1, 2, 3))
    assert new is not None
    assert new.reasoning == " be"
    assert [each.token_id for each in new.logprobs] == [3]
    assert new.tool_calls == [inference_pb2.ToolCallDelta(arguments='": 1}')]


def test_nothing_new_is_nothing() -> None:
    received: Received[GenerateResponse] = Received()
    received.take(GenerateResponse(text="ab", index=1))
    received.again()
    assert received.take(GenerateResponse(text="a", index=1)) is None


def test_what_is_not_told_again_is_passed_on_untouched() -> None:
    received: Received[GenerateResponse] = Received()
    response = told("abc")[0]
    assert received.take(response) is response
