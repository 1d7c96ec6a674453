"""Any order of submit, abort, step, failure and loss keeps the scheduler's invariants."""

from hypothesis import given, settings
from hypothesis import strategies as st

from core_engine import Engine, Shape, requests
from core_outputs import SHAPES, check_output
from hash_model import expected_beams, expected_output
from scheduler_machine import SchedulerMachine
from triptych.engine_core.errors import NotFinite, QueueFull
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.step import FinishReason

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
