"""vllm.grpc.engine.VllmEngine, by its own stubs and through the gateway that is made for it."""

import hashlib
import io
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as smg_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb2
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from engine import Engine, is_serving, running_engine
from free_port import free_ports
from grpc_errors import refused, violations
from leaving import until
from small_engines import EXACT, tiny_model
from triptych.v1 import inference_pb2

SERVICE = "vllm.grpc.engine.VllmEngine"
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("vllm"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    run_dir = tmp_path_factory.mktemp("run")
    with running_engine(
        model, run_dir, *EXACT, "--vllm-grpc", "--served-model-name", "tiny"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def stub(engine: Engine) -> Iterator[vllm_grpc.VllmEngineStub]:
    with grpc.insecure_channel(engine.address) as channel:
        yield vllm_grpc.VllmEngineStub(channel)


def ask(prompt: Sequence[int] = PROMPT, *, stream: bool = True, **params: Any) -> Any:
    """A request; keyword arguments are SamplingParams fields."""
    return vllm_pb2.GenerateRequest(
        request_id="r",
        tokenized=vllm_pb2.TokenizedInput(input_ids=prompt),
        sampling_params=vllm_pb2.SamplingParams(**params),
        stream=stream,
    )


def streamed_ids(messages: list[Any], index: int = 0) -> list[int]:
    chunks = [each.chunk for each in messages if each.HasField("chunk")]
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


def completes(messages: list[Any]) -> list[Any]:
    return [each.complete for each in messages if each.HasField("complete")]


def test_streamed_and_whole_are_what_generate_says(
    engine: Engine, stub: vllm_grpc.VllmEngineStub
) -> None:
    params: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 7, "ignore_eos": True}
    expected = engine.generate(PROMPT, **params)
    streamed = list(stub.Generate(ask(**params)))
    assert streamed_ids(streamed) == expected.token_ids
    (end,) = completes(streamed)
    assert (end.finish_reason, end.prompt_tokens) == ("length", len(PROMPT))
    (whole,) = completes(list(stub.Generate(ask(stream=False, **params))))
    assert list(whole.output_ids) == expected.token_ids
    assert whole.completion_tokens == len(expected.token_ids)
    assert whole.finish_reason == "length"


def test_unset_scalars_are_defaults_and_temperature_0_is_greedy(
    engine: Engine, stub: vllm_grpc.VllmEngineStub
) -> None:
    (whole,) = completes(list(stub.Generate(ask(stream=False, max_tokens=8, temperature=0))))
    greedy = engine.generate(PROMPT, max_tokens=8, temperature=0)
    assert list(whole.output_ids) == greedy.token_ids


def test_logprobs_and_choices(engine: Engine, stub: vllm_grpc.VllmEngineStub) -> None:
    params: dict[str, Any] = {"max_tokens": 4, "seed": 3, "ignore_eos": True, "n": 2}
    messages = list(stub.Generate(ask(logprobs=2, prompt_logprobs=1, **params)))
    ends = completes(messages)
    assert sorted(end.index for end in ends) == [0, 1]
    for index in (0, 1):
        chunks = [m.chunk for m in messages if m.HasField("chunk") and m.chunk.index == index]
        logged = [token for chunk in chunks for token in chunk.output_logprobs.token_ids]
        assert logged == streamed_ids(messages, index)
        assert all(
            len(top.token_ids) == 2
            for chunk in chunks
            for top in chunk.output_logprobs.top_logprobs
        )
        prompt = chunks[0].input_logprobs
        assert list(prompt.token_ids) == PROMPT
        assert not prompt.token_logprobs[0].HasField("value")
        assert all(each.value < 0 for each in prompt.token_logprobs[1:])
    alone = engine.generate(PROMPT, **{**params, "n": 1})
    assert streamed_ids(messages, 0) == alone.token_ids


def test_why_it_ended(engine: Engine, stub: vllm_grpc.VllmEngineStub) -> None:
    answer = engine.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
    stop = answer.token_ids[3]
    (end,) = completes(
        list(
            stub.Generate(ask(max_tokens=8, temperature=0, ignore_eos=True, stop_token_ids=[stop]))
        )
    )
    assert (end.finish_reason, end.matched_token_id) == ("stop", stop)


def test_truncation_keeps_the_end(engine: Engine, stub: vllm_grpc.VllmEngineStub) -> None:
    params: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    cut = ask([1, 2, 3, *PROMPT], stream=False, truncate_prompt_tokens=len(PROMPT), **params)
    (whole,) = completes(list(stub.Generate(cut)))
    assert list(whole.output_ids) == engine.generate(PROMPT, **params).token_ids
    assert whole.prompt_tokens == len(PROMPT)


def test_a_form_is_kept(stub: vllm_grpc.VllmEngineStub, engine: Engine) -> None:
    choice = vllm_pb2.ChoiceConstraint(choices=["abc", "xyz"])
    (whole,) = completes(list(stub.Generate(ask(stream=False, max_tokens=20, choice=choice))))
    request = inference_pb2.DetokenizeRequest(token_ids=whole.output_ids)
    assert engine.stub.Detokenize(request).text in ("abc", "xyz")


def test_abort_ends_with_abort_and_leaves_nothing(
    engine: Engine, stub: vllm_grpc.VllmEngineStub
) -> None:
    request = ask(max_tokens=1500, ignore_eos=True)
    request.request_id = "to be aborted"
    with engine.frozen():  # so that it does not end before
        messages = stub.Generate(request, timeout=60)
        until(lambda: engine.stats("scheduler").scheduler.requests_tracked == 1)
        stub.Abort(vllm_pb2.AbortRequest(request_ids=["nobody's", "to be aborted"]), timeout=30)
    (end,) = completes(list(messages))
    assert end.finish_reason == "abort"
    engine.wait_idle()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokenized": vllm_pb2.TokenizedInput(input_ids=[10**6])}, "tokenized.input_ids[0]"),
        ({"tokenized": vllm_pb2.TokenizedInput()}, "tokenized.input_ids"),
        ({"mm_inputs": vllm_pb2.MultimodalInputs()}, "mm_inputs"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"data_parallel_rank": 3}, "data_parallel_rank"),
        ({"sampling_params": vllm_pb2.SamplingParams(top_p=7)}, "sampling_params.top_p"),
        (
            {"sampling_params": vllm_pb2.SamplingParams(logit_bias={-1: 2.0})},
            "sampling_params.logit_bias",
        ),
        (
            {"sampling_params": vllm_pb2.SamplingParams(truncate_prompt_tokens=0)},
            "sampling_params.truncate_prompt_tokens",
        ),
    ],
)
def test_what_is_wrong_is_named(
    stub: vllm_grpc.VllmEngineStub, change: dict[str, Any], field: str
) -> None:
    request = ask(max_tokens=1)
    for name in change:
        request.ClearField(name)
    request.MergeFrom(vllm_pb2.GenerateRequest(**change))
    error = refused(lambda: list(stub.Generate(request)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert list(violations(error)) == [field]


def test_facts(engine: Engine, stub: vllm_grpc.VllmEngineStub, model: Path) -> None:
    assert is_serving(engine.address, SERVICE)
    assert stub.HealthCheck(vllm_pb2.HealthCheckRequest()).healthy
    facts = stub.GetModelInfo(vllm_pb2.GetModelInfoRequest())
    config = json.loads((model / "config.json").read_text())
    assert (facts.served_model_name, facts.model_path) == ("tiny", str(model))
    assert facts.vocab_size == config["vocab_size"]
    assert facts.is_generation
    server = stub.GetServerInfo(vllm_pb2.GetServerInfoRequest())
    assert (server.server_type, server.data_parallel_size) == ("vllm-grpc", 1)
    assert server.block_size == 16
    (load,) = stub.GetLoads(vllm_pb2.GetLoadsRequest()).loads
    core = engine.stats("scheduler").scheduler
    assert load.max_total_num_tokens == core.blocks_total * core.block_size
    assert load.max_running_requests == core.max_num_seqs


def test_the_tokenizer_comes_as_a_zip(stub: vllm_grpc.VllmEngineStub, model: Path) -> None:
    chunks = list(stub.GetTokenizer(smg_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as bundle:
        assert bundle.read("tokenizer.json") == (model / "tokenizer.json").read_bytes()
        assert not [name for name in bundle.namelist() if name.endswith(".safetensors")]


def test_the_cache_is_flushed(engine: Engine, stub: vllm_grpc.VllmEngineStub) -> None:
    engine.generate(list(range(3, 60)), max_tokens=2)
    engine.wait_idle()
    assert stub.FlushCache(smg_pb2.FlushCacheRequest()).success
    assert engine.stats("scheduler").scheduler.blocks_cached == 0


def test_what_is_not_here_says_so(stub: vllm_grpc.VllmEngineStub) -> None:
    error = refused(lambda: stub.Embed(vllm_pb2.EmbedRequest()))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    events = smg_pb2.SubscribeKvEventsRequest()
    error = refused(lambda: list(stub.SubscribeKvEvents(events)))
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED


def test_without_the_flag_there_is_no_such_service(model: Path, tmp_path: Path) -> None:
    with (
        running_engine(model, tmp_path / "run", *EXACT) as engine,
        grpc.insecure_channel(engine.address) as channel,
    ):
        error = refused(lambda: list(vllm_grpc.VllmEngineStub(channel).Generate(ask())))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED


# ---------------------------------------------------------------------------- through the gateway


@pytest.fixture(scope="module")
def gateway(engine: Engine, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an SMG gateway whose one worker is the engine."""
    program = shutil.which("smg", path=f"{Path(sys.executable).parent}")
    if program is None:
        pytest.skip("the gateway (PyPI smg) is not installed")
    port, metrics = free_ports(2)
    log = tmp_path_factory.mktemp("gateway") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                program, "launch", "--host", "127.0.0.1", "--port", str(port),
                "--worker-urls", f"grpc://{engine.address}", "--model-path", str(model),
                "--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1",
            ],
            stdout=out,
            stderr=out,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while b'"tiny"' not in body_of(f"http://127.0.0.1:{port}/v1/models"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


def body_of(url: str, data: object = None) -> bytes:
    """Of a GET or, with data, a POST. Of a GET empty while nobody answers, or is not ready."""
    raw = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(url, raw, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as error:
        if data is None and error.code == 503:
            return b""
        raise
    except OSError:
        return b""


def test_completions_through_the_gateway(engine: Engine, gateway: str) -> None:
    data = {"model": "tiny", "prompt": "hello there", "max_tokens": 6, "temperature": 0}
    answer = json.loads(body_of(f"{gateway}/v1/completions", data))
    expected = engine.generate("hello there", max_tokens=6, temperature=0)
    assert answer["usage"]["completion_tokens"] == expected.completion_tokens
    assert answer["choices"][0]["text"] == expected.text


def test_a_stream_through_the_gateway(engine: Engine, gateway: str) -> None:
    message = {"role": "user", "content": "hello"}
    data = {"model": "tiny", "messages": [message], "max_tokens": 9, "seed": 4, "stream": True}
    lines = body_of(f"{gateway}/v1/chat/completions", data).decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    ends = [json.loads(event)["choices"] for event in events[:-1]]
    assert [choice["finish_reason"] for choices in ends for choice in choices][-1] == "length"
    engine.wait_idle()
