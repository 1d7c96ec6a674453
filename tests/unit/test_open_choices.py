"""What is kept of choices that have not ended, and the Submits that are made of it."""

import pytest

from triptych.engine_core.errors import RequestError, Unavailable
from triptych.services.tokenizer.open_choices import (
    LATE,
    MOST_SCHEDULERS,
    OpenChoices,
    OpenRequest,
)
from triptych.services.tokenizer.outage import Outage
from triptych.services.tokenizer.whole_choice import WholeChoice
from triptych.services.transport.wire import unpack_u32
from triptych.v1 import stage_pb2


class Sink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.satisfied_after = 1 << 30

    def started(self, cached_tokens: int) -> None:
        self.said.append(("started", cached_tokens))

    def prompt_logprobs(self, position: int, rows: object) -> None:
        self.said.append(("prompt", position))

    def scored(self, score: float) -> None:
        self.said.append(("score", score))

    def accept(self, token_id: int, finish: int, logprobs: object) -> bool:
        self.said.append((token_id, finish))
        return len(self.said) >= self.satisfied_after

    def fail(self, error: RequestError) -> None:
        self.said.append(error)

    def wake(self) -> None:
        self.said.append("wake")


def submit_of(
    prompt_tokens: int = 5, n: int = 1, timeout_ms: int = 0, queue_timeout_ms: int = 0
) -> stage_pb2.Submit:
    submit = stage_pb2.Submit(
        prompt_token_ids=bytes(4 * prompt_tokens),
        timeout_ms=timeout_ms,
        queue_timeout_ms=queue_timeout_ms,
    )
    submit.params.n, submit.params.max_tokens, submit.params.seed = n, 50, 9
    return submit


def added(table: OpenChoices, submit: stage_pb2.Submit, now: float = 10.0) -> OpenRequest:
    return table.add(submit, [Sink() for _ in range(submit.params.n)], now)


def test_a_request_without_tokens_goes_out_as_it_was() -> None:
    table, submit = OpenChoices(), submit_of(n=3)
    request = added(table, submit)
    (part,) = request.parts()
    assert part is request
    held = part.message(11.5)
    assert not held.accepted
    assert held.age_ms == 1500
    request.give()
    again = part.message(12.0)
    assert again.accepted
    expected = stage_pb2.Submit(accepted=True, age_ms=2000)
    expected.MergeFrom(submit)
    assert again == expected
    assert not submit.accepted


def test_with_tokens_each_open_choice_goes_out_alone() -> None:
    table = OpenChoices()
    added(table, submit_of())
    request = added(table, submit_of(n=4))
    request.give()
    first, _, third, _ = request.choices
    first.token_ids.extend((7, 2**32 - 1))
    table.remove(request.submit.slot + 1)
    parts = request.parts()
    messages = [part.message(10.0) for part in parts]
    assert [each.slot for each in messages] == [2, 4, 5]
    assert [each.choice for each in messages] == [0, 2, 3]
    assert [each.params.n for each in messages] == [1, 1, 1]
    assert [unpack_u32(each.output_token_ids, "x") for each in messages] == [
        (7, 2**32 - 1), (), (),
    ]  # fmt: skip
    assert all(each.accepted and each.params.seed == 9 for each in messages)
    table.remove(third.slot)
    assert [bool(part.choices) for part in parts] == [True, False, True]


@pytest.mark.parametrize(
    ("rows", "kept"),
    [([], True), ([(1, 2)], True), ([(1, 2), (3, 1)], True), ([(1, 2), (3, 2)], False),
     ([(3, 2)], True), ([(1, 2), (1, 4)], False), ([(1, 4), (1, 1)], False)],
)  # fmt: skip
def test_prompt_logprobs_are_asked_for_until_all_are_here(
    rows: list[tuple[int, int]], kept: bool
) -> None:
    submit = submit_of(5, n=2)
    submit.params.prompt_logprobs = 3
    request = added(OpenChoices(), submit)
    for position, count in rows:
        request.scored_up_to(position, count)
    request.choices[1].token_ids.append(1)
    messages = [part.message(10.0) for part in request.parts()]
    assert [each.params.HasField("prompt_logprobs") for each in messages] == [kept, kept]
    assert submit.params.HasField("prompt_logprobs")


def test_a_beam_search_goes_out_whole_and_is_seen_whole() -> None:
    table, submit = OpenChoices(), submit_of(n=2)
    submit.params.beam.width = 2
    sinks = [Sink(), Sink()]
    request = table.add(submit, sinks, 0.0)
    request.give()
    first, second = request.choices
    for choice in (first, second):
        choice.token_ids.append(5)
        assert not choice.sink.accept(5, 0, None)
        choice.sink.wake()
    assert sinks[0].said == sinks[1].said == []
    table.remove(first.slot)
    (part,) = request.parts()
    message = part.message(0.0)
    assert (message.params.n, message.output_token_ids) == (2, b"")
    part.give()
    assert not second.token_ids
    assert isinstance(second.sink, WholeChoice)
    second.sink.started(3)
    for token, finish in ((6, 0), (7, 2)):
        if finish:
            second.sink.scored(-0.5)
        second.sink.accept(token, finish, None)
    second.sink.wake()
    assert sinks[1].said == [("started", 3), (6, 0), ("score", -0.5), (7, 2), "wake"]


def test_a_whole_choice_that_its_sink_ends_takes_no_more() -> None:
    sink = Sink()
    sink.satisfied_after = 1
    whole = WholeChoice(sink)
    whole.accept(1, 0, None)
    assert whole.accept(2, 2, None)
    assert sink.said == [(1, 0)]
    failed = WholeChoice(sink)
    error = Unavailable("x")
    failed.fail(error)
    failed.wake()
    assert sink.said[1:] == [error, "wake"]


def test_a_choice_wears_out_unless_a_token_comes() -> None:
    (choice,) = added(OpenChoices(), submit_of()).choices

    def lost(*, given: bool = True, suspicion: float = 1.0, tokens: int = 0) -> bool:
        if given:
            choice.give()
        choice.token_ids.extend([1] * tokens)
        return choice.take_back(suspicion=suspicion)

    assert [lost() for _ in range(MOST_SCHEDULERS - 1)] == [False] * (MOST_SCHEDULERS - 1)
    assert not lost(given=False), "it had not come so far"
    assert not lost(suspicion=0.0), "nothing ran there"
    assert not lost(tokens=2)
    assert [lost() for _ in range(MOST_SCHEDULERS)] == [False] * (MOST_SCHEDULERS - 1) + [True]
    assert choice.lost == MOST_SCHEDULERS
    assert not lost(tokens=1)
    late = [lost(suspicion=LATE) for _ in range(16)]
    assert late == [False] * 15 + [True], "what kills late kills for ever too"


def test_time_outs_of_a_request_that_waits() -> None:
    request = added(OpenChoices(), submit_of(timeout_ms=500, queue_timeout_ms=200), now=1.0)
    assert request.timed_out(1.2) is None
    assert request.timed_out(1.3) == "queue_timeout_ms 200"
    request.give()  # it may have run: the next scheduler knows
    assert request.timed_out(1.3) is None
    assert request.timed_out(1.6) == "timeout_ms 500"
    assert added(OpenChoices(), submit_of(), now=1.0).timed_out(1e6) is None


def test_slots_and_order() -> None:
    table = OpenChoices()
    requests = [added(table, submit_of(n=n)) for n in (1, 3, 2)]
    assert [each.slots for each in requests] == [range(1, 2), range(2, 5), range(5, 7)]
    assert table.requests == requests
    assert len(table) == 6
    assert table.remove(1) is not None
    assert table.remove(1) is None
    assert table.requests == requests[1:]
    for slot in range(2, 7):
        table.remove(slot)
    assert len(table) == 0
    assert table.requests == []
    assert added(table, submit_of()).submit.slot == 7, "no slot is used again"


def test_an_outage() -> None:
    word: list[str] = []
    outage = Outage(60.0, lambda: word[0] if word else None)
    assert outage.refusal(0.0) == outage.reason == "the engine is starting"
    outage.missing("the scheduler is gone", 1.0)
    assert outage.refusal(1.0) == "the engine is starting", "nobody knows when it will be"
    outage.ready()
    assert outage.refusal(2.0) is None
    assert outage.reason == ""
    outage.missing("the scheduler is gone", 10.0)
    outage.missing("the scheduler waits for an executor", 50.0)
    assert outage.refusal(69.9) is None
    assert outage.reason == "the scheduler waits for an executor"
    assert "recovery_timeout 60 s" in (outage.refusal(70.0) or "")
    outage.ready()
    outage.missing("the executor is gone", 100.0)
    assert outage.refusal(101.0) is None
    word.append("executor: it crashes")
    assert outage.refusal(101.0) is None, "it is asked at ticks only"
    outage.look()
    assert outage.refusal(101.0) == outage.reason == "executor: it crashes"
    word.clear()
    outage.look()
    assert outage.refusal(101.0) is None
    outage.ready()
    word.append("not asked")
    outage.look()
    assert outage.refusal(200.0) is None
