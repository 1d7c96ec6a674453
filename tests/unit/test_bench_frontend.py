"""The stub scheduler's steps, and how the clients of bench-frontend count."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bench_modules import load_bench_module
from triptych.services.transport.step_outputs import tokens_from_outputs
from triptych.v1 import common_pb2, stage_pb2

steps = load_bench_module("instant_steps")
counters = load_bench_module("stream_counters")
LENGTH = common_pb2.FINISH_REASON_LENGTH


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=6))
def test_every_slot_gets_its_tokens_and_one_end(requests: list[tuple[int, int]]) -> None:
    """Requests of so many tokens, each begun after so many steps more."""
    stub = steps.InstantSteps(7)
    got: Counter[int] = Counter()
    ends: Counter[int] = Counter()
    starts: Counter[int] = Counter()

    def step() -> None:
        outputs = stage_pb2.TokenizerReply.FromString(stub.next_step()).outputs
        starts.update(each.slot for each in outputs.started)
        for slot, token, finish in tokens_from_outputs(outputs):
            assert token == 7
            assert not ends[slot]
            got[slot] += 1
            ends[slot] += finish == LENGTH

    for slot, (tokens, wait) in enumerate(requests):
        stub.begin([slot], tokens)
        for _ in range(wait):
            step()
    while stub.left:
        step()
    assert got == {slot: tokens for slot, (tokens, _) in enumerate(requests)}
    assert set(ends.values()) == set(starts.values()) == {1}


def test_an_aborted_slot_gets_nothing_more() -> None:
    stub = steps.InstantSteps(7)
    stub.begin([1, 2], 10)
    stub.next_step()
    stub.next_step()
    stub.abort([1, 99])
    outputs = stage_pb2.TokenizerReply.FromString(stub.next_step()).outputs
    assert tokens_from_outputs(outputs) == [(2, 7, 0)]
    assert stub.left == {2: 7}


@given(st.text("abx", max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_occurrences_are_counted_wherever_the_bytes_are_cut(text: str, cuts: list[int]) -> None:
    counted = counters.Occurrences(b"abx")
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b].encode() for a, b in pairwise(edges)]
    assert sum(counted.count(piece) for piece in pieces) == text.count("abx")


def test_counters_are_shared_by_the_file(tmp_path: Path) -> None:
    ours = counters.StreamCounters(tmp_path / "counters", create=True)
    ours.window = 2
    theirs = counters.StreamCounters(tmp_path / "counters")
    theirs.add(0, 5, 1)
    theirs.add(3, 6, 2)
    theirs.opened(3, 4)
    assert (ours.tokens(), ours.messages(), ours.open_streams()) == (11, 3, 4)
    assert theirs.window == 2
    ours.close_all()
    assert theirs.open_streams() == 0
