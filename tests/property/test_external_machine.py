"""Sequences whose tokens come from outside, at any time between steps: any order of everything."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from core_engine import BIG, Shape, wish
from core_outputs import SHAPES, check_output
from external_engine import LEASE, ExternalEngine, made_external, mixed_requests
from hash_model import expected_output
from scheduler_machine import SchedulerMachine
from triptych.engine_core.errors import NotFinite, QueueFull
from triptych.engine_core.handover import take_over
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import ExternalSampler, SamplingParams
from triptych.engine_core.step import FinishReason, StepResult


class ExternalMachine(SchedulerMachine):
    engine: ExternalEngine

    def new_engine(self, shape: Shape) -> ExternalEngine:
        return ExternalEngine(shape)

    def requests(self, shape: Shape) -> st.SearchStrategy[Request]:
        return mixed_requests(self.count, shape)

    @precondition(lambda self: self.engine.plan is None)
    @rule()
    def begin_patiently(self) -> None:
        """Nobody who waits for a token has to make room while nobody computes."""
        scheduler, running = self.engine.scheduler, self.engine.batch.sequence_ids()
        plan = scheduler.plan(patient=True)
        if plan:
            self.engine.plan = plan
            scheduler.write(plan, self.engine.slot)
        else:
            assert self.engine.batch.sequence_ids() == running
            assert running or scheduler.num_requests == scheduler.num_held, "somebody could enter"

    @precondition(lambda self: self.engine.plan is None and self.engine.pending)
    @rule(data=st.data())
    def tell(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.engine.pending)), unique=True))
        self.engine.tell(some)

    @precondition(lambda self: self.engine.plan is None and self.engine.pending)
    @rule(data=st.data())
    def make_room(self, data: st.DataObject) -> None:
        """Those who wait for a token leave, while somebody waits to run who cannot."""
        scheduler = self.engine.scheduler
        slow = data.draw(st.lists(st.sampled_from(sorted(self.engine.pending)), unique=True))
        running, held = scheduler.num_running, scheduler.num_held
        scheduler.make_room(slow)
        assert running - len(slow) <= scheduler.num_running <= running
        assert scheduler.num_held == held
        assert scheduler.num_waiting or scheduler.num_running == running, "nobody is in want"

    @precondition(lambda self: self.engine.plan is None)
    @rule(tells=st.lists(st.booleans(), min_size=1, max_size=8))
    def step_and_tell(self, tells: list[bool]) -> None:
        for told in tells:
            self.begin()
            if self.engine.plan is not None:
                self.engine.end()
            if told:
                self.engine.tell(list(self.engine.pending))

    @precondition(lambda self: self.engine.plan is None)
    @rule()
    def another_core(self) -> None:
        """All goes on in a new core, what was pending with it."""
        before = self.engine
        after = ExternalEngine(before.shape, pending=before.pending)
        after.outputs, after.endings, after.cached = before.outputs, before.endings, before.cached
        after.anew = before.anew | set(before.outputs)
        after.prompt_logprobs, after.logprobs = before.prompt_logprobs, before.logprobs
        after.record(take_over(after.scheduler, before.scheduler))
        self.engine = after

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "engine"):
            assert self.engine.scheduler.num_held == 0


TestExternalMachine = ExternalMachine.TestCase
TestExternalMachine.settings = settings(stateful_step_count=40)


@given(data=st.data(), shape=SHAPES)
def test_tokens_from_outside_make_the_same_output(data: st.DataObject, shape: Shape) -> None:
    """However late they come, and whether their sequences run, wait or are computed anew."""
    engine, wishes = ExternalEngine(shape), []
    for number in range(data.draw(st.integers(1, 6))):
        request = data.draw(mixed_requests(number, shape))
        try:
            engine.submit(request)
        except QueueFull:
            continue
        wishes.append(request)
    for act in data.draw(st.lists(st.sampled_from(["step", "step", "tell", "lose"]), max_size=40)):
        match act:
            case "step":
                scheduler = engine.scheduler
                has_work = scheduler.num_requests > scheduler.num_held
                assert bool(engine.begin()) is has_work
                if has_work:
                    engine.end()
            case "tell":
                engine.tell(sorted(engine.pending)[:2])
            case "lose":
                engine.lose()
        engine.scheduler.check()
    engine.run_to_empty()
    engine.assert_empty()
    for request in wishes:
        check_output(engine, request)
        assert set(request.choices()) <= set(engine.endings)


def test_who_waits_for_a_token_makes_room_and_comes_back() -> None:
    """With one place: preempted while it waits, told while it is out, run again."""
    engine = ExternalEngine(Shape(max_num_seqs=1))
    outside, inside = made_external(wish(0, max_tokens=4)), wish(16, max_tokens=2)
    engine.submit(outside)
    engine.begin()
    engine.end()
    engine.submit(inside)
    assert not engine.scheduler.plan(patient=True)
    assert engine.begin().preempted
    assert engine.scheduler.num_held == 1
    engine.end()
    engine.tell([outside.request_id])
    engine.scheduler.check()
    assert engine.scheduler.num_held == 0
    assert engine.scheduler.num_waiting == 1
    engine.run_to_empty()
    engine.assert_empty()
    for request in (outside, inside):
        assert engine.outputs[request.request_id] == expected_output(request)


def test_who_waits_for_long_makes_room_while_others_compute() -> None:
    """Of three places two wait for tokens: their holders leave one by one, as others are in want of
    a place, and come back."""
    engine = ExternalEngine(replace(BIG, max_num_seqs=3))
    outside = [made_external(wish(16 * number, max_tokens=4)) for number in range(2)]
    long = wish(32, max_tokens=9)
    slow = [request.request_id for request in outside]
    for request in (*outside, long):
        engine.submit(request)
    engine.begin()
    engine.end()
    scheduler = engine.scheduler
    scheduler.make_room(slow)
    assert engine.scheduler.num_running == 3, "nobody is in want"
    inside = [wish(48 + 16 * number, max_tokens=2) for number in range(2)]
    for request in inside:
        engine.submit(request)
    assert engine.begin().num_samples == 1, "no place for them"
    engine.end()
    for count in (2, 3):
        scheduler.make_room(slow)
        assert engine.begin().num_samples == count
        engine.end()
    assert scheduler.num_held == 2
    assert scheduler.preemptions_total == 2
    engine.tell(slow)
    scheduler.check()
    assert scheduler.num_held == 0
    engine.run_to_empty()
    engine.assert_empty()
    for request in (*outside, long, *inside):
        assert engine.outputs[request.request_id] == expected_output(request)


def test_a_token_counts_while_its_text_is_computed_anew() -> None:
    engine = ExternalEngine()
    request = made_external(wish(0, max_tokens=4))
    engine.submit(request)
    engine.begin()
    engine.end()
    engine.lose()
    assert engine.scheduler.num_held == 1
    assert not engine.begin()
    engine.tell([request.request_id])
    assert engine.begin().num_tokens == 3
    engine.end()
    assert [position for position, _ in engine.pending.values()] == [1]
    engine.run_to_empty()
    engine.assert_empty()
    assert engine.outputs[request.request_id] == expected_output(request)


def test_a_token_from_outside_ends_by_id_and_by_length() -> None:
    engine = ExternalEngine(BIG)
    params = SamplingParams(
        max_tokens=2, stop_token_ids=(5,), external=ExternalSampler(lease=LEASE, tag=3)
    )
    for number in (1, 2, 3):
        engine.submit(Request(RequestId(number), (number, number), params))
    engine.begin()
    drawn = engine.scheduler.external_samples()
    assert [(each.lease, each.tag, each.position) for each in drawn] == [(LEASE, 3, 0)] * 3
    ids = [each.request_id for each in drawn]
    assert ids == [1, 2, 3]
    result = StepResult(1, [0, -1, 0])
    output = engine.scheduler.apply(result)
    assert [(each.request_id, type(each.error)) for each in output.failed] == [(2, NotFinite)]
    output = engine.scheduler.take_tokens([(ids[0], 5), (ids[0], 1), (ids[1], 0), (ids[2], 4)])
    assert list(output.request_ids) == [1, 3]
    assert list(output.token_ids) == [5, 4]
    assert list(output.finishes) == [FinishReason.STOP, 0]
    assert [each.request_id for each in output.started] == [1, 3]
    output = engine.scheduler.take_tokens([(ids[2], 4)])
    assert list(output.finishes) == [FinishReason.LENGTH]
    assert not output.started
    engine.assert_empty()
    with pytest.raises(AssertionError, match="token id 7"):
        engine.scheduler.take_tokens([(ids[2], 7)])
