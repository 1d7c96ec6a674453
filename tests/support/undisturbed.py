"""Beside programs that misbehave: others are served with the tokens that they would have had."""

from collections.abc import Iterator
from contextlib import contextmanager

from fake_executor import continuation
from fake_tokenizer import FakeTokenizer
from raw_sampler import LEASE, RawSampler, outside
from scheduler_bench import Engine

LENGTH = 60


@contextmanager
def undisturbed(engine: Engine, tokenizer: FakeTokenizer) -> Iterator[None]:
    """Others are served within it, with the tokens that they would have had."""
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE + 99, 1)
        with sampler.drawing():
            own = {tokenizer.submit([n, 8], LENGTH): n for n in range(2)}
            theirs = tokenizer.submit([7, 8], LENGTH, **outside(LEASE + 99))
            tokenizer.until(lambda: all(tokenizer.tokens[slot] for slot in (*own, theirs)))
            yield
            tokenizer.until(lambda: tokenizer.ended(*own, theirs))
    assert not set(tokenizer.failed).intersection((*own, theirs))
    for slot, n in own.items():
        assert tokenizer.tokens[slot] == continuation([n, 8], LENGTH)
    assert tokenizer.tokens[theirs] == continuation([7, 8], LENGTH)


def all_back(engine: Engine) -> None:
    engine.until_idle()
    engine.until(lambda: engine.stats.sampler_leases == engine.stats.sampler_rows_used == 0)
