"""The scheduler's end of the connections to the tokenizer processes: who asked for what.

Every choice in the core has its slot here, from Submit to its last token, its failure, its abort,
or the end of its tokenizer. Nothing is done per token: who owns what is in the request ids
(step_outputs.request_id_of), and only choices that end are taken off, one by one.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import zmq

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import MAX_CHOICES
from triptych.engine_core.step import StepOutput
from triptych.services.transport import step_outputs, wire
from triptych.services.transport.channel import PROTOCOL_VERSION, Received, RouterChannel
from triptych.services.transport.output_columns import outputs_by_peer
from triptych.services.transport.vocabulary import Vocabulary, vocabulary_from
from triptych.v1 import stage_pb2

MAX_TOKENIZERS = 256
_SLOTS = 1 << 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request, its choices tracked from now on. Time-outs in seconds, None: the engine's; they
    count from `age` seconds ago, as does `deadline`, the one of the call (None: it has none).

    Whoever refuses it says so with a Failed for each of its `params.n` choices.
    """

    request: Request
    queue_timeout: float | None = None
    timeout: float | None = None
    age: float = 0.0
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """Choices that nobody waits for any more; no longer tracked."""

    request_ids: list[RequestId]


@dataclass(slots=True)
class _Peer:
    """`index` is part of the request ids, and never used again: a second hello gets another."""

    name: bytes
    index: int
    hello: stage_pb2.TokenizerHello
    heard: float
    welcomed: bool = False
    slots: set[int] = field(default_factory=set)

    def request_ids(self, slots: Iterable[int]) -> list[RequestId]:
        return [step_outputs.request_id_of(self.index, slot) for slot in slots]


class TokenizerLink:
    """All tokenizer processes. Used by the loop's thread only; `now` is by its ListeningClock."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        epoch: int,
        poller: zmq.Poller,
        timeout: float,
    ) -> None:
        self._channel: RouterChannel[stage_pb2.TokenizerMessage, stage_pb2.TokenizerReply] = (
            RouterChannel(context, endpoint, stage_pb2.TokenizerMessage)
        )
        self._epoch = epoch
        self._timeout = timeout
        self._peers: dict[bytes, _Peer] = {}
        self._by_index: dict[int, _Peer] = {}
        self._next_index = 1
        self._vocabulary_size: int | None = None
        self._vocabulary_known = False
        self.refused_total = 0
        poller.register(self._channel.socket, zmq.POLLIN)

    # ------------------------------------------------------------------------------------- state

    @property
    def num_peers(self) -> int:
        """Tokenizer processes that have said hello and are alive."""
        return len(self._peers)

    @property
    def num_tracked(self) -> int:
        """Choices with an owner."""
        return sum(len(peer.slots) for peer in self._peers.values())

    @property
    def vocabulary_size(self) -> int | None:
        """Ids at or above this are never sampled; None until the first tokenizer is welcomed."""
        return self._vocabulary_size

    # ---------------------------------------------------------------------------------- incoming

    def receive(self, now: float) -> Iterator[Submitted | Dropped | Vocabulary]:
        """What has arrived, without waiting."""
        for received in self._channel.receive():
            yield from self._take(received, now)

    def _take(
        self, received: Received[stage_pb2.TokenizerMessage], now: float
    ) -> Iterator[Submitted | Dropped | Vocabulary]:
        message, name = received.message, received.peer
        if message is None:
            _log.warning("malformed message from tokenizer %r", name)
            yield from self._refuse(name, "malformed message")
            return
        if message.HasField("hello"):
            yield from self._take_hello(name, message.hello, now)
            return
        peer = self._peers.get(name)
        if peer is None or not (peer.welcomed or message.HasField("beat")):
            # It was welcomed by another scheduler, or counted as dead: it must start again.
            self._send(name, beat=stage_pb2.SchedulerBeat(epoch=0))
            return
        peer.heard = now
        match message.WhichOneof("message"):
            case "submit":
                yield from self._take_submit(peer, message.submit)
            case "abort":
                slots = [slot for slot in dict.fromkeys(message.abort.slots) if slot in peer.slots]
                peer.slots.difference_update(slots)
                yield Dropped(peer.request_ids(slots))
            case "vocabulary":
                yield from self._take_vocabulary(peer, message.vocabulary)
            case _:
                pass  # a beat

    def _take_hello(
        self, name: bytes, hello: stage_pb2.TokenizerHello, now: float
    ) -> Iterator[Dropped]:
        yield from self._forget(name)  # a second hello: it has dropped all it had
        reason = None
        if hello.protocol_version != PROTOCOL_VERSION:
            reason = (
                f"this scheduler speaks protocol {PROTOCOL_VERSION}, "
                f"the tokenizer {hello.protocol_version}"
            )
        elif hello.vocabulary_size < 1:
            reason = "vocabulary_size: the tokenizer's is 0"
        elif len(self._peers) >= MAX_TOKENIZERS:
            reason = f"{MAX_TOKENIZERS} tokenizers are connected"
        if reason is not None:
            yield from self._refuse(name, reason)
            return
        peer = _Peer(name, self._next_index, hello, now)
        self._next_index += 1
        self._peers[name] = self._by_index[peer.index] = peer

    def _take_submit(self, peer: _Peer, submit: stage_pb2.Submit) -> Iterator[Submitted | Dropped]:
        try:
            request = wire.request_from_submit(
                submit, step_outputs.request_id_of(peer.index, submit.slot)
            )
            slots = range(submit.slot, submit.slot + request.params.n)
            if slots.stop > _SLOTS:
                raise InvalidRequest("slot", f"{submit.slot} leaves no room for {len(slots)}")
        except InvalidRequest as error:
            yield from self._refuse_submit(peer, submit, error)
            return
        if not peer.slots.isdisjoint(slots):
            yield from self._refuse(peer.name, f"slot {submit.slot} is in use")
            return
        peer.slots.update(slots)
        yield Submitted(
            request,
            _seconds(submit.queue_timeout_ms),
            _seconds(submit.timeout_ms),
            submit.age_ms / 1000,
            _seconds(submit.deadline_ms),
        )

    def _refuse_submit(
        self, peer: _Peer, submit: stage_pb2.Submit, error: InvalidRequest
    ) -> Iterator[Dropped]:
        """Each choice that it may have meant ends; not those that an earlier one has."""
        self.refused_total += 1
        count = min(max(submit.params.n, 1), MAX_CHOICES, _SLOTS - submit.slot)
        slots = set(range(submit.slot, submit.slot + count)) - peer.slots
        failures = [wire.failure_from_error(slot, error) for slot in sorted(slots)]
        if not self._send(peer.name, outputs=stage_pb2.StepOutputs(failures=failures)):
            yield from self._forget(peer.name)

    def _take_vocabulary(
        self, peer: _Peer, message: stage_pb2.Vocabulary
    ) -> Iterator[Vocabulary | Dropped]:
        """The first counts: all tokenizers are of one model (its fingerprint)."""
        if self._vocabulary_known:
            return
        try:
            vocabulary = vocabulary_from(message)
            if len(vocabulary.tokens) != self._vocabulary_size:
                raise InvalidRequest(
                    "lengths", f"{len(vocabulary.tokens)} tokens, not {self._vocabulary_size}"
                )
        except InvalidRequest as error:
            _log.error("vocabulary of tokenizer %r: %s", peer.name, error)
            yield from self._refuse(peer.name, f"vocabulary: {error}")
            return
        self._vocabulary_known = True
        yield vocabulary

    # ---------------------------------------------------------------------------------- outgoing

    def welcome(self, facts: stage_pb2.ModelFacts, max_sequence_len: int) -> Iterator[Dropped]:
        """Welcome, or refuse, every tokenizer that waits for an executor."""
        for name, peer in list(self._peers.items()):
            if peer.welcomed:
                continue
            reason = _objection(peer.hello, facts, self._vocabulary_size)
            if reason is not None:
                _log.error("tokenizer refused: %s", reason)
                yield from self._refuse(name, reason)
                continue
            peer.welcomed = True
            self._vocabulary_size = peer.hello.vocabulary_size
            yield from self._tell_facts(name, facts, max_sequence_len)

    def pool_changed(self, facts: stage_pb2.ModelFacts, max_sequence_len: int) -> Iterator[Dropped]:
        """Tell those that were welcomed: how long a request may get depends on the pool."""
        for name in [name for name, peer in self._peers.items() if peer.welcomed]:
            yield from self._tell_facts(name, facts, max_sequence_len)

    def emit(self, output: StepOutput) -> Iterator[Dropped]:
        """Send what a step meant, nearly always one message a process.

        Choices that ended are tracked no more; what is for a process that is gone is dropped.
        """
        self._untrack_ended(output)
        for index, messages in outputs_by_peer(output).items():
            peer = self._by_index.get(index)
            if peer is None:
                continue
            if not all(self._send(peer.name, outputs=message) for message in messages):
                yield from self._forget(peer.name)

    def _untrack_ended(self, output: StepOutput) -> None:
        finished = np.flatnonzero(np.asarray(output.finishes, np.uint8)).tolist()
        ended = [output.request_ids[entry] for entry in finished]
        for request_id in (*ended, *(failed.request_id for failed in output.failed)):
            peer = self._by_index.get(step_outputs.peer_of(request_id))
            if peer is not None:
                peer.slots.discard(step_outputs.slot_of(request_id))

    def beat(self, beat: stage_pb2.SchedulerBeat) -> Iterator[Dropped]:
        """Say to all that the scheduler lives."""
        for name in list(self._peers):
            if not self._send(name, beat=beat):
                yield from self._forget(name)

    def expire(self, now: float) -> Iterator[Dropped]:
        """Forget tokenizers that have been silent for too long."""
        for name, peer in list(self._peers.items()):
            if now - peer.heard > self._timeout:
                _log.warning("tokenizer %r is silent", name)
                yield from self._forget(name)

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def _send(
        self,
        name: bytes,
        *,
        welcome: stage_pb2.TokenizerWelcome | None = None,
        refused: stage_pb2.Refused | None = None,
        outputs: stage_pb2.StepOutputs | None = None,
        beat: stage_pb2.SchedulerBeat | None = None,
    ) -> bool:
        return self._channel.send(
            name,
            stage_pb2.TokenizerReply(welcome=welcome, refused=refused, outputs=outputs, beat=beat),
        )

    def _tell_facts(
        self, name: bytes, facts: stage_pb2.ModelFacts, max_sequence_len: int
    ) -> Iterator[Dropped]:
        welcome = stage_pb2.TokenizerWelcome(
            epoch=self._epoch,
            model=facts,
            max_sequence_len=max_sequence_len,
            attempt=self._peers[name].hello.attempt,
        )
        if not self._send(name, welcome=welcome):
            yield from self._forget(name)

    def _refuse(self, name: bytes, reason: str) -> Iterator[Dropped]:
        self._send(name, refused=stage_pb2.Refused(reason=reason))
        yield from self._forget(name)

    def _forget(self, name: bytes) -> Iterator[Dropped]:
        """The peer is gone or starts again: nobody waits for its requests."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        del self._by_index[peer.index]
        if peer.slots:
            yield Dropped(peer.request_ids(sorted(peer.slots)))


def _seconds(milliseconds: int) -> float | None:
    return milliseconds / 1000 if milliseconds else None


def _objection(
    hello: stage_pb2.TokenizerHello, facts: stage_pb2.ModelFacts, vocabulary_size: int | None
) -> str | None:
    if hello.fingerprint != facts.fingerprint:
        return (
            f"model: the executor runs {facts.fingerprint}, "
            f"the tokenizer was started for {hello.fingerprint}"
        )
    if hello.vocabulary_size > facts.vocabulary_size:
        return (
            f"vocabulary_size: the tokenizer's {hello.vocabulary_size} is above "
            f"the model's {facts.vocabulary_size}"
        )
    if vocabulary_size not in (None, hello.vocabulary_size):
        return (
            f"vocabulary_size: the tokenizer's {hello.vocabulary_size} differs from "
            f"the {vocabulary_size} of others"
        )
    return None
