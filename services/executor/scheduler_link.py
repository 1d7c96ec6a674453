"""The executor's end of the connection to the scheduler: hello, rings, steps, beats.

A Session is one joined connection; when the scheduler dies it ends, the weights stay where they
are, and the next `join` says hello to the next scheduler. The order of the handshake is described
in the scheduler's executor_link.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator

import zmq
from google.protobuf.message import DecodeError

from triptych.engine_core.layout import LAYOUT_VERSION
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.run_dir import RunDir
from triptych.services.transport import fd_passing
from triptych.services.transport.channel import (
    PROTOCOL_VERSION,
    DealerChannel,
    beat_identity,
    new_identity,
)
from triptych.services.transport.fd_passing import FdConnection, Offer, OfferError
from triptych.services.transport.ring_layouts import logits_layout, step_layout
from triptych.services.transport.rings import LogitsRing, RingError, StepRing
from triptych.v1 import stage_pb2

_WELCOME_SECONDS = 1.0
"""A scheduler answers at once. One that died with our hello does not, and the next never saw it."""
_AGAIN_SECONDS = 0.05
_EXCHANGE_SECONDS = 10.0

Context = zmq.Context[zmq.Socket[bytes]]
Channel = DealerChannel[stage_pb2.ExecutorReply, stage_pb2.ExecutorMessage]
Beat = Callable[[], stage_pb2.ExecutorBeat]

_log = logging.getLogger(__name__)


class Session:
    """A joined connection. Used by one thread, but for `step_waits`; the beats come from a thread
    of their own."""

    def __init__(
        self,
        channel: Channel,
        connection: FdConnection,
        rings: tuple[StepRing, LogitsRing | None],
        epoch: int,
    ) -> None:
        """`rings`: to read steps from, and to write logits to; None where another rank writes."""
        self.epoch = epoch
        self.step_ring, self.logits_ring = rings
        self.taken: Callable[[int], None] = lambda _step_id: None
        """Told of each step before it is computed."""
        self._channel = channel
        self._connection = connection

    def steps(self, wake: int) -> Iterator[stage_pb2.StepReady]:
        """Steps as they come, until the scheduler is gone or the eventfd `wake` is written to."""
        poller = select.poll()
        for fd in (self._channel.fd, self._connection.fileno(), wake):
            poller.register(fd, select.POLLIN)
        while True:
            readable = {fd for fd, _ in poller.poll()}
            if wake in readable:
                return
            if self._channel.fd in readable:
                for _ in self._channel.receive():  # beats; they would fill the queue
                    pass
            if self._connection.fileno() in readable:
                ready = self._receive()
                if ready is None:
                    return
                self.taken(ready.step_id)
                yield ready

    def step_waits(self) -> bool:
        """Whether something has come that `steps` has not taken yet. Any thread."""
        fd = self._connection.fileno()
        if fd < 0:  # closed
            return False
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return any(events & select.POLLIN for _, events in poller.poll(0))

    def _receive(self) -> stage_pb2.StepReady | None:
        """The step that the scheduler sent; None when it is gone, or breaks its promise."""
        try:
            packet = self._connection.receive_packet()
            if packet is None:
                return None
            ready = stage_pb2.ExecutorReply.FromString(packet).ready
        except (OSError, OfferError, DecodeError) as error:
            _log.warning("the scheduler's connection: %s", error)
            return None
        return ready if ready.epoch == self.epoch else None

    def send(self, message: stage_pb2.ExecutorMessage) -> None:
        """Answer a step. When it cannot be sent the scheduler is not alive; `steps` ends then."""
        with contextlib.suppress(OSError):
            self._connection.send_packet(message.SerializeToString())

    def close(self) -> bool:
        """Let go of sockets and rings; False when somebody still holds views into a ring."""
        self._connection.close()
        self._channel.close()
        closed = self.step_ring.close()
        return (self.logits_ring is None or self.logits_ring.close()) and closed


class SchedulerLink:
    """Finds the scheduler of a run directory and joins it."""

    def __init__(
        self, context: Context, run_dir: RunDir, name: str, hello: stage_pb2.ExecutorHello
    ) -> None:
        hello.protocol_version = PROTOCOL_VERSION
        hello.layout_version = LAYOUT_VERSION
        hello.pid = os.getpid()
        self._context = context
        self._run_dir = run_dir
        self._name = name
        self._hello = hello

    def join(self, stopping: threading.Event) -> tuple[Session, bytes] | None:
        """Say hello until a scheduler welcomes us: the session and our identity in it.

        None when `stopping` was set. Raises StartupError with the scheduler's words if it refuses.
        """
        while not stopping.is_set():
            # A new identity for each attempt: no late answer to an earlier one can be mistaken.
            identity = new_identity(self._name)
            channel: Channel = DealerChannel(
                self._context, self._run_dir.executor_endpoint, stage_pb2.ExecutorReply, identity
            )
            session = self._attempt(channel, stopping)
            if session is not None:
                return session, identity
            channel.close()
            stopping.wait(_AGAIN_SECONDS)
        return None

    def _attempt(self, channel: Channel, stopping: threading.Event) -> Session | None:
        channel.send(stage_pb2.ExecutorMessage(hello=self._hello))
        deadline = time.monotonic() + _WELCOME_SECONDS
        while time.monotonic() < deadline and not stopping.is_set():
            channel.wait(0.1)
            for reply in channel.receive():
                if reply.HasField("refused"):
                    channel.close()
                    raise StartupError(f"the scheduler refused: {reply.refused.reason}")
                if reply.HasField("welcome"):
                    return self._exchange(channel, reply.welcome)
        return None

    def _exchange(self, channel: Channel, welcome: stage_pb2.ExecutorWelcome) -> Session | None:
        facts, epoch = self._hello.model, welcome.epoch
        try:
            logits_ring = LogitsRing.create(logits_layout(facts, welcome, self._hello.rank), epoch)
        except RingError as error:
            raise StartupError(str(error)) from error
        try:
            connection = fd_passing.connect(self._run_dir.executor_fds, _EXCHANGE_SECONDS)
        except (OSError, OfferError) as error:
            _log.warning("cannot reach the scheduler's descriptor socket: %s", error)
            logits_ring.close()
            return None
        try:
            connection.send(Offer(epoch, channel.identity, logits_ring.fd))
            offer = connection.receive()
            if offer is None:
                raise OfferError("the scheduler closed the connection")
            step_ring = StepRing.attach(offer.fd, step_layout(facts, welcome), epoch)
        except (OSError, OfferError, RingError) as error:
            _log.warning("exchange of rings: %s", error)
            connection.close()
            logits_ring.close()
            return None
        if self._hello.rank == 0:
            return Session(channel, connection, (step_ring, logits_ring), epoch)
        logits_ring.close()
        return Session(channel, connection, (step_ring, None), epoch)


class Beats:
    """A thread that tells the scheduler every `interval` seconds that this process lives.

    It has a socket of its own, so that beats go out while a step is computed.
    """

    def __init__(
        self, context: Context, run_dir: RunDir, identity: bytes, interval: float, beat: Beat
    ) -> None:
        self._context = context
        self._endpoint = run_dir.executor_endpoint
        self._identity = beat_identity(identity)
        self._interval = interval
        self._beat = beat
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        channel: Channel = DealerChannel(
            self._context, self._endpoint, stage_pb2.ExecutorReply, self._identity
        )
        try:
            while not self._ended.wait(self._interval):
                channel.send(stage_pb2.ExecutorMessage(beat=self._beat()))
        finally:
            channel.close()
