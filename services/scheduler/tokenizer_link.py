"""The scheduler's end of the connections to the tokenizer processes: who asked for what.

Every request in the core has one entry here, from Submit to its last event, its abort, or the end
of its tokenizer. Its prompt and the tokens sent so far are all that a new core needs to go on.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import zmq

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.step import Event, Failed, Token
from triptych.services.transport import wire
from triptych.services.transport.channel import PROTOCOL_VERSION, Received, RouterChannel
from triptych.v1 import stage_pb2

MAX_TOKENIZERS = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A new request, tracked from now on."""

    request: Request


@dataclass(frozen=True, slots=True)
class Dropped:
    """Requests that nobody waits for any more; no longer tracked."""

    request_ids: list[RequestId]


@dataclass(slots=True)
class _Tracked:
    peer: bytes
    slot: int
    request: Request
    sent: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Peer:
    hello: stage_pb2.TokenizerHello
    heard: float
    welcomed: bool = False
    slots: dict[int, RequestId] = field(default_factory=dict)


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
        self._tracked: dict[RequestId, _Tracked] = {}
        self._next_request_id = 1
        self._vocabulary_size: int | None = None
        self.refused_total = 0
        poller.register(self._channel.socket, zmq.POLLIN)

    # ------------------------------------------------------------------------------------- state

    @property
    def num_peers(self) -> int:
        """Tokenizer processes that have said hello and are alive."""
        return len(self._peers)

    @property
    def num_tracked(self) -> int:
        """Requests with an owner."""
        return len(self._tracked)

    @property
    def vocabulary_size(self) -> int | None:
        """Ids at or above this are never sampled; None until the first tokenizer is welcomed."""
        return self._vocabulary_size

    def resumed_requests(self) -> list[Request]:
        """Every tracked request with the tokens sent so far as its past, oldest first."""
        return [
            Request(
                request_id=request_id,
                prompt_token_ids=tracked.request.prompt_token_ids,
                params=tracked.request.params,
                priority=tracked.request.priority,
                output_token_ids=(*tracked.request.output_token_ids, *tracked.sent),
            )
            for request_id, tracked in sorted(self._tracked.items())
        ]

    # ---------------------------------------------------------------------------------- incoming

    def receive(self, now: float) -> Iterator[Submitted | Dropped]:
        """What has arrived, without waiting."""
        for received in self._channel.receive():
            yield from self._take(received, now)

    def _take(
        self, received: Received[stage_pb2.TokenizerMessage], now: float
    ) -> Iterator[Submitted | Dropped]:
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
                yield from self._take_submit(name, peer, message.submit)
            case "abort":
                slots = message.abort.slots
                dropped = [peer.slots.pop(slot) for slot in slots if slot in peer.slots]
                for request_id in dropped:
                    del self._tracked[request_id]
                yield Dropped(dropped)
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
        self._peers[name] = _Peer(hello, now)

    def _take_submit(
        self, name: bytes, peer: _Peer, submit: stage_pb2.Submit
    ) -> Iterator[Submitted | Dropped]:
        if submit.slot in peer.slots:
            yield from self._refuse(name, f"slot {submit.slot} is in use")
            return
        request_id = RequestId(self._next_request_id)
        self._next_request_id += 1
        try:
            request = wire.request_from_submit(submit, request_id)
        except InvalidRequest as error:
            self.refused_total += 1
            outputs = stage_pb2.StepOutputs(failures=[wire.failure_from_error(submit.slot, error)])
            if not self._send(name, outputs=outputs):
                yield from self._forget(name)
            return
        self._tracked[request_id] = _Tracked(name, submit.slot, request)
        peer.slots[submit.slot] = request_id
        yield Submitted(request)

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

    def emit(self, step_id: int, events: Iterable[Event]) -> Iterator[Dropped]:
        """Send a step's events, one message per process; those that ended are tracked no more."""
        by_peer: dict[bytes, list[tuple[int, Token | Failed]]] = {}
        for event in events:
            tracked = self._tracked.get(event.request_id)
            if tracked is None:
                continue  # aborted after the step had been computed
            by_peer.setdefault(tracked.peer, []).append((tracked.slot, event))
            if isinstance(event, Token) and event.finish is None:
                tracked.sent.append(event.token_id)
            else:
                del self._tracked[event.request_id]
                del self._peers[tracked.peer].slots[tracked.slot]
        for name, pairs in by_peer.items():
            if not self._send(name, outputs=wire.outputs_from_events(step_id, pairs)):
                yield from self._forget(name)

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
            epoch=self._epoch, model=facts, max_sequence_len=max_sequence_len
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
        for request_id in peer.slots.values():
            del self._tracked[request_id]
        if peer.slots:
            yield Dropped(list(peer.slots.values()))


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
