"""Guesses of an executor's draft model, over real sockets: taken, counted, and wrong in number."""

import pytest

from fake_executor import continuation
from scheduler_bench import MakeEngine
from triptych.engine_core.errors import FatalRequest


def test_a_draft_model_changes_no_output(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_method="draft_model", max_num_batched_tokens=64)
    engine.executor(draft_model="good", num_blocks=256)
    tokenizer = engine.tokenizer()
    slots = {tokenizer.submit([n, 2], 60): n for n in range(4)}
    tokenizer.until(lambda: tokenizer.ended(*slots))
    for slot, n in slots.items():
        assert tokenizer.tokens[slot] == continuation([n, 2], 60)
    engine.until_idle()
    stats = engine.stats
    # The draft model is the very model: nearly all of its guesses come true.
    assert stats.draft_tokens_total > 0
    assert 0.8 * stats.draft_tokens_total <= stats.accepted_draft_tokens_total
    assert stats.accepted_draft_tokens_total <= stats.draft_tokens_total
    assert stats.generated_tokens_total == 4 * 60
    assert stats.steps_total < 60


def test_the_wrong_number_of_guesses_loses_the_executor(make_engine: MakeEngine) -> None:
    """It comes back and does it again: the request ends, and never with wrong tokens."""
    engine = make_engine(speculative_method="draft_model", max_num_batched_tokens=64)
    engine.executor(draft_model="short", num_blocks=256)
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1, 2], 40)
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert isinstance(tokenizer.failed[slot], FatalRequest)
    told = tokenizer.tokens[slot]
    assert told == continuation([1, 2], 40)[: len(told)]
    engine.until(lambda: engine.stats.executors_lost_total == 2)
    for executor in engine.executors:
        executor.kill()
    engine.executor(draft_model="good", num_blocks=256)
    again = tokenizer.submit([1, 2], 40)
    tokenizer.until(lambda: tokenizer.ended(again))
    assert tokenizer.tokens[again] == continuation([1, 2], 40)
    engine.until_idle()


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_guesses_from_the_text_change_no_output(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine(speculative_method=method, max_num_batched_tokens=64)
    engine.executor()
    tokenizer = engine.tokenizer()
    # What follows a prompt that has its own continuation in it is easily guessed.
    prompt = [1, 2, *continuation([1, 2], 20)]
    slots = [tokenizer.submit(prompt, 30) for _ in range(2)]
    tokenizer.until(lambda: tokenizer.ended(*slots))
    for slot in slots:
        assert tokenizer.tokens[slot] == continuation(prompt, 30)
    engine.until_idle()


def test_an_executor_without_a_draft_model_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_method="draft_model")
    executor = engine.executor()
    code, said = executor.wait(60)
    assert code != 0
    assert "the executor has no speculative_model" in said
    assert not engine.stats.executor_ready
