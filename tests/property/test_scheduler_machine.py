"""Any order of submit, abort, step, failure and loss keeps the scheduler's invariants."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core_strategies import Engine, Shape, expected_output, requests
from triptych.engine_core.errors import NotFinite, QueueFull, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.step import FinishReason

SHAPES = st.builds(
    Shape,
    num_blocks=st.integers(4, 8),
    block_size=st.integers(1, 3),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(4, 9),
    max_num_waiting=st.integers(0, 6),
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.accepted: dict[RequestId, Request] = {}
        self.aborted: set[RequestId] = set()

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        shape = self.engine.shape
        request = data.draw(requests(len(self.accepted), shape))
        full = self.engine.scheduler.num_requests >= shape.max_num_seqs + shape.max_num_waiting
        try:
            self.engine.submit(request)
        except QueueFull:
            assert full
        else:
            assert not full
            self.accepted[request.request_id] = request

    @rule(number=st.integers(0, 15))
    def abort(self, number: int) -> None:
        request_id = RequestId(number)
        live = (
            request_id in self.accepted
            and request_id not in self.aborted
            and request_id not in self.engine.endings
        )
        assert self.engine.scheduler.abort(request_id) is live
        assert self.engine.scheduler.abort(request_id) is False
        if live:
            self.aborted.add(request_id)

    @precondition(lambda self: self.engine.plan is None)
    @rule()
    def begin(self) -> None:
        scheduler = self.engine.scheduler
        had_work, running = scheduler.num_requests > 0, scheduler.num_running
        plan = self.engine.begin()
        shape = self.engine.shape
        assert bool(plan) is had_work, "there is a step whenever there is a request"
        assert plan.num_tokens <= shape.max_num_batched_tokens
        assert len(plan.rows) <= shape.max_num_seqs
        assert len(plan.preempted) < max(running, 1), "the first running one is never preempted"
        assert all(row.num_tokens >= 1 for row in plan.rows)

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
        assert self.engine.scheduler.num_free_blocks == self.engine.shape.num_blocks

    @invariant()
    def everything_holds(self) -> None:
        self.engine.scheduler.check()
        assert not self.aborted & set(self.engine.endings)

    def teardown(self) -> None:
        live = set(self.accepted) - self.aborted - set(self.engine.endings)
        wishes = [self.accepted[request_id] for request_id in live]
        self.engine.run_to_empty(
            max_steps=sum(len(r.prompt_token_ids) + r.params.max_tokens for r in wishes) + 1
        )
        scheduler = self.engine.scheduler
        assert scheduler.num_free_blocks == self.engine.shape.num_blocks
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_requests == 0
        assert set(self.engine.endings) == set(self.accepted) - self.aborted
        for request_id, request in self.accepted.items():
            self._check_output(request, self.engine.endings.get(request_id))

    def _check_output(self, request: Request, ending: FinishReason | Exception | None) -> None:
        output, expected = self.engine.outputs[request.request_id], expected_output(request)
        assert output == expected[: len(output)]
        match ending:
            case FinishReason.STOP:
                assert output == expected
                assert output[-1] in request.params.stop_token_ids
            case FinishReason.LENGTH:
                assert output == expected
                assert output[-1] not in request.params.stop_token_ids
            case None | NotFinite() | Unavailable():
                pass
            case _:
                raise AssertionError(f"unexpected ending {ending!r}")


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40)


@given(data=st.data(), shape=SHAPES)
def test_output_does_not_depend_on_chunking_budget_or_preemption(
    data: st.DataObject, shape: Shape
) -> None:
    engine = Engine(shape)
    room = shape.max_num_seqs + shape.max_num_waiting
    wishes = [data.draw(requests(n, shape)) for n in range(data.draw(st.integers(1, room)))]
    for request in wishes:
        engine.submit(request)
        if data.draw(st.booleans()):
            engine.begin()
            if engine.plan:
                engine.end()
    engine.run_to_empty()
    for request in wishes:
        assert engine.outputs[request.request_id] == expected_output(request)


@given(data=st.data(), shape=SHAPES)
def test_a_request_ends_within_the_steps_of_those_that_came_before(
    data: st.DataObject, shape: Shape
) -> None:
    engine, bound, steps = Engine(shape), 0, 0
    bounds: dict[RequestId, int] = {}
    for n in range(shape.max_num_seqs + shape.max_num_waiting):
        wish = data.draw(requests(n, shape))
        request = Request(wish.request_id, wish.prompt_token_ids, wish.params)
        engine.submit(request)
        bound += len(request.prompt_token_ids) + request.params.max_tokens
        bounds[request.request_id] = bound
    while engine.begin():
        steps += 1
        for event in engine.end():
            if event.request_id in engine.endings:
                assert steps <= bounds[event.request_id]
    assert set(engine.endings) == set(bounds)
