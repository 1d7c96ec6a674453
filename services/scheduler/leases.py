"""Who draws tokens outside the engine: leases of logits rows, which request has which row, and the
tickets that are out.

A program that holds a lease has `num_rows` rows of logits. A request of the lease owns one of them
from when it is accepted to its end. A ticket goes out for every token that it needs; the answer to
the ticket is its token. Sockets and memory are sampler_link.py's business, the core's tokens
steps.py's. The clock is the caller's, in seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from triptych.engine_core.errors import InvalidRequest, QueueFull
from triptych.engine_core.ids import RequestId

_NOTHING = -1
"""As a position: no token was asked for yet. As a ticket: none is out."""


class ClaimRefused(Exception):
    """No lease for whoever asks. `retry`: the same may be granted later."""

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry = retry


class Ticket(NamedTuple):
    """Row `row` of the lease waits for a token."""

    lease: int
    row: int
    number: int


@dataclass(slots=True, eq=False)
class _Row:
    """Owned by a request. `position`: of the token that was asked for last."""

    lease: int
    number: int
    request_id: RequestId
    position: int = _NOTHING
    ticket: int = _NOTHING
    sent_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Lease:
    """`rows[i]` is None where nobody owns row i; `free` are those. `delay`: seconds that its last
    token took."""

    rows: list[_Row | None]
    free: list[int] = field(default_factory=list)
    delay: float = 0.0


class Leases:
    """Used by the loop's thread only."""

    def __init__(self, max_rows: int, timeout: float, first_ticket: int) -> None:
        """`max_rows`: of all leases together. `timeout`: seconds for one token. Tickets count from
        `first_ticket` on, so that an answer to another scheduler's is none to ours."""
        self._max_rows = max_rows
        self._timeout = timeout
        self._next_ticket = first_ticket
        self._leases: dict[int, _Lease] = {}
        self._rows: dict[RequestId, _Row] = {}
        self._out: dict[int, _Row] = {}  # by ticket, in the order in which they went out

    # ------------------------------------------------------------------ leases

    def claim(self, lease: int, num_rows: int) -> None:
        """Grant a lease. Raises ClaimRefused."""
        if lease == 0:
            raise ClaimRefused("lease: 0 is none", retry=False)
        if not 1 <= num_rows <= self._max_rows:
            raise ClaimRefused(
                f"num_rows: {num_rows} is not within 1 and sampler_rows {self._max_rows}",
                retry=False,
            )
        if lease in self._leases:
            raise ClaimRefused(f"lease: {lease} is held on another connection", retry=True)
        if num_rows > self._max_rows - self.num_rows:
            raise ClaimRefused(
                f"num_rows: others hold {self.num_rows} rows of sampler_rows {self._max_rows},"
                f" {num_rows} are not left",
                retry=True,
            )
        self._leases[lease] = _Lease([None] * num_rows, list(range(num_rows))[::-1])

    def end(self, lease: int) -> list[RequestId]:
        """The lease is held no more. Returns the requests that had rows."""
        requests = [row.request_id for row in self._leases[lease].rows if row is not None]
        for request_id in requests:
            self.give_back(request_id)
        del self._leases[lease]
        return requests

    # ------------------------------------------------------------------ rows

    def take(self, lease: int, request_id: RequestId, lives: Callable[[RequestId], bool]) -> None:
        """Give a request its row; those of requests that do not live any more are free. Raises
        InvalidRequest when nobody holds the lease, QueueFull when it has no row left."""
        assert request_id not in self._rows, f"{request_id} has a row"
        held = self._leases.get(lease)
        if held is None:
            raise InvalidRequest("external_sampler.lease", f"{lease} is held by no program")
        if not held.free:
            self.prune(lives)
        if not held.free:
            raise QueueFull(f"all {len(held.rows)} rows of the lease {lease} are in use")
        number = held.free.pop()
        self._rows[request_id] = held.rows[number] = _Row(lease, number, request_id)

    def give_back(self, request_id: RequestId) -> None:
        """A request needs its row no more; nothing, if it has none."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        self._out.pop(row.ticket, None)
        held = self._leases[row.lease]
        held.rows[row.number] = None
        held.free.append(row.number)

    def prune(self, lives: Callable[[RequestId], bool]) -> None:
        """Take back the rows of requests that do not live any more."""
        for request_id in [each for each in self._rows if not lives(each)]:
            self.give_back(request_id)

    # ------------------------------------------------------------------ tokens

    def ask(self, request_id: RequestId, position: int, now: float) -> Ticket | None:
        """A ticket for the request's output token at `position`, whose logits are there. None where
        that was asked before (the core computed it again), or the request has ended."""
        row = self._rows.get(request_id)
        if row is None or row.position == position:
            return None
        self._out.pop(row.ticket, None)
        row.position, row.ticket, row.sent_at = position, self._next_ticket, now
        self._next_ticket += 1
        self._out[row.ticket] = row
        return Ticket(row.lease, row.number, row.ticket)

    def answer(self, ticket: Ticket, now: float) -> RequestId | None:
        """A ticket comes back, with a token for this request; None where it is not out any more.
        Raises ValueError for a row that the lease does not have."""
        held = self._leases[ticket.lease]
        if not 0 <= ticket.row < len(held.rows):
            raise ValueError(f"row {ticket.row} of {len(held.rows)}")
        row = held.rows[ticket.row]
        if row is None or row.ticket != ticket.number or row.ticket == _NOTHING:
            return None
        del self._out[row.ticket]
        row.ticket = _NOTHING
        held.delay = now - row.sent_at
        return row.request_id

    def expired(self, now: float) -> list[RequestId]:
        """Requests whose ticket has been out for too long; each once. Their rows are free."""
        found = []
        while self._out:
            row = next(iter(self._out.values()))
            if now - row.sent_at < self._timeout:
                break
            self.give_back(row.request_id)
            found.append(row.request_id)
        return found

    @property
    def asked_at(self) -> float | None:
        """Since when the newest ticket is out; None while none is."""
        for row in reversed(self._out.values()):
            return row.sent_at
        return None

    def slow(self, now: float, seconds: float) -> list[RequestId]:
        """Whose ticket is out for as long as that; the oldest first."""
        found = []
        for row in self._out.values():
            if now - row.sent_at < seconds:
                break
            found.append(row.request_id)
        return found

    def expected_until(self, now: float, seconds: float) -> float | None:
        """Of tickets that are out for less than `seconds`, to programs whose last token took no
        longer: when the newest will be out for as long. None while there is none."""
        for row in reversed(self._out.values()):
            if now - row.sent_at >= seconds:
                break
            if self._leases[row.lease].delay <= seconds:
                return row.sent_at + seconds
        return None

    @property
    def next_at(self) -> float | None:
        """When the next ticket expires; None while none is out."""
        for row in self._out.values():
            return row.sent_at + self._timeout
        return None

    # ------------------------------------------------------------------ facts

    @property
    def num_out(self) -> int:
        """Tickets that are out."""
        return len(self._out)

    @property
    def num_leases(self) -> int:
        """Leases that are held."""
        return len(self._leases)

    @property
    def num_rows(self) -> int:
        """Rows of all leases."""
        return sum(len(held.rows) for held in self._leases.values())

    @property
    def num_used(self) -> int:
        """Rows that a request owns."""
        return len(self._rows)

    def check(self) -> None:
        """Assert every invariant; each names itself. For tests."""
        assert self.num_rows <= self._max_rows, "more rows than there may be"
        owned: dict[RequestId, _Row] = {}
        for lease, held in self._leases.items():
            assert held.rows, "a lease has a row"
            free = {number for number, row in enumerate(held.rows) if row is None}
            assert sorted(held.free) == sorted(free), "what nobody owns is free, once"
            for number, row in enumerate(held.rows):
                if row is not None:
                    assert (row.lease, row.number) == (lease, number), "a row knows its place"
                    assert row.request_id not in owned, "one row a request"
                    owned[row.request_id] = row
        assert owned == self._rows, "who owns a row is known, and nobody else"
        out = {row.ticket: row for row in owned.values() if row.ticket != _NOTHING}
        assert out == self._out, "tickets that are out are their rows'"
        times = [row.sent_at for row in self._out.values()]
        assert times == sorted(times), "the oldest ticket is the first"
