"""Programs that draw tokens themselves, beside a scheduler over real sockets and shared memory."""

import json

import numpy as np
import pytest

from fake_executor import VOCABULARY, continuation, next_token
from fake_tokenizer import EOS
from raw_sampler import LEASE, TIMEOUT, RawSampler, by_tag, drawn_by_tag, likeliest, outside
from scheduler_bench import Engine, MakeEngine
from triptych.engine_core.errors import InvalidRequest, QueueFull, Unavailable
from triptych.engine_core.step import FinishReason
from triptych.services.scheduler import steps
from triptych.services.transport.rings import LogitsView
from triptych.v1 import sampler_pb2, stage_pb2


def idle_again(engine: Engine) -> None:
    engine.until_idle()
    engine.until(lambda: engine.stats.sampler_rows_used == 0)


def test_tokens_are_the_programs_own(make_engine: MakeEngine) -> None:
    """Whatever it draws, logits that come next are those of a model that drew it itself."""
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        offer = sampler.claim(LEASE, 5)
        assert (offer.num_rows, offer.vocabulary_size) == (5, VOCABULARY)
        assert offer.sampleable_vocabulary == VOCABULARY
        assert offer.token_timeout_ms == 10_000
        prompts = {tag: [tag, 2, 3] for tag in range(5)}

        def checked(logits: LogitsView, row: sampler_pb2.ReadyRow) -> int:
            tokens = prompts[row.tag] + drawn_by_tag(row.tag, row.position)
            assert int(np.argmax(logits)) == next_token(tokens)
            return by_tag(logits, row)

        with sampler.drawing(checked):
            slots = {tag: tokenizer.submit(prompts[tag], 12, **outside(tag=tag)) for tag in prompts}
            own = tokenizer.submit([9, 9], 12)
            tokenizer.until(lambda: tokenizer.ended(own, *slots.values()))
        for tag, slot in slots.items():
            assert tokenizer.tokens[slot] == drawn_by_tag(tag, 12)
            assert tokenizer.finished[slot] == FinishReason.LENGTH
        assert tokenizer.tokens[own] == continuation([9, 9], 12)
        positions = sorted((row.tag, row.position) for row in sampler.asked)
        assert positions == [(tag, position) for tag in range(5) for position in range(12)]
        idle_again(engine)
        assert engine.stats.sampler_leases == 1
        assert engine.stats.sampler_rows == 5
    engine.until(lambda: engine.stats.sampler_leases == 0)
    stats = engine.stats
    assert stats.sampler_rows == stats.sampler_timeouts_total == 0
    assert stats.external_tokens_total == 60
    assert stats.host_tokens_total == 12
    assert stats.generated_tokens_total == 72
    assert stats.requests_finished_total == 6


def test_it_ends_where_any_request_ends(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        with sampler.drawing(lambda _, row: EOS if row.position == row.tag else 5):
            early = tokenizer.submit([1], 9, stop_token_ids=(EOS,), **outside(tag=3))
            whole = tokenizer.submit([1], 4, **outside(tag=2))
            sent = tokenizer.submit([1], 9, sent=[5, 5], stop_token_ids=(EOS,), **outside(tag=4))
            tokenizer.until(lambda: tokenizer.ended(early, whole, sent))
        assert tokenizer.tokens[early] == [5, 5, 5, EOS]
        assert tokenizer.finished[early] == FinishReason.STOP
        assert tokenizer.tokens[whole] == [5, 5, EOS, 5]
        assert tokenizer.finished[whole] == FinishReason.LENGTH
        assert tokenizer.tokens[sent] == [5, 5, EOS]
        assert sorted(row.position for row in sampler.asked if row.tag == 4) == [2, 3, 4]
        idle_again(engine)


def test_two_leases(make_engine: MakeEngine) -> None:
    engine = make_engine(sampler_rows=6, heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as one, RawSampler(engine.run_dir) as other:
        one.claim(LEASE, 4)
        other.claim(LEASE + 1, 2)
        with one.drawing(by_tag), other.drawing():
            ones = {tag: tokenizer.submit([tag], 20, **outside(tag=tag)) for tag in range(4)}
            others = [tokenizer.submit([n], 20, **outside(LEASE + 1)) for n in range(2)]
            tokenizer.until(lambda: tokenizer.ended(*ones.values(), *others))
        for tag, slot in ones.items():
            assert tokenizer.tokens[slot] == drawn_by_tag(tag, 20)
        for n, slot in enumerate(others):
            assert tokenizer.tokens[slot] == continuation([n], 20)
        assert len(one.asked) == 80
        assert len(other.asked) == 40
        assert engine.stats.sampler_leases == 2
        assert engine.stats.sampler_rows == 6
    idle_again(engine)


def test_more_requests_than_rows(make_engine: MakeEngine) -> None:
    """The next one is refused, until a row is free; whoever has none is not held up by it."""
    engine = make_engine(heartbeat_interval=50, heartbeat_timeout=100)  # no tick that helps
    engine.executor()
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE, 2)
        slots = [tokenizer.submit([n], 3, **outside()) for n in range(3)]
        tokenizer.until(lambda: tokenizer.ended(slots[2]))
        refused = tokenizer.failed[slots[2]]
        assert isinstance(refused, QueueFull)
        assert str(refused) == f"all 2 rows of the lease {LEASE} are in use"
        with sampler.drawing():
            tokenizer.until(lambda: tokenizer.ended(*slots))
            more = [tokenizer.submit([n], 3, **outside()) for n in range(2)]
            tokenizer.until(lambda: tokenizer.ended(*more))
        for n, slot in enumerate(slots[:2] + more):
            assert tokenizer.tokens[slot] == continuation([n % 2], 3)


def test_a_row_is_given_back_by_an_abort(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE, 1)
        slot = tokenizer.submit([1, 2], 5, **outside())
        (row,) = sampler.ready()
        tokenizer.abort(slot)
        engine.until(lambda: engine.stats.requests_aborted_total == 1)
        assert engine.stats.sampler_rows_used == 0
        again = tokenizer.submit([3, 4], 5, **outside())
        sampler.draw(row, 17)  # too late: the row is another's by now, or will be
        with sampler.drawing():
            tokenizer.until(lambda: tokenizer.ended(again))
        assert tokenizer.tokens[again] == continuation([3, 4], 5)
        assert tokenizer.tokens[slot] == []
        idle_again(engine)


def test_a_request_of_no_lease(make_engine: MakeEngine) -> None:
    """A young scheduler may have it yet; then nobody waits for it."""
    engine = make_engine(sampler_timeout=3.0, heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    soon, never = (tokenizer.submit([1, 2], 5, **outside(lease)) for lease in (LEASE, 7))
    with RawSampler(engine.run_dir) as sampler:
        tokenizer.until(lambda: engine.stats.requests_tracked == 2)
        sampler.claim(LEASE)
        with sampler.drawing():
            tokenizer.until(lambda: tokenizer.ended(soon))
        assert tokenizer.tokens[soon] == continuation([1, 2], 5)
        assert engine.stats.sampler_leases == 1
    assert not tokenizer.ended(never)
    tokenizer.until(lambda: tokenizer.ended(never))
    gone = tokenizer.failed[never]
    assert isinstance(gone, Unavailable)
    assert str(gone) == "no sampler has come for the lease 7 in 3 s (sampler_timeout)"
    for lease in (7, LEASE):
        slot = tokenizer.submit([1, 2], 5, **outside(lease))
        tokenizer.until(lambda: tokenizer.ended(slot))  # noqa: B023  # called at once
        refused = tokenizer.failed[slot]
        assert isinstance(refused, InvalidRequest)
        assert str(refused) == f"external_sampler.lease: {lease} is held by no program"
    engine.until(lambda: engine.stats.requests_refused_total == 3)


def test_a_request_that_the_core_refuses_keeps_no_row(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_interval=50, heartbeat_timeout=100)
    engine.executor()
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE, 1)
        slots = [tokenizer.submit([VOCABULARY], 5, **outside()) for _ in range(3)]
        tokenizer.until(lambda: tokenizer.ended(*slots))
        for slot in slots:
            assert isinstance(tokenizer.failed[slot], InvalidRequest)
            assert "prompt" in str(tokenizer.failed[slot])
        assert engine.stats.sampler_rows_used == 0


def test_what_was_accepted_before_waits_for_its_sampler(make_engine: MakeEngine) -> None:
    engine = make_engine(sampler_timeout=20, heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    params = outside()
    before = [continuation([n], n) for n in range(3)]
    slots = [tokenizer.submit([n], 9, sent=before[n], accepted=True, **params) for n in range(3)]
    aborted = tokenizer.submit([1], 9, sent=[1], accepted=True, **params)
    own = tokenizer.submit([5], 9)
    tokenizer.until(lambda: tokenizer.ended(own))
    tokenizer.abort(aborted)
    engine.until(lambda: engine.stats.requests_aborted_total == 1)
    assert not tokenizer.ended(*slots)
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE, 2)  # fewer rows than it had: one has to wait on
        with sampler.drawing():
            tokenizer.until(lambda: tokenizer.ended(*slots))
        for n, slot in enumerate(slots):
            assert tokenizer.tokens[slot] == continuation([n], 9)[n:]
        idle_again(engine)
    assert not tokenizer.failed


def test_a_sampler_that_does_not_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine(sampler_timeout=0.5, heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1], 9, sent=[2], accepted=True, **outside())
    tokenizer.until(lambda: tokenizer.ended(slot))
    gone = tokenizer.failed[slot]
    assert isinstance(gone, Unavailable)
    assert str(gone) == (f"no sampler has come for the lease {LEASE} in 0.5 s (sampler_timeout)")
    idle_again(engine)


def test_a_step_waits_for_programs_that_are_quick(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the requests of one, and those of the engine, are computed together."""
    monkeypatch.setattr(steps, "_GATHERING", TIMEOUT)
    monkeypatch.setattr(steps, "_GATHERING_SHARE", 1e9)
    engine = make_engine(heartbeat_timeout=20)
    engine.executor(step_seconds=0.02)
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        with sampler.drawing():
            early = tokenizer.submit([1], 80, **outside())
            tokenizer.until(lambda: len(tokenizer.tokens[early]) > 3)
            late = [tokenizer.submit([n], 20, **outside()) for n in (2, 3)]
            own = tokenizer.submit([4], 20)
            tokenizer.until(lambda: tokenizer.ended(early, *late, own))
    assert tokenizer.tokens[early] == continuation([1], 80)
    for n, slot in zip((2, 3, 4), (*late, own), strict=True):
        assert tokenizer.tokens[slot] == continuation([n], 20)
    assert engine.stats.steps_total <= 83, "one for each token of the first, and for a prompt"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_nobody_guesses_for_a_sampler(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine(speculative_method=method, max_num_batched_tokens=64)
    engine.executor()
    tokenizer = engine.tokenizer()
    again = [5 + position % 3 for position in range(30)]  # easily guessed
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        with sampler.drawing(lambda _, row: again[row.position]):
            slot = tokenizer.submit([5, 6, 7], 30, **outside())
            tokenizer.until(lambda: tokenizer.ended(slot))
            assert engine.stats.draft_tokens_total == 0
            own = tokenizer.submit([5, 5, 5], 30, allowed_token_ids=(5,))
            beside = tokenizer.submit([5, 6, 7], 30, **outside())
            tokenizer.until(lambda: tokenizer.ended(own, beside))
    assert tokenizer.tokens[slot] == tokenizer.tokens[beside] == again
    assert tokenizer.tokens[own] == [5] * 30
    assert engine.stats.draft_tokens_total > 0


def test_beside_a_device_that_draws(make_engine: MakeEngine) -> None:
    """It draws for the others only; steps are sent ahead again when no sampler's request runs."""
    engine = make_engine(heartbeat_timeout=20)
    engine.executor(draws_tokens=1, num_blocks=128)
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        alone = tokenizer.submit([7], 30)
        tokenizer.until(lambda: len(tokenizer.tokens[alone]) > 3)
        with sampler.drawing(by_tag):
            slots = {tag: tokenizer.submit([tag], 20, **outside(tag=tag)) for tag in range(3)}
            others = {n: tokenizer.submit([n], 40) for n in range(3)}
            tokenizer.until(lambda: tokenizer.ended(alone, *slots.values(), *others.values()))
    for tag, slot in slots.items():
        assert tokenizer.tokens[slot] == drawn_by_tag(tag, 20)
    for n, slot in others.items():
        assert tokenizer.tokens[slot] == continuation([n], 40)
    assert tokenizer.tokens[alone] == continuation([7], 30)
    idle_again(engine)
    stats = engine.stats
    assert stats.external_tokens_total == 60
    assert stats.host_tokens_total == 0
    assert stats.device_tokens_total >= 150


def test_scores_of_the_prompt(make_engine: MakeEngine) -> None:
    """They are the engine's business, as ever."""
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        with sampler.drawing():
            slot = tokenizer.submit([1, 2, 3], 4, prompt_logprobs=2, **outside())
            own = tokenizer.submit([1, 2, 3], 4, prompt_logprobs=2)
            tokenizer.until(lambda: tokenizer.ended(slot, own))
    assert tokenizer.tokens[slot] == tokenizer.tokens[own]
    found = [tokenizer.prompt_logprobs[each] for each in (slot, own)]
    theirs, mine = ([row.logprob for part in rows for row in part.rows] for rows in found)
    assert theirs == mine
    assert len(mine) == 2
    assert tokenizer.cached_tokens[slot] == 0


def test_a_scheduler_that_waits_for_samplers_alone_is_idle(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=1.5)
    engine.executor()
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        slot = tokenizer.submit([1, 2], 3, **outside())
        (row,) = sampler.ready()
        tokenizer.pump(0.3)
        tokenizer.beats.clear()
        tokenizer.pump(2.5)
        assert {beat.activity for beat in tokenizer.beats} == {stage_pb2.ACTIVITY_IDLE}
        assert engine.loop.snapshot.serving
        sampler.draw(row, likeliest(sampler.logits(row), row))
        with sampler.drawing():
            tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == continuation([1, 2], 3)


def test_grammars_and_samplers_side_by_side(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    tokenizer.tell_vocabulary()
    grammar = json.dumps({"grammars": [{"lark_grammar": 'start: "abc"'}]})
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        with sampler.drawing(by_tag):
            formed = tokenizer.submit([1], 9, grammar=grammar, stop_token_ids=(EOS,))
            slot = tokenizer.submit([1], 9, **outside(tag=3))
            tokenizer.until(lambda: tokenizer.ended(formed, slot))
    assert tokenizer.tokens[formed][:3] == [ord(each) - ord("!") for each in "abc"]
    assert tokenizer.tokens[slot] == drawn_by_tag(3, 9)


def test_a_slow_program_s_requests_make_room(make_engine: MakeEngine) -> None:
    """Also while others compute: two of three places are theirs, and one after another is given to
    those who wait to run."""
    engine = make_engine(max_num_seqs=3, heartbeat_timeout=20, sampler_timeout=100)
    engine.executor(step_seconds=0.01)
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        theirs = [tokenizer.submit([n], 5, **outside()) for n in range(2)]
        engine.until(lambda: engine.stats.sampler_rows_used == engine.stats.requests_running == 2)
        long = tokenizer.submit([7], 200)
        others = [tokenizer.submit([n, 8], 5) for n in range(4)]
        tokenizer.until(lambda: tokenizer.ended(*others))
        assert not tokenizer.ended(long), "one place, and they would come after it"
        assert engine.stats.preemptions_total == 2
        with sampler.drawing():
            tokenizer.until(lambda: tokenizer.ended(*theirs, long))
        for n in range(2):
            assert tokenizer.tokens[theirs[n]] == continuation([n], 5)
        assert tokenizer.tokens[long] == continuation([7], 200)
        for n in range(4):
            assert tokenizer.tokens[others[n]] == continuation([n, 8], 5)
        idle_again(engine)
