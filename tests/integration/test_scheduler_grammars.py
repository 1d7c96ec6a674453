"""Grammars in the step loop, over real sockets: compiled beside it, waited for, kept, let go."""

import json
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from llguidance import LLMatcher

from fake_executor import continuation
from fake_tokenizer import FakeTokenizer, fake_vocabulary, text_of
from scheduler_bench import Engine, MakeEngine
from triptych.engine_core.errors import DeadlinePassed, InvalidRequest, QueueFull
from triptych.engine_core.step import FinishReason
from triptych.services.scheduler.grammar_compiler import VocabularyTables
from triptych.services.transport.vocabulary import vocabulary_message


def schema(value: object) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


def regex(pattern: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]})


def told(engine: Engine) -> FakeTokenizer:
    tokenizer = engine.tokenizer()
    tokenizer.tell_vocabulary()
    return tokenizer


def until_forgotten(engine: Engine) -> None:
    """All gauges are back at 0, the cache aside."""
    engine.until_idle()
    engine.until(lambda: engine.stats.grammars_running == engine.stats.grammars_waiting == 0)


class Gate:
    """Keeps grammars that contain "slow" from compiling until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[str] = []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    compile_now = VocabularyTables.compile

    def compile_later(tables: VocabularyTables, grammar: str) -> LLMatcher:
        gate.begun.append(grammar)
        if "slow" in grammar:
            gate.open.wait(60)
        return compile_now(tables, grammar)

    monkeypatch.setattr(VocabularyTables, "compile", compile_later)
    yield gate
    gate.open.set()


@pytest.mark.parametrize("impl", ["native", "python"])
def test_an_answer_matches_and_the_one_beside_it_is_as_ever(
    make_engine: MakeEngine, impl: str
) -> None:
    engine = make_engine(engine_impl=impl)
    engine.executor(step_seconds=0.002)
    tokenizer = told(engine)
    beside = tokenizer.submit([1, 2, 3], 40)
    bound = tokenizer.submit([1, 2, 3], 60, grammar=schema({"const": {"a": [1, 2], "b": "cde"}}))
    choices = tokenizer.submit([1], 40, n=3, grammar=regex("(ab|cd){3}x"), temperature=1.0)
    slots = [beside, bound, *range(choices, choices + 3)]
    tokenizer.until(lambda: tokenizer.ended(*slots))
    assert tokenizer.tokens[beside] == continuation([1, 2, 3], 40)
    assert json.loads(text_of(tokenizer.tokens[bound])) == {"a": [1, 2], "b": "cde"}
    assert tokenizer.finished[bound] is FinishReason.STOP
    for slot in slots[2:]:
        text = text_of(tokenizer.tokens[slot])
        assert len(text) == 7
        assert set(text[:6]) <= set("abcd")
        assert text[6] == "x"
    until_forgotten(engine)
    stats = engine.stats
    assert (stats.grammars_compiled_total, stats.grammars_cached) == (2, 2)
    assert stats.grammar_compile_seconds_total > 0
    assert stats.step_times.masks > 0
    # What the grammar forces is guessed, and all of it taken: it goes out in fewer steps.
    assert 0 < stats.accepted_draft_tokens_total <= stats.draft_tokens_total


def test_equal_grammars_compile_once(make_engine: MakeEngine, gate: Gate) -> None:
    engine = make_engine()
    engine.executor()
    first, second = told(engine), told(engine)
    grammar = regex("slow{3}")
    slots = [first.submit([1], 20, grammar=grammar) for _ in range(3)]
    other = second.submit([1], 20, grammar=grammar)
    engine.until(lambda: engine.stats.grammars_waiting == 4)
    gate.open.set()
    first.until(lambda: first.ended(*slots))
    second.until(lambda: second.ended(other))
    assert {text_of(first.tokens[slot]) for slot in slots} == {"slowww"}
    assert text_of(second.tokens[other]) == "slowww"
    again = first.submit([5], 20, grammar=grammar)
    first.until(lambda: first.ended(again))
    assert len(gate.begun) == engine.stats.grammars_compiled_total == 1
    assert engine.stats.grammar_cache_hits_total == 1
    until_forgotten(engine)


def test_an_abort_while_a_grammar_compiles(make_engine: MakeEngine, gate: Gate) -> None:
    engine = make_engine()
    engine.executor()
    tokenizer = told(engine)
    whole = tokenizer.submit([1], 20, n=2, grammar=regex("slow!"))
    part = tokenizer.submit([1], 20, n=3, grammar=regex("slow[?]"), temperature=1.0)
    engine.until(lambda: engine.stats.grammars_waiting == 2)
    tokenizer.abort(whole, whole + 1, part + 1)
    engine.until(lambda: engine.stats.requests_aborted_total == 3)
    assert engine.stats.grammars_waiting == 1
    assert engine.stats.requests_tracked == 2
    gate.open.set()
    tokenizer.until(lambda: tokenizer.ended(part, part + 2))
    assert {text_of(tokenizer.tokens[slot]) for slot in (part, part + 2)} == {"slow?"}
    assert not tokenizer.tokens[part + 1]
    assert not tokenizer.ended(part + 1)
    assert not tokenizer.ended(whole)
    until_forgotten(engine)
    assert engine.stats.requests_aborted_total == 3


def test_time_outs_while_a_grammar_compiles(make_engine: MakeEngine, gate: Gate) -> None:
    engine = make_engine(structured_output_timeout=1.5)
    engine.executor(step_seconds=0.01)
    tokenizer = told(engine)
    beside = tokenizer.submit([1, 2], 200)
    slow = tokenizer.submit([1], 20, grammar=regex("slow1"))
    submit_bound = tokenizer.submit([1], 20, n=2, grammar=regex("slow1"))
    tokenizer.until(lambda: tokenizer.ended(slow, submit_bound, submit_bound + 1))
    error = tokenizer.failed[slow]
    assert isinstance(error, DeadlinePassed)
    assert str(error) == "structured_output_timeout: 1.5 s while its grammar compiled passed"
    engine.until(lambda: engine.stats.requests_timed_out_total == 3)
    # Another grammar does not wait for the one that hangs.
    quick = tokenizer.submit([1], 20, grammar=regex("quick"))
    tokenizer.until(lambda: tokenizer.ended(quick, beside))
    assert text_of(tokenizer.tokens[quick]) == "quick"
    assert tokenizer.tokens[beside] == continuation([1, 2], 200)
    gate.open.set()
    late = tokenizer.submit([1], 20, grammar=regex("slow1"))
    tokenizer.until(lambda: tokenizer.ended(late))
    assert text_of(tokenizer.tokens[late]) == "slow1"
    assert gate.begun.count(regex("slow1")) == 1  # it went on in the background
    until_forgotten(engine)


def test_the_time_outs_of_the_queue_hold_there(make_engine: MakeEngine, gate: Gate) -> None:
    engine = make_engine(queue_timeout=0.5)
    engine.executor()
    tokenizer = told(engine)
    slot = tokenizer.submit([1], 20, grammar=regex("slow"))
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert "queue_timeout" in str(tokenizer.failed[slot])
    gate.open.set()
    until_forgotten(engine)


def test_those_who_wait_count_where_the_queue_is_bounded(
    make_engine: MakeEngine, gate: Gate
) -> None:
    engine = make_engine(max_num_seqs=2, max_num_waiting=2)
    engine.executor()
    tokenizer = told(engine)
    waiting = [tokenizer.submit([n], 20, grammar=regex("slow")) for n in range(4)]
    refused = tokenizer.submit([9], 20, grammar=regex("slow"))
    plain = tokenizer.submit([9], 20)
    tokenizer.until(lambda: tokenizer.ended(refused, plain))
    assert isinstance(tokenizer.failed[refused], QueueFull)
    assert isinstance(tokenizer.failed[plain], QueueFull)
    gate.open.set()
    tokenizer.until(lambda: tokenizer.ended(*waiting))
    assert {text_of(tokenizer.tokens[slot]) for slot in waiting} == {"slow"}
    until_forgotten(engine)


def test_a_tokenizer_that_vanishes_takes_its_waiting_requests_along(
    make_engine: MakeEngine, gate: Gate
) -> None:
    engine = make_engine()
    engine.executor()
    gone = told(engine)
    for n in range(3):
        gone.submit([n], 20, grammar=regex("slow"))
    engine.until(lambda: engine.stats.grammars_waiting == 3)
    gone.close()
    engine.until(lambda: engine.stats.requests_aborted_total == 3)
    until_forgotten(engine)
    stays = told(engine)
    gate.open.set()
    slot = stays.submit([1], 20, grammar=regex("slow"))
    stays.until(lambda: stays.ended(slot))
    assert text_of(stays.tokens[slot]) == "slow"


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /a/",
        '{"grammars": []}',
        '{"grammars": [{"lark_grammar": "start: nothing_of_that_name"}]}',
        schema({"type": "string", "pattern": "(?<=a)b"}),
        schema({"$dynamicRef": "#x"}),
        regex("((a{1,900}){1,900}){1,900}"),
    ],
)
def test_a_bad_grammar_fails_alone(make_engine: MakeEngine, grammar: str) -> None:
    engine = make_engine()
    engine.executor(step_seconds=0.002)
    tokenizer = told(engine)
    beside = tokenizer.submit([1, 2], 50)
    good = tokenizer.submit([1], 20, grammar=regex("good"))
    bad = tokenizer.submit([1], 30, n=2, grammar=grammar)
    tokenizer.until(lambda: tokenizer.ended(beside, good, bad, bad + 1))
    for slot in (bad, bad + 1):
        error = tokenizer.failed.get(slot)
        if "900" in grammar and error is None:
            continue  # it compiles, and what is drawn first may still be within its limits
        assert isinstance(error, InvalidRequest)
        assert error.field == "structured_output"
        assert "\n" not in str(error)
    assert text_of(tokenizer.tokens[good]) == "good"
    assert tokenizer.tokens[beside] == continuation([1, 2], 50)
    until_forgotten(engine)


def test_a_grammar_before_any_vocabulary(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1], 20, grammar=regex("a"))
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert isinstance(tokenizer.failed[slot], InvalidRequest)
    assert "has not told its vocabulary" in str(tokenizer.failed[slot])
    tokenizer.tell_vocabulary()
    slot = tokenizer.submit([1], 20, grammar=regex("a"))
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert text_of(tokenizer.tokens[slot]) == "a"
    until_forgotten(engine)


def test_a_vocabulary_that_is_none_ends_its_tokenizer_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    for spoil in (b"abc", b""):  # torn; of no tokens
        bad = engine.tokenizer()
        message = vocabulary_message(fake_vocabulary())
        message.lengths = spoil
        bad.tell_vocabulary(message)
        bad.until(partial(getattr, bad, "refused"))
        assert "vocabulary: lengths" in str(bad.refused)
    good = told(engine)
    slot = good.submit([1], 20, grammar=regex("ok"))
    good.until(lambda: good.ended(slot))
    assert text_of(good.tokens[slot]) == "ok"


def test_what_runs_never_meets_an_evicted_grammar(make_engine: MakeEngine) -> None:
    """A cache of none, a pool in which sequences are preempted and begin again, and forks."""
    engine = make_engine(structured_output_cache=0)
    engine.executor(num_blocks=24)
    tokenizer = told(engine)
    grammar = regex("[a-f]{60}")
    slots = [tokenizer.submit([n, n], 70, grammar=grammar) for n in range(4)]
    several = tokenizer.submit([7], 70, n=3, grammar=grammar, temperature=1.0)
    slots += range(several, several + 3)
    for n in range(20):
        other = tokenizer.submit([1], 20, grammar=regex(f"other{n}"))
        tokenizer.until(lambda: tokenizer.ended(other))  # noqa: B023 - called before it changes
        assert text_of(tokenizer.tokens[other]) == f"other{n}"
    tokenizer.until(lambda: tokenizer.ended(*slots))
    for slot in slots:
        assert slot not in tokenizer.failed
        assert len(text_of(tokenizer.tokens[slot])) == 60
    until_forgotten(engine)
    engine.until(lambda: engine.stats.grammars_cached == 0)


@pytest.mark.parametrize("num_blocks", [64, 40])
def test_grammars_go_on_with_another_executor(make_engine: MakeEngine, num_blocks: int) -> None:
    """In the same pool, and in another one."""
    engine = make_engine()
    first = engine.executor(step_seconds=0.01)
    tokenizer = told(engine)
    whole = {"const": {"text": "x" * 60}}
    slots = [tokenizer.submit([n], 90, grammar=regex("[a-f]{80}")) for n in range(3)]
    slots.append(tokenizer.submit([1], 90, grammar=schema(whole)))
    tokenizer.until(lambda: all(len(tokenizer.tokens[slot]) > 3 for slot in slots[:3]))
    first.kill()
    tokenizer.until(lambda: not tokenizer.executor_ready)
    waits = tokenizer.submit([5], 90, grammar=regex("new{3}"))
    engine.executor(num_blocks=num_blocks)
    tokenizer.until(lambda: tokenizer.ended(*slots, waits))
    assert not tokenizer.failed
    assert {len(text_of(tokenizer.tokens[slot])) for slot in slots[:3]} == {80}
    assert json.loads(text_of(tokenizer.tokens[slots[3]])) == whole["const"]
    assert text_of(tokenizer.tokens[waits]) == "newww"
    until_forgotten(engine)


def test_those_who_wait_go_on_with_another_executor(make_engine: MakeEngine, gate: Gate) -> None:
    engine = make_engine()
    first = engine.executor()
    tokenizer = told(engine)
    slot = tokenizer.submit([1], 20, grammar=regex("slow"))
    engine.until(lambda: engine.stats.grammars_waiting == 1)
    first.kill()
    tokenizer.until(lambda: not tokenizer.executor_ready)
    gate.open.set()
    engine.until(lambda: engine.stats.requests_waiting == 1)
    engine.executor(num_blocks=40)
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert text_of(tokenizer.tokens[slot]) == "slow"
    until_forgotten(engine)


def test_what_nobody_uses_goes_between_beats(make_engine: MakeEngine) -> None:
    engine = make_engine(structured_output_cache=0, heartbeat_interval=50, heartbeat_timeout=60)
    engine.executor()
    tokenizer = told(engine)
    most = 0
    for n in range(0, 200, 4):
        slots = [tokenizer.submit([1], 12, grammar=numbered(n + i)) for i in range(4)]
        tokenizer.until(lambda: tokenizer.ended(*slots))  # noqa: B023 - called before it changes
        most = max(most, engine.stats.grammars_cached)
    assert most < 50


def numbered(n: int) -> str:
    """A schema that no other number has."""
    if n % 2:
        properties = {f"{name}{n}": {"type": "integer", "maximum": n} for name in "abcdef"}
        return schema({"type": "object", "properties": properties})
    return schema({"enum": [f"{n}-{each}" for each in range(40)]})


def test_a_thousand_schemas_one_after_another(make_engine: MakeEngine) -> None:
    """Memory is bounded, and who streams beside goes on."""
    engine = make_engine(max_num_batched_tokens=64, structured_output_cache=50)
    engine.executor(num_blocks=256)
    tokenizer = told(engine)
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    beside = tokenizer.submit([1, 2, 3], 240)
    longest, before = 0.0, 0
    for n in range(0, 1000, 4):
        if n == 200:  # by then, what is allocated once has been
            before = resident()
        seen, since = len(tokenizer.tokens[beside]), time.monotonic()
        slots = [tokenizer.submit([n % 90], 12, grammar=numbered(n + i)) for i in range(4)]
        tokenizer.until(lambda: tokenizer.ended(*slots))  # noqa: B023 - called before it changes
        assert not tokenizer.failed
        if len(tokenizer.tokens[beside]) == seen and not tokenizer.ended(beside):
            longest = max(longest, time.monotonic() - since)
        if tokenizer.ended(beside):
            beside = tokenizer.submit([n % 90], 240)
    assert longest < 2.0
    assert resident() - before < 64 << 20
    tokenizer.until(lambda: tokenizer.ended(beside))
    until_forgotten(engine)
    engine.until(lambda: engine.stats.grammars_cached <= 50)
    assert engine.stats.grammars_compiled_total == 1000
