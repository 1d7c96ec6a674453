"""A step's tokens in waves: what is drawn, and what is known before it."""

from typing import Literal

import pytest

from grammar_sources import EOS, SMALL_VOCABULARY, regex, schema
from step_samplers import (
    ABC,
    BOTH,
    ENDS,
    A,
    B,
    C,
    params,
    rows,
    step_sampler,
)
from triptych.engine_core.errors import InvalidRequest, NotSupported
from triptych.services.scheduler.running_grammars import LAST
from triptych.services.scheduler.sampler import StepSampler, new_sampler


@BOTH
def test_samples_count_up_to_the_first_that_is_not_its_draft(
    impl: Literal["native", "python"],
) -> None:
    sampler = step_sampler(impl)
    for sequence_id in (1, 2, 3):
        sampler.open(sequence_id, params(), 0, (9,), (8,))
    drawn = sampler.draw(
        rows(10, 11, 12, 20, 21, 30), [1, 1, 1, 2, 2, 3], range(6), [10, 11, LAST, 99, LAST, LAST]
    )
    assert drawn.token_ids == [10, 11, 12, 20, -1, 30]
    assert not drawn.errors
    assert not drawn.complete


@BOTH
def test_accepted_tokens_are_known_to_what_follows(impl: Literal["native", "python"]) -> None:
    """A token may come once: the second row's first choice came out in this very step."""
    sampler = step_sampler(impl)
    sampler.open(1, params(no_repeat_ngram_size=1), 0, (9,), (8,))
    drawn = sampler.draw(rows(10, 10, 10), [1] * 3, range(3), [10, 11, LAST])
    assert drawn.token_ids[:2] == [10, 11]
    sampler.append([1, 1, 1], drawn.token_ids)
    assert not sampler._ahead
    drawn = sampler.draw(rows(10, 11), [1, 1], range(2), [99, LAST])
    assert drawn.token_ids[0] not in (8, 9, 10, 11)


def test_the_kernels_count_each_token_once() -> None:
    sampler, plain = step_sampler(), step_sampler()
    wanted = params(frequency_penalty=0.5)
    for each in (sampler, plain):
        each.open(1, wanted, 0, (9,), (10,))
    drawn = sampler.draw(rows(10, 10, 10), [1] * 3, range(3), [10, 10, LAST])
    sampler.append([1] * 3, drawn.token_ids)
    plain.append([1] * 3, drawn.token_ids)
    again = [each.draw(rows(10, 11), [1], [0], [LAST]).token_ids for each in (sampler, plain)]
    assert again[0] == again[1]
    positions = [each._sampler.draw(rows(10), [1], [0]).token_ids for each in (sampler, plain)]
    assert positions[0] == positions[1]


def test_a_step_may_be_applied_in_part_and_the_sequence_closed() -> None:
    """The core takes no token behind one that ended the sequence."""
    sampler = step_sampler()
    sampler.open(1, params(), 0, (9,), (8,))
    sampler.open(2, params(), 0, (9,), (8,))
    drawn = sampler.draw(rows(10, 11, 12, 10), [1, 1, 1, 2], range(4), [10, 11, LAST, LAST])
    assert drawn.token_ids == [10, 11, 12, 10]
    sampler.append([1, 2], [10, 10])
    sampler.close(1)
    assert not sampler._ahead
    sampler.open(1, params(), 0, (9,), (8, 10))  # under an id that was in use
    sampler.append([1, 2], [11, 11])
    assert not sampler._ahead
    for sequence_id in (1, 2):
        sampler.close(sequence_id)
    assert not sampler._params
    assert sampler._sampler.open_sequences == 0


def test_nothing_is_drawn_behind_a_stop_id() -> None:
    sampler = step_sampler()
    sampler.open(1, params(), 0, (9,), (8,))
    drawn = sampler.draw(rows(10, EOS, 12), [1] * 3, range(3), [10, EOS, LAST])
    assert drawn.token_ids == [10, EOS, -1]


def test_nothing_is_drawn_behind_a_complete_output() -> None:
    sampler = step_sampler()
    sampler.open(1, params(regex("[ax]{3}[by]"), logprobs=0), 0, (9,), (A,))
    drawn = sampler.draw(rows(A, A, B, C), [1] * 4, range(4), [A, A, B, LAST])
    assert drawn.token_ids == [A, A, B, -1]
    assert drawn.complete == [2]
    assert sorted(drawn.logprobs) == [0, 1, 2]


def test_complete_is_ascending_where_waves_are_not() -> None:
    sampler = step_sampler()
    sampler.open(1, params(regex("xyz")), 0, (9,), (ord("x"),))
    sampler.open(2, params(regex("xy")), 0, (9,), (ord("x"),))
    y, z = ord("y"), ord("z")
    drawn = sampler.draw(rows(y, z, y), [1, 1, 2], range(3), [y, LAST, LAST])
    assert drawn.token_ids == [y, z, y]
    assert drawn.complete == [1, 2]


def test_masks_go_to_their_own_samples() -> None:
    """Beside a sequence without a grammar, and one with plug-ins as well."""
    sampler = step_sampler()
    sampler.open(1, params(), 0, (9,), (8,))
    sampler.open(2, params(regex("b*"), processors=(("nothing", ""),)), 0, (9,), ())
    sampler.open(3, params(regex("c+")), 0, (9,), ())
    drawn = sampler.draw(rows(A, A, A), [1, 2, 3], range(3), [LAST] * 3)
    assert drawn.token_ids[0] == A
    assert drawn.token_ids[1] in (B, 140, *ENDS)
    assert drawn.token_ids[2] == C


def test_a_grammar_is_never_left_out() -> None:
    sampler = StepSampler(new_sampler("native", SMALL_VOCABULARY, processed_logprobs=False), {})
    with pytest.raises(NotSupported):
        sampler.check(params(regex("a")))
    with pytest.raises(AssertionError):
        sampler.open(1, params(regex("a")), 0, (9,), ())


def test_a_grammar_that_fails_ends_its_own_sequence() -> None:
    sampler = step_sampler()
    sampler.open(1, params(schema({"$ref": "#"}), logprobs=1), 0, (9,), ())
    sampler.open(2, params(regex("abc"), logprobs=1), 0, (9,), ())
    sampler.open(3, params(logprobs=1), 0, (9,), ())
    for prepare in (True, False):
        if prepare:
            sampler.prepare([1, 2, 3], [LAST] * 3)
        drawn = sampler.draw(rows(7, 7, 7), [1, 2, 3], range(3), [LAST] * 3)
        assert drawn.token_ids == [-1, ABC, 7]
        assert list(drawn.errors) == [0]
        error = drawn.errors[0]
        assert isinstance(error, InvalidRequest)
        assert error.field == "structured_output"
        assert sorted(drawn.logprobs) == [1, 2]
        sampler.close(2)
        sampler.open(2, params(regex("abc"), logprobs=1), 0, (9,), ())
