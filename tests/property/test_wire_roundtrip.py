"""wire.py: value -> message -> bytes and back is the identity; any bytes are survived."""

import struct

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine_core.errors import InvalidRequest, NotFinite, QueueFull, TooLong, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.step import Failed, FinishReason, Token
from triptych.services.transport import wire
from triptych.v1 import stage_pb2

u32 = st.integers(0, 2**32 - 1)
token_lists = st.lists(u32, max_size=20).map(tuple)


def fraction(high: float) -> st.SearchStrategy[float]:
    return st.floats(0.0, high, width=32)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    max_tokens = draw(st.integers(1, 2**32 - 1))
    return Request(
        request_id=RequestId(draw(st.integers(0, 2**63))),
        prompt_token_ids=draw(st.lists(u32, min_size=1, max_size=20).map(tuple)),
        params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            temperature=draw(fraction(100.0)),
            top_k=draw(st.integers(-1, 2**31 - 1)),
            top_p=draw(fraction(1.0)),
            min_p=draw(fraction(1.0)),
            seed=draw(st.integers(0, 2**64 - 1)),
            stop_token_ids=draw(token_lists),
        ),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        output_token_ids=draw(token_lists.map(lambda ids: ids[: max_tokens - 1])),
    )


@given(requests(), u32, st.text(max_size=20))
def test_requests(request: Request, slot: int, label: str) -> None:
    submit = wire.submit_of(wire.pack_u32(request.prompt_token_ids), request.params, label)
    submit.slot = slot
    submit.priority = request.priority
    submit.output_token_ids = wire.pack_u32(request.output_token_ids)
    received = stage_pb2.Submit.FromString(submit.SerializeToString())
    assert (received.slot, received.request_id) == (slot, label)
    assert wire.request_from_submit(received, request.request_id) == request


tokens = st.builds(
    Token, st.just(RequestId(0)), u32, st.one_of(st.none(), st.sampled_from(FinishReason))
)
names = st.from_regex(r"[a-z_]{1,10}", fullmatch=True)
errors = st.one_of(
    st.builds(TooLong, names, st.text(max_size=20)),
    st.builds(InvalidRequest, names, st.text(max_size=20)),
    st.builds(QueueFull, st.text(max_size=20), u32),
    st.builds(Unavailable, st.text(max_size=20), u32),
    st.builds(NotFinite, st.text(max_size=20)),
)
events = st.lists(st.tuples(u32, tokens | st.builds(Failed, st.just(RequestId(0)), errors)))


@given(st.integers(0, 2**64 - 1), events)
def test_outputs(step_id: int, pairs: list[tuple[int, Token | Failed]]) -> None:
    sent = wire.outputs_from_events(step_id, pairs).SerializeToString()
    outputs = stage_pb2.StepOutputs.FromString(sent)
    assert outputs.step_id == step_id
    assert wire.tokens_from_outputs(outputs) == [
        (slot, event.token_id, event.finish or 0)
        for slot, event in pairs
        if isinstance(event, Token)
    ]
    failures = [(slot, event.error) for slot, event in pairs if isinstance(event, Failed)]
    back = [(row.slot, row.error) for row in wire.failures_from_outputs(outputs)]
    assert [slot for slot, _ in back] == [slot for slot, _ in failures]
    for (_, got), (_, sent_error) in zip(back, failures, strict=True):
        assert type(got) is type(sent_error)
        assert vars(got) == vars(sent_error)
        assert str(got) == str(sent_error)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_invalid_request(data: bytes) -> None:
    try:
        submit = stage_pb2.Submit.FromString(data)
        outputs = stage_pb2.StepOutputs.FromString(data)
    except DecodeError:
        return
    wire.failures_from_outputs(outputs)
    try:
        wire.request_from_submit(submit, RequestId(1))
        wire.tokens_from_outputs(outputs)
    except InvalidRequest:
        pass


@given(st.binary(max_size=64))
def test_columns(data: bytes) -> None:
    try:
        values = wire.unpack_u32(data, "slots")
    except InvalidRequest:
        assert len(data) % 4
        return
    assert struct.pack(f"<{len(values)}I", *values) == data
    assert wire.pack_u32(values) == data
