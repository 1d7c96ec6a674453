"""Requests that a scheduler before this one had: they go on as if nothing had been."""

import json
from random import Random

import pytest

from fake_executor import VOCABULARY, continuation
from fake_tokenizer import FakeTokenizer
from request_mixes import PROCESSORS
from resumed_mixes import VOCABULARY as HARMLESS
from resumed_mixes import Playing, mix, vocabulary
from scheduler_bench import Engine, MakeEngine
from triptych.engine_core.errors import DeadlinePassed, InvalidRequest, QueueFull
from triptych.engine_core.sampling_params import BeamParams, SamplingParams
from triptych.services.transport import wire

GREEDY = SamplingParams(max_tokens=30, temperature=0.0)


def told(engine: Engine) -> FakeTokenizer:
    tokenizer = engine.tokenizer(vocabulary_size=HARMLESS)
    tokenizer.tell_vocabulary(vocabulary())
    return tokenizer


@pytest.mark.parametrize("seed", range(4))
def test_from_any_cut_on_they_are_the_undisturbed_run(make_engine: MakeEngine, seed: int) -> None:
    """All of sampling, n, beams, grammars, plug-ins, logprobs; with guesses and without."""
    source = Random(seed)
    requests = mix(source, 14)
    mode = source.choice(["raw_logprobs", "processed_logprobs"])
    first = make_engine(processors=PROCESSORS, logprobs_mode=mode)
    first.executor(num_blocks=128)
    undisturbed = Playing(told(first))
    undisturbed.whole(requests)
    expected = undisturbed.played()
    first.until_idle()
    first.stop()
    second = Engine(
        first.run_dir.path,
        processors=PROCESSORS,
        logprobs_mode=mode,
        speculative_method=source.choice(["off", "ngram", "suffix"]),
        max_num_batched_tokens=64,
    )
    try:
        cuts = {
            key: source.randrange(max(1, len(each.tokens))) if source.random() < 0.8 else 0
            for key, each in expected.items()
        }
        for index, request in enumerate(requests):
            if request.params.beam is not None:
                cuts |= {(index, choice): 0 for choice in range(request.params.n)}
        again = Playing(told(second))
        again.resumed(requests, lambda *key: expected[key].tokens[: cuts[key]])
        found = again.played()
        for key, each in expected.items():
            assert found[key] == each.after(cuts[key]), (requests[key[0]], key, cuts[key])
        for key, slot in again.slots.items():
            assert (slot in again.tokenizer.cached_tokens) <= (cuts[key] == 0)
        second.until_idle()
        assert second.stats.choices_accepted_before_total == len(expected)
        assert second.stats.prompt_tokens_total == 0
        assert second.stats.generated_tokens_total >= sum(
            len(each.tokens) for each in found.values()
        )
    finally:
        second.close()


def test_a_frozen_tokenizer_resubmits(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=1.5)
    engine.executor(step_seconds=0.02)
    tokenizer = engine.tokenizer()
    assert [welcome.attempt for welcome in tokenizer.welcomes] == [1]
    slots = {tokenizer.submit([n, 2], 240): n for n in range(4)}
    tokenizer.until(lambda: all(len(tokenizer.tokens[slot]) > 2 for slot in slots))
    engine.until(lambda: engine.stats.tokenizers_connected == 0)  # frozen, for that long
    engine.until_idle()
    tokenizer.until(lambda: tokenizer.told_to_start_again)
    tokenizer.say_hello()
    tokenizer.until(lambda: tokenizer.welcomes)
    assert tokenizer.welcomes[-1].attempt == tokenizer.attempt == 2
    for slot, n in slots.items():
        sent = wire.pack_u32(tokenizer.tokens[slot])
        params = SamplingParams(max_tokens=240, temperature=0.0)
        tokenizer.submit_with(
            [n, 2], params, slot=slot, output_token_ids=sent, accepted=True, age_ms=2000
        )
    tokenizer.until(lambda: tokenizer.ended(*slots))
    for slot, n in slots.items():
        assert tokenizer.tokens[slot] == continuation([n, 2], 240)
    engine.until_idle()


def test_every_welcome_names_the_hello_it_answers(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=60)
    first = engine.executor()
    tokenizer, other = engine.tokenizer(), engine.tokenizer()
    for _ in range(2):
        tokenizer.say_hello()
        tokenizer.until(lambda: tokenizer.welcomes)
    first.kill()
    engine.executor(num_blocks=40)
    for each, attempt in ((tokenizer, 3), (other, 1)):
        each.until(lambda: each.welcomes[-1].model.num_blocks == 40)  # noqa: B023  # called at once
        assert {welcome.attempt for welcome in each.welcomes} == {attempt}


def test_time_outs_count_from_the_first_submission(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.executor(step_seconds=0.02)
    tokenizer = engine.tokenizer()
    runs = tokenizer.submit([1], 100)
    tokenizer.until(lambda: tokenizer.tokens[runs])
    over = tokenizer.submit_with([2], GREEDY, accepted=True, timeout_ms=5000, age_ms=5000)
    waited = tokenizer.submit_with([3], GREEDY, queue_timeout_ms=5000, age_ms=2**32 - 1)
    had_tokens = tokenizer.submit_with(
        [4],
        GREEDY,
        output_token_ids=wire.pack_u32(continuation([4], 5)),
        accepted=True,
        queue_timeout_ms=5000,
        age_ms=2**32 - 1,
    )
    tokenizer.until(lambda: tokenizer.ended(over, waited))
    assert not tokenizer.ended(runs)
    assert isinstance(tokenizer.failed[over], DeadlinePassed)
    assert "request_timeout: 5 s" in str(tokenizer.failed[over])
    assert isinstance(tokenizer.failed[waited], DeadlinePassed)
    tokenizer.until(lambda: tokenizer.ended(runs, had_tokens))
    assert tokenizer.tokens[had_tokens] == continuation([4], 30)[5:]
    assert tokenizer.tokens[over] == tokenizer.tokens[waited] == []
    assert engine.stats.requests_timed_out_total == 2
    engine.until_idle()


def test_who_may_have_run_is_given_its_time_in_the_queue_again(make_engine: MakeEngine) -> None:
    """Of a search and of a prompt nobody can say how far they were."""
    engine = make_engine(max_num_seqs=2)
    engine.executor(step_seconds=0.02)
    tokenizer = engine.tokenizer()
    run = [tokenizer.submit([n], 40) for n in (8, 9)]
    tokenizer.until(lambda: all(tokenizer.tokens[slot] for slot in run))
    search = SamplingParams(n=2, max_tokens=20, beam=BeamParams(width=2, length_penalty=1.0))
    searching = tokenizer.submit_with(
        [1], search, accepted=True, queue_timeout_ms=9000, age_ms=9500
    )
    waiting = tokenizer.submit_with([2], GREEDY, accepted=True, queue_timeout_ms=50, age_ms=20)
    prompt = tokenizer.submit_with([3], GREEDY, accepted=True, queue_timeout_ms=9000, age_ms=9500)
    tokenizer.until(lambda: tokenizer.ended(searching, searching + 1, waiting, prompt))
    assert set(tokenizer.failed) == {waiting}
    assert tokenizer.tokens[prompt] == continuation([3], 30)
    engine.until_idle()


def test_what_is_left_of_a_time_out(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(step_seconds=0.05)
    tokenizer = engine.tokenizer()
    long = SamplingParams(max_tokens=200, temperature=0.0)
    slot = tokenizer.submit_with([1], long, accepted=True, timeout_ms=60_000, age_ms=58_500)
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert isinstance(tokenizer.failed[slot], DeadlinePassed)
    assert 0 < len(tokenizer.tokens[slot]) < 200


def test_who_was_accepted_is_not_refused_for_a_full_queue(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2, max_num_waiting=1)
    engine.executor(step_seconds=0.01)
    tokenizer = engine.tokenizer()
    tokenizer.tell_vocabulary()
    grammar = json.dumps({"grammars": [{"lark_grammar": "start: /[a-z]{5}/"}]})
    structured = SamplingParams(
        max_tokens=30, temperature=0.0, grammar=grammar, stop_token_ids=(94,)
    )
    ours = [tokenizer.submit_with([n], GREEDY, accepted=True) for n in range(6)]
    ours += [tokenizer.submit_with([n], structured, accepted=True) for n in range(6)]
    new = tokenizer.submit([9], 3)
    tokenizer.until(lambda: tokenizer.ended(new, *ours))
    assert isinstance(tokenizer.failed.pop(new), QueueFull)
    assert not tokenizer.failed
    assert engine.stats.choices_accepted_before_total == 12
    engine.until_idle()


def test_hostile_values_end_their_own_choices_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(step_seconds=0.01)
    tokenizer = engine.tokenizer()
    good = tokenizer.submit([1, 2, 3], 40)
    unknown = wire.pack_u32([1, VOCABULARY])
    bad = [
        tokenizer.submit_with([1], GREEDY, accepted=True, output_token_ids=unknown),
        tokenizer.submit_with([1], GREEDY, output_token_ids=wire.pack_u32(range(30))),
        tokenizer.submit_with([1], GREEDY, output_token_ids=b"torn!"),
        tokenizer.submit_with([1], GREEDY, choice=2**32 - 1),
    ]
    three = SamplingParams(max_tokens=30, temperature=0.0, n=3)
    first = tokenizer.submit_with([1], three, choice=126)
    bad += range(first, first + 3)
    first = tokenizer.submit_with([1], three, output_token_ids=wire.pack_u32([1]))
    bad += range(first, first + 3)
    tokenizer.until(lambda: tokenizer.ended(good, *bad))
    assert all(isinstance(tokenizer.failed[slot], InvalidRequest) for slot in bad)
    assert set(tokenizer.failed) == set(bad)
    assert tokenizer.tokens[good] == continuation([1, 2, 3], 40)
    engine.until_idle()
    assert engine.stats.requests_refused_total == 6
