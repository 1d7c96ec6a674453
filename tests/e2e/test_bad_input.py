"""Values out of bounds: a status that names field, value and bound, at once; others go on."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import pytest

from engine import Engine, generate_request, running_engine
from faults import wait_for
from grpc_errors import refused, retry_delay, violations
from small_engines import SMALL, tiny_model
from triptych.v1 import common_pb2, inference_pb2

pytestmark = pytest.mark.e2e

INVALID = grpc.StatusCode.INVALID_ARGUMENT
V = 320


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("bad")
    model = tiny_model(folder, max_position_embeddings=4096)
    flags = (*SMALL, "--max-num-waiting", "4", "--max-num-seqs", "2")
    with running_engine(model, folder / "run", *flags) as engine:
        yield engine
        engine.wait_idle()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan), ("temperature", math.inf), ("temperature", -0.1),
        ("temperature", 1e9), ("top_p", math.nan), ("top_p", -0.01), ("top_p", 1.5),
        ("min_p", math.nan), ("min_p", -1.0), ("min_p", 2.0), ("top_k", -2), ("max_tokens", 0),
        ("stop", ["", "x"]), ("stop", ["x"] * 500), ("stop", ["y" * 5000]),
        ("stop_token_ids", [V]), ("stop_token_ids", list(range(129))),
        ("typical_p", math.nan), ("typical_p", 1.1), ("top_n_sigma", math.inf),
        ("top_n_sigma", -1.0), ("presence_penalty", math.nan), ("presence_penalty", 2.5),
        ("frequency_penalty", -math.inf), ("frequency_penalty", -2.5),
        ("repetition_penalty", math.nan), ("repetition_penalty", 0.0),
        ("logit_bias", {V: 1.0}), ("logit_bias", {3: math.nan}), ("logit_bias", {3: 1e9}),
        ("allowed_token_ids", common_pb2.TokenIds()),
        ("allowed_token_ids", common_pb2.TokenIds(ids=[V])), ("bad_words", [""]),
        ("bad_words_token_ids", [common_pb2.TokenIds(ids=[V])]), ("n", 0), ("n", 129),
        ("best_of", 0), ("logprobs", 21), ("logprobs", -2), ("prompt_logprobs", 21),
        ("beam", common_pb2.BeamSearch(width=1)),
        ("logits_processors", [common_pb2.LogitsProcessor(name="nobody")]),
    ],
)  # fmt: skip
def test_a_parameter_out_of_bounds(engine: Engine, field: str, value: object) -> None:
    params: dict[str, Any] = {"max_tokens": 4, field: value}
    error = refused(lambda: engine.generate([1, 2, 3], **params))
    assert error.code() == INVALID
    assert any(field in name for name in violations(error)), violations(error)


def test_min_tokens_above_max_tokens(engine: Engine) -> None:
    error = refused(lambda: engine.generate([1], min_tokens=5, max_tokens=4))
    assert error.code() == INVALID
    assert "min_tokens" in error.details()


@pytest.mark.parametrize("bad", [V, V + 1, 2**31, 2**32 - 1])
def test_a_prompt_token_out_of_range(engine: Engine, bad: int) -> None:
    error = refused(lambda: engine.generate([1, bad, 2], max_tokens=4))
    assert error.code() == INVALID
    assert str(bad) in error.details()
    error = refused(
        lambda: engine.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[bad]))
    )
    assert error.code() == INVALID


@pytest.mark.parametrize("name", ["nobody", "../x", "x" * 10_000])
def test_an_unknown_model(engine: Engine, name: str) -> None:
    calls = (
        lambda: list(engine.stub.Generate(inference_pb2.GenerateRequest(model=name, text="a"))),
        lambda: list(engine.stub.Chat(inference_pb2.ChatRequest(
            model=name, messages=[inference_pb2.ChatMessage(role="user", content="a")]))),
        lambda: engine.stub.Tokenize(inference_pb2.TokenizeRequest(model=name, text="a")),
        lambda: engine.stub.Detokenize(inference_pb2.DetokenizeRequest(model=name, token_ids=[1])),
    )  # fmt: skip
    for call in calls:
        assert refused(call).code() == grpc.StatusCode.NOT_FOUND


def test_a_served_name_is_accepted(engine: Engine) -> None:
    (model,) = engine.stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert model.vocabulary_size == V
    assert model.max_model_len == 4096
    request = generate_request([1, 2], max_tokens=2)
    request.model = model.name
    assert list(engine.stub.Generate(request))[-1].finish_reason


def test_a_full_queue_says_so_at_once_and_when_to_come_back(engine: Engine) -> None:
    long = generate_request([5] * 8, max_tokens=4000, ignore_eos=True)

    def streams(running: int, waiting: int) -> bool | None:
        now = engine.stats("scheduler").scheduler
        return (now.requests_running, now.requests_waiting) == (running, waiting) or None

    calls = [engine.stub.Generate(long) for _ in range(2)]
    wait_for(lambda: streams(2, 0), "they do not run")
    with engine.frozen():  # so that no place becomes free meanwhile
        calls += [engine.stub.Generate(long) for _ in range(4)]
        wait_for(lambda: streams(2, 4), "the queue does not fill")
        refusals = [refused(lambda: next(engine.stub.Generate(long))) for _ in range(6)]
    for call in calls:
        call.cancel()
    for error in refusals:
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        delay = retry_delay(error)
        assert delay is not None
        assert delay > 0
    engine.wait_idle()
    assert engine.generate([1, 2], max_tokens=2, ignore_eos=True).completion_tokens == 2


def test_a_message_beyond_the_limit_fails_alone(engine: Engine) -> None:
    error = refused(lambda: engine.generate("x" * (17 << 20), max_tokens=1))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    error = refused(lambda: engine.generate([1] * 1_000_000, max_tokens=1))
    assert error.code() == INVALID
    assert "1000000" in error.details()


def test_neighbours_of_bad_requests_are_untouched(engine: Engine) -> None:
    params: dict[str, Any] = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
    reference = engine.generate([9, 8, 7], **params).token_ids
    call = engine.stub.Generate(generate_request([9, 8, 7], **params))
    stream = iter(call)
    ids = list(next(stream).token_ids)
    for field, value in (("top_p", 7.0), ("temperature", math.nan), ("stop_token_ids", [2**31])):
        bad: dict[str, Any] = {"max_tokens": 2, field: value}
        refused(partial(engine.generate, [1], **bad))
    for response in stream:
        ids += response.token_ids
    assert ids == reference


def test_the_same_label_twice_never_mixes(engine: Engine) -> None:
    """request_id is a label: two running requests may share it."""
    first = generate_request([1, 2, 3], max_tokens=60, temperature=0.0, ignore_eos=True)
    second = generate_request([4, 5, 6], max_tokens=60, temperature=0.0, ignore_eos=True)
    first.request_id = second.request_id = "same"
    references = [engine.generate(ids, max_tokens=60, temperature=0.0, ignore_eos=True).token_ids
                  for ids in ([1, 2, 3], [4, 5, 6])]  # fmt: skip
    calls = [engine.stub.Generate(first), engine.stub.Generate(second)]
    got = [[i for response in call for i in response.token_ids] for call in calls]
    assert got == references


def test_an_overlong_label_is_refused(engine: Engine) -> None:
    request = generate_request([1], max_tokens=1)
    request.request_id = "x" * 200
    error = refused(lambda: list(engine.stub.Generate(request)))
    assert error.code() == INVALID
    assert "request_id" in violations(error)


def test_chat_refuses_an_empty_role_and_too_many_messages(engine: Engine) -> None:
    message = inference_pb2.ChatMessage(role="user", content="a")
    error = refused(
        lambda: list(engine.stub.Chat(inference_pb2.ChatRequest(messages=[message] * 5000)))
    )
    assert error.code() == INVALID
    assert "messages" in violations(error)
    nobody = inference_pb2.ChatMessage(content="a")
    error = refused(
        lambda: list(engine.stub.Chat(inference_pb2.ChatRequest(messages=[message, nobody])))
    )
    assert error.code() == INVALID
    assert "messages[1].role" in violations(error)
