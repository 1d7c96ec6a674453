"""Requests to the scheduler and tokens back to their streams, across the death of schedulers.

    submit -> OpenChoices -> connection          outputs -> sinks, each woken once a drain

When a scheduler is lost, nothing fails: the choices wait, and go out again to the next one. They
end with Unavailable when a stage is missing for too long, when the supervisor knows that waiting is
in vain, and when scheduler after scheduler dies with them. It knows nothing of text.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from triptych.engine_core.errors import DeadlinePassed, QueueFull, RequestError, Unavailable
from triptych.services.tokenizer.open_choices import (
    LATE,
    OpenChoice,
    OpenChoices,
    OpenRequest,
)
from triptych.services.tokenizer.outage import Outage
from triptych.services.tokenizer.scheduler_connection import SchedulerConnection, SchedulerFacts
from triptych.services.tokenizer.stats import Counters
from triptych.services.tokenizer.token_sink import TokenSink
from triptych.services.transport.step_outputs import (
    failures_from_outputs,
    logprobs_from_outputs,
    prompt_logprobs_from_outputs,
    scores_from_outputs,
    tokens_from_outputs,
)
from triptych.v1 import stage_pb2

_PARTS = 64  # submitted again per turn of the event loop
_YOUNG = 60.0  # seconds; who has had the choices for longer hardly died of one of them
_NO_ROOM = 0.01  # seconds until the next try when the scheduler does not keep up

_log = logging.getLogger(__name__)


class SchedulerClient:
    """What the tokenizer process asks of the scheduler. Not thread-safe: on the event loop only.

    `on_change` is called when `ready`, `serving` or `facts` may have changed. `vocabulary` makes
    what goes to each scheduler before the first request with a grammar.
    """

    def __init__(
        self,
        connection: SchedulerConnection,
        counters: Counters,
        on_change: Callable[[], None],
        vocabulary: Callable[[], stage_pb2.Vocabulary] | None = None,
        outage: Outage | None = None,
    ) -> None:
        self._connection = connection
        self._counters = counters
        self._on_change = on_change
        self._vocabulary = vocabulary
        self._vocabulary_sent = False  # to the scheduler that has welcomed us last
        self._outage = outage if outage is not None else Outage()
        self._loop = asyncio.get_running_loop()
        self._open = OpenChoices()
        self._unsent: deque[OpenRequest | OpenChoice] = deque()  # to the one that is there
        self._sending: asyncio.Handle | None = None
        self._touched: dict[TokenSink, None] = {}
        self._aborts: list[int] = []
        self._facts: SchedulerFacts | None = None
        self._executor_ready = False
        self._welcomed_at = 0.0
        self._stuck = False
        self.ended = connection.ended

    # ------------------------------------------------------------------------------------- state

    @property
    def facts(self) -> SchedulerFacts | None:
        """The latest welcome's; they outlive the connection. None before the first."""
        return self._facts

    @property
    def connected(self) -> bool:
        """Whether the scheduler has welcomed us and has not been lost since."""
        return self._connection.welcomed

    @property
    def ready(self) -> bool:
        """Whether a request submitted now can run now."""
        return self.connected and self._executor_ready

    @property
    def serving(self) -> bool:
        """Whether steps are made: ready, and the engine is not stuck. Health says this."""
        return self.ready and not self._stuck

    @property
    def reason(self) -> str:
        """Why it is not serving; empty when it is."""
        if self.ready and self._stuck:
            return f"stuck: no step has ended for {self._connection.beats.timeout:g} s"
        return self._outage.reason

    @property
    def streams(self) -> int:
        """Choices that have not ended."""
        return len(self._open)

    # --------------------------------------------------------------------------------- lifecycle

    def start(self) -> None:
        """Connect; the scheduler's welcome makes it ready."""
        self._connection.start(self)

    def stop(self) -> None:
        """Fail what still runs and close the sockets."""
        self._flush_aborts()
        self._fail_all(Unavailable("the tokenizer is stopping"))
        if self._sending is not None:
            self._sending.cancel()
        self._connection.stop()

    # ---------------------------------------------------------------------------------- requests

    def check(self) -> None:
        """Raises Unavailable where a request would wait in vain."""
        refusal = self._outage.refusal(self._connection.now())
        if refusal is not None:
            raise Unavailable(refusal)

    def submit(self, submit: stage_pb2.Submit, sinks: Sequence[TokenSink]) -> range:
        """Take a request; it goes out now, or to the next scheduler. The slots of its choices are
        chosen here and returned. Raises NoRoom."""
        self.check()
        request = self._open.add(submit, sinks, self._loop.time())
        if self._unsent:
            self._unsent.append(request)
        elif self.connected and not self._give(request, submit):
            for slot in request.slots:
                self._open.remove(slot)
            raise QueueFull("the scheduler does not keep up")
        return request.slots

    def abort(self, slots: Iterable[int]) -> None:
        """Forget choices; the scheduler hears of those that have not ended. Idempotent."""
        running = [slot for slot in slots if self._open.remove(slot) is not None]
        if running:
            self._queue_aborts(running)

    # ----------------------------------------------------------------------------------- sending

    def _give(self, part: OpenRequest | OpenChoice, submit: stage_pb2.Submit) -> bool:
        if submit.params.grammar and not self._tell_vocabulary():
            return False
        if not self._connection.send(stage_pb2.TokenizerMessage(submit=submit)):
            return False
        part.give()
        return True

    def _tell_vocabulary(self) -> bool:
        if self._vocabulary_sent:
            return True
        assert self._vocabulary is not None, "a grammar needs the vocabulary"
        message = stage_pb2.TokenizerMessage(vocabulary=self._vocabulary())
        self._vocabulary_sent = self._connection.send(message)
        return self._vocabulary_sent

    def _send_unsent(self) -> None:
        """What the scheduler does not know yet, in order; the other callbacks get their turns."""
        self._sending = None
        for _ in range(_PARTS):
            if not self._unsent or not self.connected:
                return
            part = self._unsent[0]
            if part.choices and not self._give_again(part):
                self._sending = self._loop.call_later(
                    _NO_ROOM, self._connection.guarded, self._send_unsent
                )
                return
            self._unsent.popleft()
        self._sending = self._loop.call_soon(self._connection.guarded, self._send_unsent)

    def _give_again(self, part: OpenRequest | OpenChoice) -> bool:
        submit = part.message(self._loop.time())
        if not self._give(part, submit):
            return False
        if submit.accepted:
            self._counters.choices_resubmitted_total += len(part.choices)
        if submit.params.n > len(part.choices):  # of a beam search, whose choices come together
            slots = range(submit.slot, submit.slot + submit.params.n)
            self._queue_aborts([slot for slot in slots if slot not in self._open.by_slot])
        return True

    def _queue_aborts(self, slots: list[int]) -> None:
        if not self._aborts:
            self._loop.call_soon(self._connection.guarded, self._flush_aborts)
        self._aborts += slots

    def _flush_aborts(self) -> None:
        if not self._aborts:
            return
        if not self.connected:
            self._aborts.clear()  # the scheduler that knew them is gone
            return
        message = stage_pb2.TokenizerMessage(abort=stage_pb2.Abort(slots=self._aborts))
        if self._connection.send(message):
            self._aborts.clear()  # otherwise the next tick tries again

    # -------------------------------------------------------------------- what the scheduler says

    def outputs(self, outputs: stage_pb2.StepOutputs) -> None:
        """See ConnectionOwner."""
        tokens = tokens_from_outputs(outputs)
        logprobs = logprobs_from_outputs(outputs)
        scores = scores_from_outputs(outputs)
        self._prompt_facts(outputs)
        by_slot, touched = self._open.by_slot, self._touched
        aborts: list[int] = []
        for entry, (slot, token_id, finish) in enumerate(tokens):
            choice = by_slot.get(slot)
            if choice is None:
                continue  # aborted while the token was on its way
            sink = choice.sink
            if scores and entry in scores:
                sink.scored(scores[entry])
            choice.token_ids.append(token_id)
            satisfied = sink.accept(token_id, finish, logprobs.get(entry) if logprobs else None)
            touched[sink] = None
            if finish or satisfied:
                self._open.remove(slot)
                if not finish:
                    aborts.append(slot)
        for failure in failures_from_outputs(outputs):
            self._fail(failure.slot, failure.error)
        if aborts:
            self._queue_aborts(aborts)

    def _prompt_facts(self, outputs: stage_pb2.StepOutputs) -> None:
        for rows in prompt_logprobs_from_outputs(outputs):
            choice = self._open.by_slot.get(rows.slot)
            if choice is not None:
                choice.sink.prompt_logprobs(rows.position, rows.rows)
                choice.request.scored_up_to(rows.position, len(rows.rows))
        for started in outputs.started:
            choice = self._open.by_slot.get(started.slot)
            if choice is not None:
                choice.sink.started(started.cached_tokens)

    def drained(self, started: float) -> None:
        """See ConnectionOwner."""
        if self._touched:
            self._wake_touched()
            # Runs after the streams that were just woken have handed their responses to gRPC.
            self._loop.call_soon(self._handed_on, started)

    def _handed_on(self, started: float) -> None:
        self._counters.drains_total += 1
        self._counters.drain_seconds_total += self._loop.time() - started

    def _wake_touched(self) -> None:
        touched, self._touched = self._touched, {}
        for sink in touched:
            sink.wake()

    def beat(self, beat: stage_pb2.SchedulerBeat) -> None:
        """See ConnectionOwner."""
        stuck = (
            beat.activity == stage_pb2.ACTIVITY_STUCK
            or beat.step_age_ms > self._connection.beats.timeout * 1000
        )
        if (beat.executor_ready, stuck) != (self._executor_ready, self._stuck):
            self._executor_ready, self._stuck = beat.executor_ready, stuck
            self._changed()

    # ------------------------------------------------------------- schedulers that come and go

    def welcomed(self, facts: SchedulerFacts) -> None:
        """See ConnectionOwner."""
        self._welcomed_at = self._loop.time()
        self._executor_ready, self._stuck, self._vocabulary_sent = True, False, False
        self._unsent = deque(part for request in self._open.requests for part in request.parts())
        if self._sending is None:
            self._send_unsent()
        self.facts_changed(facts)

    def facts_changed(self, facts: SchedulerFacts) -> None:
        """See ConnectionOwner."""
        self._facts = facts
        self._changed()

    def lost(self, why: str) -> None:
        """See ConnectionOwner."""
        _log.warning("the scheduler is gone: %s", why, extra={"choices": len(self._open)})
        self._counters.schedulers_lost_total += 1
        suspicion = 1.0 if self._loop.time() - self._welcomed_at < _YOUNG else LATE
        if not self._executor_ready:
            suspicion = 0.0  # it has computed nothing
        self._executor_ready = self._stuck = False
        self._aborts.clear()
        self._unsent.clear()
        for slot, choice in [*self._open.by_slot.items()]:
            if choice.take_back(suspicion=suspicion):
                said = f"{choice.lost} schedulers in a row were lost before its next token"
                self._fail(slot, Unavailable(said))
        self._changed()
        self._wake_touched()

    def tick(self, now: float) -> None:
        """See ConnectionOwner."""
        self._flush_aborts()
        if self.ready:
            return
        self._outage.look()
        self._outage.missing(self._missing, now)
        self._end_vain_waits(now)
        if not self.connected:
            self._time_out()
        self._wake_touched()

    def _changed(self) -> None:
        if self.ready:
            self._outage.ready()
        else:
            now = self._connection.now()
            self._outage.missing(self._missing, now)
            self._end_vain_waits(now)
        self._on_change()

    @property
    def _missing(self) -> str:
        if self.connected:
            return "the executor is gone"
        if self._connection.linked:
            return "the scheduler waits for an executor"
        return "the scheduler is gone"

    def _end_vain_waits(self, now: float) -> None:
        refusal = self._outage.refusal(now)
        if refusal is None or not self._open:
            return
        if self.connected:
            self._queue_aborts([*self._open.by_slot])
        self._fail_all(Unavailable(refusal))

    def _time_out(self) -> None:
        """What the scheduler would end, if there was one."""
        now = self._loop.time()
        for request in self._open.requests:
            name = request.timed_out(now)
            if name is not None:
                error = DeadlinePassed(f"{name} passed while the engine recovered")
                for choice in request.choices:
                    self._fail(choice.slot, error)

    def _fail(self, slot: int, error: RequestError) -> None:
        """The choice ends; whoever calls wakes what was touched."""
        choice = self._open.remove(slot)
        if choice is not None:
            choice.sink.fail(error)
            self._touched[choice.sink] = None

    def _fail_all(self, error: RequestError) -> None:
        for slot in [*self._open.by_slot]:
            self._fail(slot, error)
        self._wake_touched()
