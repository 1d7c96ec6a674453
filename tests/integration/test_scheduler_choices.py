"""Choices, logprobs and time-outs through the step loop, a real ring and a fake model."""

from fake_executor import continuation
from scheduler_bench import MakeEngine
from triptych.engine_core.errors import DeadlinePassed, TooLong
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.transport import wire


def test_choices_are_forked_and_end_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    tokenizer = engine.tokenizer()
    prompt = list(range(1, 11))
    slot = tokenizer.submit(prompt, 9, n=4)
    slots = range(slot, slot + 4)
    tokenizer.until(lambda: tokenizer.ended(*slots))
    for each in slots:
        assert tokenizer.tokens[each] == continuation(prompt, 9)
        assert each in tokenizer.cached_tokens
    again = tokenizer.submit(prompt, 2)
    tokenizer.until(lambda: tokenizer.ended(again))
    assert tokenizer.cached_tokens[again] == len(prompt) - 1
    assert engine.stats.prefix_hits_total >= len(prompt) - 1
    engine.until_idle()


def test_choices_outlive_their_executor(make_engine: MakeEngine) -> None:
    """Each goes on from its own tokens, in a pool of another size too."""
    engine = make_engine()
    first = engine.executor(step_seconds=0.03)
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1, 2, 3], 25, n=3, temperature=1.0, seed=5)
    slots = range(slot, slot + 3)
    tokenizer.until(lambda: all(len(tokenizer.tokens[each]) > 2 for each in slots))
    first.kill()
    engine.executor(num_blocks=40)
    tokenizer.until(lambda: tokenizer.ended(*slots))
    alone = tokenizer.submit([1, 2, 3], 25, n=3, temperature=1.0, seed=5)
    tokenizer.until(lambda: tokenizer.ended(*range(alone, alone + 3)))
    for index in range(3):
        assert tokenizer.tokens[slot + index] == tokenizer.tokens[alone + index]
    engine.until_idle()


def test_one_choice_aborted_leaves_the_others(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(step_seconds=0.02)
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([5, 6, 7], 60, n=3)
    tokenizer.until(lambda: all(tokenizer.tokens[each] for each in range(slot, slot + 3)))
    tokenizer.abort(slot)
    tokenizer.until(lambda: tokenizer.ended(slot + 1, slot + 2))
    assert not tokenizer.ended(slot)
    assert tokenizer.tokens[slot + 2] == continuation([5, 6, 7], 60)
    assert engine.stats.requests_aborted_total == 1
    engine.until_idle()


def test_choices_that_are_refused_are_all_told(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1] * 250, 20, n=3)
    tokenizer.until(lambda: tokenizer.ended(*range(slot, slot + 3)))
    assert isinstance(tokenizer.failed[slot + 2], TooLong)
    assert engine.stats.requests_tracked == 0


def test_logprobs_travel(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.executor()
    tokenizer = engine.tokenizer()
    prompt = list(range(1, 21))
    slot = tokenizer.submit(prompt, 5, logprobs=2, prompt_logprobs=1)
    tokenizer.until(lambda: tokenizer.ended(slot))
    rows = tokenizer.logprobs[slot]
    assert [int(row.top_ids[0]) for row in rows] == tokenizer.tokens[slot]
    assert [row.rank for row in rows] == [1] * 5
    assert all(len(row.top_ids) == 2 for row in rows)
    parts = tokenizer.prompt_logprobs[slot]
    assert [part.position for part in parts] == sorted({part.position for part in parts})
    assert sum(len(part.rows) for part in parts) == len(prompt) - 1
    engine.until_idle()


def test_a_time_out_in_the_queue_costs_no_step(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.executor(step_seconds=0.02)
    tokenizer = engine.tokenizer()
    runs = tokenizer.submit([1], 100)
    tokenizer.until(lambda: tokenizer.tokens[runs])
    waits = wire.submit_of(wire.pack_u32([2, 3]), SamplingParams(max_tokens=4))
    waits.slot, waits.queue_timeout_ms = 50, 100
    tokenizer.send_submit(waits)
    tokenizer.until(lambda: tokenizer.ended(50, runs))
    assert isinstance(tokenizer.failed[50], DeadlinePassed)
    assert tokenizer.tokens == {runs: continuation([1], 100), 50: []}
    assert engine.stats.requests_timed_out_total == 1
    engine.until_idle()


def test_the_deadline_of_a_call_ends_its_work(make_engine: MakeEngine) -> None:
    """Also where nobody is left to cancel it; the time-outs, which are longer, stay as they are."""
    engine = make_engine()
    engine.executor(step_seconds=0.02)
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit_with(
        [1], SamplingParams(max_tokens=200, temperature=0.0), deadline_ms=1000, timeout_ms=60_000
    )
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert isinstance(tokenizer.failed[slot], DeadlinePassed)
    assert str(tokenizer.failed[slot]) == "deadline: 1 s of the call passed"
    assert 0 < len(tokenizer.tokens[slot]) < 200
    engine.until_idle()
