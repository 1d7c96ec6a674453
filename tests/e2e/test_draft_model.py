"""A draft model over gRPC: whatever it guesses, the answers are those of the engine without it."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from choices import joined, values
from engine import Engine, generate_request, running_engine
from small_engines import SMALL, tiny_model

pytestmark = pytest.mark.e2e

V = 320
CONTEXT = 256
BLOCK_BYTES = 3072
"""2 layers x 16 tokens x 2 heads x (k of 8, v in lanes of 16) x 2 bytes; half of it in 1 layer."""
FEW_SEQUENCES = ("--max-num-batched-tokens", "64", "--max-num-seqs", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("served"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model that has nothing to do with the served one."""
    return tiny_model(
        tmp_path_factory.mktemp("draft"),
        max_position_embeddings=CONTEXT,
        num_hidden_layers=1,
        seed=3,
    )


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running_engine(model, tmp_path_factory.mktemp("plain") / "run", *SMALL) as engine:
        yield engine


def drafting(draft: Path, *flags: str) -> tuple[str, ...]:
    return ("--speculative-method", "draft_model", "--speculative-model", str(draft), *flags)


Said = tuple[dict[int, list[int]], dict[int, str], dict[int, int], list[float | None]]


def answers(engine: Engine, requests: Sequence[dict[str, Any]]) -> list[Said]:
    """Of each: tokens, text and end of every choice, and the logprobs of the first."""

    def one(wanted: dict[str, Any]) -> Said:
        request = generate_request(**wanted, add_special_tokens=False)
        got = joined(engine.stub.Generate(request, timeout=60))
        return dict(got.ids), dict(got.text), got.finish, values(got.logprobs[0])

    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(one, requests))


def a_mix(count: int) -> list[dict[str, Any]]:
    """Prompts that share beginnings, with every way of drawing tokens."""
    rng = random.Random(11)
    text = [rng.randrange(V) for _ in range(120)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 4, "top_p": 0.9},
        {"temperature": 1.0, "seed": 5, "n": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.7, "seed": 6, "logprobs": 2, "min_tokens": 4},
    ]
    return [
        {
            "prompt": [*text[: rng.randrange(1, 100)], rng.randrange(V)],
            "max_tokens": rng.randrange(1, 40),
            **ways[i % len(ways)],
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("itself", [False, True])
def test_answers_are_the_same_whatever_the_draft_model_guesses(
    model: Path, stranger: Path, plain: Engine, tmp_path: Path, itself: bool
) -> None:
    """One that knows nothing, and one that is right where the likeliest token is drawn; in a pool
    that makes sequences give way to one another."""
    requests = a_mix(40)
    expected = answers(plain, requests)
    draft, of_both = (model, 2 * BLOCK_BYTES) if itself else (stranger, BLOCK_BYTES * 3 // 2)
    flags = ("--kv-cache-memory", str(24 * of_both), "--cpu-threads", "1", *FEW_SEQUENCES)
    with running_engine(model, tmp_path / "run", *flags, *drafting(draft)) as engine:
        assert engine.stats("scheduler").scheduler.blocks_total == 24
        for _ in range(5):  # a machine that is busy may not get many of them to run at once
            assert answers(engine, requests) == expected
            scheduler = engine.wait_idle()
            if scheduler.preemptions_total > 0:
                break
        assert scheduler.preemptions_total > 0
        assert scheduler.accepted_draft_tokens_total < scheduler.draft_tokens_total
        assert scheduler.accepted_draft_tokens_total > 0 or not itself
        executor = engine.stats("executor-0").executor
        assert executor.draft_model == draft.name
        assert executor.draft_tokens_total == scheduler.draft_tokens_total


def test_a_draft_model_that_is_the_served_one_is_always_right(
    model: Path, plain: Engine, tmp_path: Path
) -> None:
    prompts = [request["prompt"] for request in a_mix(12)]
    requests = [
        {"prompt": prompt, "max_tokens": 48, "temperature": 0.0, "ignore_eos": True}
        for prompt in prompts
    ]
    expected = answers(plain, requests)
    with running_engine(
        model, tmp_path / "run", *SMALL, *FEW_SEQUENCES, *drafting(model)
    ) as engine:
        assert answers(engine, requests) == expected
        scheduler = engine.wait_idle()
        assert scheduler.accepted_draft_tokens_total == scheduler.draft_tokens_total > 0
        # A step that guesses nothing gives a sequence one token.
        assert scheduler.draft_tokens_total > scheduler.generated_tokens_total // 2
