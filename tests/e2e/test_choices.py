"""n and best_of over gRPC: from a known distribution, reproducible, nothing left behind."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from choices import Choices, joined, values
from engine import Engine, generate_request, running_engine
from grpc_errors import refused
from scripted_models import T1_EOS, write_s1_markov
from small_engines import SMALL
from triptych.v1 import common_pb2, control_pb2, inference_pb2

pytestmark = pytest.mark.e2e

V = 320
LETTERS = list(b"abcd")
FIRST = ord("s")
PROBABILITIES = [0.4, 0.3, 0.2, 0.1]


def table() -> npt.NDArray[np.float64]:
    """After any token: a, b, c or d; after "d", the end of sequence half of the time."""
    rows = np.zeros((V, V))
    rows[:, LETTERS] = PROBABILITIES
    rows[ord("d"), LETTERS] = np.array(PROBABILITIES) / 2
    rows[ord("d"), T1_EOS] = 0.5
    return rows


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("choices")
    write_s1_markov(folder / "model", table(), max_position_embeddings=4096)
    with running_engine(folder / "model", folder / "run", *SMALL) as engine:
        yield engine
        engine.wait_idle()


def run(engine: Engine, prompt: list[int] | None = None, **params: Any) -> Choices:
    request = generate_request(prompt or [FIRST], **params)
    return joined(engine.stub.Generate(request, timeout=60))


def test_each_choice_is_the_same_whatever_n_is(engine: Engine) -> None:
    params: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    three = run(engine, n=3, seed=11, **params)
    eight = run(engine, n=8, seed=11, **params)
    assert [three.ids[i] for i in range(3)] == [eight.ids[i] for i in range(3)]
    assert len({tuple(ids) for ids in eight.ids.values()}) == 8
    assert run(engine, n=8, seed=11, **params).ids == eight.ids
    assert run(engine, n=8, seed=12, **params).ids != eight.ids


def test_the_first_choice_is_that_of_a_plain_request(engine: Engine) -> None:
    assert (
        run(engine, n=4, seed=3, max_tokens=20).ids[0] == run(engine, seed=3, max_tokens=20).ids[0]
    )


def test_choices_have_the_models_distribution(engine: Engine) -> None:
    counts = np.zeros(4)
    for seed in range(8):
        answer = run(engine, n=128, seed=seed, max_tokens=1)
        for ids in answer.ids.values():
            counts[LETTERS.index(ids[0])] += 1
    assert counts.sum() == 1024
    expected = 1024 * np.array(PROBABILITIES)
    # Chi-square with 3 degrees of freedom: above 16.3 in one of a thousand.
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3


def test_each_choice_ends_on_its_own(engine: Engine) -> None:
    answer = run(engine, n=16, seed=5, max_tokens=40, stop=["ab"], stop_token_ids=[ord("c")])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(ids) for ids in answer.ids.values())
    assert set(answer.finish) == set(range(16))
    for index, ids in answer.ids.items():
        text = bytes(token for token in ids if token != T1_EOS).decode()
        if answer.finish[index] == common_pb2.FINISH_REASON_STOP:
            assert ids[-1] in (T1_EOS, ord("c")) or text.endswith("ab")
        assert "ab" not in answer.text[index]
        assert "c" not in answer.text[index]


def mean(rows: list[common_pb2.TokenLogprob]) -> float:
    return float(np.mean([row.logprob for row in rows]))


def test_best_of_are_the_best_of_those(engine: Engine) -> None:
    params: dict[str, Any] = {"seed": 21, "max_tokens": 10}
    every = run(engine, n=12, logprobs=0, **params)
    ranked = sorted(range(12), key=lambda index: -mean(every.logprobs[index]))
    best = run(engine, n=3, best_of=12, **params)
    assert [best.ids[i] for i in range(3)] == [every.ids[index] for index in ranked[:3]]
    for place, index in enumerate(ranked[:3]):
        assert best.score[place] == pytest.approx(mean(every.logprobs[index]), abs=1e-5)
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens
    assert best.messages == 3
    shown = run(engine, n=1, best_of=12, logprobs=1, **params)
    assert values(shown.logprobs[0]) == values(every.logprobs[ranked[0]])


def test_greedy_choices_are_equal(engine: Engine) -> None:
    answer = run(engine, n=3, temperature=0.0, max_tokens=5)
    assert answer.text == dict.fromkeys(range(3), "aaaaa")


def test_more_choices_than_run_at_once(engine: Engine) -> None:
    """SMALL runs 64 sequences; 128 choices take their turns."""
    answer = run(engine, [FIRST] * 40, n=128, seed=2, max_tokens=8)
    few = run(engine, [FIRST] * 40, n=2, seed=2, max_tokens=8)
    assert len(answer.finish) == 128
    assert [answer.ids[i] for i in range(2)] == [few.ids[i] for i in range(2)]
    engine.wait_idle()


def test_cancelling_stops_every_choice(engine: Engine) -> None:
    before = engine.stats("scheduler").scheduler.requests_aborted_total
    call = engine.stub.Generate(generate_request([FIRST], n=5, max_tokens=3000, ignore_eos=True))
    next(iter(call))
    call.cancel()
    engine.wait_idle()
    assert engine.stats("scheduler").scheduler.requests_aborted_total == before + 5


def test_a_session_cancels_every_choice(engine: Engine) -> None:
    def requests() -> Iterator[inference_pb2.SessionRequest]:
        start = inference_pb2.SessionStart(
            id=1, generate=generate_request([FIRST], n=3, max_tokens=200, ignore_eos=True)
        )
        yield inference_pb2.SessionRequest(start=start)
        cancel = inference_pb2.SessionCancel(id=1)
        yield inference_pb2.SessionRequest(cancel=cancel)

    answer = joined(
        event.output for response in engine.stub.Session(requests(), timeout=30)
        for event in response.events
    )  # fmt: skip
    assert set(answer.finish) == {0, 1, 2}
    assert set(answer.finish.values()) <= {
        common_pb2.FINISH_REASON_ABORT, common_pb2.FINISH_REASON_LENGTH
    }  # fmt: skip
    engine.wait_idle()


def cached_tokens(engine: Engine, prompt: list[int], salt: str = "") -> int:
    request = generate_request(prompt, max_tokens=1, n=2)
    request.cache_salt = salt
    usage = joined(engine.stub.Generate(request, timeout=60)).usage
    assert usage is not None
    return usage.cached_tokens


def test_cached_tokens_are_told(engine: Engine) -> None:
    prompt = list(range(140, 181))
    assert [cached_tokens(engine, prompt) for _ in range(2)] == [0, 40]
    assert cached_tokens(engine, prompt, salt="mine") == 0
    assert engine.flush_cache() > 0
    assert [cached_tokens(engine, prompt) for _ in range(2)] == [0, 40]
    stats = engine.stats("scheduler").scheduler
    assert stats.prefix_hits_total >= 80
    assert stats.blocks_cached > 0
    with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
        engine.control("tokenizer-0").FlushCache(control_pb2.FlushCacheRequest())


def test_time_outs_end_a_request(engine: Engine) -> None:
    request = generate_request([FIRST], max_tokens=200, ignore_eos=True, n=2)
    request.timeout_ms = 1
    error = refused(partial(list, engine.stub.Generate(request)))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    stats = engine.wait_idle()
    assert stats.requests_timed_out_total >= 1
