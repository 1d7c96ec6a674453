"""The scheduler: which tokens of which sequences to compute next. All generation state is here.

    submit(request)             refused at once, or waiting
    plan() -> StepPlan          what to compute; unless empty, the step is in flight
      write(plan, slot)           its inputs, for the executor
      samples(), scores()         which logits rows to draw from, and to score the prompt by
      drafts(), fill_drafts(ids)  what is guessed behind each; guesses that the executor made
    plan_ahead() -> StepPlan    for an executor that draws tokens: the step behind that (ahead.py)
      write, samples_ahead(), scores_ahead()
    then, of the older step in flight, one of
      apply(result) -> StepOutput the step was computed: tokens out, finished sequences freed
      fail_step(error) -> ...     the executor could not compute it: its sequences end
      lost() -> StepOutput        the executor is gone with its KV cache: compute all again
    external_samples(), take_tokens(...), make_room(...)    tokens drawn outside: external.py
    abort(request_id)           at any time

Pure and synchronous: no clock, no randomness, no I/O; the same calls give the same plans.
Every accepted choice ends with one event (a finish in StepOutput, or Failed), or with abort and
none. Here is who gets to run; what is done for each sequence in each step is in batch.py.

Speculation: the SamplingState's guesses are computed behind the sequences' own tokens where there
is room for them, and taken as far as the very same tokens are drawn. They change neither what comes
out nor who runs.
"""

from array import array
from collections.abc import Collection, Iterable
from dataclasses import replace

from triptych.engine_core.admission import Limits, check_queue, check_request
from triptych.engine_core.ahead import StepAhead
from triptych.engine_core.batch import NOT_FINITE, Batch, Score
from triptych.engine_core.beam_steps import BeamSteps
from triptych.engine_core.beams import BeamGroups
from triptych.engine_core.choices import Choices
from triptych.engine_core.entrance import Entrance
from triptych.engine_core.errors import FatalRequest, NotFinite, RequestError
from triptych.engine_core.external import ExternalSample, ExternalSequences
from triptych.engine_core.ids import RequestId, SequenceId
from triptych.engine_core.outputs import OutputColumns
from triptych.engine_core.policy import Policy, Priority
from triptych.engine_core.prompt_scores import PromptScores
from triptych.engine_core.request import Request
from triptych.engine_core.roster import Roster
from triptych.engine_core.sampling import SamplingState
from triptych.engine_core.sequence import Sequence, SequenceState
from triptych.engine_core.step import StepOutput, StepPlan, StepResult
from triptych.engine_core.step_drafts import StepDrafts
from triptych.engine_core.suspects import Suspects, Trials


class Scheduler:
    """Continuous batching over a paged KV cache; one step in flight at a time, and one ahead."""

    def __init__(
        self,
        limits: Limits,
        batch: Batch,
        sampling: SamplingState,
        policy: Policy | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        self._limits = limits
        self._batch = batch
        self._sampling = sampling
        self._policy = Priority() if policy is None else policy
        self._roster = Roster(limits, batch, sampling)
        self._choices = Choices(self._roster)
        self._beams = BeamGroups(self._roster, limits.sampleable_vocabulary)
        self._external = ExternalSequences(self._roster, limits.max_model_len)
        self.suspects = Suspects() if suspects is None else suspects
        self._trials = Trials(self.suspects, self._roster, self._beams)
        self._entrance = Entrance(
            limits, batch, self._roster, self._choices, self.suspects, self._trials
        )
        obstacles = self.suspects, self._beams, self._external
        self._step_ahead = StepAhead(
            limits, batch, self._roster, self._entrance, self._choices, obstacles
        )
        self._beam_steps = BeamSteps(self._beams, self._roster, self._policy, self.suspects)
        self._prompt_scores = PromptScores(self._roster, batch)
        self._drafts = StepDrafts(self._roster, batch, sampling, limits.vocabulary_size)
        self._by_request: dict[RequestId, Sequence] = {}  # choices neither ended nor aborted
        self._in_flight: StepPlan | None = None
        self._ahead: StepPlan | None = None  # behind it
        self._next_step_id = 1
        self.preemptions_total = 0

    # ------------------------------------------------------------------ requests in and out

    def submit(self, request: Request) -> None:
        """Accept a request, or raise InvalidRequest, TooLong or QueueFull and keep nothing."""
        try:
            check_request(request, self._limits, self._batch.num_blocks, self._batch.block_size)
            if not request.accepted:
                check_queue(self.num_requests, request.params.n, self._limits)
        except RequestError:  # it may be of another core, whose suspects are ours
            self.suspects.clear(request.choices())
            raise
        rank = self._policy.rank(request)
        if request.params.beam is not None:
            self._beams.begin(request, rank)
            return
        for sequence in self._choices.begin(request, rank):
            assert sequence.request_id not in self._by_request, f"{sequence!r}: its id is in use"
            self._by_request[sequence.request_id] = sequence
            if sequence.is_external:
                self._external.begin(sequence)

    def abort(self, request_id: RequestId) -> bool:
        """End a choice without an event; False if it is unknown, ended or aborted already."""
        group = self._beams.find(request_id)
        if group is not None:
            self._beams.abort(group, request_id)
            self.suspects.clear((request_id,))
            self._policy.ended(group.request, 0)
            return True
        sequence = self._by_request.get(request_id)
        if sequence is None:
            return False
        self._drop(sequence)
        return True

    def lives(self, request_id: RequestId) -> bool:
        """Whether the choice has neither ended nor been aborted."""
        return request_id in self._by_request or self._beams.find(request_id) is not None

    def is_fresh(self, request_id: RequestId) -> bool:
        """Whether nothing of the choice's request has run: a time-out in the queue ends it."""
        beams = self._beams.find(request_id)
        sequence = beams.sequences[0] if beams else self._by_request.get(request_id)
        if sequence is None or not sequence.fresh:
            return False
        return sequence.group is None or sequence.group.fresh

    def resumable(self) -> list[Request]:
        """Requests for all choices that have not ended, their output so far as their past.

        What another core needs to go on. Requests none of whose choices has a token go as they
        came; so do searches, nothing of which is out, with choices that do not live any more.
        """
        requests = [replace(group.request, accepted=True) for group in self._beams.groups()]
        for sequence in sorted(self._by_request.values(), key=lambda each: each.sequence_id):
            group, request = sequence.group, sequence.request
            if group is None or len(group.waiting) < request.params.n:
                requests.append(sequence.resumed(self._roster.tokens(sequence)))
            elif sequence.index == 0:
                requests.append(replace(request, accepted=True))
        return requests

    # ------------------------------------------------------------------ a step

    def plan(self, *, patient: bool = False) -> StepPlan:
        """Choose the next step. Unless empty, it is in flight until applied, failed or lost.

        Where nobody who runs has anything to compute, but waits for others or for a token from
        outside, they make room for those who wait to run; not if `patient`.
        """
        assert self._in_flight is None, "one step in flight at a time"
        roster, batch = self._roster, self._batch
        roster.step_over()
        preempted: list[SequenceId] = []
        newcomers = bool(roster.waiting) and not roster.full
        if not newcomers:
            self._drafts.tell()
        self._plan_running(preempted)
        if newcomers and not preempted:
            self._entrance.admit()
        if newcomers and self._drafts.tell():  # into what they left
            self._plan_running(preempted)
        # Beams that wait for one another hold blocks and compute nothing: others may need them.
        while not patient and batch.num_rows == 0 and roster.waiting and roster.running:
            self._preempt_last(preempted)
            self._plan_running(preempted)
            self._entrance.admit()
        self._choices.fork(lambda: batch.samples()[0])
        plan = StepPlan(
            step_id=self._next_step_id,
            num_rows=batch.num_rows,
            num_tokens=batch.num_tokens,
            num_samples=len(batch.samples()[0]),
            num_logits=batch.num_logits,
            preempted=tuple(preempted),
        )
        if plan:
            self._next_step_id += 1
            self._in_flight = plan
        return plan

    def plan_ahead(self, host_drawn: Collection[int] = ()) -> StepPlan:
        """While one step is in flight and written, choose the next. Unless empty, write it at once:
        it is in flight then, too. `host_drawn`: the sequences among `samples()` whose tokens the
        executor does not draw; they have no row in it."""
        assert self._in_flight is not None, "nothing to be ahead of"
        assert self._ahead is None, "two steps in flight at a time"
        plan = self._step_ahead.plan(self._next_step_id, host_drawn)
        if plan:
            self._next_step_id += 1
            self._ahead = plan
        return plan

    def _plan_running(self, preempted: list[SequenceId]) -> None:
        """Rows for what runs. Without blocks for all, the last in order are preempted.

        The first never is: it fits the pool alone (admission), so every step makes progress.
        """
        limits = self._limits
        most = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
        while not self._batch.plan(limits.max_num_batched_tokens, most, limits.max_num_logits):
            self._preempt_last(preempted)

    def _preempt_last(self, preempted: list[SequenceId]) -> None:
        sequence = self._roster.running[-1]
        self._preempt(sequence)
        preempted.append(sequence.sequence_id)

    def _preempt(self, sequence: Sequence) -> None:
        self._roster.preempt(sequence)
        self._roster.step_over()  # nothing is in flight, and it may run again in this very plan
        self._choices.stopped(sequence, waits=True)
        self.preemptions_total += 1

    def write(self, plan: StepPlan, slot: memoryview) -> None:
        """Fill a slot of the step ring with the inputs of the step that was planned last."""
        assert plan is (self._ahead or self._in_flight), (
            "only the step in flight that was planned last"
        )
        self._batch.write(slot, plan.step_id)

    def samples(self) -> tuple["array[int]", "array[int]"]:
        """Sequence ids (int64) and logits rows (int32) of the tokens to draw in the step in flight.

        All of the sequences are open in the SamplingState, those aborted in flight too.
        """
        return self._batch.samples()

    def samples_ahead(self) -> tuple["array[int]", "array[int]", "array[int]"]:
        """Likewise, of the step ahead; and for each the index (int32) among `samples()` of what
        draws the last token of its text, -1 where that is known."""
        return self._batch.samples_ahead()

    def scores_ahead(self) -> list[Score]:
        """The logits rows for prompt logprobs in the step ahead."""
        return self._batch.scores_ahead()

    def drafts(self) -> "array[int]":
        """For each sample of the step in flight the draft behind it (int32); UNKNOWN_DRAFT where
        the executor makes it, UNKNOWN_DRAFT - 1 where there is none."""
        return self._batch.drafts()

    def fill_drafts(self, token_ids: Iterable[int]) -> None:
        """What the executor guessed. ValueError, with nothing filled, unless these are as many
        tokens as were left to it."""
        self._drafts.fill(token_ids)

    def scores(self) -> list[tuple[Score, tuple[int, ...], int]]:
        """For prompt logprobs: the logits rows, the tokens that followed them, and how many of the
        most likely tokens are wanted beside each."""
        return self._prompt_scores.wanted()

    # ------------------------------------------------------------------ the end of a step

    def apply(self, result: StepResult) -> StepOutput:
        """Take in what was drawn in the step in flight; a token for each choice that got one."""
        plan = self._in_flight
        assert plan is not None, "no step is in flight"
        assert result.step_id == plan.step_id, f"result of {result.step_id}, not {plan.step_id}"
        most = max(result.token_ids, default=NOT_FINITE)
        assert most < self._limits.vocabulary_size, f"token id {most} from the sampler"
        columns = OutputColumns(plan.step_id)
        sequence_ids, _ = self._batch.samples()
        failed = self._prompt_scores.take(result, columns)
        outcome = self._batch.apply(result.token_ids, result.complete)
        self._next_step()
        self._sampling.append(*columns.take(outcome, sequence_ids, result))
        if self.suspects:
            self._trials.drawn(sequence_ids)
        columns.started += self._choices.first_tokens(sequence_ids)
        for sequence_id, length in zip(outcome.finished, outcome.finished_tokens, strict=True):
            self._ended(self._roster.by_id[sequence_id], length)
        for sequence in failed:
            if sequence.state is not SequenceState.FINISHED:
                columns.fail(
                    sequence.request_id, NotFinite("the logits of the prompt are not finite")
                )
                self._drop(sequence)
        if self._beams:
            self._beam_steps.take(sequence_ids, result, columns)
        if self._external:
            for sequence in self._external.computed(sequence_ids, result.token_ids, columns):
                self._drop(sequence)
        self._roster.step_over()
        return columns.output()

    def external_samples(self) -> list[ExternalSample]:
        """The samples of the step in flight whose tokens are drawn outside. What is drawn here for
        them only says whether their logits are finite."""
        return self._external.samples(self._batch.samples()[0]) if self._external else []

    def make_room(self, request_ids: Iterable[RequestId]) -> None:
        """Between two steps: those of these choices that wait for a token from outside give up
        their places, one after another, while somebody waits to run who has found none. They run
        again when their token has come."""
        assert self._in_flight is None, "a step is in flight"
        for sequence in self._external.resting(request_ids):
            if not self._roster.waiting or self._entrance.is_open:
                return
            self._preempt(sequence)

    def take_tokens(self, drawn: Iterable[tuple[RequestId, int]]) -> StepOutput:
        """Tokens from outside, between two steps: each the next one of its choice. What is for a
        choice that has ended is nobody's. AssertionError for a token id that is none."""
        assert self._in_flight is None, "a step is in flight"
        columns, tokens = OutputColumns(0), list(drawn)
        for _, token_id in tokens:
            assert 0 <= token_id < self._limits.sampleable_vocabulary, f"token id {token_id}"
        for sequence in self._external.take(tokens, columns):
            self._drop(sequence)
        self._roster.step_over()
        return columns.output()

    def fail_step(self, error: RequestError) -> StepOutput:
        """The executor is alive but could not compute the step in flight: its requests end."""
        assert self._in_flight is not None, "no step is in flight"
        columns = OutputColumns(self._in_flight.step_id)
        rows = [*(sequence_id for sequence_id, *_ in self._batch.rows()), *self._batch.samples()[0]]
        self._batch.abandon()
        self._next_step()
        found = (self._roster.by_id.get(SequenceId(each)) for each in rows)
        self._fail([each for each in found if each is not None], columns, error)
        self._roster.step_over()
        return columns.output()

    def _fail(
        self, sequences: Iterable[Sequence], columns: OutputColumns, error: RequestError
    ) -> None:
        for sequence in sequences:
            if sequence.state is SequenceState.FINISHED:
                continue  # twice among them, or the beam of a search that has just ended
            if sequence.is_beam:
                self._beam_steps.fail(sequence, columns, error)
            else:
                columns.fail(sequence.request_id, error)
                self._drop(sequence)

    def lost(self) -> StepOutput:
        """The executor is gone, with the steps in flight (if any) and all it had in its KV cache.

        Every running sequence waits again and is computed anew from its tokens: no token that was
        sent is lost, doubled or changed. Choices of which executors die (suspects.py) end with
        FatalRequest; nothing else is in the output.
        """
        columns, rows = OutputColumns(0), list[Sequence | None]()
        while self._in_flight is not None:
            rows += [self._roster.by_id.get(each.sequence_id) for each in self._batch.rows()]
            self._batch.abandon()
            self._next_step()
            self._roster.step_over()
        while self._roster.running:
            sequence = self._roster.running[-1]
            self._roster.preempt(sequence)
            self._choices.stopped(sequence, waits=True)
        self._batch.forget_cache()
        self._roster.step_over()
        fatal = FatalRequest("executors died computing it, the last one computing nothing else")
        self._fail(self._trials.died(rows), columns, fatal)
        self.suspects.fatal_total += len(columns.failed)
        return columns.output()

    def _next_step(self) -> None:
        self._in_flight, self._ahead = self._ahead, None

    def forget_cache(self) -> None:
        """No prompt is found in the cache any more; what runs goes on."""
        self._batch.forget_cache()

    def _drop(self, sequence: Sequence) -> None:
        """A choice ends here and now, whatever its state."""
        length = len(self._roster.tokens(sequence))
        self._roster.drop(sequence)
        self._forget(sequence, length)

    def _ended(self, sequence: Sequence, length: int) -> None:
        """The batch has ended a choice."""
        self._roster.ended(sequence)
        self._forget(sequence, length)

    def _forget(self, sequence: Sequence, length: int) -> None:
        del self._by_request[sequence.request_id]
        self.suspects.clear((sequence.request_id,))
        self._choices.stopped(sequence, waits=False)
        self._policy.ended(sequence.request, length - sequence.num_prompt)
        self._external.ended(sequence)

    # ------------------------------------------------------------------ facts

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks yet, or no longer."""
        return len(self._roster.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._roster.running)

    @property
    def num_requests(self) -> int:
        """Choices that have neither ended nor been aborted."""
        return len(self._by_request) + self._beams.num_requests

    @property
    def num_held(self) -> int:
        """Choices that wait for a token from outside, with nothing to compute."""
        return self._external.num_idle if self._external else 0

    @property
    def batch(self) -> Batch:
        """The running half, for facts about blocks and the cache."""
        return self._batch

    def check(self) -> None:
        """Assert every invariant; each names itself. O(everything): for tests."""
        self._batch.check()
        self._roster.check()
        self._choices.check()
        self._trials.check()
        self._beams.check()
        self._external.check(self._by_request)
        live = {*self._roster.running, *self._roster.waiting}
        live |= {s for s in self._by_request.values() if s.is_external and s.idle}
        choices = {s.request_id: s for s in live if not s.is_beam}
        assert self._by_request == choices, "the request map names the live choices, no others"
        assert all(map(self.lives, self.suspects.request_ids())), "who is suspected lives"
