import pytest

from triptych.engine_core.ids import RequestId, SequenceId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.sequence import Sequence, SequenceState


def sequence(output: tuple[int, ...] = (), index: int = 0) -> Sequence:
    request = Request(
        RequestId(1), (1, 2, 3), SamplingParams(max_tokens=5), output_token_ids=output
    )
    return Sequence(request, (0.0, SequenceId(6), SequenceId(7)), index)


def test_a_resumed_sequence_starts_with_its_output() -> None:
    resumed = sequence((8, 9))
    assert resumed.tokens == [1, 2, 3, 8, 9]
    assert resumed.started
    assert resumed.sequence_id == 7


def test_a_choice_has_an_id_and_noise_of_its_own() -> None:
    third = sequence(index=2)
    assert (third.request_id, third.choice) == (3, 2)
    again = third.resumed([1, 2, 3, 8])
    assert (again.request_id, again.choice, again.output_token_ids) == (3, 2, (8,))


def test_a_life_with_a_preemption() -> None:
    one = sequence()
    assert one.fresh
    one.start()
    assert (one.tokens, one.fresh) == ([], False)
    one.requeue([1, 2, 3, 4])
    assert (one.state, one.tokens) == (SequenceState.WAITING, [1, 2, 3, 4])
    one.start()
    one.finish()
    assert one.state is SequenceState.FINISHED
    assert repr(one) == "<sequence 7 of 1 FINISHED>"


def test_other_transitions_are_bugs() -> None:
    one = sequence()
    with pytest.raises(AssertionError, match="cannot be requeued"):
        one.requeue([])
    one.start()
    with pytest.raises(AssertionError, match="cannot start"):
        one.start()
    one.finish()
    with pytest.raises(AssertionError, match="cannot finish twice"):
        one.finish()
    with pytest.raises(AssertionError, match="cannot start"):
        one.start()
