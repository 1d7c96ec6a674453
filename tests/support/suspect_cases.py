"""Short words for tests of who is suspected."""

from collections.abc import Sequence

from core_engine import Engine, wish
from hash_model import expected_output
from triptych.engine_core.request import Request


def in_step(engine: Engine) -> list[int]:
    """Plan a step; the requests of its rows."""
    engine.begin()
    by_id = engine.scheduler._roster.by_id
    return sorted(by_id[row.sequence_id].request_id for row in engine.batch.rows())


def suspected(engine: Engine) -> set[int]:
    return set(map(int, engine.scheduler.suspects.request_ids()))


def submit(engine: Engine, numbers: Sequence[int], max_tokens: int = 4) -> list[Request]:
    """Plain requests with prompts of their own."""
    wishes = [wish(number, prompt=3, max_tokens=max_tokens) for number in numbers]
    for request in wishes:
        engine.submit(request)
    return wishes


def lose_in_step(engine: Engine) -> None:
    engine.begin()
    engine.lose()


def assert_whole(engine: Engine, wishes: Sequence[Request]) -> None:
    """All of them end as if nothing had happened."""
    engine.run_to_empty()
    engine.assert_empty()
    assert not engine.scheduler.suspects
    for request in wishes:
        for index, request_id in enumerate(request.choices()):
            assert engine.outputs[request_id] == expected_output(request, index)
