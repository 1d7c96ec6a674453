"""Any order of submit, abort, step, failure and loss keeps the scheduler's invariants."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core_engine import Engine, Shape, requests
from core_outputs import SHAPES, check_output
from hash_model import expected_beams, expected_output
from triptych.engine_core.errors import NotFinite, QueueFull, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.step import FinishReason


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.accepted: dict[RequestId, Request] = {}
        self.owner: dict[RequestId, Request] = {}
        self.aborted: set[RequestId] = set()
        self.count = 0

    @initialize(shape=SHAPES)
    def start(self, shape: Shape) -> None:
        self.engine = Engine(shape)

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        shape = self.engine.shape
        request = data.draw(requests(self.count, shape))
        self.count += 1
        room = shape.max_num_seqs + shape.max_num_waiting - self.engine.scheduler.num_requests
        try:
            self.engine.submit(request)
        except QueueFull:
            assert room < request.params.n
        else:
            assert room >= request.params.n
            self.accepted[request.request_id] = request
            self.owner.update((each, request) for each in request.choices())

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.owner)))
        live = request_id not in self.aborted and request_id not in self.engine.endings
        assert self.engine.scheduler.lives(request_id) is live
        assert self.engine.scheduler.abort(request_id) is live
        assert self.engine.scheduler.abort(request_id) is False
        if live:
            self.aborted.add(request_id)

    @precondition(lambda self: self.engine.plan is None)
    @rule()
    def begin(self) -> None:
        scheduler = self.engine.scheduler
        had_work = scheduler.num_requests > 0
        plan = self.engine.begin()
        shape = self.engine.shape
        assert bool(plan) is had_work, "there is a step whenever there is a request"
        assert plan.num_tokens <= shape.max_num_batched_tokens
        assert plan.num_rows <= shape.max_num_seqs
        assert plan.num_logits <= shape.max_num_seqs + shape.extra_logits

    @precondition(lambda self: self.engine.plan is not None)
    @rule(broken=st.frozensets(st.integers(0, 3), max_size=1))
    def end(self, broken: frozenset[int]) -> None:
        self.engine.end(broken)

    @precondition(lambda self: self.engine.plan is None)
    @rule(steps=st.integers(1, 8))
    def step_on(self, steps: int) -> None:
        for _ in range(steps):
            self.begin()
            if self.engine.plan is None:
                break
            self.engine.end()

    @precondition(lambda self: self.engine.plan is not None)
    @rule()
    def fail_step(self) -> None:
        self.engine.fail_step(Unavailable("it broke", 100))

    @rule()
    def lose(self) -> None:
        self.engine.lose()
        assert self.engine.batch.num_free_blocks == self.engine.shape.num_blocks

    @rule()
    def forget_cache(self) -> None:
        if self.engine.plan is None:
            self.engine.scheduler.forget_cache()
            assert self.engine.batch.num_cached_blocks == 0

    @invariant()
    def everything_holds(self) -> None:
        self.engine.scheduler.check()
        assert not self.aborted & set(self.engine.endings)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run_to_empty(max_steps=2000)
        self.engine.assert_empty()
        assert set(self.engine.endings) == set(self.owner) - self.aborted
        for request in self.accepted.values():
            check_output(self.engine, request)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40)


@given(data=st.data(), shape=SHAPES)
def test_output_does_not_depend_on_chunking_budget_cache_or_preemption(
    data: st.DataObject, shape: Shape
) -> None:
    engine = Engine(shape)
    wishes = []
    for number in range(data.draw(st.integers(1, 8))):
        request = data.draw(requests(number, shape))
        try:
            engine.submit(request)
        except QueueFull:
            continue
        wishes.append(request)
        if data.draw(st.booleans()):
            engine.begin()
            if engine.plan:
                engine.end()
    engine.run_to_empty()
    engine.assert_empty()
    for request in wishes:
        check_output(engine, request)
        for request_id in request.choices():
            ending = engine.endings[request_id]
            assert isinstance(ending, FinishReason) or request.params.beam is not None
            assert engine.cached.get(request_id, 0) < len(request.prompt_token_ids)


@given(data=st.data(), shape=SHAPES)
def test_a_request_ends_within_the_steps_of_those_that_came_before(
    data: st.DataObject, shape: Shape
) -> None:
    """Nobody is starved: under fcfs the bound is the work of the requests before, and the own."""
    if shape.policy not in ("fcfs", "priority"):
        return
    engine, bound, steps = Engine(shape), 0, 0
    bounds: dict[RequestId, int] = {}
    for number in range(6):
        wish = data.draw(requests(number, shape, beams=False))
        request = Request(wish.request_id, wish.prompt_token_ids, wish.params)
        try:
            engine.submit(request)
        except QueueFull:
            continue
        each = len(request.prompt_token_ids) + request.params.max_tokens
        bound += request.params.n * each
        bounds.update((each, bound) for each in request.choices())
    while engine.begin():
        steps += 1
        engine.end()
        for request_id in engine.endings:
            bounds.setdefault(request_id, 0)
        for request_id, most in bounds.items():
            assert request_id in engine.endings or steps <= most
    assert set(engine.endings) == set(bounds)


@given(data=st.data(), shape=SHAPES)
def test_under_any_policy_an_early_request_ends_while_others_keep_coming(
    data: st.DataObject, shape: Shape
) -> None:
    """Later requests of the same priority never starve one, however many come."""
    engine = Engine(shape)
    first = data.draw(requests(0, shape, beams=False))
    first = Request(first.request_id, first.prompt_token_ids, first.params, tenant="x")
    try:
        engine.submit(first)
    except QueueFull:
        return
    number, steps = 1, 0
    while not set(first.choices()) <= set(engine.endings):
        if engine.scheduler.num_requests < shape.max_num_seqs + shape.max_num_waiting:
            prompt = (number % 7,)
            other = data.draw(st.sampled_from(["x", "y"]))
            params = SamplingParams(max_tokens=2)
            engine.submit(Request(RequestId(16 * number), prompt, params, tenant=other))
            number += 1
        engine.begin()
        engine.end()
        steps += 1
        assert steps < 3000, "the first request is starved"


@given(data=st.data(), shape=SHAPES)
def test_what_was_sent_is_what_another_core_goes_on_from(data: st.DataObject, shape: Shape) -> None:
    engine, wishes = Engine(shape), []
    for number in range(3):
        request = data.draw(requests(number, shape))
        try:
            engine.submit(request)
        except QueueFull:
            continue
        wishes.append(request)
    for _ in range(data.draw(st.integers(0, 12))):
        if not engine.begin():
            break
        engine.end()
    other = Engine(shape)
    other.outputs = {key: list(tokens) for key, tokens in engine.outputs.items()}
    other.endings = dict(engine.endings)
    for request in engine.scheduler.resumable():
        other.scheduler.submit(request)
        other.cached.update((each, 0) for each in request.choices() if engine.outputs[each])
    other.run_to_empty()
    other.assert_empty()
    for request in wishes:
        for index, request_id in enumerate(request.choices()):
            if request.params.beam is None:
                assert other.outputs[request_id] == expected_output(request, index)
            elif isinstance(other.endings[request_id], FinishReason):
                assert other.outputs[request_id] == expected_beams(request)[index]


def test_not_finite_ends_one_choice_and_no_other() -> None:
    engine = Engine(Shape(max_num_seqs=3))
    for number in range(3):
        engine.submit(Request(RequestId(number), (number,), SamplingParams(max_tokens=2)))
    engine.begin()
    engine.end(frozenset({1}))
    engine.run_to_empty()
    assert isinstance(engine.endings[RequestId(1)], NotFinite)
    assert engine.outputs[RequestId(0)]
    assert engine.outputs[RequestId(2)]
