"""The scheduler's end of the connections to programs that draw tokens themselves (sampler.proto).

    a program connects -> LeaseRequest -> LeaseOffer with its rows, or LeaseRefused
    -> LogitsReady, TokensDrawn ... -> end of the connection, and of the lease

Logits are copied into the program's own rows: one that is slow holds no slot of the executor's
ring, and none sees what is not for it. A program that breaks the protocol, or does not read, is
disconnected; nobody else notices. What happens to requests is the loop's business: this module
says which of them cannot go on.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import zmq
from google.protobuf.message import DecodeError

from triptych.engine_core.errors import DeadlinePassed, InvalidRequest, Unavailable
from triptych.engine_core.external import ExternalSample
from triptych.engine_core.ids import RequestId
from triptych.engine_core.layout import LAYOUT_VERSION, LogitsLayout
from triptych.engine_core.step import Failed
from triptych.kernels.sampler_params import NO_TOKEN
from triptych.services.runtime.run_dir import RunDir
from triptych.services.scheduler.leases import ClaimRefused, Leases, Ticket
from triptych.services.transport.fd_passing import FdConnection, FdListener, OfferError
from triptych.services.transport.rings import LogitsRing, LogitsView, RingError
from triptych.v1 import sampler_pb2

MAX_STRANGERS = 64
"""Connections without a lease; one more ends the oldest of them."""
_STRANGER_SECONDS = 10.0
"""Within which a connection asks for a lease."""
_MOST_PACKETS = 64
"""That are read from one program before others have their turn."""
_ROWS_OF_A_PACKET = 1024
"""Rows in one LogitsReady: it fits a packet."""

_log = logging.getLogger(__name__)


class _Broken(Exception):
    """What is wrong with a program; its connection ends."""


@dataclass(slots=True, eq=False)
class _Stranger:
    """Connected, without a lease. `since`: when it came."""

    connection: FdConnection
    since: float


@dataclass(slots=True, eq=False)
class _Holder:
    """Has a lease. `owed`: tickets that it has not answered; there is a bound to what it may say.
    `broken`: why nothing more is sent to it; "" as long as all is well."""

    lease: int
    connection: FdConnection
    rows: LogitsRing
    owed: int = 0
    broken: str = ""


@dataclass(frozen=True, slots=True)
class _Model:
    vocabulary_size: int
    sampleable: int


class SamplerLink:
    """All programs. Used by the loop's thread only; `now` is by its ListeningClock."""

    def __init__(
        self, run_dir: RunDir, poller: zmq.Poller, epoch: int, max_rows: int, timeout: float
    ) -> None:
        """`max_rows`: of all leases together. `timeout`: seconds for one token."""
        self.leases = Leases(max_rows, timeout, first_ticket=epoch)
        self._epoch = epoch
        self._timeout = timeout
        self._poller = poller
        self._listener = FdListener(run_dir.samplers)
        self._strangers: list[_Stranger] = []
        self._holders: dict[int, _Holder] = {}  # by lease
        self._model: _Model | None = None
        self._drawn: list[tuple[RequestId, int]] = []
        self._asked: set[int] = set()  # leases, not answered, since the last `receive`
        poller.register(self._listener.fileno(), zmq.POLLIN)

    def serve(self, vocabulary_size: int, sampleable_vocabulary: int) -> None:
        """The model's logits have this width, and ids at or above the second are not drawn. Both
        stay as they are: the executor of a scheduler is never one of another model."""
        self._model = _Model(vocabulary_size, sampleable_vocabulary)

    # ------------------------------------------------------------------ tokens

    def ask(
        self,
        samples: Sequence[ExternalSample],
        logits: LogitsView,
        logits_rows: Sequence[int],
        token_ids: Sequence[int],
        now: float,
    ) -> None:
        """Let tokens be drawn for these samples of the step that was computed.

        `logits`: float32 [rows, vocabulary]; row logits_rows[i] is sample i's, and is copied.
        `token_ids`: by sample; NO_TOKEN where the logits are not finite: nobody is asked then.
        """
        ready: dict[int, list[sampler_pb2.ReadyRow]] = {}
        for each in samples:
            if token_ids[each.sample] == NO_TOKEN:
                continue
            ticket = self.leases.ask(each.request_id, each.position, now)
            if ticket is None:
                continue
            rows = self._holders[ticket.lease].rows
            rows.logits(ticket.row)[0] = logits[logits_rows[each.sample]]
            rows.publish(ticket.row, ticket.number, 1)
            row = sampler_pb2.ReadyRow(
                row=ticket.row, ticket=ticket.number, tag=each.tag, position=each.position
            )
            ready.setdefault(ticket.lease, []).append(row)
        self._asked.update(ready)
        for lease, waiting in ready.items():
            self._tell(self._holders[lease], waiting)

    def _tell(self, holder: _Holder, ready: Sequence[sampler_pb2.ReadyRow]) -> None:
        holder.owed += len(ready)
        for first in range(0, len(ready), _ROWS_OF_A_PACKET):
            rows = sampler_pb2.LogitsReady(rows=ready[first : first + _ROWS_OF_A_PACKET])
            try:
                holder.connection.send_packet(_packet(ready=rows))
            except OSError as error:
                # Its requests end when the loop asks next; until then nothing more is for it.
                holder.broken = holder.broken or f"it does not read: {error}"
                return

    @property
    def num_drawn(self) -> int:
        """Tokens that `take_drawn` would give."""
        return len(self._drawn)

    def take_drawn(self) -> list[tuple[RequestId, int]]:
        """The tokens that have come since the last call; of requests that have ended, too."""
        drawn, self._drawn = self._drawn, []
        return drawn

    # ------------------------------------------------------------------ what happens

    @property
    def any_asked(self) -> bool:
        """Whether somebody was asked since the last `receive`, and has not answered."""
        return bool(self._asked)

    @property
    def alone(self) -> bool:
        """Whether no program is connected: nothing is owed to anybody."""
        return not (self._holders or self._strangers)

    def receive(self, readable: set[int], now: float) -> Iterable[Failed]:
        """What has arrived, without waiting; the requests that cannot go on for it. `readable`: the
        descriptors that the poll named."""
        if self.alone and self._listener.fileno() not in readable:
            return ()
        return self._receive(readable, now)

    def _receive(self, readable: set[int], now: float) -> Iterator[Failed]:
        self._asked.clear()
        for holder in [*self._holders.values()]:
            if holder.broken:
                yield from self._end(holder, holder.broken)
            elif holder.connection.fileno() in readable:
                yield from self._take_packets(holder, now)
        for stranger in [each for each in self._strangers if each.connection.fileno() in readable]:
            self._take_request(stranger)
        if self._listener.fileno() in readable:
            self._accept(now)

    def receive_asked(self, now: float) -> Iterator[Failed]:
        """As `receive`, from those who were asked since then. A program may answer in 20 us; the
        next poll is ten times as far away."""
        for holder in [self._holders[lease] for lease in self._asked if lease in self._holders]:
            yield from self._take_packets(holder, now)

    def expire(self, now: float) -> Iterator[Failed]:
        """The requests whose token has not come in time; connections that never asked for a lease
        end."""
        late = [each for each in self._strangers if now - each.since > _STRANGER_SECONDS]
        for stranger in late:
            self._discard(stranger)
        for request_id in self.leases.expired(now):
            error = DeadlinePassed(f"sampler_timeout: {self._timeout:g} s without a token passed")
            yield Failed(request_id, error)

    @property
    def next_at(self) -> float | None:
        """When the next token is late; None while none is waited for."""
        return self.leases.next_at

    def close(self) -> None:
        """End everything; the programs see end of file, and their rows stay mapped."""
        for stranger in [*self._strangers]:
            self._discard(stranger)
        for holder in [*self._holders.values()]:
            self._forget(holder)
        self._poller.unregister(self._listener.fileno())
        self._listener.close()

    # ------------------------------------------------------------------ programs that have a lease

    def _take_packets(self, holder: _Holder, now: float) -> Iterator[Failed]:
        try:
            for _ in range(_MOST_PACKETS):
                message = _receive(holder.connection)
                if message is None:
                    yield from self._end(holder, "its connection ended")
                    return
                tokens = message.drawn.tokens
                if not tokens:
                    raise _Broken("it sent something else than drawn tokens")
                holder.owed -= len(tokens)
                if holder.owed < 0:
                    raise _Broken("it answered more often than it was asked")
                self._asked.discard(holder.lease)
                yield from self._take_drawn(holder, tokens, now)
        except BlockingIOError:
            return
        except _Broken as error:
            yield from self._end(holder, str(error))

    def _take_drawn(
        self, holder: _Holder, tokens: Iterable[sampler_pb2.DrawnToken], now: float
    ) -> Iterator[Failed]:
        assert self._model is not None, "a lease is of a model"
        bound = self._model.sampleable
        for token in tokens:
            try:
                ticket = Ticket(holder.lease, token.row, token.ticket)
                request_id = self.leases.answer(ticket, now)
            except ValueError as error:
                raise _Broken(f"it answered {error}") from error
            if request_id is None:
                continue
            if token.token_id < bound:
                self._drawn.append((request_id, token.token_id))
                continue
            said = f"its sampler drew token id {token.token_id}, not below vocabulary_size {bound}"
            yield Failed(request_id, InvalidRequest("external_sampler", said))

    def _end(self, holder: _Holder, why: str) -> Iterator[Failed]:
        """Of a lease, and of its requests."""
        requests = self._forget(holder)
        _log.info("sampler gone: %s", why, extra={"lease": holder.lease, "rows": len(requests)})
        for request_id in requests:
            gone = f"the sampler with the lease {holder.lease} is gone: {why}"
            yield Failed(request_id, Unavailable(gone))

    def _forget(self, holder: _Holder) -> list[RequestId]:
        del self._holders[holder.lease]
        self._poller.unregister(holder.connection.fileno())
        holder.connection.close()
        holder.rows.close()
        return self.leases.end(holder.lease)

    # ------------------------------------------------------------------ programs that have none

    def _accept(self, now: float) -> None:
        try:
            connection = self._listener.accept()
        except OfferError as error:
            _log.warning("sampler: %s", error)
            return
        if connection is None:
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._discard(self._strangers[0])
        self._strangers.append(_Stranger(connection, now))
        self._poller.register(connection.fileno(), zmq.POLLIN)

    def _discard(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._poller.unregister(stranger.connection.fileno())
        stranger.connection.close()

    def _take_request(self, stranger: _Stranger) -> None:
        try:
            message = _receive(stranger.connection)
            if message is not None and not message.HasField("lease"):
                raise _Broken("it sent something else than a lease's request")
        except BlockingIOError:
            return
        except _Broken as error:
            _log.warning("sampler refused: %s", error)
            message = None
        if message is None:
            self._discard(stranger)
            return
        try:
            self._grant(stranger, message.lease)
        except ClaimRefused as refused:
            reply = sampler_pb2.LeaseRefused(reason=refused.reason, retry=refused.retry)
            self._say_last(stranger, reply)

    def _say_last(self, stranger: _Stranger, refused: sampler_pb2.LeaseRefused) -> None:
        try:
            stranger.connection.send_packet(_packet(refused=refused))
        except OSError:
            _log.info("a sampler that was refused is gone")
        self._discard(stranger)

    def _grant(self, stranger: _Stranger, request: sampler_pb2.LeaseRequest) -> None:
        """Raises ClaimRefused, and all is as before."""
        if request.layout_version != LAYOUT_VERSION:
            raise ClaimRefused(
                f"layout_version: the rows are of {LAYOUT_VERSION}, not {request.layout_version}",
                retry=False,
            )
        if self._model is None:
            raise ClaimRefused("no model is served yet", retry=True)
        lease, num_rows = request.lease, request.num_rows
        self.leases.claim(lease, num_rows)
        layout = LogitsLayout(num_rows, 1, self._model.vocabulary_size)
        try:
            rows = LogitsRing.create(layout, self._epoch)
        except RingError as error:
            self.leases.end(lease)
            raise ClaimRefused(str(error), retry=True) from error
        self._strangers.remove(stranger)
        holder = self._holders[lease] = _Holder(lease, stranger.connection, rows)
        offer = sampler_pb2.LeaseOffer(
            num_rows=num_rows,
            vocabulary_size=self._model.vocabulary_size,
            sampleable_vocabulary=self._model.sampleable,
            token_timeout_ms=round(self._timeout * 1000),
            epoch=self._epoch,
        )
        try:
            holder.connection.send_packet_with(_packet(offer=offer), rows.fd)
        except OSError:
            self._forget(holder)
            return
        _log.info("sampler joined", extra={"lease": lease, "rows": num_rows})


def _receive(connection: FdConnection) -> sampler_pb2.SamplerMessage | None:
    """None at the end of the connection. Raises BlockingIOError, _Broken."""
    try:
        packet = connection.receive_packet()
        return None if packet is None else sampler_pb2.SamplerMessage.FromString(packet)
    except (OfferError, DecodeError) as error:
        raise _Broken(f"it sent a malformed packet: {error}") from error


def _packet(
    *,
    offer: sampler_pb2.LeaseOffer | None = None,
    refused: sampler_pb2.LeaseRefused | None = None,
    ready: sampler_pb2.LogitsReady | None = None,
) -> bytes:
    reply = sampler_pb2.SamplerReply(offer=offer, refused=refused, ready=ready)
    return reply.SerializeToString()
