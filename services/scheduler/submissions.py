"""Requests on their way into the core, and out of it before their end: refused, aborted, timed out.

A request with a grammar waits in a queue of its own until that is compiled; one whose tokens are
drawn outside has its row of logits before it enters (and waits for that if it had entered another
scheduler before). What is said here of a choice holds wherever it is, there or in the core.
"""

from collections.abc import Iterable

from triptych.engine_core.errors import (
    DeadlinePassed,
    InvalidRequest,
    QueueFull,
    RequestError,
    Unavailable,
)
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import Failed, StepOutput
from triptych.services.scheduler.deadlines import Deadline, Deadlines, Limit
from triptych.services.scheduler.grammar_queue import GrammarQueue, Released, choices_of
from triptych.services.scheduler.grammars import Grammars
from triptych.services.scheduler.lease_queue import LeaseQueue
from triptych.services.scheduler.leases import Leases
from triptych.services.scheduler.sampler import StepSampler
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.services.scheduler.stats import Counters
from triptych.services.scheduler.tokenizer_link import Dropped, Submitted

_WHERE = {
    Limit.QUEUE: "in the queue",
    Limit.TOTAL: "in all",
    Limit.GRAMMAR: "while its grammar compiled",
    Limit.CALL: "of the call",
}


class Submissions:
    """Used by the loop's thread only. What it has to say goes to `outbox`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        grammars: Grammars,
        leases: Leases,
        counters: Counters,
        outbox: list[StepOutput],
    ) -> None:
        self._settings = settings
        self._grammars = grammars
        self._leases = leases
        self._counters = counters
        self._outbox = outbox
        self._queue = GrammarQueue(grammars)
        self._unclaimed = LeaseQueue(leases, settings.sampler_timeout)
        self._deadlines = Deadlines(self.lives)
        self._core: Scheduler | None = None
        self._sampler: StepSampler | None = None  # there is one when there is a core
        self._young_until: float | None = None  # samplers of a scheduler before may come back

    def serve(self, core: Scheduler, sampler: StepSampler, now: float) -> None:
        """The core that requests go to from now on."""
        self._core, self._sampler = core, sampler
        if self._young_until is None:
            self._young_until = now + self._settings.sampler_timeout

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammar."""
        return self._queue.num_requests

    @property
    def next_at(self) -> float | None:
        """When the next deadline passes; None without one."""
        if not self._unclaimed:
            return self._deadlines.next_at
        times = (self._deadlines.next_at, self._unclaimed.next_at)
        return min((each for each in times if each is not None), default=None)

    def lives(self, request_id: RequestId) -> bool:
        """Whether the choice has neither ended nor been aborted."""
        core = self._core
        waits = self._queue.lives(request_id) or self._unclaimed.lives(request_id)
        return waits or (core is not None and core.lives(request_id))

    # ------------------------------------------------------------------ in

    def submit(self, event: Submitted, now: float) -> None:
        """Take a request, or refuse it."""
        request, choices = event.request, choices_of(event)
        if self._grammars.crowded:
            self._grammars.prune(self.lives)
        grammar = request.params.grammar
        try:
            if self._core is None or self._sampler is None:
                raise Unavailable("no executor has joined")
            self._sampler.check(request.params)
            if not request.accepted:
                self._check_room(self._core, len(choices))
            if grammar and not self._grammars.ask(grammar, choices):
                self._queue.add(event)
            elif not self._take_row(request, now):
                self._unclaimed.add(event, now)
            else:
                self._enter(self._core, event)
        except RequestError as error:
            self._refuse(choices, error)
            return
        self._watch(event, choices, now)

    def take_compiled(self) -> None:
        """Requests whose grammars are there go on; those whose grammar failed end."""
        for released in self._queue.release():
            error = released.error
            if error is None:
                error = self._go_on(released)
            if error is not None:
                self._refuse(released.choices(), error)

    def _take_row(self, request: Request, now: float) -> bool:
        """A row of logits for a request that needs one; False where it has to wait for it: until
        its sampler is back from a scheduler before this one. Raises InvalidRequest or QueueFull for
        what need not have been there."""
        external = request.params.external
        if external is None:
            return True
        try:
            self._leases.take(external.lease, request.request_id, self.lives)
        except (InvalidRequest, QueueFull) as error:
            assert self._young_until is not None, "there is a core"
            young = isinstance(error, InvalidRequest) and now < self._young_until
            if not (request.accepted or young):
                raise
            return False
        return True

    def take_claimed(self, now: float) -> None:
        """Requests whose sampler is back go on; those that have waited for too long end."""
        if not self._unclaimed:
            return
        for claimed in self._unclaimed.release(self.lives, now):
            event, error = claimed.submitted, claimed.error
            if error is None:
                assert self._core is not None, "it was there when the request came"
                try:
                    self._enter(self._core, event)
                except RequestError as refused:
                    error = refused
            if error is not None:
                self._refuse(choices_of(event), error)

    def _go_on(self, released: Released) -> RequestError | None:
        assert self._core is not None, "it was there when the request came"
        try:
            self._enter(self._core, released.submitted)
        except RequestError as error:
            return error
        for request_id in released.gone:
            self._core.abort(request_id)
        return None

    def _check_room(self, core: Scheduler, num_new: int) -> None:
        """The core bounds those it knows of; those who wait here are as many fewer."""
        waiting = self._queue.num_choices + len(self._unclaimed)
        bound = self._settings.max_num_seqs + self._settings.max_num_waiting
        if waiting and core.num_requests + waiting + num_new > bound:
            raise QueueFull(
                f"{core.num_requests + waiting} requests are running or waiting, the bound is"
                f" {bound} (max_num_seqs + max_num_waiting)"
            )

    def _enter(self, core: Scheduler, event: Submitted) -> None:
        request = event.request
        try:
            core.submit(request)
        except RequestError:
            self._leases.give_back(request.request_id)
            raise
        if request.accepted:  # its prompt was counted where it was new
            self._counters.choices_accepted_before += request.params.n
        else:
            self._counters.prompt_tokens += len(request.prompt_token_ids)

    def _watch(self, event: Submitted, choices: Iterable[RequestId], now: float) -> None:
        defaults = self._settings
        queue = defaults.queue_timeout if event.queue_timeout is None else event.queue_timeout
        total = defaults.request_timeout if event.timeout is None else event.timeout
        began = now - event.age
        # What another scheduler had may have run there, and nobody can say: it waits anew.
        queued = now if event.request.accepted else began
        for choice in choices:
            if not event.request.output_token_ids:  # else it has waited its turn
                self._deadlines.add(choice, queued, Limit.QUEUE, queue)
            self._deadlines.add(choice, began, Limit.TOTAL, total)
            self._deadlines.add(choice, began, Limit.CALL, event.deadline or 0.0)
            if self._queue.lives(choice):
                grammar = defaults.structured_output_timeout
                self._deadlines.add(choice, now, Limit.GRAMMAR, grammar)

    # ------------------------------------------------------------------ out

    def drop(self, dropped: Iterable[Dropped]) -> None:
        """Nobody waits for these choices any more."""
        for each in dropped:
            for request_id in each.request_ids:
                self._counters.requests_aborted += self._abort(request_id)

    def time_out(self, now: float) -> None:
        """End what has waited, or run, for too long. What never ran costs no step."""
        failed = []
        for deadline in self._deadlines.passed(now):
            if self._concerns(deadline):
                self._abort(deadline.request_id)
                name, seconds = deadline.limit.value, deadline.seconds
                error = DeadlinePassed(f"{name}: {seconds:g} s {_WHERE[deadline.limit]} passed")
                failed.append(Failed(deadline.request_id, error))
        if failed:
            self._counters.requests_timed_out += len(failed)
            self._counters.requests_finished += len(failed)
            self._outbox.append(StepOutput(0, failed=failed))

    def fail(self, failures: Iterable[Failed]) -> None:
        """End choices whose tokens cannot come from outside any more; not those that have ended."""
        failed = [each for each in failures if self._abort(each.request_id)]
        if failed:
            late = sum(isinstance(each.error, DeadlinePassed) for each in failed)
            self._counters.sampler_timeouts += late
            self._counters.requests_finished += len(failed)
            self._outbox.append(StepOutput(0, failed=failed))

    def _concerns(self, deadline: Deadline) -> bool:
        """Whether a choice is still where its deadline is about."""
        core, request_id = self._core, deadline.request_id
        match deadline.limit:
            case Limit.QUEUE:
                fresh = core is not None and core.is_fresh(request_id)
                unclaimed = self._unclaimed.lives(request_id)
                return self._queue.lives(request_id) or unclaimed or fresh
            case Limit.GRAMMAR:
                return self._queue.lives(request_id)
            case Limit.TOTAL | Limit.CALL:
                return True

    def _abort(self, request_id: RequestId) -> bool:
        self._leases.give_back(request_id)
        if self._queue.abort(request_id) or self._unclaimed.abort(request_id):
            return True
        return self._core is not None and self._core.abort(request_id)

    def _refuse(self, choices: Iterable[RequestId], error: RequestError) -> None:
        self._counters.requests_refused += 1
        self._outbox.append(StepOutput(0, failed=[Failed(each, error) for each in choices]))
