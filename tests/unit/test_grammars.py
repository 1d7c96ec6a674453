"""The cache of compiled grammars, and the queue of those who wait for one."""

import json
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from fake_tokenizer import EOS, fake_vocabulary
from triptych.engine_core.errors import InvalidRequest, RequestError, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.scheduler import grammars
from triptych.services.scheduler.grammar_compiler import (
    GrammarCompiler,
    VocabularyTables,
    unforced,
)
from triptych.services.scheduler.grammar_queue import GrammarQueue, Released
from triptych.services.scheduler.grammars import Grammars
from triptych.services.scheduler.tokenizer_link import Submitted
from triptych.services.transport.vocabulary import Vocabulary

BYTES = tuple(bytes([each]) for each in range(256))


def regex(pattern: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]})


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "the condition does not come true"
        time.sleep(0.001)


class Cache:
    """Grammars, and who lives."""

    def __init__(self, most: int = 2, most_bytes: int = 1 << 20) -> None:
        self.done = threading.Semaphore(0)
        self.compiler = GrammarCompiler(self.done.release)
        self.grammars = Grammars(self.compiler, most, most_bytes)
        self.grammars.learn(fake_vocabulary())
        self.live: set[RequestId] = set()

    def ask(self, grammar: str, *choices: int) -> bool:
        ids = [RequestId(each) for each in choices]
        self.live.update(ids)
        return self.grammars.ask(grammar, ids)

    def use(self, grammar: str, *choices: int) -> None:
        """Ask, and have it."""
        if not self.ask(grammar, *choices):
            assert self.done.acquire(timeout=20)
            self.grammars.take()

    def end(self, *choices: int) -> None:
        self.live.difference_update(map(RequestId, choices))
        self.grammars.prune(self.live.__contains__)

    def has(self, grammar: str) -> bool:
        try:
            self.grammars.matcher(grammar)
        except Unavailable:
            return False
        return True


def test_the_least_recently_used_goes_first() -> None:
    cache = Cache(most=2)
    for choice, name in enumerate("abc", start=1):
        cache.use(regex(name), choice)
    assert len(cache.grammars) == 3  # all are in use
    cache.end(1)
    cache.end(2)
    assert len(cache.grammars) == 3
    assert cache.ask(regex("a"), 4)  # a hit: "b" is older now
    cache.end(4)
    cache.end(3)
    assert len(cache.grammars) == 2
    assert not cache.ask(regex("b"), 5)
    assert cache.ask(regex("a"), 6)
    assert cache.ask(regex("c"), 7)
    assert cache.grammars.hits_total == 3


def test_the_text_of_idle_grammars_is_bounded() -> None:
    cache = Cache(most=1000, most_bytes=500)
    for choice in range(20):
        cache.use(regex(f"{'x' * 60}{choice}"), choice)
    assert len(cache.grammars) == 20
    cache.end(*range(20))
    assert 1 <= len(cache.grammars) <= 5
    for choice in range(20):
        assert not cache.has(regex(f"{'x' * 60}{choice}"))


def test_what_a_live_choice_needs_is_never_evicted() -> None:
    cache = Cache(most=0)
    cache.use(regex("held"), 1, 2)
    for choice in range(10, 20):
        cache.use(regex(f"other{choice}"), choice)
        cache.end(choice)
    assert cache.has(regex("held"))
    cache.end(1)
    assert cache.has(regex("held"))
    cache.end(2)
    assert len(cache.grammars) == 0


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30),
    st.integers(0, 3),
)
def test_any_coming_and_going(moves: list[tuple[int, bool]], most: int) -> None:
    cache = Cache(most=most)
    choices: dict[int, list[int]] = {}
    for number, (which, begins) in enumerate(moves):
        if begins:
            cache.use(regex(f"g{which}"), number)
            choices.setdefault(which, []).append(number)
        elif choices.get(which):
            cache.end(choices[which].pop(0))
        held = {each for each, live in choices.items() if live}
        assert all(cache.has(regex(f"g{each}")) for each in held)
        assert len(held) <= len(cache.grammars) <= len(held) + most
    for live in choices.values():
        cache.end(*live)
    assert len(cache.grammars) <= most
    assert cache.grammars.compiled_total + cache.grammars.hits_total == sum(
        begins for _, begins in moves
    )
    cache.compiler.close()


def test_equal_grammars_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    go = threading.Event()
    compile_now = VocabularyTables.compile

    def compile_later(tables: VocabularyTables, grammar: str) -> LLMatcher:
        begun.append(grammar)
        go.wait(20)
        return compile_now(tables, grammar)

    monkeypatch.setattr(VocabularyTables, "compile", compile_later)
    cache = Cache()
    assert not any(cache.ask(regex("same"), choice) for choice in range(5))
    assert not cache.ask(regex("other"), 7)
    # Both threads are busy now: this one has not begun, and nobody waits for it any more.
    until(lambda: len(begun) == 2)
    assert not cache.ask(regex("unwanted"), 8)
    cache.grammars.forget(regex("unwanted"))
    go.set()
    for _ in range(3):
        assert cache.done.acquire(timeout=20)
    assert {each.grammar for each in cache.grammars.take()} == {regex("same"), regex("other")}
    assert begun.count(regex("same")) == 1
    assert regex("unwanted") not in begun
    assert not cache.ask(regex("unwanted"), 9)
    assert cache.done.acquire(timeout=20)
    assert [each.grammar for each in cache.grammars.take()] == [regex("unwanted")]


def test_a_failure_is_told_and_not_kept() -> None:
    cache = Cache()
    assert not cache.ask(regex("("), 1)
    assert cache.done.acquire(timeout=20)
    (compiled,) = cache.grammars.take()
    assert isinstance(compiled.outcome, InvalidRequest)
    assert compiled.outcome.field == "structured_output"
    assert len(cache.grammars) == cache.grammars.compiled_total == 0
    assert not cache.has(regex("("))


def test_a_panic_of_the_library_fails_the_grammar_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        pass

    compile_now = VocabularyTables.compile

    def panic(tables: VocabularyTables, grammar: str) -> LLMatcher:
        if "panic" in grammar:
            raise PanicError
        return compile_now(tables, grammar)

    monkeypatch.setattr(VocabularyTables, "compile", panic)
    cache = Cache()
    for number in range(4):  # more than there are threads
        cache.ask(regex(f"panic{number}"), number)
        assert cache.done.acquire(timeout=20)
    outcomes = [each.outcome for each in cache.grammars.take()]
    assert [type(each) for each in outcomes] == [InvalidRequest] * 4
    cache.use(regex("ok"), 9)
    assert cache.has(regex("ok"))


def test_before_the_vocabulary() -> None:
    made = Grammars(GrammarCompiler(lambda: None), 1, 1)
    with pytest.raises(InvalidRequest, match="has not told its vocabulary"):
        made.ask(regex("a"), [RequestId(1)])
    assert (made.vocabulary_size, made.eos_token_ids) == (0, ())


def test_the_first_vocabulary_counts() -> None:
    cache = Cache()
    cache.grammars.learn(Vocabulary((b"a",), (), (0,)))
    assert cache.grammars.vocabulary_size == 97
    assert cache.grammars.eos_token_ids == (EOS,)


def test_a_vocabulary_without_an_end() -> None:
    tables = VocabularyTables(Vocabulary((b"a", b"b"), (), ()))
    with pytest.raises(InvalidRequest, match="no end-of-sequence token"):
        tables.compile(regex("a"))


def test_tokens_longer_than_the_trie_takes_never_match() -> None:
    tokens = (b"a", b"z" * 20_000, b"z" * 255, b"<eos>")
    tables = VocabularyTables(Vocabulary(tokens, (3,), (3,)))
    assert tables.compile(regex("[az]{30000}")).compute_bitmask()[0] == 0b0101
    assert tables.greedy_tokens(b"a" + b"z" * 255) == [0, 2]


def test_greedy_tokens_are_of_whole_characters() -> None:
    tokens = (*BYTES, "é".encode(), b"ab", b"<eos>")
    tables = VocabularyTables(Vocabulary(tokens, (258,), (258,)))
    assert tables.greedy_tokens("abéa".encode()) == [257, 256, ord("a")]
    assert tables.greedy_tokens("abé".encode()[:-1]) == [257]
    assert tables.greedy_tokens(b"a\xff\xfeb") == [ord("a")]
    assert tables.greedy_tokens(b"") == []


def test_forced_text_may_be_cut_in_any_way() -> None:
    tokens = (*BYTES, b"ba", b"baz", b"<eos>")
    tables = VocabularyTables(Vocabulary(tokens, (258,), (258,)))
    matcher = tables.compile(json.dumps({"grammars": [{"json_schema": {"const": "baz"}}]}))
    assert matcher.consume_token(ord('"'))
    mask = matcher.compute_bitmask()
    assert [each for each in range(259) if mask[each >> 3] >> (each & 7) & 1] == [
        ord("b"), 256, 257
    ]  # fmt: skip
    assert matcher.compute_ff_bytes().startswith(b"baz")


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "[]", "{}", '{"grammars": {}}', '{"grammars": [1]}', '{"grammars": []}'),
        '{"others": [], "grammars": [{}]}',
    ],
)
def test_what_is_no_grammar(text: str) -> None:
    with pytest.raises(InvalidRequest, match="not in llguidance's JSON form"):
        unforced(text)


def test_numbers_of_a_grammar_stay_as_they_are() -> None:
    text = '{"grammars": [{"json_schema": {"maximum": 1e400, "minimum": 0.10000000000000000001}}]}'
    assert '{"maximum": 1e400, "minimum": 0.10000000000000000001}' in unforced(text)
    named = '{"grammars":[{"name":"top","lark_grammar":"start: @b"},{"name":"b"}]}'
    assert json.loads(unforced(named))["grammars"][1:] == json.loads(named)["grammars"]
    assert "start: @top" in unforced(named)


def test_a_grammar_whose_states_are_used_up_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Matchers of one grammar share the states of its lexer: without `renewed` a pattern that
    many have used would fail for all."""
    monkeypatch.setattr(grammars, "_LONGEST_RENEWAL", 60.0)  # however busy the machine is
    tokens = (*BYTES, b"<eos>")
    cache = Cache()
    cache.grammars = Grammars(cache.compiler, 8, 1 << 20)
    cache.grammars.learn(Vocabulary(tokens, (256,), (256,)))
    pattern = regex("[a-zé]{1,50000}x")
    cache.use(pattern, 1)
    matcher = cache.grammars.matcher(pattern)
    renewals = 0
    sofar: list[int] = []
    for byte in b"a" * 14_000:
        matcher.compute_bitmask()
        if matcher.is_error():
            assert "too many states" in matcher.get_error()
            matcher = cache.grammars.renewed(pattern)
            assert matcher.consume_tokens(sofar)
            matcher.compute_bitmask()
            assert not matcher.is_error()
            renewals += 1
        assert matcher.consume_token(byte)
        sofar.append(byte)
    assert renewals > 0
    assert cache.grammars.compiled_total == 1 + renewals


def test_a_renewed_grammar_is_not_kept_after_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_LONGEST_RENEWAL", 60.0)
    cache = Cache(most=8)
    cache.use(regex("ab"), 1)
    assert cache.grammars.renewed(regex("ab")).consume_token(ord("a") - ord("!"))
    assert cache.has(regex("ab"))
    cache.end(1)
    assert len(cache.grammars) == 0


def test_what_takes_long_to_compile_is_not_compiled_by_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_now = VocabularyTables.compile

    def slowly(tables: VocabularyTables, grammar: str) -> LLMatcher:
        end = time.thread_time() + 0.06
        while time.thread_time() < end:
            pass
        return compile_now(tables, grammar)

    monkeypatch.setattr(VocabularyTables, "compile", slowly)
    cache = Cache()
    cache.use(regex("a"), 1)
    with pytest.raises(InvalidRequest, match="more lexer states"):
        cache.grammars.renewed(regex("a"))


def test_what_waits_for_a_core_has_not_taken_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine: the time on the clock says nothing of the grammar."""
    compile_now = VocabularyTables.compile

    def late(tables: VocabularyTables, grammar: str) -> LLMatcher:
        time.sleep(0.1)
        return compile_now(tables, grammar)

    monkeypatch.setattr(VocabularyTables, "compile", late)
    cache = Cache()
    cache.use(regex("a"), 1)
    assert cache.grammars.renewed(regex("a")).consume_token(ord("a") - ord("!"))


# ------------------------------------------------------------------------------------------- queue


def submitted(first: int, n: int, grammar: str) -> Submitted:
    params = SamplingParams(max_tokens=4, n=n, grammar=grammar)
    return Submitted(Request(RequestId(first), (1, 2), params))


class Queue:
    def __init__(self) -> None:
        self.cache = Cache()
        self.queue = GrammarQueue(self.cache.grammars)

    def add(self, first: int, n: int, grammar: str) -> None:
        assert not self.cache.ask(grammar, *range(first, first + n))
        self.queue.add(submitted(first, n, grammar))

    def released(self, count: int) -> list[Released]:
        found: list[Released] = []

        def enough() -> bool:
            found.extend(self.queue.release())
            return len(found) >= count

        until(enough)
        return found


def test_all_who_wait_for_a_grammar_leave_together() -> None:
    queue = Queue()
    queue.add(10, 2, regex("a"))
    queue.add(20, 1, regex("a"))
    queue.add(30, 3, regex("("))
    assert (queue.queue.num_requests, queue.queue.num_choices) == (3, 6)
    assert queue.queue.lives(RequestId(11))
    assert not queue.queue.lives(RequestId(12))
    found = {each.submitted.request.request_id: each for each in queue.released(3)}
    assert found[RequestId(10)].error is found[RequestId(20)].error is None
    assert isinstance(found[RequestId(30)].error, RequestError)
    assert found[RequestId(30)].choices() == [30, 31, 32]
    assert (queue.queue.num_requests, queue.queue.num_choices) == (0, 0)
    assert not queue.queue.abort(RequestId(10))


def test_choices_are_aborted_one_by_one() -> None:
    queue = Queue()
    queue.add(10, 3, regex("a"))
    queue.add(20, 2, regex("b"))
    assert queue.queue.abort(RequestId(11))
    assert not queue.queue.abort(RequestId(11))
    assert queue.queue.abort(RequestId(20))
    assert queue.queue.abort(RequestId(21))
    assert (queue.queue.num_requests, queue.queue.num_choices) == (1, 2)
    (released,) = queue.released(1)
    assert released.gone == [11]
    assert released.choices() == [10, 12]
    until(lambda: not list(queue.queue.release()))


def test_an_end_of_all_does_not_end_the_grammar_of_others() -> None:
    queue = Queue()
    queue.add(10, 1, regex("a"))
    queue.add(20, 1, regex("a"))
    assert queue.queue.abort(RequestId(10))
    (released,) = queue.released(1)
    assert released.submitted.request.request_id == 20
