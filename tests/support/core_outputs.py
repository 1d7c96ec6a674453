"""Small engines, and what must have come out of one (core_engine.py) for a request."""

from hypothesis import strategies as st

from core_engine import Engine, Shape
from hash_model import candidates, expected_beams, expected_output, is_complete, logprob
from triptych.engine_core.errors import RequestError
from triptych.engine_core.ids import RequestId
from triptych.engine_core.policy import POLICY_NAMES
from triptych.engine_core.request import Request
from triptych.engine_core.step import FinishReason

SHAPES = st.builds(
    Shape,
    num_blocks=st.integers(4, 12),
    block_size=st.integers(1, 3),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(4, 9),
    max_num_waiting=st.integers(0, 6),
    extra_logits=st.integers(0, 6),
    guess_seed=st.integers(0, 4),
    long_prefill_token_threshold=st.sampled_from([0, 0, 1, 2]),
    watermark_blocks=st.integers(0, 2),
    prefix_caching=st.sampled_from([True, True, False]),
    policy=st.sampled_from(POLICY_NAMES),
    num_host_blocks=st.sampled_from([0, 0, 2, 12]),
    max_transfers=st.sampled_from([1, 3, 20]),
)


def check_output(engine: Engine, request: Request) -> None:
    """What each choice got is what it gets alone; all of it, unless it was cut short."""
    params = request.params
    for index, request_id in enumerate(request.choices()):
        output, ending = engine.outputs[request_id], engine.endings.get(request_id)
        if params.beam is not None:
            found = expected_beams(request)
            expected = found[index] if index < len(found) else []
        else:
            expected = expected_output(request, index)
        assert output == expected[: len(output)]
        match ending:
            case FinishReason.STOP:
                assert output == expected
                text = [*request.prompt_token_ids, *request.output_token_ids, *output]
                assert output[-1] in params.stop_token_ids or is_complete(text, params)
            case FinishReason.LENGTH:
                assert output == expected
                assert output[-1] not in params.stop_token_ids
            case None | RequestError():
                pass
            case _:
                raise AssertionError(f"unexpected ending {ending!r}")
        if output and params.beam is None:
            check_logprobs(engine, request, index)


def check_logprobs(engine: Engine, request: Request, index: int) -> None:
    params, prompt = request.params, request.prompt_token_ids
    request_id = RequestId(request.request_id + index)
    output = engine.outputs[request_id]
    found = engine.logprobs.get(request_id, [])
    if params.logprobs >= 0:
        expected = [logprob([*prompt, *output[:i]], each) for i, each in enumerate(output)]
        assert [each.logprob for each in found] == expected
    else:
        assert not found
    scored = engine.prompt_logprobs.get(request_id, [])
    if params.prompt_logprobs >= 0 and index == 0:
        expected = [logprob(prompt[:i], prompt[i]) for i in range(1, len(prompt))]
        assert [each.logprob for each in scored] == expected
        tops = [candidates(prompt[:i], params.prompt_logprobs, ()) for i in range(1, len(prompt))]
        assert [(each.top_ids, each.top_logprobs) for each in scored] == tops
    else:
        assert not scored
