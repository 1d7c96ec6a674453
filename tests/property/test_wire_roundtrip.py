"""wire.py, step_outputs.py: value -> message -> bytes and back is the identity.

Any bytes are survived.
"""

import struct
from array import array
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine_core.errors import (
    DeadlinePassed,
    FatalRequest,
    InvalidRequest,
    NotFinite,
    QueueFull,
    RequestError,
    TooLong,
    Unavailable,
)
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import (
    MAX_CHOICES,
    NO_LOGPROBS,
    BeamParams,
    ExternalSampler,
    SamplingParams,
)
from triptych.engine_core.step import Failed, PromptLogprobs, Started, StepOutput
from triptych.services.transport import output_columns, step_outputs, wire
from triptych.services.transport.step_outputs import TokenLogprobs, peer_of, slot_of
from triptych.services.transport.vocabulary import (
    MAX_VOCABULARY_BYTES,
    Vocabulary,
    vocabulary_from,
    vocabulary_message,
)
from triptych.v1 import stage_pb2

u32 = st.integers(0, 2**32 - 1)
token_lists = st.lists(u32, max_size=20).map(tuple)
some_tokens = st.lists(u32, min_size=1, max_size=20).map(tuple)


def within(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


beams = st.builds(
    BeamParams,
    width=st.integers(2, 64),
    length_penalty=within(-100, 100),
    early_stopping=st.sampled_from(["true", "false", "never"]),
)


externals = st.builds(
    ExternalSampler, lease=st.integers(1, 2**64 - 1), tag=st.integers(0, 2**64 - 1)
)


@st.composite
def sampling(draw: st.DrawFn, n: st.SearchStrategy[int]) -> SamplingParams:
    max_tokens = draw(st.integers(1, 2**32 - 1))
    if draw(st.integers(0, 4)) == 0:  # somebody else draws: next to nothing is left to say
        return SamplingParams(
            max_tokens=max_tokens,
            seed=draw(st.integers(0, 2**64 - 1)),
            stop_token_ids=draw(token_lists),
            prompt_logprobs=draw(st.integers(NO_LOGPROBS, 2**31)),
            external=draw(externals),
        )
    biases = st.dictionaries(u32, within(-100, 100), max_size=8)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        temperature=draw(within(0, 100)),
        top_k=draw(st.integers(-1, 2**31 - 1)),
        top_p=draw(within(0, 1)),
        min_p=draw(within(0, 1)),
        typical_p=draw(within(0, 1)),
        top_n_sigma=draw(within(0, 1000)),
        seed=draw(st.integers(0, 2**64 - 1)),
        stop_token_ids=draw(token_lists),
        logprobs=draw(st.integers(NO_LOGPROBS, 2**31)),
        prompt_logprobs=draw(st.integers(NO_LOGPROBS, 2**31)),
    )
    beam = draw(st.none() | beams)
    if beam is not None:  # nothing that changes logits beside it
        return replace(params, beam=beam, n=min(draw(n), beam.width))
    return replace(
        params,
        repetition_penalty=draw(within(0.125, 100)),
        presence_penalty=draw(within(-2, 2)),
        frequency_penalty=draw(within(-2, 2)),
        no_repeat_ngram_size=draw(u32),
        logit_bias=tuple(sorted(draw(biases).items())),
        allowed_token_ids=draw(st.none() | some_tokens),
        bad_words=draw(st.lists(some_tokens, max_size=4).map(tuple)),
        processors=draw(st.lists(st.tuples(st.text(), st.text()), max_size=3).map(tuple)),
        grammar=draw(st.text(max_size=40)),
        n=draw(n),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    sent = draw(token_lists)
    params = draw(sampling(st.just(1) if sent else st.integers(1, 128)))
    return Request(
        request_id=RequestId(draw(st.integers(0, 2**63))),
        prompt_token_ids=draw(some_tokens),
        params=params,
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        output_token_ids=sent[: params.max_tokens - 1] if params.beam is None else (),
        choice=draw(st.integers(0, MAX_CHOICES - params.n)),
        cache_salt=draw(st.text(max_size=60)),
        tenant=draw(st.text(max_size=30)),
        accepted=draw(st.booleans()),
    )


@given(requests(), u32, st.text(max_size=20))
def test_requests(request: Request, slot: int, label: str) -> None:
    submit = wire.submit_of(wire.pack_u32(request.prompt_token_ids), request.params, label)
    submit.slot = slot
    submit.priority = request.priority
    submit.output_token_ids = wire.pack_u32(request.output_token_ids)
    submit.choice, submit.accepted = request.choice, request.accepted
    submit.cache_salt, submit.tenant = request.cache_salt, request.tenant
    received = stage_pb2.Submit.FromString(submit.SerializeToString())
    assert (received.slot, received.request_id) == (slot, label)
    assert wire.request_from_submit(received, request.request_id) == request


names = st.from_regex(r"[a-z_]{1,10}", fullmatch=True)
errors: st.SearchStrategy[RequestError] = st.one_of(
    st.builds(TooLong, names, st.text(max_size=20)),
    st.builds(InvalidRequest, names, st.text(max_size=20)),
    st.builds(QueueFull, st.text(max_size=20), u32),
    st.builds(Unavailable, st.text(max_size=20), u32),
    st.builds(NotFinite, st.text(max_size=20)),
    st.builds(DeadlinePassed, st.text(max_size=20)),
    st.builds(FatalRequest, st.text(max_size=20)),
)
request_ids = st.builds(step_outputs.request_id_of, st.integers(1, 3), u32)


class Row(NamedTuple):
    """Logprobs as plain values, which compare."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@st.composite
def logprobs(draw: st.DrawFn) -> Row:
    count = draw(st.integers(0, 3))
    ids = draw(st.lists(u32, min_size=count, max_size=count))
    values = draw(st.lists(within(-50, 0), min_size=count, max_size=count))
    return Row(draw(within(-50, 0)), draw(u32), ids, values)


@st.composite
def outputs(draw: st.DrawFn) -> StepOutput:
    ids = draw(st.lists(request_ids, max_size=12))
    some = st.integers(0, len(ids) - 1) if ids else st.nothing()
    count = len(ids)
    return StepOutput(
        step_id=draw(st.integers(0, 2**64 - 1)),
        request_ids=array("q", ids),
        token_ids=array(
            "i", draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
        ),
        finishes=array("B", draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))),
        logprobs=draw(st.dictionaries(some, logprobs(), max_size=4)) if ids else {},
        scores=draw(st.dictionaries(some, within(-50, 0), max_size=4)) if ids else {},
        started=draw(st.lists(st.builds(Started, request_ids, u32), max_size=3)),
        prompt_logprobs=draw(
            st.lists(
                st.builds(
                    PromptLogprobs,
                    request_ids,
                    st.integers(0, 2**31),
                    st.lists(logprobs(), min_size=1, max_size=5),
                ),
                max_size=3,
            )
        ),
        failed=draw(st.lists(st.builds(Failed, request_ids, errors), max_size=3)),
    )


def plain(row: TokenLogprobs) -> Row:
    return Row(row.logprob, row.rank, row.top_ids.tolist(), row.top_logprobs.tolist())


@pytest.mark.parametrize("most", [output_columns.MAX_LOGPROB_BYTES, 16])
def test_outputs(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and in several messages."""
    monkeypatch.setattr(output_columns, "MAX_LOGPROB_BYTES", most)

    @given(outputs())
    def check(output: StepOutput) -> None:
        by_peer = output_columns.outputs_by_peer(output)
        for peer in (1, 2, 3):
            check_peer(output, peer, by_peer.get(peer, []))

    check()


def check_peer(output: StepOutput, peer: int, sent: list[stage_pb2.StepOutputs]) -> None:
    tokens: list[step_outputs.SlotToken] = []
    rows: dict[int, Row] = {}
    scores: dict[int, float] = {}
    prompt: list[tuple[int, int, Row]] = []
    started: list[tuple[int, int]] = []
    failures: list[step_outputs.SlotFailure] = []
    for message in sent:
        back = stage_pb2.StepOutputs.FromString(message.SerializeToString())
        assert back.step_id == output.step_id
        at = len(tokens)
        tokens += step_outputs.tokens_from_outputs(back)
        found = step_outputs.logprobs_from_outputs(back).items()
        rows |= {at + entry: plain(row) for entry, row in found}
        scored = step_outputs.scores_from_outputs(back).items()
        scores |= {at + entry: score for entry, score in scored}
        for each in step_outputs.prompt_logprobs_from_outputs(back):
            prompt += [
                (each.slot, each.position + index, plain(row))
                for index, row in enumerate(each.rows)
            ]
        started += [(each.slot, each.cached_tokens) for each in back.started]
        failures += step_outputs.failures_from_outputs(back)
    mine = [at for at, request_id in enumerate(output.request_ids) if peer_of(request_id) == peer]
    assert tokens == [
        (slot_of(output.request_ids[at]), output.token_ids[at], output.finishes[at]) for at in mine
    ]
    places = {at: place for place, at in enumerate(mine)}
    assert rows == {places[at]: row for at, row in output.logprobs.items() if at in places}
    assert scores == {places[at]: score for at, score in output.scores.items() if at in places}
    assert started == [
        (slot_of(each.request_id), each.cached_tokens)
        for each in output.started
        if peer_of(each.request_id) == peer
    ]
    assert prompt == [
        (slot_of(each.request_id), each.position + index, row)
        for each in output.prompt_logprobs
        if peer_of(each.request_id) == peer
        for index, row in enumerate(each.logprobs)
    ]
    failed = [each for each in output.failed if peer_of(each.request_id) == peer]
    assert [each.slot for each in failures] == [slot_of(each.request_id) for each in failed]
    for got, want in zip(failures, failed, strict=True):
        assert type(got.error) is type(want.error)
        assert vars(got.error) == vars(want.error)
        assert str(got.error) == str(want.error)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_invalid_request(data: bytes) -> None:
    try:
        submit = stage_pb2.Submit.FromString(data)
        message = stage_pb2.StepOutputs.FromString(data)
    except DecodeError:
        return
    step_outputs.failures_from_outputs(message)
    for read in (
        lambda: wire.request_from_submit(submit, RequestId(1)),
        lambda: step_outputs.tokens_from_outputs(message),
        lambda: step_outputs.logprobs_from_outputs(message),
        lambda: step_outputs.scores_from_outputs(message),
        lambda: step_outputs.prompt_logprobs_from_outputs(message),
    ):
        with suppress(InvalidRequest):
            read()


@st.composite
def vocabularies(draw: st.DrawFn) -> Vocabulary:
    tokens = draw(st.lists(st.binary(max_size=6), max_size=20).map(tuple))
    ids = st.integers(0, len(tokens) - 1) if tokens else st.nothing()
    some = st.lists(ids, max_size=4).map(tuple) if tokens else st.just(())
    return Vocabulary(tokens, draw(some), draw(some))


@given(vocabularies())
def test_vocabularies(value: Vocabulary) -> None:
    sent = vocabulary_message(value).SerializeToString()
    assert vocabulary_from(stage_pb2.Vocabulary.FromString(sent)) == value


@given(st.lists(u32, max_size=4), st.binary(max_size=16), st.lists(u32, max_size=2))
def test_a_vocabulary_is_a_value_or_an_invalid_request(
    lengths: list[int], data: bytes, ids: list[int]
) -> None:
    message = stage_pb2.Vocabulary(
        lengths=wire.pack_u32(lengths), data=data, eos_token_ids=wire.pack_u32(ids)
    )
    right = sum(lengths) == len(data) and all(each < len(lengths) for each in ids)
    try:
        value = vocabulary_from(message)
    except InvalidRequest:
        assert not right
        return
    assert right
    assert b"".join(value.tokens) == data
    assert list(map(len, value.tokens)) == lengths


def test_a_vocabulary_that_is_too_large_is_not_sent() -> None:
    value = Vocabulary((bytes(MAX_VOCABULARY_BYTES),), (), ())
    with pytest.raises(InvalidRequest, match="more than 25165824"):
        vocabulary_message(value)


@given(st.binary(max_size=64))
def test_columns(data: bytes) -> None:
    try:
        values = wire.unpack_u32(data, "slots")
    except InvalidRequest:
        assert len(data) % 4
        return
    assert struct.pack(f"<{len(values)}I", *values) == data
    assert wire.pack_u32(values) == data
