"""Calls from other threads into the step loop: answered at its turns, whoever still waits."""

import threading
from concurrent.futures import CancelledError, Future

import pytest

from fake_executor import continuation
from scheduler_bench import MakeEngine


def test_a_caller_that_has_gone_harms_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    tokenizer = engine.tokenizer()
    held = threading.Event()

    def hold() -> int:
        held.wait(10)
        return 0

    first: Future[int] = Future()
    engine.loop._calls.append((hold, first))
    gone = engine.loop.forget_cache()  # behind one that keeps the loop busy
    stays = engine.loop.forget_cache()
    assert gone.cancel()  # as asyncio.wrap_future does when the rpc is cancelled
    held.set()
    assert first.result(10) == stays.result(10) == 0
    slot = tokenizer.submit([1, 2], 5)
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == continuation([1, 2], 5)
    engine.until_idle()


def test_calls_after_the_end_are_cancelled(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.stop()
    with pytest.raises(CancelledError):
        engine.loop.forget_cache().result(10)
    engine.loop.stop()  # once more, as a process does whose loop has died: nothing
