"""Any order of calls with up to two steps in flight: every sequence gets what it gets alone."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ahead_engine import AheadEngine
from batch_twins import TWINS
from core_engine import BatchFactory, Shape, requests
from core_outputs import SHAPES, check_output
from triptych.engine_core.errors import QueueFull
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request


class AheadMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.accepted: dict[RequestId, Request] = {}
        self.owner: dict[RequestId, Request] = {}
        self.aborted: set[RequestId] = set()
        self.count = 0

    @initialize(
        shape=SHAPES, factory=st.sampled_from(TWINS), host_seed=st.sampled_from((0, 0, 1, 2))
    )
    def start(self, shape: Shape, factory: BatchFactory, host_seed: int) -> None:
        self.engine = AheadEngine(shape, factory, host_seed=host_seed)

    @rule(data=st.data(), beams=st.sampled_from((False, False, True)))
    def submit(self, data: st.DataObject, beams: bool) -> None:
        request = data.draw(requests(self.count, self.engine.shape, beams=beams))
        self.count += 1
        try:
            self.engine.submit(request)
        except QueueFull:
            return
        self.accepted[request.request_id] = request
        self.owner.update((each, request) for each in request.choices())

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.owner)))
        if self.engine.scheduler.abort(request_id):
            self.aborted.add(request_id)

    @precondition(lambda self: not self.engine.flights)
    @rule(fails=st.sampled_from((False, False, False, True)))
    def begin(self, fails: bool) -> None:
        self.engine.begin(fails=fails)

    @precondition(lambda self: len(self.engine.flights) == 1)
    @rule(fails=st.sampled_from((False, False, False, True)))
    def begin_ahead(self, fails: bool) -> None:
        self.engine.begin_ahead(fails=fails)

    @precondition(lambda self: self.engine.flights)
    @rule(broken=st.sampled_from([frozenset(), frozenset(), frozenset({0}), frozenset({1})]))
    def end(self, broken: frozenset[int]) -> None:
        self.engine.end(broken)

    @rule(turns=st.integers(1, 8), ahead=st.sampled_from((True, True, False)))
    def turns(self, turns: int, ahead: bool) -> None:
        for _ in range(turns):
            if not self.engine.turn(ahead=ahead):
                break

    @rule()
    def lose(self) -> None:
        self.engine.lose()
        assert self.engine.batch.num_free_blocks == self.engine.shape.num_blocks

    @rule()
    def forget_cache(self) -> None:
        self.engine.scheduler.forget_cache()
        assert self.engine.batch.num_cached_blocks == 0

    @rule()
    def what_is_told_is_what_is_out(self) -> None:
        """Nothing of a token that is not drawn leaks."""
        for request in self.engine.scheduler.resumable():
            if request.params.beam is None and request.output_token_ids:
                assert list(request.output_token_ids) == self.engine.outputs[request.request_id]

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()
            assert not self.aborted & set(self.engine.endings)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run_to_empty(max_steps=3000)
        self.engine.assert_empty()
        assert set(self.engine.endings) == set(self.owner) - self.aborted
        for request in self.accepted.values():
            check_output(self.engine, request)


TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = settings(stateful_step_count=40)


@given(data=st.data(), shape=SHAPES, host_seed=st.integers(0, 2), factory=st.sampled_from(TWINS))
def test_ahead_or_not_the_tokens_are_the_same(
    data: st.DataObject, shape: Shape, host_seed: int, factory: BatchFactory
) -> None:
    engines = [AheadEngine(shape, factory, host_seed=host_seed) for _ in range(2)]
    wishes = []
    for number in range(data.draw(st.integers(1, 6))):
        request = data.draw(requests(number, shape))
        try:
            for engine in engines:
                engine.submit(request)
        except QueueFull:
            continue
        wishes.append(request)
    for engine, ahead in zip(engines, (True, False), strict=True):
        while engine.turn(ahead=ahead):
            pass
        engine.assert_empty()
        for request in wishes:
            check_output(engine, request)
    assert engines[0].outputs == engines[1].outputs
    assert engines[0].endings == engines[1].endings
    assert engines[0].wasted <= len(engines[0].endings), "one token in vain for each at most"
    assert not engines[1].wasted
