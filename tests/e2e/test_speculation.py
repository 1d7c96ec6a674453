"""Speculation over gRPC: whoever guesses, the answers are those of the engine that does not."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from choices import Choices
from engine import Engine, generate_request, running_engine
from scripted_models import T1_EOS
from small_engines import SMALL, tiny_model
from structured import (
    Asked,
    ask,
    ask_all,
    ask_through_a_death,
    check_returned,
    figures,
    form,
    one_of,
    said,
    schema,
)

pytestmark = pytest.mark.e2e

V = 320
CONTEXT = 256
BLOCK_BYTES = 3072
"""2 layers x 16 tokens x 2 heads x (k of 8, v in lanes of 16) x 2 bytes; half of it in 1 layer."""
BLOCKS = 26
METHODS = ("ngram", "suffix", "draft_model", "off")

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "ignore_eos": True},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    {"temperature": 0.2, "frequency_penalty": 0.3, "logprobs": 1, "min_p": 0.05},
    {"temperature": 0.0, "stop": ["q", "e8", "\n"], "min_tokens": 3},
    {"temperature": 0.2, "min_tokens": 20, "stop_token_ids": [T1_EOS, 65, 66, 67]},
    {"temperature": 0.0, "no_repeat_ngram_size": 3},
    {"temperature": 0.0, "max_tokens": 1},
    {"temperature": 0.1, "max_tokens": 2, "n": 2, "best_of": 4},
    {"temperature": 0.0, "max_tokens": 3, "prompt_logprobs": 1},
    {"temperature": 0.4, "structured_output": schema(
        {"type": "array", "items": {"enum": ["left", "right"]}, "minItems": 6, "maxItems": 9})},
    {"temperature": 0.0, "structured_output": form(regex="(ab|ba){10,16}"), "logprobs": 2},
    {"temperature": 1.0, "structured_output": one_of("forwards", "backwards"), "n": 2},
    {"temperature": 0.5, "structured_output": schema(
        {"type": "object", "properties": {"longer_name": {"type": "integer", "maximum": 99},
                                          "other_name": {"type": "boolean"}},
         "required": ["longer_name", "other_name"], "additionalProperties": False}),
     "presence_penalty": 0.5},
    {"temperature": 0.0, "bad_words_token_ids": [{"ids": [70]}, {"ids": [71, 72]}]},
    {"temperature": 0.0, "allowed_token_ids": {"ids": list(range(97, 104))}},
    {"temperature": 0.3, "logit_bias": {97: 6.0, 98: 5.0, T1_EOS: 3.0}, "logprobs": 0},
    {"temperature": 0.0, "structured_output": form(regex="[ab]{2,60}"), "min_tokens": 12},
]  # fmt: skip


def a_mix(count: int = 40) -> list[Asked]:
    """Prompts that repeat themselves and share beginnings; every way twice."""
    source = random.Random(3)
    text = [source.randrange(97, 123) for _ in range(30)] * 3
    return [
        (
            [*text[: source.randrange(1, 90)], source.randrange(256)],
            {"max_tokens": source.randrange(20, 60), "seed": k} | WAYS[k % len(WAYS)],
        )
        for k in range(count)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("served"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def expected(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[object, ...]]:
    """Of the engine that guesses nothing, with room, one request at a time, by the Python twins."""
    flags = (*SMALL, "--engine-impl", "python", "--max-num-seqs", "8")
    with running_engine(model, tmp_path_factory.mktemp("plain") / "run", *flags) as engine:
        answers = {k: said(ask(engine, each)) for k, each in enumerate(a_mix())}
        engine.wait_idle()
    return answers


@pytest.fixture(scope="module", params=METHODS)
def engine(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """One that guesses, in a pool where sequences give way to one another."""
    method: str = request.param
    block_bytes, drafts = BLOCK_BYTES, ["--speculative-method", method]
    if method == "draft_model":  # itself: right wherever the likeliest token is drawn
        block_bytes, drafts = 2 * BLOCK_BYTES, [*drafts, "--speculative-model", str(model)]
    flags = ("--kv-cache-memory", str(BLOCKS * block_bytes), "--cpu-threads", "1",
             "--max-num-batched-tokens", "64", "--max-num-seqs", "16")  # fmt: skip
    run_dir = tmp_path_factory.mktemp(method) / "run"
    with running_engine(model, run_dir, *flags, *drafts) as engine:
        assert engine.stats("scheduler").scheduler.blocks_total == BLOCKS
        ask(engine, ([1], {"max_tokens": 1, "structured_output": one_of("a")}))
        yield engine
        engine.wait_idle()


def differing(
    answers: list[Choices], expected: dict[int, tuple[object, ...]]
) -> dict[int, tuple[object, object]]:
    return {
        k: (said(answer), expected[k])
        for k, answer in enumerate(answers)
        if said(answer) != expected[k]
    }


def test_the_mix_is_what_it_says(expected: dict[int, tuple[object, ...]]) -> None:
    """Different answers, some of which repeat themselves."""
    assert len({repr(answer[1]) for answer in expected.values()}) > 30


def test_answers_are_the_same_whoever_guesses(
    engine: Engine, expected: dict[int, tuple[object, ...]]
) -> None:
    before = figures(engine)
    for _ in range(5):  # a machine that is busy may not get many of them to run at once
        assert differing(ask_all(engine, a_mix(), at_once=40), expected) == {}
        scheduler = engine.wait_idle()
        if scheduler.preemptions_total > 0:
            break
    assert scheduler.preemptions_total > 0
    # Even the engine that guesses nothing jumps over what a grammar forces.
    assert 0 < scheduler.accepted_draft_tokens_total <= scheduler.draft_tokens_total
    check_returned(engine, before)
    # One at a time: no company, guesses as long as they get.
    few = list(range(0, len(a_mix()), 3))
    mix = a_mix()
    alone = {k: said(ask(engine, mix[k])) for k in few}
    assert alone == {k: expected[k] for k in few}
    check_returned(engine, before)


def test_guesses_are_made_and_taken(engine: Engine, request: pytest.FixtureRequest) -> None:
    method = request.node.callspec.params["engine"]
    before = engine.wait_idle()
    for k in range(4):
        prompt = list(b"abcabcabc" * 4)[: 30 + k]
        ask(engine, (prompt, {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}))
    after = engine.wait_idle()
    drafted = after.draft_tokens_total - before.draft_tokens_total
    accepted = after.accepted_draft_tokens_total - before.accepted_draft_tokens_total
    steps = after.steps_total - before.steps_total
    if method == "off":
        assert (drafted, accepted, steps) == (0, 0, 4 * 60)
        return
    assert 0 < accepted <= drafted
    # A step that takes nothing of what was guessed gives one token: the others are saved.
    assert steps <= 4 * 60 - accepted + 4
    if method == "draft_model":
        assert accepted == drafted
        assert engine.stats("executor-0").executor.draft_tokens_total > 0


def test_the_executor_dies_in_the_middle(
    engine: Engine, expected: dict[int, tuple[object, ...]]
) -> None:
    before = figures(engine)
    assert differing(ask_through_a_death(engine, a_mix()), expected) == {}
    check_returned(engine, before)


def test_cancelled_with_guesses_in_flight(engine: Engine) -> None:
    before = figures(engine)

    def one(k: int) -> None:
        request = generate_request(
            list(b"abcabcabc" * 4), max_tokens=200, temperature=0.0, ignore_eos=True, n=1 + k % 3
        )
        call = engine.stub.Generate(request)
        next(iter(call))
        time.sleep(0.003 * k)
        call.cancel()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(24)))
    check_returned(engine, before)
