"""The C++ batch alone: its digests, what it takes as token ids, and how it words refusals."""

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_twins import TWINS
from triptych.engine_core.batch import FINISH_NONE, FINISH_STOP, UNKNOWN_DRAFT, Batch, SequenceRules
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import StepLayout
from triptych.kernels import core

LAYOUT = StepLayout(num_slots=2, max_tokens=24, max_rows=7, max_blocks_per_row=9, max_logits=16)


def _plain_rules() -> SequenceRules:
    return SequenceRules(request_id=1, num_prompt=5, max_tokens=9, max_len=20)


@given(
    block_size=st.integers(1, 80),
    salt=st.binary(max_size=300),
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=200),
)
def test_digests_are_chained_blake2b(block_size: int, salt: bytes, tokens: list[int]) -> None:
    batch = core.Batch(1, block_size, LAYOUT)
    chain = [blake2b(salt, digest_size=16).digest()]
    for end in range(block_size, len(tokens) + 1, block_size):
        words = array("I", tokens[end - block_size : end]).tobytes()
        chain.append(blake2b(chain[-1] + words, digest_size=16).digest())
    assert batch.prefix_digests(tokens, salt) == b"".join(chain)


@pytest.mark.parametrize("length", [0, 1, 111, 112, 113, 127, 128, 129, 255, 256, 257, 1000])
def test_blake2b_at_the_borders_of_its_blocks(length: int) -> None:
    salt = bytes(range(256)) * 4
    root = core.Batch(1, 4, LAYOUT).prefix_digests([], salt[:length])
    assert root == blake2b(salt[:length], digest_size=16).digest()


TOKENS = [5, 0, 2**31 - 1, 7, 9]


@pytest.mark.parametrize(
    "given_as",
    [
        list,
        tuple,
        lambda ids: array("i", ids),
        lambda ids: array("q", ids),
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array([ids, ids], np.int32).T[:, 0],  # not contiguous
        lambda ids: memoryview(array("i", ids)),
        lambda ids: np.array(ids, np.uint32),
    ],
)  # fmt: skip
def test_tokens_in_any_sequence(given_as: Callable[[list[int]], Sequence[int]]) -> None:
    batch = core.Batch(4, 4, LAYOUT)
    tokens = given_as(TOKENS)
    assert batch.prefix_digests(tokens, b"") == batch.prefix_digests(TOKENS, b"")
    batch.open(1, tokens, batch.prefix_digests(tokens, b""), _plain_rules(), 0, 0)
    assert batch.token_ids(1) == TOKENS
    assert batch.plan(8, 8, 8)
    batch.write(bytearray(LAYOUT.slot_bytes), 1)
    assert batch.apply(given_as([3])).token_ids == array("i", [3])
    batch.draft(1, given_as([4]))
    batch.draft(1, [4, -1])
    assert batch.plan(8, 8, 8)
    batch.write(bytearray(LAYOUT.slot_bytes), 2)
    batch.fill_drafts(given_as([5]))
    outcome = batch.apply(given_as([4, 5, 6]), given_as([1]))
    assert outcome.samples == array("i", [0, 1])
    assert outcome.finishes == array("B", [FINISH_NONE, FINISH_STOP])


@pytest.mark.parametrize("tokens", [[2**31], [-(2**31) - 1], np.array([2**40]), [2**70]])
def test_tokens_beyond_32_bits_are_refused(tokens: Sequence[int]) -> None:
    batch = core.Batch(4, 4, LAYOUT)
    with pytest.raises(OverflowError):
        batch.open(1, tokens, batch.prefix_digests([1], b""), _plain_rules(), 0, 0)
    assert batch.sequence_ids() == []


@pytest.mark.parametrize("tokens", [[1.5], "ab", 7, np.array([1.0]), [None]])
def test_what_are_no_tokens_is_refused(tokens: object) -> None:
    batch = core.Batch(4, 4, LAYOUT)
    with pytest.raises(TypeError):
        batch.prefix_digests(cast(Sequence[int], tokens), b"")


ONE, FORK = SequenceId(1), SequenceId(4)
ONES = [1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("filled", "call"),
    [  # filled: None before the plan, else the step is in flight, and so many drafts are known
        (None, lambda batch: batch.draft(ONE, [0, -2])),
        (None, lambda batch: batch.draft(ONE, [0, -1, 0])),
        (None, lambda batch: batch.draft(SequenceId(2), [0])),
        (None, lambda batch: batch.draft(SequenceId(3), [0])),
        (None, lambda batch: batch.draft(ONE, [2**31])),
        (None, lambda batch: batch.fill_drafts([])),
        ([], lambda batch: batch.draft(ONE, [0])),
        ([], lambda batch: batch.fill_drafts([])),
        ([], lambda batch: batch.fill_drafts([1, -5])),
        ([], lambda batch: batch.fill_drafts([2**31, 0])),
        ([], lambda batch: batch.fork(ONE, FORK, _plain_rules(), 0)),
        ([], lambda batch: batch.apply(ONES)),
        ([1, 2], lambda batch: batch.fill_drafts([1])),
        ([1, 2], lambda batch: batch.apply(ONES, [0, 0])),
        ([1, 2], lambda batch: batch.apply(ONES, [6])),
        ([1, 2], lambda batch: batch.apply(ONES, [-1])),
        ([1, 2], lambda batch: batch.apply([*ONES, 1])),
        ([1, 2], lambda batch: batch.apply([*ONES[1:], -2])),
    ],
)
def test_wrong_drafts_are_refused_in_the_same_words(
    filled: list[int] | None, call: Callable[[Batch], object]
) -> None:
    refusals, facts = [], []
    for factory in TWINS:
        batch = factory(8, 4, LAYOUT, True)
        _open_three(batch)
        if filled is not None:
            batch.draft(ONE, [0, UNKNOWN_DRAFT, UNKNOWN_DRAFT])
            assert batch.plan(20, 8, 16)
            batch.write(memoryview(bytearray(LAYOUT.slot_bytes)), 1)
        if filled:
            batch.fill_drafts(filled)
        with pytest.raises((AssertionError, OverflowError, ValueError)) as refusal:
            call(batch)
        words = "" if refusal.type is OverflowError else str(refusal.value)  # Python has its own
        refusals.append((refusal.type, words))
        batch.check()
        facts.append((batch.num_free_blocks, batch.samples(), batch.drafts()))
    assert refusals[0] == refusals[1]
    assert facts[0] == facts[1]


def _open_three(batch: Batch) -> None:
    """The first has output, the second has none, the third is held."""
    for number, num_prompt, held in ((1, 3, False), (2, 5, False), (3, 3, True)):
        text = [0, 1, 2, 0, number]
        chosen = _plain_rules()._replace(num_prompt=num_prompt, held=held)
        digests = batch.prefix_digests(text, b"")
        assert batch.open(SequenceId(number), text, digests, chosen, number - 1, 0) >= 0
