"""Many requests at once, cancelled at any point: right answers, and everything lent comes back."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from engine import Engine, generate_request, running_engine
from grpc_errors import as_error, refused
from leaving import ends_within_a_step
from small_engines import tiny_model
from triptych.v1 import common_pb2, inference_pb2

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("many")
    model = tiny_model(folder, max_position_embeddings=4096)
    flags = ("--kv-cache-memory", "1MiB", "--cpu-threads", "1", "--max-num-batched-tokens", "96",
             "--max-num-seqs", "24")  # fmt: skip
    with running_engine(model, folder / "run", *flags) as engine:
        yield engine
        engine.wait_idle()


def mixed_requests(count: int, seed: int) -> list[tuple[list[int], int]]:
    source = random.Random(seed)
    return [
        ([source.randrange(256) for _ in range(source.randrange(1, 150))], source.randrange(1, 60))
        for _ in range(count)
    ]


def test_64_mixed_requests_at_once_each_as_alone(engine: Engine) -> None:
    requests = mixed_requests(64, seed=1)

    def run(request: tuple[list[int], int]) -> list[int]:
        prompt, tokens = request
        return engine.generate(
            prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True
        ).token_ids

    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(run, requests))
    assert together == [run(request) for request in requests]
    engine.wait_idle()


def test_seeded_sampling_does_not_depend_on_the_neighbours(engine: Engine) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_k": 5, "seed": 2}, {"temperature": 1.5, "top_p": 0.8, "seed": 3},
        {"temperature": 1.0, "min_p": 0.1, "seed": 4},
        {"temperature": 2.0, "seed": 5}, {"temperature": 1.0, "top_k": 1, "seed": 6},
        {"temperature": 1.0, "top_p": 0.0, "seed": 7},
    ]  # fmt: skip

    def run(params: dict[str, Any]) -> list[int]:
        return engine.generate([9, 9, 9], max_tokens=24, ignore_eos=True, **params).token_ids

    alone = [run(params) for params in settings]
    assert len({tuple(ids) for ids in alone}) > 3
    for order in range(5):
        shuffled = list(enumerate(settings))
        random.Random(order).shuffle(shuffled)
        with ThreadPoolExecutor(8) as pool:
            for (index, _), ids in zip(
                shuffled, pool.map(lambda item: run(item[1]), shuffled), strict=True
            ):
                assert ids == alone[index]


def test_200_requests_half_of_them_cancelled_at_random_points(engine: Engine) -> None:
    requests = mixed_requests(200, seed=2)
    source = random.Random(3)
    plans = [source.random() * 0.6 if i % 2 else None for i in range(200)]
    finished: dict[int, list[int]] = {}
    refusals: list[grpc.StatusCode] = []
    lock = threading.Lock()

    def run(index: int) -> None:
        prompt, tokens = requests[index]
        call = engine.stub.Generate(
            generate_request(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True),
            timeout=120,
        )
        delay = plans[index]
        timer = threading.Timer(delay, call.cancel) if delay is not None else None
        if timer is not None:
            timer.start()
        ids: list[int] = []
        try:
            for response in call:
                ids += response.token_ids
        except grpc.RpcError as error:
            with lock:
                refusals.append(as_error(error).code())
            return
        finally:
            if timer is not None:
                timer.cancel()
        with lock:
            finished[index] = ids

    with ThreadPoolExecutor(200) as pool:
        list(pool.map(run, range(200)))
    assert set(refusals) <= {grpc.StatusCode.CANCELLED}
    assert {i for i in range(200) if plans[i] is None} <= finished.keys()
    assert refusals
    engine.wait_idle()
    for index in list(finished)[::5]:
        prompt, tokens = requests[index]
        reference = engine.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        assert finished[index] == reference.token_ids


def test_a_deadline_stops_the_work_and_says_so(engine: Engine) -> None:
    def call() -> None:
        request = generate_request([3] * 10, max_tokens=4000, ignore_eos=True)
        list(engine.stub.Generate(request, timeout=0.05))

    with ThreadPoolExecutor(50) as pool:
        codes = list(pool.map(lambda _: refused(call).code(), range(50)))
    assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    engine.wait_idle()
    assert engine.generate([1, 2], max_tokens=3, ignore_eos=True).completion_tokens == 3


def test_a_deadline_already_over_runs_nothing(engine: Engine) -> None:
    before = engine.stats("scheduler").scheduler.prompt_tokens_total
    request = generate_request([3] * 10, max_tokens=50)
    assert refused(
        lambda: list(engine.stub.Generate(request, timeout=0.0))
    ).code() == grpc.StatusCode.DEADLINE_EXCEEDED  # fmt: skip
    engine.wait_idle()
    assert engine.stats("scheduler").scheduler.prompt_tokens_total == before


def test_a_cancelled_stream_stops_within_a_step(engine: Engine) -> None:
    aborted = engine.wait_idle().requests_aborted_total
    call = engine.stub.Generate(generate_request([3] * 4, max_tokens=4000, ignore_eos=True))
    received = 0
    for response in call:
        received += len(response.token_ids)
        if received >= 3:
            break
    call.cancel()
    ends_within_a_step(engine, aborted)


def test_a_client_that_does_not_read_does_not_stop_others(engine: Engine) -> None:
    stalled = engine.stub.Generate(generate_request([3] * 4, max_tokens=500, ignore_eos=True))
    answer = engine.generate([1, 2, 3], max_tokens=20, ignore_eos=True)
    assert answer.completion_tokens == 20
    stalled.cancel()
    engine.wait_idle()


def test_a_session_multiplexes_and_cancels_by_id(engine: Engine) -> None:
    def start(request_id: int, prompt: list[int], tokens: int) -> inference_pb2.SessionRequest:
        generate = generate_request(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return inference_pb2.SessionRequest(
            start=inference_pb2.SessionStart(id=request_id, generate=generate)
        )

    release = threading.Event()

    def actions() -> Iterator[inference_pb2.SessionRequest]:
        for i in range(8):
            yield start(i, [i + 1, 2, 3], 20)
        yield start(100, [5] * 5, 400)
        yield start(101, [2**31], 4)
        release.wait(30)
        yield inference_pb2.SessionRequest(cancel=inference_pb2.SessionCancel(id=100))

    ids: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    for response in engine.stub.Session(actions(), timeout=60):
        for event in response.events:
            ids.setdefault(event.id, []).extend(event.output.token_ids)
            if event.HasField("error"):
                ends[event.id] = f"error {event.error.code}"
            elif event.output.finish_reason:
                ends[event.id] = common_pb2.FinishReason.Name(event.output.finish_reason)
        if sum(end == "FINISH_REASON_LENGTH" for end in ends.values()) >= 8 and ids.get(100):
            release.set()
    for i in range(8):
        alone = engine.generate([i + 1, 2, 3], max_tokens=20, temperature=0.0, ignore_eos=True)
        assert ids[i] == alone.token_ids
        assert ends[i] == "FINISH_REASON_LENGTH"
    assert ends[101] == f"error {grpc.StatusCode.INVALID_ARGUMENT.value[0]}"
    assert ends[100] in {"FINISH_REASON_ABORT", "FINISH_REASON_LENGTH"}
    engine.wait_idle()
