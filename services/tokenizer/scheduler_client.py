"""The connection to the scheduler: hello, beats, submit, abort, and tokens back to their streams.

It runs on the event loop without tasks: the socket's descriptor wakes `_drain`, which hands every
token to its sink and then wakes each sink once, however many tokens it got. It knows nothing of
text. When the scheduler goes (its socket closes, it falls silent, or another epoch answers), every
sink fails with Unavailable and the client says hello again until it is welcomed.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from triptych.engine_core.errors import InvalidRequest, QueueFull, Unavailable
from triptych.services.tokenizer.stats import Counters
from triptych.services.tokenizer.token_sink import TokenSink
from triptych.services.transport.channel import PROTOCOL_VERSION, DealerChannel, new_identity
from triptych.services.transport.silence import ListeningClock
from triptych.services.transport.step_outputs import (
    failures_from_outputs,
    logprobs_from_outputs,
    prompt_logprobs_from_outputs,
    scores_from_outputs,
    tokens_from_outputs,
)
from triptych.v1 import stage_pb2

_BATCH = 1024  # frames per turn of the event loop, so that a flood cannot starve the rpcs
_SLOTS = 2**32

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


class SchedulerClient:
    """One tokenizer process's connection. Not thread-safe: everything runs on the event loop.

    `on_change` is called when `ready`, `serving` or `facts` may have changed. `ended` resolves when
    the process must end: with the scheduler's refusal, or with the exception of a bug in a sink.
    `vocabulary` makes what goes before the first request with a grammar on each connection.
    """

    def __init__(
        self,
        endpoint: str,
        hello: stage_pb2.TokenizerHello,
        counters: Counters,
        on_change: Callable[[], None],
        beats: Beats = Beats(),
        vocabulary: Callable[[], stage_pb2.Vocabulary] | None = None,
    ) -> None:
        hello.protocol_version = PROTOCOL_VERSION
        self._endpoint = endpoint
        self._hello = stage_pb2.TokenizerMessage(hello=hello)
        self._counters = counters
        self._on_change = on_change
        self._beats = beats
        self._vocabulary = vocabulary
        self._vocabulary_sent = False  # to the scheduler that has welcomed us last
        self._loop = asyncio.get_running_loop()
        self._sinks: dict[int, TokenSink] = {}
        self._aborts: list[int] = []
        self._next_slot = 1
        self._facts: SchedulerFacts | None = None
        self._welcomed = False
        self._executor_ready = False
        self._step_stuck = False
        self._linked = False
        self._clock = ListeningClock(beats.interval, self._loop.time())
        self._heard = 0.0  # by that clock
        self._timer: asyncio.TimerHandle | None = None  # runs from start to stop
        self.ended: asyncio.Future[str] = self._loop.create_future()

    # ------------------------------------------------------------------------------------- state

    @property
    def facts(self) -> SchedulerFacts | None:
        """The latest welcome's; they outlive the connection. None before the first."""
        return self._facts

    @property
    def connected(self) -> bool:
        """Whether the scheduler has welcomed us and has not been found silent since."""
        return self._welcomed

    @property
    def ready(self) -> bool:
        """Whether a request submitted now can run."""
        return self.connected and self._executor_ready

    @property
    def serving(self) -> bool:
        """Whether steps are made: ready, and the step in flight is not stuck. Health says this."""
        return self.ready and not self._step_stuck

    @property
    def streams(self) -> int:
        """Choices that the scheduler works for, as far as we know."""
        return len(self._sinks)

    # --------------------------------------------------------------------------------- lifecycle

    def start(self) -> None:
        """Connect; the hello follows as soon as the scheduler listens."""
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
        self._send(self._hello)
        self._tick()

    def stop(self) -> None:
        """Fail what still runs and close the sockets. Nothing when not started."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self._loop.remove_reader(self._channel.fd)
        self._loop.remove_reader(self._monitor_fd)
        self._flush_aborts()
        self._fail_all(Unavailable("the tokenizer is stopping"))
        self._channel.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._channel.close()
        self._context.term()

    # ---------------------------------------------------------------------------------- requests

    def submit(self, submit: stage_pb2.Submit, sinks: Sequence[TokenSink]) -> range:
        """Send a request; the slots of its choices are chosen here and returned. Raises NoRoom."""
        if not self.ready:
            raise Unavailable("the engine is not ready")
        slots = self._free_slots(len(sinks))
        submit.slot = slots.start
        if submit.params.grammar:
            self._tell_vocabulary()
        if not self._send(stage_pb2.TokenizerMessage(submit=submit)):
            raise QueueFull("the scheduler does not keep up")
        self._next_slot = slots.stop
        self._sinks.update(zip(slots, sinks, strict=True))
        return slots

    def abort(self, slots: Iterable[int]) -> None:
        """Forget choices; the scheduler hears of those that have not ended. Idempotent."""
        running = [slot for slot in slots if self._sinks.pop(slot, None) is not None]
        if running:
            self._queue_aborts(running)

    def _tell_vocabulary(self) -> None:
        if self._vocabulary_sent:
            return
        if self._vocabulary is None:
            raise AssertionError("a grammar needs the vocabulary")
        if not self._send(stage_pb2.TokenizerMessage(vocabulary=self._vocabulary())):
            raise QueueFull("the scheduler does not keep up")
        self._vocabulary_sent = True

    def _free_slots(self, count: int) -> range:
        """The next in line; none of the last 2^32 is used again."""
        slots = range(self._next_slot, self._next_slot + count)
        if slots.stop > _SLOTS:
            slots = range(1, 1 + count)
        while taken := [slot for slot in slots if slot in self._sinks]:
            slots = range(taken[-1] + 1, taken[-1] + 1 + count)
        return slots

    # ----------------------------------------------------------------------------------- sending

    def _send(self, message: stage_pb2.TokenizerMessage) -> bool:
        sent = self._channel.send(message)
        # Sending may eat the descriptor's edge for what arrived meanwhile.
        self._loop.call_soon(self._readable)
        return sent

    def _queue_aborts(self, slots: list[int]) -> None:
        if not self._aborts:
            self._loop.call_soon(self._flush_aborts)
        self._aborts += slots

    def _flush_aborts(self) -> None:
        if not self._aborts:
            return
        if not self._welcomed:
            self._aborts.clear()  # the scheduler that knew them is gone
            return
        message = stage_pb2.TokenizerMessage(abort=stage_pb2.Abort(slots=self._aborts))
        if self._send(message):
            self._aborts.clear()  # otherwise the next tick tries again

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._beats.interval, self._tick)
        self._readable()  # what waits in the socket counts as heard
        now = self._now()
        silence = now - self._heard
        if silence > self._beats.timeout:
            if self._welcomed:
                self._lost(f"it was silent for {silence:.1f} s")
            self._heard = now
            self._send(self._hello)
        elif self._linked:
            # To a scheduler that does not know us this beat says so: it answers with epoch 0.
            self._send(stage_pb2.TokenizerMessage(beat=stage_pb2.TokenizerBeat()))
            self._flush_aborts()

    def _now(self) -> float:
        return self._clock.at(self._loop.time())

    # --------------------------------------------------------------------------------- receiving

    def _readable(self) -> None:
        if self.ended.done() or self._channel.socket.closed:
            return
        try:
            self._drain()
        except Exception as error:  # the top of this callback: a bug must end the process
            _log.exception("the drain failed")
            self.ended.set_exception(error)

    def _drain(self) -> None:
        started, heard = self._loop.time(), self._now()
        touched: dict[TokenSink, None] = {}
        frames = 0
        for reply in self._channel.receive(_BATCH):
            frames += 1
            self._heard = heard
            self._linked = True  # the monitor misses a handshake from before it was attached
            match reply.WhichOneof("message"):
                case "outputs":
                    self._outputs(reply.outputs, touched)
                case "beat":
                    self._beat(reply.beat)
                case "welcome":
                    self._welcome(reply.welcome)
                case "refused":
                    self._refused(reply.refused.reason)
        for sink in touched:
            sink.wake()
        if touched:
            # Runs after the streams that were just woken have handed their responses to gRPC.
            self._loop.call_soon(self._drained, started)
        if frames == _BATCH:
            self._loop.call_soon(self._readable)

    def _drained(self, started: float) -> None:
        self._counters.drains_total += 1
        self._counters.drain_seconds_total += self._loop.time() - started

    def _outputs(self, outputs: stage_pb2.StepOutputs, touched: dict[TokenSink, None]) -> None:
        try:
            tokens = tokens_from_outputs(outputs)
            logprobs = logprobs_from_outputs(outputs)
            scores = scores_from_outputs(outputs)
            self._prompt_facts(outputs)
        except InvalidRequest as error:
            self._lost(f"it sent torn outputs: {error}")
            self._send(self._hello)
            return
        aborts: list[int] = []
        for entry, (slot, token_id, finish) in enumerate(tokens):
            sink = self._sinks.get(slot)
            if sink is None:
                continue  # aborted while the token was on its way
            if scores and entry in scores:
                sink.scored(scores[entry])
            satisfied = sink.accept(token_id, finish, logprobs.get(entry) if logprobs else None)
            touched[sink] = None
            if finish or satisfied:
                del self._sinks[slot]
                if not finish:
                    aborts.append(slot)
        for failure in failures_from_outputs(outputs):
            sink = self._sinks.pop(failure.slot, None)
            if sink is not None:
                sink.fail(failure.error)
                touched[sink] = None
        if aborts:
            self._queue_aborts(aborts)

    def _prompt_facts(self, outputs: stage_pb2.StepOutputs) -> None:
        for rows in prompt_logprobs_from_outputs(outputs):
            sink = self._sinks.get(rows.slot)
            if sink is not None:
                sink.prompt_logprobs(rows.position, rows.rows)
        for started in outputs.started:
            sink = self._sinks.get(started.slot)
            if sink is not None:
                sink.started(started.cached_tokens)

    def _beat(self, beat: stage_pb2.SchedulerBeat) -> None:
        if self._welcomed and self._facts is not None and beat.epoch != self._facts.epoch:
            self._lost("it does not know this connection" if beat.epoch == 0 else "it was replaced")
            self._send(self._hello)
        elif beat.epoch == 0:
            self._send(self._hello)
        stuck = beat.step_age_ms > self._beats.timeout * 1000
        if (beat.executor_ready, stuck) != (self._executor_ready, self._step_stuck):
            self._executor_ready, self._step_stuck = beat.executor_ready, stuck
            self._on_change()

    def _welcome(self, welcome: stage_pb2.TokenizerWelcome) -> None:
        model = welcome.model
        if self._welcomed and self._facts is not None and welcome.epoch != self._facts.epoch:
            self._lost("it was replaced")
        self._facts = SchedulerFacts(
            epoch=welcome.epoch,
            architecture=model.architecture,
            vocabulary_size=min(model.vocabulary_size, self._hello.hello.vocabulary_size),
            max_model_len=model.max_model_len,
            max_sequence_len=min(welcome.max_sequence_len, model.max_model_len),
        )
        self._welcomed = self._executor_ready = True
        self._vocabulary_sent = False
        self._step_stuck = False
        _log.info("welcomed by the scheduler", extra={"epoch": welcome.epoch})
        self._on_change()

    def _refused(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    # -------------------------------------------------------------------------------- connection

    def _connection_changed(self) -> None:
        while not self._monitor.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._linked = True
                self._heard = self._now()
                continue
            if self._welcomed:
                self._readable()  # what it said before it went still counts
            self._linked = False
            if self._welcomed:
                self._lost("its socket closed")
                self._send(self._hello)  # for the next one; it waits in the socket

    def _lost(self, why: str) -> None:
        _log.warning("the scheduler is gone: %s", why, extra={"streams": len(self._sinks)})
        self._welcomed = self._executor_ready = False
        self._aborts.clear()
        self._fail_all(Unavailable("the scheduler is gone"))
        self._on_change()

    def _fail_all(self, error: Unavailable) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(error)
            sink.wake()
