"""The scheduler's end of the connection to its executor: hello, rings, steps, and how it is lost.

    hello, welcome (ZeroMQ) -> offer of the logits ring, offer of the step ring (descriptor socket)
    -> joined: StepReady, StepDone (descriptor socket), beats (ZeroMQ)
    -> end of file, silence, or a broken promise: lost

An executor of several ranks has joined when all of them have said hello and exchanged rings, and is
lost with the first of them that is. The newest hello of a rank wins while no executor has joined;
afterwards another executor is refused. What happens to sequences is the loop's business: this
module yields events and never calls back.
"""

import logging
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import zmq
from google.protobuf.message import DecodeError

from triptych.engine_core.layout import LAYOUT_VERSION
from triptych.services.runtime.run_dir import RunDir
from triptych.services.scheduler.executor_ranks import (
    Answer,
    BrokenPromise,
    Executor,
    Rank,
    size_of,
)
from triptych.services.scheduler.welcome import welcome_to
from triptych.services.transport.channel import (
    PROTOCOL_VERSION,
    Received,
    RouterChannel,
    beat_owner,
)
from triptych.services.transport.fd_passing import FdConnection, FdListener, Offer, OfferError
from triptych.services.transport.rings import LogitsView, RingError
from triptych.v1 import stage_pb2

_MAX_PENDING_CONNECTIONS = 8
# A context of one token has no room for an output (engine_core.admission.Limits).
_LEAST = {"vocabulary_size": 1, "max_model_len": 2, "block_size": 1, "num_blocks": 1}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorJoined:
    """An executor with these facts is ready for steps; its KV cache is empty. `welcome`: the rings
    between us."""

    facts: stage_pb2.ModelFacts
    welcome: stage_pb2.ExecutorWelcome


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """The executor that had joined is gone, with its KV cache and any step in flight."""

    reason: str


ExecutorEvent = ExecutorJoined | ExecutorLost | stage_pb2.StepDone | stage_pb2.StepFailed


@dataclass(frozen=True, slots=True)
class _Welcomed:
    identity: bytes
    hello: stage_pb2.ExecutorHello
    welcome: stage_pb2.ExecutorWelcome


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
        """`welcome`: what every executor gets (welcome.py has the rest). `drafts_wanted`: only an
        executor with a draft model will do."""
        self._channel: RouterChannel[stage_pb2.ExecutorMessage, stage_pb2.ExecutorReply] = (
            RouterChannel(context, run_dir.executor_endpoint, stage_pb2.ExecutorMessage)
        )
        self._listener = FdListener(run_dir.executor_fds)
        self._welcome = welcome
        self._poller = poller
        self._timeout = timeout
        self._drafts_wanted = drafts_wanted
        self._pending: list[FdConnection] = []
        self._welcomed: dict[
            int, _Welcomed
        ] = {}  # the newest of each rank; none once all are there
        self._executor: Executor | None = None  # that has joined, or some ranks of one
        self._facts: stage_pb2.ModelFacts | None = None
        poller.register(self._channel.socket, zmq.POLLIN)
        poller.register(self._listener.fileno(), zmq.POLLIN)

    # ------------------------------------------------------------------------------------- state

    @property
    def _joined(self) -> Executor | None:
        return self._executor if self._executor is not None and self._executor.complete else None

    @property
    def ready(self) -> bool:
        """Whether a step can be sent."""
        return self._joined is not None

    @property
    def draws_tokens(self) -> bool:
        """Whether the executor that has joined draws tokens, and takes a step in while it computes
        another."""
        return self._joined is not None and self._joined.draws_tokens

    def step_slot(self, slot: int) -> memoryview:
        """The step slot's bytes, to be written in place."""
        assert self._joined is not None
        return self._joined.step_ring.slot(slot)

    def logits(self, slot: int, step_id: int, num_rows: int) -> LogitsView:
        """The step's logits in place, float32 [num_rows, vocabulary_size]. Raises RingError."""
        assert self._joined is not None
        return self._joined.logits(slot, step_id, num_rows)

    # ---------------------------------------------------------------------------------- messages

    def dispatch(self, step_id: int, slot: int) -> bool:
        """Tell the executor that a slot is written; False when it is gone (end of file follows)."""
        joined = self._joined
        assert joined is not None
        ready = stage_pb2.StepReady(step_id=step_id, slot=slot, epoch=self._welcome.epoch)
        packet = stage_pb2.ExecutorReply(ready=ready).SerializeToString()
        joined.sent(step_id)
        try:
            for rank in joined.ranks.values():
                rank.connection.send_packet(packet)
        except OSError:
            return False
        return True

    def beat(self, beat: stage_pb2.SchedulerBeat) -> None:
        """Say that the scheduler lives."""
        if self._joined is not None:
            for rank in self._joined.ranks.values():
                self._channel.send(rank.identity, stage_pb2.ExecutorReply(beat=beat))

    def receive(self, readable: set[int], now: float) -> Iterator[ExecutorEvent]:
        """What has happened, without waiting. `readable`: the descriptors that the poll named."""
        if any(rank.connection.fileno() in readable for rank in self._ranks().values()):
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
        """Lose an executor of which one process has been silent for too long."""
        joined = self._joined
        if joined is None:
            return
        number, rank = min(joined.ranks.items(), key=lambda item: item[1].heard)
        if now - rank.heard > self._timeout:
            yield self._lose(joined.named(number, f"it was silent for {now - rank.heard:.1f} s"))

    def drop(self, reason: str) -> ExecutorLost:
        """Break with an executor; it sees end of file and may say hello again."""
        return self._lose(reason)

    def close(self) -> None:
        """End everything; the executor sees end of file."""
        self._let_go()
        for connection in list(self._pending):
            self._discard(connection)
        self._listener.close()
        self._channel.close()

    # ----------------------------------------------------------------------------------- details

    def _ranks(self) -> dict[int, Rank]:
        return {} if self._executor is None else self._executor.ranks

    def _take_packets(self, now: float) -> Iterator[ExecutorEvent]:
        """Everything that ranks have said of steps, and then whether one is gone."""
        ends: list[tuple[int, Rank, str]] = []
        for number, rank in list(self._ranks().items()):
            reason = yield from self._take_packets_of(number, rank, now)
            if reason is not None:
                ends.append((number, rank, reason))
        for number, rank, reason in ends:
            if self._ranks().get(number) is rank:
                yield from self._rank_lost(number, reason)

    def _take_packets_of(
        self, number: int, rank: Rank, now: float
    ) -> Generator[ExecutorEvent, None, str | None]:
        """What one rank has said; why it is lost, if it is."""
        while self._ranks().get(number) is rank:
            try:
                packet = rank.connection.receive_packet()
                message = stage_pb2.ExecutorMessage.FromString(packet or b"")
                if packet is None:
                    return "its connection ended"
                rank.heard = now
                answer = self._answer(number, message)
            except BlockingIOError:
                return None
            except (OfferError, DecodeError) as error:
                return f"it sent a malformed packet: {error}"
            except BrokenPromise as error:
                return str(error)
            if answer is not None:
                yield answer
        return None

    def _answer(self, number: int, message: stage_pb2.ExecutorMessage) -> Answer | None:
        """The executor's answer to a step, where that is complete now. Raises BrokenPromise."""
        answer = message.done if message.HasField("done") else message.failed
        executor = self._joined
        if answer.epoch != self._welcome.epoch or executor is None:
            return None
        return executor.answered(number, answer)

    def _take(
        self, received: Received[stage_pb2.ExecutorMessage], now: float
    ) -> Iterator[ExecutorEvent]:
        message, executor = received.message, self._executor
        number = None if executor is None else executor.number_of(beat_owner(received.peer))
        if message is None:
            self._refuse(received.peer, "malformed message")
            if number is not None:
                yield from self._rank_lost(number, "it sent a malformed message")
            return
        if number is not None:
            self._ranks()[number].heard = now
        if message.HasField("hello"):
            if number is not None and self._ranks()[number].identity == received.peer:
                yield from self._rank_lost(number, "it said hello again")
            self._take_hello(received.peer, message.hello)

    def _take_hello(self, peer: bytes, hello: stage_pb2.ExecutorHello) -> None:
        reason = self._objection(hello)
        if reason is not None:
            _log.error("executor refused: %s", reason, extra={"pid": hello.pid})
            self._refuse(peer, reason)
            return
        # Of hellos that waited while we did not read, only the last one's sender is still there.
        welcome = welcome_to(self._welcome, hello)
        if self._channel.send(peer, stage_pb2.ExecutorReply(welcome=welcome)):
            self._welcomed[hello.rank] = _Welcomed(peer, hello, welcome)

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
        if hello.rank >= size_of(hello):
            return f"rank: {hello.rank} is not below tensor_parallel_size {size_of(hello)}"
        if self._drafts_wanted and not hello.has_draft_model:
            return "speculative_method draft_model: the executor has no speculative_model"
        if self._joined is not None:
            return "another executor is connected"
        others = self._executor.objection(hello) if self._executor is not None else None
        return others or self._other_model(facts)

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
            executor = self._exchange(connection, offer, now)
        except (RingError, OfferError, OSError) as error:
            _log.warning("executor rings: %s", error)
            self._discard(connection)
            self._refuse(offer.identity, f"rings: {error}")
            return
        self._pending.remove(connection)
        self._executor = executor
        if executor.complete:
            self._welcomed.clear()
            self._facts = executor.facts
            yield ExecutorJoined(executor.facts, executor.welcome)

    def _exchange(self, connection: FdConnection, offer: Offer, now: float) -> Executor:
        """Rings for rings: the executor, with one rank more. Raises RingError, OfferError, OSError,
        and all is as before."""
        try:
            welcomed = self._welcomed_as(offer.identity)
            hello, executor = welcomed.hello, self._executor
            if executor is None:
                executor = Executor(hello, welcomed.welcome)
            elif (reason := executor.objection(hello)) is not None:
                raise OfferError(reason)
            elif hello.rank in executor.ranks:  # its process was started again
                self._forget(executor.remove(hello.rank))
        except (RingError, OfferError):
            os.close(offer.fd)
            raise
        try:
            rank = Rank(welcomed.identity, connection, now)
            executor.add(hello.rank, rank, offer.fd)
            connection.send(Offer(welcomed.welcome.epoch, rank.identity, executor.step_ring.fd))
        except (RingError, OSError):
            if hello.rank in executor.ranks:
                executor.remove(hello.rank)
            if not executor.ranks:
                executor.close()
                self._executor = None
            raise
        return executor

    def _welcomed_as(self, identity: bytes) -> _Welcomed:
        for welcomed in self._welcomed.values():
            if welcomed.identity == identity:
                return welcomed
        raise OfferError("the offer is not from the executor that was welcomed")

    def _refuse(self, peer: bytes, reason: str) -> None:
        refused = stage_pb2.ExecutorReply(refused=stage_pb2.Refused(reason=reason))
        self._channel.send(peer, refused)

    def _rank_lost(self, number: int, reason: str) -> Iterator[ExecutorEvent]:
        """One process is gone: with an executor that has joined, all are."""
        executor = self._executor
        assert executor is not None
        if executor.complete:
            yield self._lose(executor.named(number, reason))
            return
        _log.warning("executor: %s", executor.named(number, reason))
        self._forget(executor.remove(number))
        if not executor.ranks:
            executor.close()
            self._executor = None

    def _forget(self, rank: Rank) -> None:
        self._poller.unregister(rank.connection.fileno())
        rank.connection.close()

    def _lose(self, reason: str) -> ExecutorLost:
        assert self._joined is not None
        self._let_go()
        return ExecutorLost(reason)

    def _let_go(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            for rank in executor.ranks.values():
                self._poller.unregister(rank.connection.fileno())
            executor.close()
