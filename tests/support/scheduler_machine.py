"""Hypothesis's state machine of a scheduler: what may happen to it, and what must hold."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core_engine import Engine, Shape, requests
from core_outputs import SHAPES, check_output
from triptych.engine_core.errors import QueueFull, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, abort, step, failure and loss, in any order; in the end all has come out right."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.accepted: dict[RequestId, Request] = {}
        self.owner: dict[RequestId, Request] = {}
        self.aborted: set[RequestId] = set()
        self.count = 0

    def new_engine(self, shape: Shape) -> Engine:
        return Engine(shape)

    def requests(self, shape: Shape) -> st.SearchStrategy[Request]:
        """What is submitted next."""
        return requests(self.count, shape)

    @initialize(shape=SHAPES)
    def start(self, shape: Shape) -> None:
        self.engine = self.new_engine(shape)

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        shape = self.engine.shape
        request = data.draw(self.requests(shape))
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
        had_work = scheduler.num_requests > scheduler.num_held
        plan = self.engine.begin()
        shape = self.engine.shape
        assert bool(plan) is had_work, "there is a step whenever a request lacks a token of ours"
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
