"""The connection to the scheduler: hellos and their welcomes, beats, and when it counts as gone.

It runs on the event loop without tasks: the socket's descriptor wakes `_drain`, which hands every
message to the owner. It knows nothing of choices. When the scheduler goes (its socket closes, it
falls silent, or says that it does not know us), it says hello again until it is welcomed.

Every hello has a number, its attempt. Several may wait in the socket while there is no scheduler;
the next one takes them in turn, and forgets at each what came before. So the welcome of the latest
hello is the only one that counts, and nothing that comes before it is of use: the order of what a
socket brings is the order in which it was sent.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from triptych.engine_core.errors import InvalidRequest
from triptych.services.runtime.silence import ListeningClock
from triptych.services.transport.channel import PROTOCOL_VERSION, DealerChannel, new_identity
from triptych.v1 import stage_pb2

_BATCH = 1024  # frames per turn of the event loop, so that a flood cannot starve the rpcs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SchedulerFacts:
    """What a welcome says: the model as the executor runs it, and how long a sequence may get."""

    epoch: int
    architecture: str
    vocabulary_size: int
    max_model_len: int
    max_sequence_len: int


@dataclass(frozen=True, slots=True)
class Beats:
    """Seconds between beats, and the silence after which the scheduler counts as gone."""

    interval: float = 1.0
    timeout: float = 10.0


class ConnectionOwner(Protocol):
    """Who is told what the scheduler says. On the event loop, and never inside a call of `send`."""

    def welcomed(self, facts: SchedulerFacts) -> None:
        """By a scheduler that knows nothing of us yet; it takes requests."""

    def facts_changed(self, facts: SchedulerFacts) -> None:
        """The same scheduler, with another pool."""

    def outputs(self, outputs: stage_pb2.StepOutputs) -> None:
        """What a step brought. Raises InvalidRequest where it is torn."""

    def drained(self, started: float) -> None:
        """All that had come was handed over; `started` is the loop's time when that began."""

    def beat(self, beat: stage_pb2.SchedulerBeat) -> None:
        """From the scheduler that has welcomed us."""

    def lost(self, why: str) -> None:
        """The scheduler that had welcomed us is gone, with all that it knew."""

    def tick(self, now: float) -> None:
        """Once an interval, whatever the connection's state; `now` as for `now()`."""


class SchedulerConnection:
    """One tokenizer process's socket. Not thread-safe: everything runs on the event loop.

    `ended` resolves when the process must end: with the scheduler's refusal, or with the exception
    of a bug in whoever took a message.
    """

    def __init__(
        self, endpoint: str, hello: stage_pb2.TokenizerHello, beats: Beats = Beats()
    ) -> None:
        hello.protocol_version = PROTOCOL_VERSION
        self.beats = beats
        self._endpoint = endpoint
        self._hello = hello
        self._attempt = 0
        self._hello_due = False
        self._epoch = 0
        self._welcomed = False
        self._linked = False
        self._loop = asyncio.get_running_loop()
        self._clock = ListeningClock(beats.interval, self._loop.time())
        self._heard = 0.0  # by that clock
        self._timer: asyncio.TimerHandle | None = None  # runs from start to stop
        self.ended: asyncio.Future[str] = self._loop.create_future()

    # ------------------------------------------------------------------------------------- state

    @property
    def welcomed(self) -> bool:
        """Whether the scheduler has answered our latest hello and has not been lost since."""
        return self._welcomed

    @property
    def linked(self) -> bool:
        """Whether there is a scheduler at the other end, as far as the socket knows."""
        return self._linked

    def now(self) -> float:
        """Seconds in which this process could have heard the scheduler."""
        return self._clock.at(self._loop.time())

    # --------------------------------------------------------------------------------- lifecycle

    def start(self, owner: ConnectionOwner) -> None:
        """Connect; the hello follows as soon as the scheduler listens."""
        self._owner = owner
        # A context of its own: names of monitors are per context, and reused with descriptors.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel: DealerChannel[stage_pb2.TokenizerReply, stage_pb2.TokenizerMessage] = (
            DealerChannel(
                self._context, self._endpoint, stage_pb2.TokenizerReply, new_identity("tokenizer")
            )
        )
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._channel.socket.get_monitor_socket(events)
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._channel.fd, self._readable)
        self._loop.add_reader(self._monitor_fd, self._connection_changed)
        self._connection_changed()
        self._say_hello()
        self._tick()

    def stop(self) -> None:
        """Close the sockets. Nothing when not started."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self._welcomed = self._linked = False
        self._loop.remove_reader(self._channel.fd)
        self._loop.remove_reader(self._monitor_fd)
        self._channel.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._channel.close()
        self._context.term()

    # ----------------------------------------------------------------------------------- sending

    def send(self, message: stage_pb2.TokenizerMessage) -> bool:
        """Queue one frame; False when the scheduler does not keep up."""
        sent = self._channel.send(message)
        # Sending may eat the descriptor's edge for what arrived meanwhile.
        self._loop.call_soon(self._readable)
        return sent

    def _say_hello(self) -> None:
        """A new attempt; the next tick tries again when too much waits in the socket."""
        self._attempt += 1
        self._hello.attempt = self._attempt
        self._send_hello()

    def _send_hello(self) -> None:
        self._hello_due = not self.send(stage_pb2.TokenizerMessage(hello=self._hello))

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self.beats.interval, self._tick)
        self._readable()  # what waits in the socket counts as heard
        self.guarded(self._look_after)

    def _look_after(self) -> None:
        now = self.now()
        silence = now - self._heard
        if silence > self.beats.timeout:
            self._heard = now
            self._lose(f"it was silent for {silence:.1f} s")
            self._say_hello()
        elif self._hello_due:
            self._send_hello()
        elif self._linked:
            # To a scheduler that does not know us this beat says so: it answers with epoch 0.
            self.send(stage_pb2.TokenizerMessage(beat=stage_pb2.TokenizerBeat()))
        self._owner.tick(now)

    # --------------------------------------------------------------------------------- receiving

    def _readable(self) -> None:
        self.guarded(self._drain)

    def guarded(self, callback: Callable[[], None]) -> None:
        """Call it, as all callbacks of the event loop that work on the connection: a bug in it ends
        the process. Nothing once that is so, or the sockets are closed."""
        if self.ended.done() or self._channel.socket.closed:
            return
        try:
            callback()
        except Exception as error:  # the top of all callbacks: a bug must end the process
            _log.exception("the connection failed")
            self.ended.set_exception(error)

    def _drain(self) -> None:
        started, heard = self._loop.time(), self.now()
        frames = 0
        for reply in self._channel.receive(_BATCH):
            frames += 1
            self._heard = heard
            self._linked = True  # the monitor misses a handshake from before it was attached
            match reply.WhichOneof("message"):
                case "outputs":
                    if self._welcomed:
                        self._outputs(reply.outputs)
                case "beat":
                    self._beat(reply.beat)
                case "welcome":
                    self._welcome(reply.welcome)
                case "refused":
                    self._refused(reply.refused.reason)
        if frames:
            self._owner.drained(started)
        if frames == _BATCH:
            self._loop.call_soon(self._readable)

    def _outputs(self, outputs: stage_pb2.StepOutputs) -> None:
        try:
            self._owner.outputs(outputs)
        except InvalidRequest as error:
            self._lose(f"it sent torn outputs: {error}")
            self._say_hello()

    def _beat(self, beat: stage_pb2.SchedulerBeat) -> None:
        if beat.epoch == 0:
            self._lose("it does not know this connection")
            self._say_hello()
        elif self._welcomed and beat.epoch != self._epoch:
            self._lose("it was replaced")
            self._say_hello()
        elif self._welcomed:
            self._owner.beat(beat)

    def _welcome(self, welcome: stage_pb2.TokenizerWelcome) -> None:
        if welcome.attempt != self._attempt:
            return  # of a hello that a later one is about to undo
        model = welcome.model
        facts = SchedulerFacts(
            epoch=welcome.epoch,
            architecture=model.architecture,
            vocabulary_size=min(model.vocabulary_size, self._hello.vocabulary_size),
            max_model_len=model.max_model_len,
            max_sequence_len=min(welcome.max_sequence_len, model.max_model_len),
        )
        if self._welcomed:
            self._owner.facts_changed(facts)
            return
        self._welcomed, self._epoch = True, welcome.epoch
        _log.info(
            "welcomed by the scheduler",
            extra={"epoch": welcome.epoch, "attempt": welcome.attempt},
        )
        self._owner.welcomed(facts)

    def _refused(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    # -------------------------------------------------------------------------------- connection

    def _connection_changed(self) -> None:
        self.guarded(self._take_events)

    def _take_events(self) -> None:
        while not self._monitor.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._linked = True
                self._heard = self.now()
                continue
            self._readable()  # what it said before it went still counts
            self._linked = False
            self._lose("its socket closed")
            self._say_hello()  # for the next one; it waits in the socket

    def _lose(self, why: str) -> None:
        if self._welcomed:
            self._welcomed = False
            self._owner.lost(why)
