"""The scheduler's end of the connection to its executor: hello, rings, steps, and how it is lost.

    hello, welcome (ZeroMQ) -> offer of the logits ring, offer of the step ring (descriptor socket)
    -> joined: StepReady, StepDone (descriptor socket), beats (ZeroMQ)
    -> end of file, silence, or a broken promise: lost

The newest hello wins while no executor has joined; afterwards a second executor is refused. What
happens to sequences is the loop's business: this module yields events and never calls back.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

import zmq
from google.protobuf.message import DecodeError

from triptych.engine_core.layout import LAYOUT_VERSION
from triptych.services.runtime.run_dir import RunDir
from triptych.services.transport.channel import (
    PROTOCOL_VERSION,
    Received,
    RouterChannel,
    beat_owner,
)
from triptych.services.transport.fd_passing import FdConnection, FdListener, Offer, OfferError
from triptych.services.transport.ring_layouts import logits_layout, step_layout
from triptych.services.transport.rings import LogitsRing, LogitsView, RingError, StepRing
from triptych.v1 import stage_pb2

_MAX_PENDING_CONNECTIONS = 8
# A context of one token has no room for an output (engine_core.admission.Limits).
_LEAST = {"vocabulary_size": 1, "max_model_len": 2, "block_size": 1, "num_blocks": 1}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorJoined:
    """An executor with these facts is ready for steps; its KV cache is empty."""

    facts: stage_pb2.ModelFacts


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """The executor that had joined is gone, with its KV cache and any step in flight."""

    reason: str


ExecutorEvent = ExecutorJoined | ExecutorLost | stage_pb2.StepDone | stage_pb2.StepFailed


@dataclass(slots=True)
class _Joined:
    identity: bytes
    connection: FdConnection
    step_ring: StepRing
    logits_ring: LogitsRing
    heard: float


class ExecutorLink:
    """One executor at a time. Used by the loop's thread only; `now` is by its ListeningClock."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run_dir: RunDir,
        welcome: stage_pb2.ExecutorWelcome,
        poller: zmq.Poller,
        timeout: float,
        *,
        drafts_wanted: bool = False,
    ) -> None:
        """`drafts_wanted`: only an executor with a draft model will do."""
        self._channel: RouterChannel[stage_pb2.ExecutorMessage, stage_pb2.ExecutorReply] = (
            RouterChannel(context, run_dir.executor_endpoint, stage_pb2.ExecutorMessage)
        )
        self._listener = FdListener(run_dir.executor_fds)
        self._welcome = welcome
        self._poller = poller
        self._timeout = timeout
        self._drafts_wanted = drafts_wanted
        self._pending: list[FdConnection] = []
        self._welcomed: tuple[bytes, stage_pb2.ModelFacts] | None = None
        self._joined: _Joined | None = None
        self._facts: stage_pb2.ModelFacts | None = None
        poller.register(self._channel.socket, zmq.POLLIN)
        poller.register(self._listener.fileno(), zmq.POLLIN)

    # ------------------------------------------------------------------------------------- state

    @property
    def ready(self) -> bool:
        """Whether a step can be sent."""
        return self._joined is not None

    def beat_age(self, now: float) -> float:
        """Seconds since the executor was last heard; 0 when there is none."""
        return now - self._joined.heard if self._joined else 0.0

    def step_slot(self, slot: int) -> memoryview:
        """The step slot's bytes, to be written in place."""
        assert self._joined is not None
        return self._joined.step_ring.slot(slot)

    def logits(self, slot: int, step_id: int, num_rows: int) -> LogitsView:
        """The step's logits in place, float32 [num_rows, vocabulary_size]. Raises RingError."""
        assert self._joined is not None
        return self._joined.logits_ring.rows(slot, step_id, num_rows)

    # ---------------------------------------------------------------------------------- messages

    def dispatch(self, step_id: int, slot: int) -> bool:
        """Tell the executor that a slot is written; False when it is gone (end of file follows)."""
        assert self._joined is not None
        ready = stage_pb2.StepReady(step_id=step_id, slot=slot, epoch=self._welcome.epoch)
        packet = stage_pb2.ExecutorReply(ready=ready).SerializeToString()
        try:
            self._joined.connection.send_packet(packet)
        except OSError:
            return False
        return True

    def beat(self, beat: stage_pb2.SchedulerBeat) -> None:
        """Say that the scheduler lives."""
        if self._joined is not None:
            self._channel.send(self._joined.identity, stage_pb2.ExecutorReply(beat=beat))

    def receive(self, readable: set[int], now: float) -> Iterator[ExecutorEvent]:
        """What has happened, without waiting. `readable`: the descriptors that the poll named."""
        if self._joined is not None and self._joined.connection.fileno() in readable:
            yield from self._take_packets(now)
        answers = list(self._channel.receive())
        # Again before the answers are taken: what an executor said before it died still counts,
        # and its end goes before another one's hello.
        if answers:
            yield from self._take_packets(now)
        for received in answers:
            yield from self._take(received, now)
        if self._listener.fileno() in readable:
            self._accept()
        for connection in [each for each in self._pending if each.fileno() in readable]:
            yield from self._take_offer(connection, now)

    def expire(self, now: float) -> Iterator[ExecutorEvent]:
        """Lose an executor that has been silent for too long."""
        if self._joined is not None and self.beat_age(now) > self._timeout:
            yield self._lose(f"it was silent for {self.beat_age(now):.1f} s")

    def drop(self, reason: str) -> ExecutorLost:
        """Break with an executor; it sees end of file and may say hello again."""
        return self._lose(reason)

    def close(self) -> None:
        """End everything; the executor sees end of file."""
        if self._joined is not None:
            self._lose("the scheduler stops")
        for connection in list(self._pending):
            self._discard(connection)
        self._listener.close()
        self._channel.close()

    # ----------------------------------------------------------------------------------- details

    def _take_packets(self, now: float) -> Iterator[ExecutorEvent]:
        """Everything that the joined executor has said of its steps, and whether it is gone."""
        joined = self._joined
        while joined is not None and self._joined is joined:
            try:
                packet = joined.connection.receive_packet()
                message = stage_pb2.ExecutorMessage.FromString(packet or b"")
            except BlockingIOError:
                return
            except (OfferError, DecodeError) as error:
                yield self._lose(f"it sent a malformed packet: {error}")
                return
            if packet is None:
                yield self._lose("its connection ended")
                return
            joined.heard = now
            if message.HasField("done") and message.done.epoch == self._welcome.epoch:
                yield message.done
            elif message.HasField("failed") and message.failed.epoch == self._welcome.epoch:
                yield message.failed

    def _take(
        self, received: Received[stage_pb2.ExecutorMessage], now: float
    ) -> Iterator[ExecutorEvent]:
        message, joined = received.message, self._joined
        ours = joined is not None and beat_owner(received.peer) == joined.identity
        if message is None:
            self._refuse(received.peer, "malformed message")
            if ours:
                yield self._lose("it sent a malformed message")
            return
        if ours and joined is not None:
            joined.heard = now
        if message.HasField("hello"):
            yield from self._take_hello(received.peer, message.hello)

    def _take_hello(self, peer: bytes, hello: stage_pb2.ExecutorHello) -> Iterator[ExecutorEvent]:
        if self._joined is not None and peer == self._joined.identity:
            yield self._lose("it said hello again")
        reason = self._objection(hello)
        if reason is not None:
            _log.error("executor refused: %s", reason, extra={"pid": hello.pid})
            self._refuse(peer, reason)
            return
        # Of hellos that waited while we did not read, only the last one's sender is still there.
        if self._channel.send(peer, stage_pb2.ExecutorReply(welcome=self._welcome)):
            self._welcomed = (peer, hello.model)

    def _objection(self, hello: stage_pb2.ExecutorHello) -> str | None:
        versions = (hello.protocol_version, hello.layout_version)
        if versions != (PROTOCOL_VERSION, LAYOUT_VERSION):
            return (
                f"this scheduler speaks protocol {PROTOCOL_VERSION} with ring layout "
                f"{LAYOUT_VERSION}, the executor {versions[0]} with {versions[1]}"
            )
        facts = hello.model
        for field, least in _LEAST.items():
            if (value := getattr(facts, field)) < least:
                return f"{field}: the executor's {value} is below {least}"
        if self._drafts_wanted and not hello.has_draft_model:
            return "speculative_method draft_model: the executor has no speculative_model"
        if self._joined is not None:
            return "another executor is connected"
        return self._other_model(facts)

    def _other_model(self, facts: stage_pb2.ModelFacts) -> str | None:
        """Sequences can go on where everything but the size of the pool is the same."""
        if self._facts is None:
            return None
        for field in (
            "fingerprint", "architecture", "vocabulary_size", "max_model_len", "block_size"
        ):  # fmt: skip
            ours, other = getattr(self._facts, field), getattr(facts, field)
            if ours != other:
                return f"{field}: this scheduler serves {ours}, the executor has {other}"
        return None

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()
        except OfferError as error:
            _log.warning("%s", error)
            return
        if connection is None:
            return
        if len(self._pending) >= _MAX_PENDING_CONNECTIONS:
            self._discard(self._pending[0])
        self._pending.append(connection)
        self._poller.register(connection.fileno(), zmq.POLLIN)

    def _discard(self, connection: FdConnection) -> None:
        if connection in self._pending:
            self._pending.remove(connection)
        self._poller.unregister(connection.fileno())
        connection.close()

    def _take_offer(self, connection: FdConnection, now: float) -> Iterator[ExecutorEvent]:
        try:
            offer = connection.receive()
        except BlockingIOError:
            return
        except OfferError as error:
            _log.warning("descriptor socket: %s", error)
            offer = None
        if offer is None:
            self._discard(connection)
            return
        try:
            joined, facts = self._exchange(connection, offer, now)
        except (RingError, OfferError, OSError) as error:
            _log.warning("executor rings: %s", error)
            self._discard(connection)
            self._refuse(offer.identity, f"rings: {error}")
            return
        self._pending.remove(connection)
        self._joined, self._welcomed, self._facts = joined, None, facts
        yield ExecutorJoined(facts)

    def _exchange(
        self, connection: FdConnection, offer: Offer, now: float
    ) -> tuple[_Joined, stage_pb2.ModelFacts]:
        identity, facts = self._welcomed or (b"", stage_pb2.ModelFacts())
        if not identity or offer.identity != identity:
            os.close(offer.fd)
            raise OfferError("the offer is not from the executor that was welcomed")
        logits_ring = LogitsRing.attach(
            offer.fd, logits_layout(facts, self._welcome), self._welcome.epoch
        )
        try:
            step_ring = StepRing.create(step_layout(facts, self._welcome), self._welcome.epoch)
        except RingError:
            logits_ring.close()
            raise
        try:
            connection.send(Offer(self._welcome.epoch, identity, step_ring.fd))
        except OSError:
            logits_ring.close()
            step_ring.close()
            raise
        return _Joined(identity, connection, step_ring, logits_ring, now), facts

    def _refuse(self, peer: bytes, reason: str) -> None:
        refused = stage_pb2.ExecutorReply(refused=stage_pb2.Refused(reason=reason))
        self._channel.send(peer, refused)

    def _lose(self, reason: str) -> ExecutorLost:
        joined, self._joined = self._joined, None
        assert joined is not None
        self._poller.unregister(joined.connection.fileno())
        joined.connection.close()
        joined.step_ring.close()
        joined.logits_ring.close()
        return ExecutorLost(reason)
