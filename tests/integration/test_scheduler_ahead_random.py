"""Random requests at random times, against an executor that draws tokens and one that does not."""

import random
from typing import Any

import pytest

from ahead_mixes import Got, Wish, got, started, until_empty
from fake_executor import continuation
from scheduler_bench import MakeEngine


def random_wish(rng: random.Random) -> Wish:
    """Mostly what a device draws."""
    params: dict[str, Any] = {"seed": rng.getrandbits(64)}
    options: list[tuple[float, str, Any]] = [
        (0.6, "temperature", rng.choice([0.5, 2.0, 6.0, 20.0])),
        (0.3, "top_k", rng.randint(1, 40)),
        (0.3, "top_p", rng.random()),
        (0.2, "min_p", rng.random() / 5),
        (0.2, "repetition_penalty", rng.choice([0.5, 1.3, 2.0])),
        (0.2, "presence_penalty", rng.uniform(-2, 2)),
        (0.2, "frequency_penalty", rng.uniform(-2, 2)),
        (0.3, "logprobs", rng.choice([0, 1, 20, 21])),
        (0.1, "prompt_logprobs", rng.randint(0, 3)),
        (0.1, "typical_p", rng.random()),
        (0.3, "stop_token_ids", tuple(rng.sample(range(90), 12))),
        (0.1, "min_tokens", 4),
        (0.2, "n", rng.randint(2, 4)),
    ]
    params |= {name: value for chance, name, value in options if rng.random() < chance}
    start = rng.randint(1, 3)
    prompt = tuple(range(start, start + rng.choice([1, 2, 5, 11, 40])))
    return Wish(prompt, rng.randint(4, 40), params)


@pytest.mark.parametrize("seed", range(3))
def test_random_requests(make_engine: MakeEngine, seed: int) -> None:
    rng = random.Random(seed)
    wishes = [random_wish(rng) for _ in range(30)]
    settings: dict[str, Any] = {
        "max_num_seqs": rng.choice([4, 9, 24]),
        "max_num_batched_tokens": rng.choice([24, 48]),
        "engine_impl": rng.choice(["native", "python"]),
        "enable_prefix_caching": rng.random() < 0.7,
    }
    num_blocks = rng.choice([40, 64, 200])
    outcomes: list[list[Got]] = []
    for draws_tokens in (0, 1):
        engine = make_engine(**settings)
        executor = engine.executor(draws_tokens=draws_tokens, num_blocks=num_blocks)
        tokenizer = engine.tokenizer()
        slots = []
        gone: list[int] = []
        for wish in wishes:
            slots += started(tokenizer, [wish])
            if draws_tokens:
                tokenizer.pump(rng.random() * 0.02)
                if rng.random() < 0.2:
                    gone.append(tokenizer.submit((1, 2), 60))
                if gone and rng.random() < 0.2:
                    tokenizer.abort(gone.pop())
        if draws_tokens:
            executor.kill()
            engine.executor(draws_tokens=rng.randint(0, 1), num_blocks=num_blocks)
        outcomes.append(got(tokenizer, slots))
        assert all(each.tokens == continuation((1, 2), 60) for each in got(tokenizer, gone))
        until_empty(engine)
    assert outcomes[0] == outcomes[1]
    assert engine.stats.steps_ahead_total > 0
