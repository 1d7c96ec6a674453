"""The C++ twins do what the Python ones do: same answers, same errors, same bytes, call by call."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from core_strategies import Engine, Shape, requests
from triptych.engine_core import block_pool as plain
from triptych.engine_core.errors import Unavailable
from triptych.engine_core.ids import BlockId, RequestId, SequenceId
from triptych.engine_core.step import ScheduledSequence
from triptych.engine_core.step_writer import StepWriter
from triptych.engine_core.twins import Twins, python_twins
from triptych.kernels import core as native

Outcome = tuple[str, object]


def outcome(call: Callable[..., object], *arguments: object) -> Outcome:
    """What a call returns, or the name of what it raises."""
    try:
        return "returned", call(*arguments)
    except (AssertionError, KeyError, OverflowError, ValueError) as error:
        return "raised", type(error).__name__
    except (plain.OutOfBlocks, native.OutOfBlocks) as error:
        return "raised", type(error).__name__


POOL_CALLS = st.lists(
    st.tuples(st.sampled_from(("allocate", "retain", "release")), st.integers(0, 5)),
    min_size=20,
    max_size=60,
)


@given(calls=POOL_CALLS)
def test_block_pools_agree(calls: list[tuple[str, int]]) -> None:
    python, cpp = plain.BlockPool(5), native.BlockPool(5)
    for name, number in calls:
        a = outcome(getattr(python, name), BlockId(number))
        b = outcome(getattr(cpp, name), number)
        assert a == b, (name, number)
        assert python.num_free == cpp.num_free
        assert python.free_blocks() == cpp.free_blocks()
        assert [python.references(BlockId(n)) for n in range(5)] == [
            cpp.references(n) for n in range(5)
        ]
        python.check()
        cpp.check()


def _same_calls(a: Engine, b: Engine, call: Callable[..., object], *arguments: object) -> None:
    left, right = outcome(call, a, *arguments), outcome(call, b, *arguments)
    assert left == right
    assert bytes(a.slot) == bytes(b.slot)
    assert a.kv_cache.sequence_ids() == b.kv_cache.sequence_ids()
    for sequence_id in a.kv_cache.sequence_ids():
        key = SequenceId(sequence_id)
        assert list(a.kv_cache.table(key)) == list(b.kv_cache.table(key))
    a.scheduler.check()
    b.scheduler.check()


OPERATIONS = st.lists(
    st.sampled_from(("submit", "submit", "step", "step", "step", "abort", "begin", "fail", "lose")),
    min_size=30,
    max_size=60,
)


@given(data=st.data(), operations=OPERATIONS)
def test_schedulers_over_either_twins_agree(data: st.DataObject, operations: list[str]) -> None:
    shape = Shape(num_blocks=7, max_num_batched_tokens=5)
    a, b = Engine(shape, python_twins), Engine(shape, native.native_twins)
    submitted = 0
    for operation in operations:
        match operation:
            case "submit" if a.scheduler.num_requests < shape.max_num_seqs + shape.max_num_waiting:
                request = data.draw(requests(submitted, shape))
                submitted += 1
                _same_calls(a, b, Engine.submit, request)
            case "abort":
                target = RequestId(data.draw(st.integers(0, max(submitted, 1))))
                _same_calls(a, b, Engine.abort, target)
            case "begin" | "step":
                if a.plan is None:
                    _same_calls(a, b, Engine.begin)
                if operation == "step" and a.plan is not None:
                    _same_calls(a, b, Engine.end)
            case "fail" if a.plan is not None:
                error = Unavailable("it broke", 100)
                _same_calls(a, b, Engine.fail_step, error)
            case "lose":
                _same_calls(a, b, Engine.lose)
    assert a.run_to_empty() == b.run_to_empty()
    assert a.outputs == b.outputs


WRITER_ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(-1, 5), st.integers(0, 5), st.booleans()), max_size=4
)


@given(rows=WRITER_ROWS, reserved=st.integers(0, 6))
def test_writers_refuse_the_same_rows(
    rows: list[tuple[int, int, int, bool]], reserved: int
) -> None:
    shape = Shape(max_num_batched_tokens=6, max_num_seqs=3, max_model_len=6)
    scheduled = [ScheduledSequence(SequenceId(i), s, n, f) for i, s, n, f in rows]
    results = []
    for pair in _pairs(shape):
        for number in range(3):
            pair.kv_cache.reserve(SequenceId(number), reserved)
            pair.step_writer.open(SequenceId(number), [number] * 5)
        slot = memoryview(bytearray(b"\xaa" * shape.layout.slot_bytes))
        written = outcome(pair.step_writer.write, slot, 9, scheduled)
        if written[0] == "raised":
            assert bytes(slot) == b"\xaa" * shape.layout.slot_bytes, "nothing is written"
        results.append((written, bytes(slot)))
    assert results[0] == results[1]


def _pairs(shape: Shape) -> list[Twins]:
    return [
        factory(shape.num_blocks, shape.block_size, shape.layout)
        for factory in (python_twins, native.native_twins)
    ]


def test_writers_agree_on_misuse() -> None:
    python, cpp = (_misuses(pair.step_writer) for pair in _pairs(Shape()))
    assert python == cpp


def _misuses(writer: StepWriter) -> list[Outcome]:
    one, two = SequenceId(1), SequenceId(2)
    writer.open(one, [1, 2])
    return [
        outcome(writer.open, one, [1]),
        outcome(writer.close, two),
        outcome(writer.append, [two], [1]),
        outcome(writer.append, [one], [1, 2]),
        outcome(writer.append, [one], [2**31]),
        outcome(writer.token_ids, two),
        outcome(writer.token_ids, one),
        outcome(writer.write, memoryview(bytearray(8)), 1, []),
        outcome(writer.sequence_ids),
    ]
