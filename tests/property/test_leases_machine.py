"""Random leases: claims, requests, tickets, answers of all kinds, ends, hang-ups, time.

No row is ever owned twice, no answer reaches another request or position than it was asked for,
and in the end everything is free.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from triptych.engine_core.errors import InvalidRequest, QueueFull
from triptych.engine_core.ids import RequestId
from triptych.services.scheduler.leases import ClaimRefused, Leases, Ticket

MAX_ROWS = 5
TIMEOUT = 10.0
picks = st.integers(0, 1 << 16)


@dataclass
class Asked:
    """What a live request should find. `ticket`: that is out. `position`: asked for last."""

    lease: int
    position: int = -1
    ticket: Ticket | None = None
    since: float = 0.0


@dataclass
class Model:
    """What should be."""

    rows: dict[int, int] = field(default_factory=dict)  # by lease
    live: dict[RequestId, Asked] = field(default_factory=dict)
    unknown_dead: set[RequestId] = field(default_factory=set)  # whose rows nobody has given back

    def used(self, lease: int) -> int:
        return sum(each.lease == lease for each in self.live.values())


class LeasesMachine(RuleBasedStateMachine):
    @initialize(first_ticket=st.sampled_from([1, 2**63]))
    def start(self, first_ticket: int) -> None:
        self.leases = Leases(MAX_ROWS, TIMEOUT, first_ticket)
        self.model = Model()
        self.now = 0.0
        self.next_id = 1
        self.tickets: list[Ticket] = []
        self.positions: dict[RequestId, list[int]] = {}

    def lives(self, request_id: RequestId) -> bool:
        return request_id in self.model.live

    @rule(lease=st.integers(0, 4), num_rows=st.integers(0, 6))
    def claim(self, lease: int, num_rows: int) -> None:
        rows = self.model.rows
        left = MAX_ROWS - sum(rows.values())
        if lease > 0 and lease not in rows and 1 <= num_rows <= left:
            self.leases.claim(lease, num_rows)
            rows[lease] = num_rows
            return
        with pytest.raises(ClaimRefused) as refused:
            self.leases.claim(lease, num_rows)
        never = lease == 0 or not 1 <= num_rows <= MAX_ROWS
        assert refused.value.retry == (not never)

    @rule(lease=st.integers(1, 4))
    def hang_up(self, lease: int) -> None:
        if lease not in self.model.rows:
            return
        del self.model.rows[lease]
        ended = self.leases.end(lease)
        theirs = {each for each, asked in self.model.live.items() if asked.lease == lease}
        assert theirs <= set(ended) <= theirs | self.model.unknown_dead
        assert len(ended) == len(set(ended))
        for request_id in ended:
            self.model.live.pop(request_id, None)
            self.model.unknown_dead.discard(request_id)

    @rule(lease=st.integers(1, 4))
    def submit(self, lease: int) -> None:
        request_id = RequestId(self.next_id)
        self.next_id += 1
        try:
            self.leases.take(lease, request_id, self.lives)
        except InvalidRequest:
            assert lease not in self.model.rows
        except QueueFull:
            assert self.model.used(lease) == self.model.rows[lease], "the dead are no excuse"
        else:
            assert self.model.used(lease) < self.model.rows[lease]
            self.model.live[request_id] = Asked(lease)
            self.positions[request_id] = []

    @rule(pick=picks, again=st.booleans())
    def compute(self, pick: int, *, again: bool) -> None:
        """A step has logits for a request; maybe those that it had before."""
        if not self.model.live:
            return
        request_id = sorted(self.model.live)[pick % len(self.model.live)]
        asked = self.model.live[request_id]
        if asked.ticket is not None or (again and asked.position >= 0):
            assert self.leases.ask(request_id, asked.position, self.now) is None
            return
        asked.position += 1
        ticket = self.leases.ask(request_id, asked.position, self.now)
        assert ticket is not None
        assert ticket.lease == asked.lease
        assert ticket not in self.tickets, "no ticket comes twice"
        others = [each.ticket for each in self.model.live.values() if each.ticket is not None]
        assert ticket[:2] not in [each[:2] for each in others], "one row a request"
        self.tickets.append(ticket)
        asked.ticket, asked.since = ticket, self.now

    @rule(request_id=st.integers(1, 40))
    def compute_one_that_has_ended(self, request_id: int) -> None:
        dead = self.model.unknown_dead
        if request_id not in self.model.live and request_id not in dead:
            assert self.leases.ask(RequestId(request_id), 99, self.now) is None

    @rule(pick=picks, offset=st.sampled_from([0, 0, 0, 1, -1]), row=st.sampled_from([0, 0, 1]))
    def answer(self, pick: int, offset: int, row: int) -> None:
        """Of any ticket that ever was, or none; by whoever holds the lease."""
        if not self.tickets:
            return
        ticket = self.tickets[pick % len(self.tickets)]
        ticket = Ticket(ticket.lease, ticket.row + row, ticket.number + offset)
        if ticket.lease not in self.model.rows:
            return  # there is no connection that could
        found: RequestId | None = None
        try:
            found = self.leases.answer(ticket, self.now)
        except ValueError:
            assert ticket.row >= self.model.rows[ticket.lease]
        due = [each for each, asked in self.model.live.items() if asked.ticket == ticket]
        if found in self.model.unknown_dead:
            return
        assert due == ([] if found is None else [found])
        if found is not None:
            asked = self.model.live[found]
            self.positions[found].append(asked.position)
            asked.ticket = None

    @rule(pick=picks, told=st.booleans())
    def end(self, pick: int, *, told: bool) -> None:
        """A request ends; maybe nobody says so."""
        if not self.model.live:
            return
        request_id = sorted(self.model.live)[pick % len(self.model.live)]
        del self.model.live[request_id]
        if told:
            self.leases.give_back(request_id)
        else:
            self.model.unknown_dead.add(request_id)

    @rule()
    def prune(self) -> None:
        self.leases.prune(self.lives)
        self.model.unknown_dead.clear()

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 10.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = {
            each
            for each, asked in self.model.live.items()
            if asked.ticket is not None and self.now - asked.since >= TIMEOUT
        }
        expired = self.leases.expired(self.now)
        assert due <= set(expired) <= due | self.model.unknown_dead
        assert len(expired) == len(set(expired))
        for request_id in expired:
            self.model.live.pop(request_id, None)
            self.model.unknown_dead.discard(request_id)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "leases"):
            return
        self.leases.check()
        assert self.leases.num_rows == sum(self.model.rows.values())
        assert len(self.model.live) <= self.leases.num_used
        assert self.leases.num_used <= len(self.model.live) + len(self.model.unknown_dead)
        for positions in self.positions.values():
            assert positions == list(range(len(positions))), "each position has one answer"
        until = self.leases.expected_until(self.now, 4.0)
        young = [
            each.since
            for each in self.model.live.values()
            if each.ticket is not None and self.now - each.since < 4.0
        ]
        assert until is None or until - 4.0 in young or self.model.unknown_dead
        next_at = self.leases.next_at
        assert next_at is None or next_at > self.now - 1e-9

    def teardown(self) -> None:
        if not hasattr(self, "leases"):
            return
        self.model.live.clear()
        self.leases.prune(self.lives)
        self.leases.check()
        assert self.leases.num_used == 0
        assert self.leases.next_at is None
        for lease in self.model.rows:
            assert self.leases.end(lease) == []
        assert self.leases.num_rows == self.leases.num_leases == 0


TestLeases = LeasesMachine.TestCase
TestLeases.settings = settings(stateful_step_count=60)
