"""Hostile clients of the others' services: each request ends once, and nobody else waits."""

import json
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb2
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from engine import Engine, running_engine
from grpc_errors import refused, violations
from leaving import until
from small_engines import EXACT, tiny_model
from triptych.kserve import inference_pb2 as kserve_pb2
from triptych.kserve import inference_pb2_grpc as kserve_grpc

PROMPT = [5, 6, 7, 8, 9]
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "seed": 3, "temperature": 0.8}
MESSAGE_BYTES = 256 << 10
_TYPES = {"input_ids": "INT32", "stream": "BOOL", "exclude_input_in_output": "BOOL"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = tiny_model(tmp_path_factory.mktemp("hostile"), max_position_embeddings=2048)
    run_dir: Path = tmp_path_factory.mktemp("run")
    flags = (
        "--vllm-grpc", "--kserve-grpc", "--served-model-name", "tiny", "--max-logprobs", "-1",
        "--unread-timeout", "1", "--max-message-bytes", str(MESSAGE_BYTES),
    )  # fmt: skip
    with running_engine(model, run_dir, *EXACT, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def channel(engine: Engine) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(engine.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def vllm(channel: grpc.Channel) -> vllm_grpc.VllmEngineStub:
    return vllm_grpc.VllmEngineStub(channel)


@pytest.fixture(scope="module")
def kserve(channel: grpc.Channel) -> kserve_grpc.GRPCInferenceServiceStub:
    return kserve_grpc.GRPCInferenceServiceStub(channel)


def ask(*, name: str = "r", stream: bool = True, **params: Any) -> Any:
    return vllm_pb2.GenerateRequest(
        request_id=name,
        tokenized=vllm_pb2.TokenizedInput(input_ids=PROMPT),
        sampling_params=vllm_pb2.SamplingParams(**params),
        stream=stream,
    )


def infer(
    *, name: str = "", stream: bool = False, outputs: Iterable[str] = (), **params: Any
) -> kserve_pb2.ModelInferRequest:
    text = json.dumps(params).encode()
    request = kserve_pb2.ModelInferRequest(model_name="tiny", id=name)
    for tensor, shape, raw in (
        ("input_ids", [len(PROMPT)], struct.pack(f"<{len(PROMPT)}i", *PROMPT)),
        ("sampling_parameters", [1], struct.pack("<I", len(text)) + text),
        ("stream", [1], bytes([stream])),
        ("exclude_input_in_output", [1], b"\1"),
    ):
        request.inputs.add(name=tensor, datatype=_TYPES.get(tensor, "BYTES"), shape=shape)
        request.raw_input_contents.append(raw)
    for output in outputs:
        request.outputs.add(name=output)
    return request


def ids_of(tensor: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(tensor) // 4}i", tensor))


def texts_of(answer: kserve_pb2.ModelInferResponse) -> list[bytes]:
    raw, found = answer.raw_output_contents[0], []
    while raw:
        (length,) = struct.unpack_from("<I", raw)
        found.append(raw[4 : 4 + length])
        raw = raw[4 + length :]
    return found


def final(answer: kserve_pb2.ModelStreamInferResponse) -> bool:
    parameters = answer.infer_response.parameters
    return bool(answer.error_message) or parameters["triton_final_response"].bool_param


def ends_of(messages: Iterable[Any]) -> list[Any]:
    return [message.complete for message in messages if message.HasField("complete")]


# ------------------------------------------------------------------------------------------ sizes


def test_an_answer_that_no_message_holds_is_refused_by_name(
    engine: Engine,
    vllm: vllm_grpc.VllmEngineStub,
    kserve: kserve_grpc.GRPCInferenceServiceStub,
) -> None:
    whole = infer(n=128, **LONG)
    error = refused(lambda: kserve.ModelInfer(whole, timeout=60))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert list(violations(error)) == ["sampling_parameters.max_tokens"]
    for stream, field in ((True, "prompt_logprobs"), (False, "logprobs")):
        request = ask(stream=stream, **{**LONG, "n": 2, field: -1})
        if stream:
            request.tokenized.input_ids[:] = PROMPT * 100
            request.sampling_params.max_tokens = 4
        error = refused(lambda: list(vllm.Generate(request, timeout=60)))  # noqa: B023  # at once
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()
        assert list(violations(error)) == [f"sampling_params.{field}"]
    engine.wait_idle()


def test_128_choices_with_the_whole_vocabulary(
    engine: Engine, vllm: vllm_grpc.VllmEngineStub
) -> None:
    params: dict[str, Any] = {
        "max_tokens": 2,
        "n": 128,
        "logprobs": -1,
        "prompt_logprobs": 0,
        "ignore_eos": True,
    }
    ends = ends_of(vllm.Generate(ask(**params), timeout=60))
    assert sorted(end.index for end in ends) == list(range(128))
    ends = ends_of(vllm.Generate(ask(stream=False, **params), timeout=60))
    assert sorted(end.index for end in ends) == list(range(128))
    assert all(len(end.output_logprobs.top_logprobs) == 2 for end in ends)
    engine.wait_idle()


# ------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"n": 0}, "sampling_parameters.n"),
        ({"n": 129}, "sampling_parameters.n"),
        ({"logprobs": 1}, "sampling_parameters.logprobs"),
        ({"prompt_logprobs": 1}, "sampling_parameters.prompt_logprobs"),
        ({"top_p": 2}, "sampling_parameters.top_p"),
        ({"max_tokens": 10**6}, "sampling_parameters.max_tokens"),
        ({"structured_output": {"regex": "("}}, "sampling_parameters.structured_output.regex"),
    ],
)
def test_errors_have_the_tensors_names(
    kserve: kserve_grpc.GRPCInferenceServiceStub, params: dict[str, Any], field: str
) -> None:
    error = refused(lambda: kserve.ModelInfer(infer(**params), timeout=30))
    assert list(violations(error)) == [field]
    (answer,) = kserve.ModelStreamInfer(iter([infer(name="x", **params)]), timeout=30)
    assert answer.error_message.startswith(f"{field}: ")
    assert answer.infer_response.id == "x"


def test_a_prompt_has_the_name_of_its_tensor(
    kserve: kserve_grpc.GRPCInferenceServiceStub,
) -> None:
    request = infer(max_tokens=1)
    for ids, field in (([], "input_ids"), ([1, 10**6], "input_ids[1]"), ([1] * 9000, "input_ids")):
        request.inputs[0].shape[:] = [len(ids)]
        request.raw_input_contents[0] = struct.pack(f"<{len(ids)}i", *ids)
        error = refused(lambda: kserve.ModelInfer(request, timeout=30))
        assert list(violations(error)) == [field]


def test_forms_have_the_contracts_names(vllm: vllm_grpc.VllmEngineStub) -> None:
    error = refused(lambda: list(vllm.Generate(ask(regex="("), timeout=30)))
    assert list(violations(error)) == ["sampling_params.regex"]


def test_long_names_are_not_repeated_in_errors(
    kserve: kserve_grpc.GRPCInferenceServiceStub,
) -> None:
    request = infer(name="ä" * 100_000, max_tokens=1)
    unknown = infer(max_tokens=1)
    unknown.model_name = "m" * 200_000
    first, second = kserve.ModelStreamInfer(iter([request, unknown]), timeout=30)
    assert first.error_message.startswith("id: ")
    assert second.error_message.startswith("model: ")
    assert max(first.ByteSize(), second.ByteSize()) < 8192


def test_empty_everything(
    vllm: vllm_grpc.VllmEngineStub, kserve: kserve_grpc.GRPCInferenceServiceStub
) -> None:
    error = refused(lambda: list(vllm.Generate(vllm_pb2.GenerateRequest(), timeout=30)))
    assert list(violations(error)) == ["input"]
    error = refused(lambda: kserve.ModelInfer(kserve_pb2.ModelInferRequest(), timeout=30))
    assert list(violations(error)) == ["inputs"]
    assert list(kserve.ModelStreamInfer(iter([]), timeout=30)) == []
    vllm.Abort(vllm_pb2.AbortRequest(), timeout=30)
    many = vllm_pb2.AbortRequest(request_ids=[""] * 65_537)
    error = refused(lambda: vllm.Abort(many, timeout=30))
    assert list(violations(error)) == ["request_ids"]


# ------------------------------------------------------------------------------------------- ends


def test_aborts_end_all_of_an_id_and_nobody_without_one(
    engine: Engine, vllm: vllm_grpc.VllmEngineStub
) -> None:
    with engine.frozen():  # so that none of them ends before
        shared = [vllm.Generate(ask(name="ours", **LONG), timeout=60) for _ in range(3)]
        nameless = vllm.Generate(ask(name="", **{**LONG, "max_tokens": 200}), timeout=60)
        until(lambda: engine.stats("scheduler").scheduler.requests_tracked == 4)
        vllm.Abort(vllm_pb2.AbortRequest(request_ids=["ours", ""] * 2000), timeout=30)
    reasons = [[end.finish_reason for end in ends_of(stream)] for stream in (*shared, nameless)]
    assert reasons == [["abort"]] * 3 + [["length"]]
    engine.wait_idle()


def test_who_does_not_read_is_ended(
    engine: Engine,
    kserve: kserve_grpc.GRPCInferenceServiceStub,
    vllm: vllm_grpc.VllmEngineStub,
) -> None:
    def endless() -> Iterator[kserve_pb2.ModelInferRequest]:
        while not done.is_set():
            yield infer(stream=True, name="n" * 900, **LONG)

    done = threading.Event()
    silent = kserve.ModelStreamInfer(endless(), timeout=60)
    unread = vllm.Generate(ask(name="silent", n=32, logprobs=-1, **LONG), timeout=60)
    deadline = time.monotonic() + 30
    while engine.stats("tokenizer-0").tokenizer.requests_running and time.monotonic() < deadline:
        assert engine.generate(PROMPT, max_tokens=2).completion_tokens  # others go on
        time.sleep(0.1)
    done.set()
    engine.wait_idle()
    for stream in (silent, unread):
        error = refused(lambda: list(stream))  # noqa: B023  # called at once
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_leaving_in_the_middle_frees_everything(
    engine: Engine,
    kserve: kserve_grpc.GRPCInferenceServiceStub,
    vllm: vllm_grpc.VllmEngineStub,
) -> None:
    for after in range(4):
        streams = [
            kserve.ModelStreamInfer(iter([infer(stream=True, **LONG)] * 50), timeout=60),
            kserve.ModelStreamInfer(iter([infer(**LONG)]), timeout=60),
            vllm.Generate(ask(n=16, **LONG), timeout=60),
            vllm.Generate(ask(stream=False, **LONG), timeout=60),
        ]
        for stream in (streams[0], streams[2]):
            for _ in range(after):
                next(stream)
        for stream in streams:
            stream.cancel()
        engine.wait_idle()


def test_deadlines(
    engine: Engine,
    kserve: kserve_grpc.GRPCInferenceServiceStub,
    vllm: vllm_grpc.VllmEngineStub,
) -> None:
    calls: list[Any] = [
        lambda: kserve.ModelInfer(infer(n=64, **LONG), timeout=0.2),
        lambda: list(kserve.ModelStreamInfer(iter([infer(n=64, **LONG)] * 9), timeout=0.2)),
        lambda: list(vllm.Generate(ask(n=64, **LONG), timeout=0.2)),
        lambda: list(vllm.Generate(ask(n=64, stream=False, **LONG), timeout=0.2)),
    ]
    for call in calls:
        assert refused(call).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    engine.wait_idle()


def test_a_stream_of_refusals_then_of_answers(
    engine: Engine, kserve: kserve_grpc.GRPCInferenceServiceStub
) -> None:
    wrong = infer(name="wrong", outputs=["nothing"])
    right = infer(name="right", max_tokens=1)
    answers = list(kserve.ModelStreamInfer(iter([wrong] * 500 + [right] * 20), timeout=60))
    assert [bool(answer.error_message) for answer in answers] == [True] * 500 + [False] * 20
    assert all(final(answer) for answer in answers)
    engine.wait_idle()


@pytest.mark.parametrize("stage", ["executor-0", "scheduler"])
def test_a_stage_may_die_in_the_middle(
    engine: Engine,
    kserve: kserve_grpc.GRPCInferenceServiceStub,
    vllm: vllm_grpc.VllmEngineStub,
    stage: str,
) -> None:
    expected = engine.generate(PROMPT, **LONG)
    streamed = infer(stream=True, outputs=["text_output", "output_ids"], **LONG)
    begun = threading.Barrier(4)  # again and again

    def over_vllm(stream: bool) -> list[int]:
        messages = vllm.Generate(ask(stream=stream, **LONG), timeout=90)
        first = [next(messages)] if stream else []
        begun.wait(30)
        (end,) = ends_of([*first, *(rest := list(messages))])
        chunks = [m.chunk for m in (*first, *rest) if m.HasField("chunk")]
        return [i for chunk in chunks for i in chunk.token_ids] if stream else end.output_ids[:]

    def over_kserve() -> list[int]:
        answers = kserve.ModelStreamInfer(iter([streamed]), timeout=90)
        found = [next(answers)]
        begun.wait(30)
        found += answers
        assert [final(answer) for answer in found] == [False] * (len(found) - 1) + [True]
        return [i for each in found for i in ids_of(each.infer_response.raw_output_contents[1])]

    def is_killed() -> bool:
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(over_vllm, True), pool.submit(over_vllm, False)]
            answers.append(pool.submit(over_kserve))
            begun.wait(30)
            killed = engine.kill_midway(stage, 3)
            assert [answer.result(90) for answer in answers] == [expected.token_ids] * 3
        return killed

    assert any(is_killed() for _ in range(10))  # a busy machine may be late
    engine.wait_idle()


def test_drain_lets_them_finish_and_takes_no_more(
    engine: Engine,
    kserve: kserve_grpc.GRPCInferenceServiceStub,
    vllm: vllm_grpc.VllmEngineStub,
) -> None:
    asked = threading.Event()

    def requests() -> Iterator[kserve_pb2.ModelInferRequest]:
        yield infer(stream=True, **{**LONG, "max_tokens": 300})
        asked.wait(60)
        yield infer(name="late", max_tokens=1)

    running = vllm.Generate(ask(**{**LONG, "max_tokens": 300}), timeout=60)
    streams = kserve.ModelStreamInfer(requests(), timeout=60)
    next(running)
    next(streams)
    with ThreadPoolExecutor(1) as pool:
        drained = pool.submit(engine.drain, grace_ms=30_000)
        assert [end.finish_reason for end in ends_of(running)] == ["length"]
        while not final(next(streams)):
            pass
        assert drained.result(60) == 0
    asked.set()
    (late,) = streams
    assert "draining" in late.error_message
    assert not kserve.ServerReady(kserve_pb2.ServerReadyRequest(), timeout=30).ready
    assert not vllm.HealthCheck(vllm_pb2.HealthCheckRequest(), timeout=30).healthy
    assert refused(lambda: list(vllm.Generate(ask(), timeout=30))).code() == (
        grpc.StatusCode.UNAVAILABLE
    )
    engine.resume()
    engine.wait_idle()
    assert texts_of(kserve.ModelInfer(infer(max_tokens=1), timeout=30))
