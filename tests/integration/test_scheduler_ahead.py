"""Steps ahead of an executor that draws tokens: what comes out is what it was without them.

The executor is a process of its own, its device a thread that draws with the reference sampler from
what the step says, late; the scheduler's loop, its core and its rings are the real ones.
"""

from typing import Any

import pytest

from ahead_mixes import (
    BOUND,
    DRAWN_BY_THE_DEVICE,
    HOST_DRAWN,
    MIX,
    PLAIN,
    WILD,
    Wish,
    got,
    is_plain,
    served,
    started,
    wish,
)
from scheduler_bench import Engine, MakeEngine
from triptych.engine_core.sampling_params import BeamParams
from triptych.engine_core.step import FinishReason

IMPLS = pytest.mark.parametrize("impl", ["native", "python"])


@IMPLS
def test_a_mix_gets_what_it_gets_without_a_device(make_engine: MakeEngine, impl: str) -> None:
    shape = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "engine_impl": impl}
    blocks = {"num_blocks": 256}
    expected, engine = served(make_engine, MIX, shape, **blocks)
    assert engine.stats.device_tokens_total == engine.stats.steps_ahead_total == 0
    assert engine.stats.host_tokens_total >= engine.stats.generated_tokens_total > 0
    drawn, ahead = served(make_engine, MIX, shape, draws_tokens=1, late=0.001, **blocks)
    assert drawn == expected
    stats = ahead.stats
    assert stats.device_tokens_total > 0
    assert stats.host_tokens_total > 0
    assert stats.steps_ahead_total > 0
    in_turn, lockstep = served(
        make_engine, MIX, {**shape, "async_scheduling": False}, draws_tokens=1, **blocks
    )
    assert in_turn == expected
    assert lockstep.stats.steps_ahead_total == lockstep.stats.wasted_tokens_total == 0
    assert lockstep.stats.device_tokens_total > 0


@IMPLS
def test_nearly_every_step_is_ahead_where_the_device_draws_all(
    make_engine: MakeEngine, impl: str
) -> None:
    expected, _ = served(make_engine, DRAWN_BY_THE_DEVICE, {"engine_impl": impl})
    drawn, engine = served(
        make_engine, DRAWN_BY_THE_DEVICE, {"engine_impl": impl}, draws_tokens=1, step_seconds=0.002
    )
    assert drawn == expected
    stats = engine.stats
    assert stats.steps_ahead_total > stats.steps_total / 2
    assert stats.host_tokens_total == 0
    assert stats.device_tokens_total == stats.generated_tokens_total + stats.wasted_tokens_total


@pytest.mark.parametrize(
    "settings",
    [{"num_slots": 1}, {"speculative_method": "ngram"}, {"async_scheduling": False}],
    ids=str,
)
def test_without_a_step_ahead(make_engine: MakeEngine, settings: dict[str, Any]) -> None:
    drawn, engine = served(make_engine, PLAIN, settings, draws_tokens=1)
    assert is_plain(drawn)
    assert engine.stats.steps_ahead_total == 0
    assert engine.stats.device_tokens_total > 0


def test_processed_logprobs_are_the_schedulers(make_engine: MakeEngine) -> None:
    settings = {"logprobs_mode": "processed_logprobs"}
    wishes = [wish(1, 2, seed=1, logprobs=3, top_k=5, **WILD), wish(1, 2, seed=1, **WILD)]
    expected, _ = served(make_engine, wishes, settings)
    drawn, engine = served(make_engine, wishes, settings, draws_tokens=1)
    assert drawn == expected
    assert engine.stats.device_tokens_total == engine.stats.host_tokens_total == 24


def test_ids_that_have_no_text_are_not_drawn(make_engine: MakeEngine) -> None:
    """The tokenizer has fewer than the logits have columns."""
    wishes = [wish(1, 2, n=2, seed=3, temperature=20.0, logprobs=9), wish(5, tokens=30)]
    outcomes = []
    for draws_tokens in (0, 1):
        engine = make_engine()
        engine.executor(draws_tokens=draws_tokens)
        tokenizer = engine.tokenizer(vocabulary_size=50)
        outcomes.append(got(tokenizer, started(tokenizer, wishes)))
        assert engine.stats.device_tokens_total > 0 or not draws_tokens
    assert outcomes[0] == outcomes[1]
    assert max(token for each in outcomes[1] for token in each.tokens) < 50


def test_a_history_without_room_is_the_schedulers(make_engine: MakeEngine) -> None:
    """Of 8 such sequences the device has room for some; who moves draws the same."""
    wishes = [wish(n, 2, seed=n, presence_penalty=1.0, tokens=60, **WILD) for n in range(8)]
    expected, _ = served(make_engine, wishes, {})
    engine = make_engine()
    engine.executor(draws_tokens=1)
    tokenizer = engine.tokenizer()
    device = _device_with_history(engine, 200)
    assert got(tokenizer, started(tokenizer, wishes)) == expected
    assert len(device) == 0
    assert min(engine.stats.device_tokens_total, engine.stats.host_tokens_total) > 0


def _device_with_history(engine: Engine, room: int) -> Any:
    sampler = engine.loop._steps.sampler
    assert sampler is not None
    device = sampler.device
    assert device is not None
    device._max_history = room
    return device


@pytest.mark.parametrize("host_drawn", [HOST_DRAWN, BOUND], ids=["plain", "grammar"])
def test_few_host_rows_do_not_hold_up_the_others(make_engine: MakeEngine, host_drawn: Wish) -> None:
    """One in ten is drawn here: steps go ahead without it, every other one has it."""
    wishes = [*(wish(n, 1, tokens=60) for n in range(9)), host_drawn]
    shape = {"max_num_seqs": 16, "max_num_batched_tokens": 32}
    expected, _ = served(make_engine, wishes, shape, num_blocks=256)
    drawn, engine = served(
        make_engine, wishes, shape, draws_tokens=1, step_seconds=0.002, num_blocks=256
    )
    assert drawn == expected
    assert engine.stats.host_tokens_total == len(drawn[-1].tokens) > 5
    assert engine.stats.steps_ahead_total > engine.stats.steps_total / 2


def test_one_beam_search_among_many(make_engine: MakeEngine) -> None:
    wishes = [*(wish(n, 1, tokens=40) for n in range(20)), wish(2, 4, beam=BeamParams(width=2))]
    shape = {"max_num_seqs": 24, "max_num_batched_tokens": 32}
    expected, _ = served(make_engine, wishes, shape, num_blocks=300)
    drawn, engine = served(make_engine, wishes, shape, draws_tokens=1, late=0.001, num_blocks=300)
    assert drawn == expected
    assert engine.stats.steps_ahead_total > 0


def test_at_most_one_token_is_wasted_on_a_sequence(make_engine: MakeEngine) -> None:
    """One that ends by a stop token has a row in the step ahead by then; one that ends by its
    length is known to, and has none."""
    stopping = [wish(n, n + 1, tokens=60, stop_token_ids=tuple(range(0, 90, 9))) for n in range(8)]
    drawn, engine = served(make_engine, stopping, {}, draws_tokens=1, step_seconds=0.002)
    stops = [each.finish for each in drawn].count(FinishReason.STOP)
    assert stops > 4
    assert 0 < engine.stats.wasted_tokens_total <= stops
    by_length, engine = served(make_engine, PLAIN, {}, draws_tokens=1, step_seconds=0.002)
    assert {each.finish for each in by_length} == {FinishReason.LENGTH}
    assert engine.stats.wasted_tokens_total == 0
    assert engine.stats.steps_ahead_total > 0


@IMPLS
def test_more_requests_than_room(make_engine: MakeEngine, impl: str) -> None:
    """Newcomers enter, sequences are preempted and go on, prompts come in chunks."""
    wishes = [
        wish(*range(n, n + 1 + n % 7), tokens=10 + n % 23, seed=n, **(WILD if n % 2 else {}))
        for n in range(30)
    ]
    settings = {"engine_impl": impl, "max_num_seqs": 6, "max_num_batched_tokens": 8}
    expected, _ = served(make_engine, wishes, settings, num_blocks=24)
    drawn, engine = served(make_engine, wishes, settings, num_blocks=24, draws_tokens=1)
    assert drawn == expected
    assert engine.stats.preemptions_total > 0
    assert engine.stats.steps_ahead_total > 0
