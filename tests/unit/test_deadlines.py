from triptych.engine_core.ids import RequestId
from triptych.services.scheduler.deadlines import Deadlines, Limit


def test_each_passes_once_in_order_and_only_of_requests_that_live() -> None:
    live = {RequestId(number) for number in range(4)}
    deadlines = Deadlines(live.__contains__)
    for number, seconds in ((0, 3.0), (1, 1.0), (2, 2.0), (3, 0.0)):
        deadlines.add(RequestId(number), 10.0, Limit.TOTAL, seconds)
    assert deadlines.next_at == 11.0
    assert deadlines.passed(10.9) == []
    live.remove(RequestId(2))
    passed = deadlines.passed(13.0)
    assert [(each.request_id, each.seconds) for each in passed] == [(1, 1.0), (0, 3.0)]
    assert deadlines.passed(99.0) == []
    assert deadlines.next_at is None


def test_entries_of_requests_that_ended_do_not_pile_up() -> None:
    live: set[RequestId] = set()
    deadlines = Deadlines(live.__contains__)
    for number in range(50_000):
        live = {RequestId(number)}
        deadlines._lives = live.__contains__
        deadlines.add(RequestId(number), 0.0, Limit.QUEUE, 1e6)
        assert len(deadlines._heap) <= 2050
