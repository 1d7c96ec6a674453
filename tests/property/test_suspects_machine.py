"""Executors die of poisoned choices, and of something outside: who ends of it, and who never does.

Over any order of submit, abort, step, loss and change of the pool: a poison ends its choice, and
that one alone, after three deaths at most; all others get what they would have got. Nothing is
guessed: a token that was computed as a draft might not be computed again. Losses with drafts are
in test_scheduler_machine.
"""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batch_twins import NATIVE_BATCH
from core_engine import BatchFactory, Shape, requests
from core_outputs import SHAPES, check_output
from hash_model import NO_GUESSES
from mortal_engine import MortalEngine, Poison, all_outputs, ended_with
from triptych.engine_core.errors import FatalRequest, NotFinite, QueueFull, TooLong, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.request import Request
from triptych.engine_core.step import FinishReason

MAX_DEATHS = 3


class SuspectsMachine(RuleBasedStateMachine):
    batch_factory: BatchFactory = staticmethod(PythonBatch)

    def __init__(self) -> None:
        super().__init__()
        self.accepted: list[Request] = []
        self.aborted: set[RequestId] = set()
        self.count = 0
        self.moved = False

    @initialize(shape=SHAPES)
    def start(self, shape: Shape) -> None:
        self.engine = MortalEngine(replace(shape, guess_seed=NO_GUESSES), self.batch_factory)

    @rule(data=st.data(), poisoned=st.sampled_from([True, False, False]))
    def submit(self, data: st.DataObject, poisoned: bool) -> None:
        request = data.draw(requests(self.count, self.engine.shape))
        self.count += 1
        try:
            self.engine.submit(request)
        except QueueFull:
            return
        self.accepted.append(request)
        if poisoned:
            most = len(request.prompt_token_ids) + request.params.max_tokens - 1
            index = data.draw(st.integers(0, request.params.n - 1))
            position = data.draw(st.integers(0, most))
            self.engine.poisons.append(Poison(request, position, index))

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.accepted))
        request_id = data.draw(st.sampled_from(request.choices()))
        if self.engine.abort(request_id):
            self.aborted.add(request_id)

    @precondition(lambda self: self.engine.plan is None)
    @rule()
    def begin(self) -> None:
        had_work = self.engine.scheduler.num_requests > 0
        assert bool(self.engine.begin()) is had_work, "there is a step whenever there is a request"

    @precondition(lambda self: self.engine.plan is not None)
    @rule(broken=st.sampled_from([frozenset[int](), frozenset[int](), frozenset({1})]))
    def end(self, broken: frozenset[int]) -> None:
        self.engine.end(broken)

    @precondition(lambda self: self.engine.plan is None)
    @rule(steps=st.integers(1, 8))
    def step_on(self, steps: int) -> None:
        for _ in range(steps):
            self.begin()
            if self.engine.plan is not None:
                self.engine.end()

    @rule()
    def lose(self) -> None:
        self.engine.lose_from_outside()

    @precondition(lambda self: self.engine.plan is not None)
    @rule()
    def fail_step(self) -> None:
        self.engine.fail_step(Unavailable("it broke", 100))

    @rule(blocks=st.integers(4, 12))
    def move(self, blocks: int) -> None:
        self.moved = True
        self.engine.move(blocks)

    @invariant()
    def everything_holds(self) -> None:
        engine = self.engine
        engine.scheduler.check()
        assert not self.aborted & set(engine.endings)
        assert engine.scheduler.suspects.fatal_total == len(ended_with(engine, FatalRequest))
        for poison, deaths in engine.deaths.items():
            # Where some have ended, the other choices are requests of their own in another core.
            ended = set(engine.endings) - ended_with(engine, FatalRequest)
            parts = self.moved and (self.aborted | ended) & poison.victims
            assert deaths <= MAX_DEATHS * (poison.request.params.n if parts else 1)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run_to_empty(max_steps=2000)
        self.everything_holds()
        engine.assert_empty()
        assert not engine.scheduler.suspects
        owned = {each for request in self.accepted for each in request.choices()}
        assert set(engine.endings) == owned - self.aborted
        for request in self.accepted:
            check_output(engine, request)
        self.check_endings()

    def check_endings(self) -> None:
        engine = self.engine
        fatal = ended_with(engine, FatalRequest)
        poisoned = set().union(*(poison.victims for poison in engine.poisons))
        assert fatal <= poisoned | engine.unlucky, "nobody ends for what another one did"
        otherwise = ended_with(engine, NotFinite, Unavailable, TooLong)
        for request_id, output in all_outputs(engine.poisons).items():
            if request_id in fatal:
                assert engine.outputs[request_id] == output or request_id in engine.unlucky
            else:
                assert request_id in otherwise | self.aborted, "who kills executors ends"
        for request in self.accepted:
            rest = set(request.choices()) - fatal - otherwise - self.aborted
            if request.params.beam is None:  # of a search there may be fewer than were asked for
                endings = {engine.endings[each] for each in rest}
                assert endings <= {FinishReason.STOP, FinishReason.LENGTH}


class NativeSuspectsMachine(SuspectsMachine):
    batch_factory = staticmethod(NATIVE_BATCH)


TestSuspects = SuspectsMachine.TestCase
TestSuspects.settings = settings(stateful_step_count=40)
TestNativeSuspects = NativeSuspectsMachine.TestCase
TestNativeSuspects.settings = settings(stateful_step_count=40)
