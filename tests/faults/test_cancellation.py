"""Whoever leaves, by whatever door and in whatever state: the work ends within a step, everything
that was lent comes back, and nobody else notices (R65, R67, R68)."""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import httpx
import pytest

from engine import Engine, running_engine, stop
from grpc_errors import refused
from leaving import (
    WAYS,
    GrpcCall,
    HttpCall,
    Leaving,
    SessionCall,
    Wanted,
    ends_within_a_step,
    figures,
    unharmed_engine,
    until,
)
from raw_http import RawHttp, request_bytes
from small_engines import tiny_model
from structured import slow_checkers
from triptych.v1 import common_pb2

pytestmark = pytest.mark.faults

FLAGS = ("--kv-cache-memory", "4500KiB", "--cpu-threads", "1", "--max-num-batched-tokens", "16",
         "--max-num-seqs", "4")  # fmt: skip
GOOD = Wanted(prompt=(9, 8, 7), max_tokens=24)
CHECK_SECONDS = 60.0
# Takes the checker's children seconds: the first one gives up after half a second.
HARD = json.dumps(
    {"allOf": [{"type": "string", "pattern": f".*a.{{{count}}}"} for count in range(14)]}
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """About a millisecond a step, 16 tokens of a prompt in each; a pool for 4,600 tokens."""
    folder = tmp_path_factory.mktemp("left")
    model = tiny_model(
        folder, max_position_embeddings=4096, hidden_size=192, intermediate_size=768,
        num_hidden_layers=4,
    )  # fmt: skip
    flags = (*FLAGS, "--structured-output-check-seconds", str(CHECK_SECONDS))
    with unharmed_engine(model, folder / "run", *flags) as engine:
        yield engine


@pytest.fixture(scope="module")
def good(engine: Engine) -> list[int]:
    """What GOOD gives where nobody ever left."""
    return whole(engine, GOOD)


def whole(engine: Engine, wanted: Wanted) -> list[int]:
    call = GrpcCall(engine, wanted)
    while call.read():
        pass
    assert call.code is grpc.StatusCode.OK
    return call.ids


# ----------------------------------------------------------------------------------------- states

State = Callable[[Engine, Callable[[Wanted], Leaving]], tuple[Leaving, list[Leaving]]]
"""Sends a request with what is given and waits for a state of it; others that run may follow."""


def prefilling(engine: Engine, send: Callable[[Wanted], Leaving]) -> tuple[Leaving, list[Leaving]]:
    before = figures(engine)
    prompt = tuple(random.Random(before.steps_total).choices(range(256), k=3500))
    left = send(Wanted(prompt=prompt, max_tokens=400))
    now = figures(engine)
    while now.steps_total <= before.steps_total + 5:
        now = figures(engine)
    assert now.generated_tokens_total == before.generated_tokens_total
    return left, []


def decoding(engine: Engine, send: Callable[[Wanted], Leaving]) -> tuple[Leaving, list[Leaving]]:
    return first_tokens(engine, send, Wanted())


def choices(engine: Engine, send: Callable[[Wanted], Leaving]) -> tuple[Leaving, list[Leaving]]:
    return first_tokens(engine, send, Wanted(params={"n": 3}))


def first_tokens(
    engine: Engine, send: Callable[[Wanted], Leaving], wanted: Wanted
) -> tuple[Leaving, list[Leaving]]:
    before = figures(engine).generated_tokens_total
    left = send(wanted)
    if left.streams:
        assert left.read()
        assert left.read()
    until(lambda: figures(engine).generated_tokens_total > before + 3)
    return left, []


def between_choices(
    engine: Engine, send: Callable[[Wanted], Leaving]
) -> tuple[Leaving, list[Leaving]]:
    """Some have ended, at a token that stops, and others have not."""
    params = {"n": 4, "temperature": 1.0, "seed": 3, "stop_token_ids": [5]}
    before = figures(engine).requests_finished_total
    left = send(Wanted(params=params))
    until(lambda: figures(engine).requests_finished_total > before)
    assert figures(engine).requests_running
    return left, []


def checked(engine: Engine, send: Callable[[Wanted], Leaving]) -> tuple[Leaving, list[Leaving]]:
    """A child of the tokenizer process looks at its grammar, and is frozen over it."""
    left = send(Wanted(schema=HARD))
    until(lambda: slow_checkers(engine, CHECK_SECONDS))
    (child,) = slow_checkers(engine, CHECK_SECONDS)
    child.suspend()
    assert engine.stats("tokenizer-0").tokenizer.requests_running == 1
    return left, []


def queued(engine: Engine, send: Callable[[Wanted], Leaving]) -> tuple[Leaving, list[Leaving]]:
    others: list[Leaving] = [GrpcCall(engine, Wanted(prompt=(k, k), max_tokens=1000))
                             for k in range(4)]  # fmt: skip
    until(lambda: figures(engine).requests_running == 4)
    with engine.frozen():  # so that no place becomes free before
        left = send(Wanted(params={"n": 2}))
        until(lambda: figures(engine).requests_waiting)
    return left, others


def preempted(engine: Engine, send: Callable[[Wanted], Leaving]) -> tuple[Leaving, list[Leaving]]:
    """Two that came before have grown over its blocks."""
    before = figures(engine)
    room = before.blocks_total * before.block_size
    source = random.Random(before.steps_total)
    others: list[Leaving] = [
        GrpcCall(engine, Wanted(prompt=tuple(source.choices(range(256), k=room // 2 - 80)),
                                max_tokens=400))
        for _ in range(2)
    ]  # fmt: skip
    until(lambda: figures(engine).requests_tracked == 2)  # long before their first tokens
    left = send(Wanted(prompt=tuple(source.choices(range(256), k=60))))
    until(lambda: figures(engine).preemptions_total > before.preemptions_total)
    return left, others


STATES: list[State] = [
    prefilling, decoding, choices, between_choices, checked, queued, preempted
]  # fmt: skip


FEW_WAYS = ["grpc-cancel", "session-by-id", "http-stream-rst", "http-whole-fin"]
CASES = [(state, way) for state in STATES for way in (FEW_WAYS if state is preempted else WAYS)]


@pytest.mark.parametrize(("state", "way"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_leaving(engine: Engine, good: list[int], state: State, way: str) -> None:
    aborted = engine.wait_idle().requests_aborted_total
    tokenizer = engine.stats("tokenizer-0").tokenizer.requests_total
    left, others = state(engine, partial(WAYS[way], engine))
    left.leave()
    if others:
        until(lambda: figures(engine).requests_aborted_total > aborted)
        until(lambda: figures(engine).requests_tracked <= len(others))
        for each in others:
            each.leave()
        engine.wait_idle()
    elif state is checked:
        engine.wait_idle(CHECK_SECONDS / 2)  # the check itself takes longer
        for child in slow_checkers(engine, CHECK_SECONDS):
            child.kill()
        until(lambda: not slow_checkers(engine, CHECK_SECONDS))
        assert engine.stats("tokenizer-0").tokenizer.requests_total == tokenizer
    else:
        ends_within_a_step(engine, aborted, choices=4)
    assert whole(engine, GOOD) == good


@pytest.mark.parametrize("way", WAYS)
def test_leaving_at_the_last_token(engine: Engine, good: list[int], way: str) -> None:
    for tokens in range(1, 25):
        left = WAYS[way](engine, Wanted(max_tokens=tokens))
        if left.streams:
            while len(left.ids) < tokens - 1 and left.read():
                pass
        else:
            time.sleep(tokens * 0.001)
        left.leave()
    engine.wait_idle()
    assert whole(engine, GOOD) == good


def test_leaving_twice(engine: Engine, good: list[int]) -> None:
    aborted = engine.wait_idle().requests_aborted_total
    call = GrpcCall(engine, Wanted())
    assert call.read()
    call.leave()
    call.leave()
    session = SessionCall(engine, Wanted(), by_id=True)
    assert session.read()
    session.leave()
    session.leave()
    while session.read():
        pass
    assert session.ends == [common_pb2.FINISH_REASON_ABORT]
    http = HttpCall(engine, Wanted(), "rst", stream=True)
    assert http.read()
    http.http.half_close()
    http.leave()
    assert engine.wait_idle().requests_aborted_total == aborted + 3
    assert whole(engine, GOOD) == good


def test_a_session_that_has_said_all_is_served_to_its_end(engine: Engine, good: list[int]) -> None:
    session = SessionCall(engine, GOOD, by_id=True)
    session.actions.put(None)
    while session.read():
        pass
    assert session.ids == good
    engine.wait_idle()


# -------------------------------------------------------------------------------------- deadlines


def test_a_hundred_deadlines_at_once(engine: Engine, good: list[int]) -> None:
    before = engine.wait_idle()
    submitted = engine.stats("tokenizer-0").tokenizer.requests_total

    def call(timeout: float) -> grpc.StatusCode:
        return refused(
            lambda: list(engine.stub.Generate(Wanted().over_grpc(), timeout=timeout))
        ).code()

    def submitted_within(timeout: float) -> int:
        with ThreadPoolExecutor(100) as pool:
            codes = list(pool.map(call, [timeout] * 100))
        assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
        engine.wait_idle()
        return engine.stats("tokenizer-0").tokenizer.requests_total - submitted

    # A busy machine may not get one of them to the scheduler in the first time.
    found = next(filter(None, map(submitted_within, (0.05, 0.2, 0.8))))
    after = engine.wait_idle()
    aborted = after.requests_aborted_total - before.requests_aborted_total
    timed_out = after.requests_timed_out_total - before.requests_timed_out_total
    assert aborted + timed_out == found  # whoever notices first
    assert after.requests_finished_total - before.requests_finished_total == timed_out
    assert call(0.0) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert whole(engine, GOOD) == good


# ------------------------------------------------------------------------- one connection, several


def test_a_connection_that_is_kept(engine: Engine, good: list[int]) -> None:
    """Two whole answers on it, then a stream that is left."""
    aborted = engine.wait_idle().requests_aborted_total
    http = RawHttp(engine)
    for _ in range(2):
        http.send(request_bytes("/v1/completions", GOOD.over_http(stream=False)))
        status, answer = http.answer()
        assert status == 200
        assert answer["choices"][0]["token_ids"] == good
    http.send(request_bytes("/v1/completions", Wanted().over_http(stream=True)))
    http.read_until(b"data: ", 3)
    http.fin()
    ends_within_a_step(engine, aborted)


@pytest.mark.parametrize("end", ["fin", "rst"])
@pytest.mark.parametrize("first", [0, 1])
def test_requests_behind_one_another(engine: Engine, good: list[int], first: int, end: str) -> None:
    """Some that are answered in their order, one that runs when the client leaves, two that wait
    for their turn and are never begun."""
    aborted = engine.wait_idle().requests_aborted_total
    before = engine.stats("tokenizer-0").tokenizer.requests_total
    http = RawHttp(engine)
    quick = request_bytes("/v1/completions", GOOD.over_http(stream=False))
    long = [request_bytes("/v1/completions", Wanted().over_http(stream=bool(k % 2)))
            for k in (first, 0, 1)]  # fmt: skip
    http.send(quick * 2 + b"".join(long))
    for _ in range(2):
        assert http.answer()[1]["choices"][0]["token_ids"] == good
    tokens = figures(engine).generated_tokens_total
    until(lambda: figures(engine).generated_tokens_total > tokens + 3)
    getattr(http, end)()
    ends_within_a_step(engine, aborted)
    assert engine.stats("tokenizer-0").tokenizer.requests_total == before + 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts(engine: Engine, good: list[int], stream: bool) -> None:
    """Some of their choices run and the others wait."""
    aborted = engine.wait_idle().requests_aborted_total
    body = {**Wanted().over_http(stream=stream), "prompt": [[k, k + 1] for k in range(6)], "n": 2}
    http = RawHttp(engine)
    http.send(request_bytes("/v1/completions", body))
    until(lambda: figures(engine).requests_running == 4)
    until(lambda: figures(engine).requests_waiting)
    http.fin()
    ends_within_a_step(engine, aborted, choices=4)
    assert engine.wait_idle().requests_aborted_total == aborted + 12
    assert whole(engine, GOOD) == good


# ------------------------------------------------------------------------------------- many, often


def test_at_random_again_and_again_and_nothing_grows(engine: Engine, good: list[int]) -> None:
    names = list(WAYS)

    def leave_one(number: int) -> None:
        source = random.Random(number)
        wanted = Wanted(
            prompt=tuple(source.choices(range(256), k=source.choice((1, 5, 40, 400)))),
            max_tokens=source.choice((1, 4, 60, 2000)),
            params=source.choice(({}, {"n": 3}, {"stop": ["~~"]}, {"logprobs": 2})),
            schema=source.choice(("", "", json.dumps({"enum": [f"x{number}", "y"]}))),
        )
        left = WAYS[names[number % len(names)]](engine, wanted)
        if source.random() < 0.3 and left.streams:
            left.read()
        time.sleep(source.choice((0.0, 0.001, 0.01, 0.05)))
        left.leave()

    def some(first: int, count: int) -> tuple[int, ...]:
        """Memory, files and maps of all three processes once all have left."""
        with ThreadPoolExecutor(8) as pool:
            neighbour = pool.submit(whole, engine, GOOD)
            list(pool.map(leave_one, range(first, first + count)))
            assert neighbour.result() == good
        engine.wait_idle()
        until(lambda: not engine.stats("scheduler").scheduler.grammars_waiting)
        processes = [engine.stats(name).process for name in ("tokenizer-0", "scheduler",
                                                             "executor-0")]  # fmt: skip
        until(lambda: engine.stats("tokenizer-0").process.open_files <= open_files)
        return sum(((p.resident_bytes, p.ring_maps) for p in processes), ())

    open_files = engine.stats("tokenizer-0").process.open_files + 4  # a checker's child may start
    before = some(0, 100)
    files = [engine.stats(name).process.open_files for name in ("scheduler", "executor-0")]
    after = some(100, 300)
    assert files == [engine.stats(name).process.open_files for name in ("scheduler", "executor-0")]
    for name, old, new in zip(
        ("tokenizer", "", "scheduler", "", "executor", ""), before, after, strict=True
    ):
        assert new <= old + (16 << 20 if name else 0), name


# -------------------------------------------------------------------------------------- at the end


@pytest.mark.parametrize("gap", [0.0, 0.01])
def test_leaving_right_before_shutdown(engine: Engine, gap: float) -> None:
    model = engine.run_dir.parent / "model"
    with running_engine(model, engine.run_dir.parent / f"again{gap}", *FLAGS) as other:
        until(lambda: httpx.get(f"http://{other.http_address}/health").status_code == 200)
        left = [way(other, Wanted(prompt=(k,))) for k, way in enumerate(WAYS.values())]
        until(lambda: figures(other).requests_running == 4)
        leaving = [threading.Thread(target=each.leave) for each in left]
        for thread in leaving:
            thread.start()
        time.sleep(gap)
        assert stop(other) == 0
        for thread in leaving:
            thread.join(30)
            assert not thread.is_alive()
        log = other.log.read_text()
        assert "Traceback" not in log, log
        assert " ERROR " not in log, log
