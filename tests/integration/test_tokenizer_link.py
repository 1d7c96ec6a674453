"""The scheduler's end of the tokenizer connections: slots, request ids, and who is told what."""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq

from fake_executor import FINGERPRINT, VOCABULARY
from fake_tokenizer import FakeTokenizer
from triptych.engine_core.errors import DeadlinePassed, InvalidRequest
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.step import Failed, FinishReason, PromptLogprobs, Started, StepOutput
from triptych.services.runtime.run_dir import RunDir
from triptych.services.scheduler.tokenizer_link import Dropped, Submitted, TokenizerLink
from triptych.services.transport import wire
from triptych.services.transport.step_outputs import peer_of, slot_of
from triptych.services.transport.vocabulary import Vocabulary
from triptych.v1 import stage_pb2

FACTS = stage_pb2.ModelFacts(
    fingerprint=FINGERPRINT, vocabulary_size=VOCABULARY, max_model_len=64, block_size=4,
    num_blocks=16,
)  # fmt: skip


class Row(NamedTuple):
    """Logprobs as the core passes them on."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Bench:
    """A link, tokenizers, and what the link has said."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir.open(folder)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link = TokenizerLink(
            self._context, self.run_dir.scheduler_endpoint, 77, zmq.Poller(), timeout=60.0
        )
        self.submitted: list[Submitted] = []
        self.dropped: list[RequestId] = []
        self.tokenizers: list[FakeTokenizer] = []

    def tokenizer(self) -> FakeTokenizer:
        tokenizer = FakeTokenizer(self.run_dir)
        self.tokenizers.append(tokenizer)
        self.until(lambda: tokenizer.welcomes)
        return tokenizer

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(3000):
            for event in (*self.link.receive(0.0), *self.link.welcome(FACTS, 64)):
                self.note(event)
            for tokenizer in self.tokenizers:
                tokenizer.pump(0.01)
            if condition():
                return
        raise AssertionError("the condition does not come true")

    def note(self, event: Submitted | Dropped | Vocabulary) -> None:
        match event:
            case Submitted():
                self.submitted.append(event)
            case Dropped(request_ids):
                self.dropped += request_ids

    def submit(self, tokenizer: FakeTokenizer, n: int = 1) -> Request:
        tokenizer.submit([1, 2, 3], n=n)
        before = len(self.submitted)
        self.until(lambda: len(self.submitted) > before)
        return self.submitted[-1].request

    def emit(self, output: StepOutput) -> None:
        for event in self.link.emit(output):
            self.note(event)

    def close(self) -> None:
        self.link.close()
        for tokenizer in self.tokenizers:
            tokenizer.close()
        self._context.term()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    (tmp_path / "run").mkdir(mode=0o700)
    bench = Bench(tmp_path / "run")
    yield bench
    bench.close()


def output_of(*entries: tuple[int, int, int], **fields: object) -> StepOutput:
    """From (request id, token, finish)."""
    ids, tokens, finishes = zip(*entries, strict=True) if entries else ((), (), ())
    return StepOutput(5, array("q", ids), array("i", tokens), array("B", finishes), **fields)  # type: ignore[arg-type]  # test values


def test_choices_have_consecutive_slots_and_ids(bench: Bench) -> None:
    tokenizer = bench.tokenizer()
    first = bench.submit(tokenizer, n=3)
    second = bench.submit(tokenizer)
    assert [slot_of(first.request_id), slot_of(second.request_id)] == [1, 4]
    assert bench.link.num_tracked == 4
    a, b, c = range(first.request_id, first.request_id + 3)
    bench.emit(output_of((a, 10, 0), (b, 11, FinishReason.STOP), (c, 12, 0)))
    assert bench.link.num_tracked == 3
    bench.emit(output_of((a, 20, FinishReason.LENGTH), (c, 22, FinishReason.STOP)))
    bench.emit(output_of((second.request_id, 30, FinishReason.STOP)))
    bench.until(lambda: tokenizer.ended(1, 2, 3, 4))
    assert tokenizer.tokens == {1: [10, 20], 2: [11], 3: [12, 22], 4: [30]}
    assert bench.link.num_tracked == 0
    assert bench.dropped == []


def test_each_process_is_told_its_own_in_one_message(bench: Bench) -> None:
    one, two = bench.tokenizer(), bench.tokenizer()
    a, b = bench.submit(one, n=2), bench.submit(two, n=2)
    assert peer_of(a.request_id) != peer_of(b.request_id)
    bench.emit(
        output_of(
            (a.request_id, 1, 0), (b.request_id, 2, 0), (a.request_id + 1, 3, 0),
            logprobs={1: Row(-0.5, 1, [9], [-0.5]), 2: Row(-1.0, 2, [], [])},
            started=[Started(RequestId(a.request_id + 1), 4)],
            prompt_logprobs=[PromptLogprobs(b.request_id, 1, [Row(-2.0, 3, [], [])])],
            scores={2: 1.5},
            failed=[Failed(RequestId(b.request_id + 1), DeadlinePassed("too late"))],
        )
    )  # fmt: skip
    bench.until(lambda: one.messages and two.messages)
    assert (one.messages, two.messages) == (1, 1)
    assert (one.tokens, two.tokens) == ({1: [1], 2: [3]}, {1: [2], 2: []})
    assert one.cached_tokens == {2: 4}
    assert one.scores == {2: 1.5}
    assert [row.logprob for row in one.logprobs[2]] == [-1.0]
    assert [row.top_ids.tolist() for row in two.logprobs[1]] == [[9]]
    assert [rows.position for rows in two.prompt_logprobs[1]] == [1]
    assert isinstance(two.failed[2], DeadlinePassed)
    assert bench.link.num_tracked == 3


def test_aborts_drop_only_what_runs(bench: Bench) -> None:
    tokenizer = bench.tokenizer()
    request = bench.submit(tokenizer, n=3)
    bench.emit(output_of((request.request_id, 1, FinishReason.STOP)))
    tokenizer.abort(1, 2, 2, 9)
    bench.until(lambda: bench.dropped)
    assert bench.dropped == [request.request_id + 1]
    assert bench.link.num_tracked == 1


def test_a_second_hello_drops_all_and_gets_new_ids(bench: Bench) -> None:
    tokenizer = bench.tokenizer()
    before = bench.submit(tokenizer, n=2)
    tokenizer.say_hello()
    bench.until(lambda: tokenizer.welcomes)
    assert bench.dropped == [before.request_id, before.request_id + 1]
    after = bench.submit(tokenizer)
    assert peer_of(after.request_id) > peer_of(before.request_id)
    bench.emit(output_of((before.request_id, 1, 0), (after.request_id, 2, 0)))
    bench.until(lambda: tokenizer.messages)
    assert tokenizer.tokens[3] == [2]
    assert tokenizer.tokens[1] == []


def test_a_slot_in_use_ends_the_connection(bench: Bench) -> None:
    tokenizer = bench.tokenizer()
    bench.submit(tokenizer, n=2)
    submit = wire.submit_of(wire.pack_u32([1]), SamplingParams(max_tokens=1))
    submit.slot = 2
    tokenizer.send_submit(submit)
    bench.until(lambda: tokenizer.refused)
    assert "slot 2 is in use" in str(tokenizer.refused)
    assert bench.link.num_tracked == 0
    assert len(bench.dropped) == 2


@pytest.mark.parametrize(("slot", "n"), [(2**32 - 1, 2), (5, 0)])
def test_what_is_no_request_is_refused_alone(bench: Bench, slot: int, n: int) -> None:
    tokenizer = bench.tokenizer()
    submit = wire.submit_of(wire.pack_u32([1]), SamplingParams(max_tokens=1))
    submit.slot, submit.params.n = slot, n
    tokenizer.tokens[slot] = []
    tokenizer.send_submit(submit)
    bench.until(lambda: tokenizer.failed)
    assert isinstance(tokenizer.failed[slot], InvalidRequest)
    assert bench.link.refused_total == 1
    assert bench.submit(tokenizer).params.n == 1


def test_time_outs_and_labels_arrive(bench: Bench) -> None:
    tokenizer = bench.tokenizer()
    submit = wire.submit_of(wire.pack_u32([1]), SamplingParams(max_tokens=1))
    submit.slot, submit.queue_timeout_ms, submit.tenant = 8, 1500, "who"
    submit.deadline_ms = 700
    tokenizer.send_submit(submit)
    bench.until(lambda: bench.submitted)
    (event,) = bench.submitted
    assert (event.queue_timeout, event.timeout, event.request.tenant) == (1.5, None, "who")
    assert event.deadline == 0.7


def test_outputs_for_a_process_that_is_gone_are_dropped(bench: Bench) -> None:
    tokenizer = bench.tokenizer()
    request = bench.submit(tokenizer)
    for event in bench.link.expire(61.0):
        bench.note(event)
    assert bench.dropped == [request.request_id]
    bench.emit(output_of((request.request_id, 1, FinishReason.STOP)))
    assert bench.link.num_tracked == bench.link.num_peers == 0
