"""Leases of logits rows: who has which, which tickets are out, and who waits for a lease."""

import pytest

from triptych.engine_core.errors import InvalidRequest, QueueFull, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import ExternalSampler, SamplingParams
from triptych.services.scheduler.lease_queue import LeaseQueue
from triptych.services.scheduler.leases import ClaimRefused, Leases, Ticket
from triptych.services.scheduler.tokenizer_link import Submitted

A, B, C, D = map(RequestId, range(1, 5))


def everybody(_request_id: RequestId) -> bool:
    return True


def held(num_rows: int = 2, timeout: float = 10.0) -> Leases:
    """Lease 5 of so many rows."""
    leases = Leases(8, timeout, first_ticket=100)
    leases.claim(5, num_rows)
    return leases


def test_what_is_refused() -> None:
    leases = held(6)
    for lease, num_rows, said, retry in (
        (0, 1, "lease: 0 is none", False),
        (6, 0, "num_rows: 0 is not within 1 and sampler_rows 8", False),
        (6, 9, "num_rows: 9 is not within 1 and sampler_rows 8", False),
        (5, 1, "lease: 5 is held on another connection", True),
        (6, 3, "num_rows: others hold 6 rows of sampler_rows 8, 3 are not left", True),
    ):
        with pytest.raises(ClaimRefused) as caught:
            leases.claim(lease, num_rows)
        assert (caught.value.reason, caught.value.retry) == (said, retry)
        leases.check()
    leases.claim(6, 2)
    assert (leases.num_leases, leases.num_rows, leases.num_used) == (2, 8, 0)


def test_a_request_has_a_row_to_its_end() -> None:
    leases = held(2)
    leases.take(5, A, everybody)
    leases.take(5, B, everybody)
    with pytest.raises(QueueFull, match="all 2 rows of the lease 5 are in use"):
        leases.take(5, C, everybody)
    assert leases.num_used == 2
    leases.give_back(A)
    leases.give_back(A)
    leases.take(5, C, everybody)
    ticket = leases.ask(C, 0, 0.0)
    assert ticket is not None
    assert ticket.row == 0
    leases.check()


def test_a_lease_that_nobody_holds() -> None:
    with pytest.raises(InvalidRequest) as caught:
        held().take(6, A, everybody)
    assert caught.value.field == "external_sampler.lease"
    assert str(caught.value) == "external_sampler.lease: 6 is held by no program"


def test_rows_of_the_dead_are_taken_when_they_are_needed() -> None:
    leases = held(2)
    for request_id in (A, B):
        leases.take(5, request_id, everybody)
    leases.take(5, C, lambda request_id: request_id != A)
    assert leases.ask(A, 0, 0.0) is None
    leases.prune(lambda request_id: request_id == B)
    assert leases.num_used == 1
    leases.check()


def test_tickets() -> None:
    leases = held()
    leases.take(5, A, everybody)
    first = leases.ask(A, 0, 1.0)
    assert first == Ticket(5, 0, 100)
    assert leases.ask(A, 0, 2.0) is None, "it was asked before"
    assert leases.answer(first._replace(number=99), 5.0) is None
    assert leases.answer(first._replace(row=1), 5.0) is None, "nobody owns that row"
    assert leases.answer(first, 5.0) == A
    assert leases.answer(first, 5.0) is None
    assert leases.answer(Ticket(5, 0, -1), 5.0) is None
    assert leases.ask(A, 0, 3.0) is None, "its answer is on the way to the core"
    second = leases.ask(A, 1, 3.0)
    assert second == Ticket(5, 0, 101)
    for row in (2, 2**32 - 1):
        with pytest.raises(ValueError, match=f"row {row} of 2"):
            leases.answer(second._replace(row=row), 5.0)
    leases.check()
    leases.give_back(A)
    assert leases.answer(second, 5.0) is None
    assert leases.next_at is None
    leases.check()


def test_a_position_that_comes_later_than_another_has_another_ticket() -> None:
    leases = held()
    leases.take(5, A, everybody)
    old, new = leases.ask(A, 0, 1.0), leases.ask(A, 1, 2.0)
    assert old is not None
    assert new is not None
    assert leases.next_at == 12.0
    assert leases.answer(old, 5.0) is None
    assert leases.answer(new, 5.0) == A
    leases.check()


def test_what_is_out_for_too_long() -> None:
    assert held().next_at is None
    leases = held(3, timeout=10.0)
    for at, request_id in enumerate((A, B, C)):
        leases.take(5, request_id, everybody)
        leases.ask(request_id, 0, float(at))
    assert leases.next_at == 10.0
    assert leases.asked_at == 2.0
    assert leases.num_out == 3
    assert leases.slow(2.9, 1.0) == [A, B]
    assert leases.slow(0.9, 1.0) == []
    assert leases.expired(9.9) == []
    assert leases.answer(Ticket(5, 1, 101), 5.0) == B, "in time"
    assert leases.expired(11.9) == [A]
    assert leases.next_at == 12.0
    assert leases.expired(100.0) == [C]
    assert leases.expired(100.0) == []
    assert leases.num_used == 1
    leases.take(5, D, everybody)
    leases.check()


def test_whose_token_is_expected_soon() -> None:
    """Of programs that were as quick before; a new one is taken for quick."""
    leases = held(4, timeout=1000.0)
    leases.claim(6, 2)
    for lease, request_id in ((5, A), (5, B), (6, C)):
        leases.take(lease, request_id, everybody)
    assert leases.expected_until(0.0, 2.0) is None
    assert held().asked_at is None
    first = leases.ask(A, 0, 0.0)
    assert leases.expected_until(1.0, 2.0) == 2.0
    assert leases.expected_until(2.0, 2.0) is None
    assert leases.expected_until(0.0, 0.0) is None
    second = leases.ask(B, 0, 5.0)
    assert leases.asked_at == 5.0
    assert leases.expected_until(5.0, 2.0) == 7.0
    assert first is not None
    assert leases.answer(first, 6.0) == A
    assert leases.expected_until(6.0, 2.0) is None, "its last token took 6 seconds"
    assert leases.expected_until(6.0, 9.0) == 14.0
    third = leases.ask(C, 0, 6.0)
    leases.ask(A, 1, 6.5)
    assert third is not None
    assert leases.expected_until(6.5, 2.0) == 8.0, "the other program is quick"
    assert leases.answer(third, 7.0) == C
    assert second is not None
    assert leases.answer(second, 6.9) == B
    assert leases.expected_until(7.0, 2.0) == 8.5


def test_the_end_of_a_lease() -> None:
    leases = held(2)
    leases.claim(6, 2)
    for lease, request_id in ((5, A), (5, B), (6, C)):
        leases.take(lease, request_id, everybody)
        leases.ask(request_id, 0, 0.0)
    assert leases.end(5) == [A, B]
    leases.check()
    assert (leases.num_leases, leases.num_rows, leases.num_used) == (1, 2, 1)
    assert leases.expired(50.0) == [C]
    leases.claim(5, 6)
    assert leases.ask(A, 1, 0.0) is None


# ------------------ waiting


def submitted(request_id: RequestId, lease: int = 5) -> Submitted:
    params = SamplingParams(max_tokens=5, external=ExternalSampler(lease=lease))
    return Submitted(Request(request_id, (1,), params, accepted=True))


def test_those_that_wait_for_their_lease() -> None:
    leases = Leases(8, 10.0, first_ticket=1)
    assert LeaseQueue(leases, 10.0).next_at is None
    queue = LeaseQueue(leases, 10.0)
    for at, request_id in enumerate((A, B, C, D)):
        queue.add(submitted(request_id, 6 if request_id == C else 5), float(at))
    assert queue.next_at == 10.0
    assert len(queue) == 4
    assert list(queue.release(everybody, 3.0)) == []
    leases.claim(5, 2)
    assert queue.abort(A)
    assert not queue.abort(A)
    released = list(queue.release(everybody, 4.0))
    assert [each.submitted.request.request_id for each in released] == [B, D]
    assert [each.error for each in released] == [None, None]
    assert leases.num_used == 2
    assert queue.lives(C)
    assert not queue.lives(B)
    assert queue.next_at == 12.0
    assert list(queue.release(everybody, 11.9)) == []
    (late,) = queue.release(everybody, 12.0)
    assert isinstance(late.error, Unavailable)
    assert str(late.error) == "no sampler has come for the lease 6 in 10 s (sampler_timeout)"
    assert len(queue) == 0


def test_those_that_wait_for_a_row() -> None:
    """In the order in which they came."""
    leases = held(1)
    leases.take(5, A, everybody)
    queue = LeaseQueue(leases, 10.0)
    queue.add(submitted(B), 0.0)
    queue.add(submitted(C), 1.0)
    assert list(queue.release(everybody, 2.0)) == []
    (first,) = queue.release(lambda request_id: request_id != A, 3.0)
    assert first.submitted.request.request_id == B
    (late,) = queue.release(everybody, 11.0)
    assert late.submitted.request.request_id == C
    assert isinstance(late.error, Unavailable)
    assert leases.num_used == 1
