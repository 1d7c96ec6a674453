"""How an output ends that a grammar or a ban leaves no other way, and who is told why."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest

from drafted_draws import Wish, run
from grammar_sources import EOS, SMALL_VOCABULARY, SmallGrammars, regex, schema
from step_samplers import (
    BOTH,
    ENDS,
    A,
    B,
    always,
    params,
    rows,
    step_sampler,
)
from triptych.engine_core.errors import InvalidRequest
from triptych.services.scheduler.logits_processors import Row
from triptych.services.scheduler.running_grammars import LAST


@BOTH
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"no_repeat_ngram_size": 1, "allowed_token_ids": (8, 9)}, "allowed_token_ids"),
        ({"min_tokens": 5, "allowed_token_ids": ENDS}, "allowed_token_ids"),
        ({"bad_words": tuple((i,) for i in range(SMALL_VOCABULARY))}, "bad_words"),
        ({"min_tokens": 9, "stop_token_ids": tuple(range(SMALL_VOCABULARY))}, "min_tokens"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ],
)
def test_a_request_that_bans_every_token_is_told_so(
    impl: Literal["native", "python"], fields: dict[str, object], field: str
) -> None:
    sampler = step_sampler(impl)
    matrix = np.full((2, SMALL_VOCABULARY), 1.0, np.float32)
    sampler.open(1, params("", **fields), 0, (9,), (8,))
    sampler.open(2, params(), 0, (9,), ())
    for drafts, ids in (([LAST, LAST], [1, 2]), ([3, LAST], [1, 1])):
        drawn = sampler.draw(matrix, ids, range(2), drafts)
        assert drawn.token_ids[0] == -1
        error = drawn.errors[0]
        assert isinstance(error, InvalidRequest)
        assert error.field == field
        assert all(_wire_name(name) in error.description for name in fields)
        assert list(drawn.errors) == [0]


def _wire_name(name: str) -> str:
    return "" if name == "stop_token_ids" else name


@BOTH
@pytest.mark.parametrize("grammar", ["", regex("a*")])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_no_ones_fault(
    impl: Literal["native", "python"], grammar: str, value: float
) -> None:
    sampler = step_sampler(impl)
    matrix = np.full((1, SMALL_VOCABULARY), value, np.float32)
    wanted = params(grammar, min_tokens=2, bad_words=((A,),))
    sampler.open(1, wanted, 0, (9,), ())
    drawn = sampler.draw(matrix, [1], [0], [LAST])
    assert drawn.token_ids == [-1]
    assert not drawn.errors


@BOTH
def test_a_grammar_beside_which_nothing_is_left_names_what_left_nothing(
    impl: Literal["native", "python"],
) -> None:
    sampler = step_sampler(impl)
    sampler.open(1, params(regex("b+"), bad_words=((B,), (140,)), min_tokens=2), 0, (9,), ())
    sampler.open(2, params(regex("b+"), allowed_token_ids=(A,)), 0, (9,), ())
    sampler.open(3, params(regex("b+")), 0, (9,), ())
    drawn = sampler.draw(rows(B, B, B), [1, 2, 3], range(3), [LAST] * 3)
    assert drawn.token_ids == [-1, -1, B]
    for sample, name in ((0, "bad_words"), (1, "allowed_token_ids")):
        error = drawn.errors[sample]
        assert isinstance(error, InvalidRequest)
        assert error.field == "structured_output"
        assert name in error.description
        assert "min_tokens" not in error.description, "which gives way"


@pytest.mark.parametrize("fields", [{}, {"min_tokens": 9}, {"stop_token_ids": ()}])
def test_an_output_that_can_only_end_ends_without_a_token_for_it(fields: dict[str, object]) -> None:
    result = run(
        step_sampler(),
        [Wish(1, params(schema({"const": {"name": True}}), **fields))],
        always(A),
    )[1]
    assert result.finish == "stop"
    assert SmallGrammars().text(result.token_ids) == '{"name":true}'
    assert not set(result.token_ids) & set(ENDS)


def test_a_star_ends_with_an_end_of_sequence_or_at_the_length() -> None:
    def logits_of(sequence_id: int, tokens: Sequence[int]) -> Row:
        row: Row = rows(A)[0].copy()
        row[EOS] = 9.0 if sequence_id == 1 and len(tokens) >= 5 else -9.0
        return row

    wanted = params(regex("a*"), max_tokens=7)
    results = run(step_sampler(), [Wish(1, wanted), Wish(2, wanted)], logits_of)
    assert (results[1].token_ids, results[1].finish) == ([A, A, A, EOS], "stop")
    assert (results[2].token_ids, results[2].finish) == ([A] * 7, "length")


def test_an_ignored_end_of_sequence_comes_only_where_nothing_else_can() -> None:
    wishes = [
        Wish(1, params(regex("a*"), stop_token_ids=(), max_tokens=4)),
        Wish(2, params(regex("a{0,2}"), stop_token_ids=(), bad_words=((139,),))),
        Wish(3, params(regex("a*"), stop_token_ids=(), bad_words=((A,), (139,)))),
    ]
    results = run(step_sampler(), wishes, always(EOS))
    assert results[1].finish == "length"
    assert not set(results[1].token_ids) & set(ENDS)
    assert (results[2].token_ids, results[2].finish) == ([A, A], "stop")
    assert (results[3].token_ids, results[3].finish) == ([EOS], "stop"), "else banned"


def test_min_tokens_gives_way_where_a_ban_leaves_only_the_end() -> None:
    wanted = params(regex("a{1,9}"), min_tokens=9, bad_words=((A, A), (A, 139), (139,)))
    result = run(step_sampler(), [Wish(1, wanted)], always(A))[1]
    assert (result.token_ids, result.finish) == ([A, EOS], "stop")
