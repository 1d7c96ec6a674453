"""Guesses change neither what comes out nor who runs, however good they are.

That outputs are those without drafts is in every property test of the core: the sampler of
core_engine guesses at random there. Here is what needs a run without drafts beside it.
"""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from batch_twins import NATIVE_BATCH
from core_engine import Engine, Shape, params, requests
from hash_model import NO_GUESSES, WRONG_GUESSES, expected_output
from triptych.engine_core.ids import RequestId, SequenceId
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import NO_LOGPROBS, SamplingParams

BATCHES = st.sampled_from((PythonBatch, NATIVE_BATCH))
GUESSES = st.integers(1, 1000)

SHAPES = st.builds(
    Shape,
    num_blocks=st.integers(4, 14),
    block_size=st.integers(1, 3),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(4, 16),
    extra_logits=st.integers(0, 12),
    max_num_waiting=st.just(100),
    long_prefill_token_threshold=st.sampled_from([0, 0, 1, 2]),
    watermark_blocks=st.integers(0, 2),
)


@given(data=st.data(), shape=SHAPES, batch=BATCHES)
def test_wrong_guesses_change_nothing_but_what_is_computed(
    data: st.DataObject, shape: Shape, batch: type[PythonBatch]
) -> None:
    """Step by step the same sequences run, are preempted and get the same tokens. Without a cache,
    of which the blocks of drafts push something out; and in the order of arrival, because a
    newcomer that goes before running ones gets more of a step that is planned anew (a second choice
    may be one)."""
    shape = replace(shape, prefix_caching=False, policy="fcfs")
    without = Engine(replace(shape, guess_seed=NO_GUESSES), batch)
    wrong = Engine(replace(shape, guess_seed=WRONG_GUESSES), batch)
    arrivals: dict[int, list[Request]] = {}
    for number in range(data.draw(st.integers(1, 8))):
        request = data.draw(requests(number, shape, beams=False))
        chosen = replace(request.params, prompt_logprobs=NO_LOGPROBS, n=1)
        request = replace(request, priority=0, params=chosen)
        arrivals.setdefault(data.draw(st.integers(0, 8)), []).append(request)
    aborts = data.draw(st.dictionaries(st.integers(1, 20), st.integers(0, 60), max_size=3))
    step = 0
    while step <= 8 or without.scheduler.num_requests:
        for engine in (without, wrong):
            for request in arrivals.get(step, ()):
                engine.submit(request)
        plan, other = without.begin(), wrong.begin()
        assert plan.preempted == other.preempted
        assert without.batch.sequence_ids() == wrong.batch.sequence_ids()
        own = [tuple(row)[:2] for row in without.batch.rows()]
        assert own == [tuple(row)[:2] for row in wrong.batch.rows()]
        drafts = sum(draft >= 0 for draft in wrong.scheduler.drafts())
        assert other.num_tokens == plan.num_tokens + drafts
        assert other.num_logits == plan.num_logits + drafts
        assert without.batch.num_free_blocks >= wrong.batch.num_free_blocks
        if step in aborts:
            target = RequestId(aborts[step])
            assert without.abort(target) == wrong.abort(target)
        for engine in (without, wrong):
            if engine.plan is not None:
                engine.end()
        assert without.outputs == wrong.outputs
        step += 1
    assert wrong.accepted_drafts == 0
    for engine in (without, wrong):
        engine.assert_empty()


def check_tables(engine: Engine, ends: dict[SequenceId, int]) -> None:
    """No blocks but for what a sequence has, or computes up to `ends`."""
    for number in map(SequenceId, engine.batch.sequence_ids()):
        tokens = max(len(engine.batch.token_ids(number)), ends.get(number, 0))
        assert len(engine.batch.table(number)) <= -(-tokens // engine.shape.block_size)


@given(data=st.data(), shape=SHAPES, batch=BATCHES, guess_seed=GUESSES)
def test_a_step_has_what_it_may_have(
    data: st.DataObject, shape: Shape, batch: type[PythonBatch], guess_seed: int
) -> None:
    """Tokens, rows of logits and blocks; and between steps no block that only drafts needed."""
    shape = replace(shape, guess_seed=guess_seed)
    engine = Engine(shape, batch)
    wishes = [data.draw(requests(number, shape)) for number in range(data.draw(st.integers(1, 6)))]
    for request in wishes:
        engine.submit(request)
    while plan := engine.begin():
        assert plan.num_tokens <= shape.max_num_batched_tokens
        assert plan.num_logits <= shape.max_num_seqs + shape.extra_logits
        ends = {row.sequence_id: row.start + row.num_tokens for row in engine.batch.rows()}
        check_tables(engine, ends)
        for sequence_id, count in Counter(engine.scheduler.samples()[0]).items():
            assert count == 1 or ends[SequenceId(sequence_id)] < shape.max_model_len
        engine.end()
        check_tables(engine, {})
        engine.scheduler.check()
    engine.assert_empty()


@settings(max_examples=50)
@given(
    data=st.data(),
    prompts=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=6), min_size=1, max_size=4),
    guess_seed=GUESSES,
    batch=BATCHES,
)
def test_good_guesses_save_steps(
    data: st.DataObject, prompts: list[list[int]], guess_seed: int, batch: type[PythonBatch]
) -> None:
    """A step less for each draft that is taken, where one request runs alone."""
    for number, prompt in enumerate(prompts):
        chosen: SamplingParams = replace(data.draw(params(20)), n=1, prompt_logprobs=NO_LOGPROBS)
        shape = Shape(
            num_blocks=30, max_model_len=40, max_num_batched_tokens=16, extra_logits=12,
            guess_seed=guess_seed,
        )  # fmt: skip
        engine, request = Engine(shape, batch), Request(RequestId(number), tuple(prompt), chosen)
        engine.submit(request)
        steps = engine.run_to_empty()
        output = engine.outputs[request.request_id]
        assert output == expected_output(request)
        assert steps >= len(output) - engine.accepted_drafts
        assert steps <= len(output)
