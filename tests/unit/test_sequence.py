import pytest

from triptych.engine_core.ids import RequestId, SequenceId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.sequence import Sequence, SequenceState


def sequence(output: tuple[int, ...] = ()) -> Sequence:
    request = Request(
        RequestId(1), (1, 2, 3), SamplingParams(max_tokens=5), output_token_ids=output
    )
    return Sequence(SequenceId(7), request)


def test_a_resumed_sequence_starts_with_its_output() -> None:
    resumed = sequence((8, 9))
    assert resumed.tokens == [1, 2, 3, 8, 9]
    assert (resumed.num_tokens, resumed.num_output, resumed.num_computed) == (5, 2, 0)


def test_a_life_with_a_preemption() -> None:
    one = sequence()
    one.start()
    one.num_computed = 2
    one.requeue()
    assert (one.state, one.num_computed) == (SequenceState.WAITING, 0)
    one.start()
    one.finish()
    assert one.state is SequenceState.FINISHED
    assert repr(one) == "<sequence 7 FINISHED computed 0/3>"


def test_other_transitions_are_bugs() -> None:
    one = sequence()
    with pytest.raises(AssertionError, match="cannot be requeued"):
        one.requeue()
    one.start()
    with pytest.raises(AssertionError, match="cannot start"):
        one.start()
    one.finish()
    with pytest.raises(AssertionError, match="cannot finish twice"):
        one.finish()
    with pytest.raises(AssertionError, match="cannot start"):
        one.start()
