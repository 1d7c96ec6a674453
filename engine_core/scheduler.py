"""The scheduler: which tokens of which sequences to compute next. All generation state is here.

    submit(request)            refused at once, or waiting
    plan() -> StepPlan         what to compute; the step is then in flight
      write(plan, slot)          its inputs, for the executor
      sample_rows(plan)          what the sampler needs besides the logits
    then one of
      apply(result) -> events    the step was computed: tokens out, finished sequences freed
      fail_step(error) -> events the executor could not compute it: its sequences end
      lost()                     the executor is gone with its KV cache: compute all again
    abort(request_id)          at any time

Pure and synchronous: no clock, no randomness, no I/O; the same calls give the same plans.
Every accepted request ends with one event (a last Token, or Failed), or with abort and none.
"""

from bisect import bisect_left, insort

from triptych.engine_core.admission import Limits, check_queue, check_request
from triptych.engine_core.errors import NotFinite, RequestError
from triptych.engine_core.ids import RequestId, SequenceId
from triptych.engine_core.kv_cache import KvBlocks
from triptych.engine_core.policy import by_priority
from triptych.engine_core.request import Request
from triptych.engine_core.sequence import Sequence, SequenceState
from triptych.engine_core.step import (
    Event,
    Failed,
    SampleRow,
    ScheduledSequence,
    StepPlan,
    StepResult,
    Token,
)
from triptych.engine_core.step_writer import StepWriter
from triptych.engine_core.stop import banned_token_ids, finish_reason

NOT_FINITE = -1
"""In a StepResult: the row's logits are NaN or infinite, no token was drawn."""


class Scheduler:
    """Continuous batching over a paged KV cache, one step in flight at a time.

    A running sequence holds the blocks of all its tokens, and the writer its tokens; a waiting one
    holds neither. An aborted sequence stays among the running until its step is over, because the
    executor may still write to its blocks.
    """

    def __init__(self, limits: Limits, kv_cache: KvBlocks, writer: StepWriter) -> None:
        self._limits = limits
        self._kv_cache = kv_cache
        self._writer = writer
        self._waiting: list[Sequence] = []  # both in the order of the policy
        self._running: list[Sequence] = []
        self._by_request: dict[RequestId, Sequence] = {}  # neither ended nor aborted
        self._in_flight: StepPlan | None = None
        self._rows: list[Sequence] = []  # sequences of the step in flight, in its row order
        self._next_sequence_id = 0
        self._next_step_id = 1
        self.preemptions_total = 0

    # ------------------------------------------------------------------ requests in and out

    def submit(self, request: Request) -> None:
        """Accept a request, or raise InvalidRequest, TooLong or QueueFull and keep nothing."""
        assert request.request_id not in self._by_request, f"{request.request_id} is in use"
        check_request(request, self._limits, self._kv_cache.num_blocks, self._kv_cache.block_size)
        check_queue(self.num_requests, self._limits)
        sequence = Sequence(SequenceId(self._next_sequence_id), request)
        self._next_sequence_id += 1
        self._by_request[request.request_id] = sequence
        insort(self._waiting, sequence, key=by_priority)

    def abort(self, request_id: RequestId) -> bool:
        """End a request without an event; False if it is unknown, ended or aborted already."""
        sequence = self._by_request.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.state is SequenceState.WAITING:
            del self._waiting[bisect_left(self._waiting, by_priority(sequence), key=by_priority)]
        sequence.finish()
        if self._in_flight is None:
            self._free_finished()
        return True

    # ------------------------------------------------------------------ a step

    def plan(self) -> StepPlan:
        """Choose the next step. Unless empty, it is in flight until applied, failed or lost."""
        assert self._in_flight is None, "one step in flight at a time"
        rows, preempted = self._plan_running()
        if not preempted:
            self._admit_waiting(rows)
        plan = StepPlan(
            step_id=self._next_step_id,
            rows=tuple(rows),
            num_tokens=sum(row.num_tokens for row in rows),
            num_samples=sum(row.samples for row in rows),
            preempted=tuple(preempted),
        )
        if plan:
            self._next_step_id += 1
            self._in_flight = plan
        return plan

    def _plan_running(self) -> tuple[list[ScheduledSequence], list[SequenceId]]:
        """One token for each running sequence, the rest of the budget to those first in order.

        Without blocks for all, the last ones are preempted. The first never is: it fits the pool
        alone (admission), so every step makes progress.
        """
        spare = self._limits.max_num_batched_tokens - len(self._running)
        rows = []
        for sequence in self._running:
            start = sequence.num_computed
            missing = len(sequence.tokens) - start
            num_tokens = missing if missing == 1 else 1 + min(missing - 1, spare)
            spare -= num_tokens - 1
            samples = num_tokens == missing
            rows.append(ScheduledSequence(sequence.sequence_id, start, num_tokens, samples))
        preempted = []
        while self._kv_cache.reserve_rows(rows) < len(rows):
            rows.pop()
            preempted.append(self._running[-1].sequence_id)
            self._requeue_last()
            self.preemptions_total += 1
        self._rows = self._running.copy()
        return rows, preempted

    def _admit_waiting(self, rows: list[ScheduledSequence]) -> None:
        """Add rows for waiting sequences, in order, while tokens, places and blocks last.

        A sequence gets the blocks of all its tokens at once, though it may take several steps to
        compute them: half a prompt that waits for blocks would hold some and help nobody. The first
        that does not fit stops those behind it, or a long prompt could wait for ever.
        """
        budget = self._limits.max_num_batched_tokens - sum(row.num_tokens for row in rows)
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            sequence = self._waiting[0]
            if not self._kv_cache.reserve(sequence.sequence_id, sequence.num_tokens):
                break
            del self._waiting[0]
            sequence.start()
            insort(self._running, sequence, key=by_priority)
            self._writer.open(sequence.sequence_id, sequence.tokens)
            num_tokens = min(budget, sequence.num_tokens)
            budget -= num_tokens
            samples = num_tokens == sequence.num_tokens
            rows.append(ScheduledSequence(sequence.sequence_id, 0, num_tokens, samples))
            self._rows.append(sequence)

    def write(self, plan: StepPlan, slot: memoryview) -> None:
        """Fill a slot of the step ring with the inputs of the step in flight."""
        assert plan is self._in_flight, "only the step in flight can be written"
        self._writer.write(slot, plan.step_id, plan.rows)

    def sample_rows(self, plan: StepPlan) -> list[SampleRow]:
        """What the sampler needs for each logits row of the step in flight, in row order."""
        assert plan is self._in_flight, "only the step in flight can be sampled"
        rows = []
        for sequence, row in zip(self._rows, plan.rows, strict=True):
            if row.samples:
                params, position = sequence.request.params, sequence.num_output
                rows.append(
                    SampleRow(
                        temperature=params.temperature,
                        top_k=params.top_k,
                        top_p=params.top_p,
                        min_p=params.min_p,
                        seed=params.seed,
                        choice=0,
                        position=position,
                        banned=banned_token_ids(params, position),
                    )
                )
        return rows

    # ------------------------------------------------------------------ the end of a step

    def apply(self, result: StepResult) -> list[Event]:
        """Take in the tokens of the step in flight; an event for each, but for aborted requests."""
        plan = self._in_flight
        assert plan is not None, "no step is in flight"
        assert result.step_id == plan.step_id, f"result of {result.step_id}, not {plan.step_id}"
        assert len(result.token_ids) == plan.num_samples, "one token for each row with samples"
        tokens = iter(result.token_ids)
        events: list[Event] = []
        grown: list[SequenceId] = []
        grown_by: list[int] = []
        for sequence, row in zip(self._rows, plan.rows, strict=True):
            sequence.num_computed += row.num_tokens
            if not row.samples:
                continue
            token_id = next(tokens)
            if sequence.state is SequenceState.FINISHED:
                continue  # aborted while in flight
            event = self._take_token(sequence, token_id)
            events.append(event)
            if sequence.state is SequenceState.RUNNING:
                grown.append(sequence.sequence_id)
                grown_by.append(token_id)
        self._writer.append(grown, grown_by)
        self._end_step()
        return events

    def _take_token(self, sequence: Sequence, token_id: int) -> Event:
        request = sequence.request
        if token_id == NOT_FINITE:
            self._end(sequence)
            position = sequence.num_output
            return Failed(
                request.request_id,
                NotFinite(f"the logits of output token {position} are not finite"),
            )
        assert 0 <= token_id < self._limits.vocabulary_size, f"token id {token_id} from the sampler"
        sequence.tokens.append(token_id)
        room = self._limits.max_model_len - len(sequence.tokens)
        finish = finish_reason(request.params, token_id, sequence.num_output, room)
        if finish is not None:
            self._end(sequence)
        return Token(request.request_id, token_id, finish)

    def fail_step(self, error: RequestError) -> list[Event]:
        """The executor is alive but could not compute the step in flight: its requests end."""
        assert self._in_flight is not None, "no step is in flight"
        events: list[Event] = []
        for sequence in self._rows:
            if sequence.state is SequenceState.RUNNING:
                self._end(sequence)
                events.append(Failed(sequence.request.request_id, error))
        self._end_step()
        return events

    def lost(self) -> None:
        """The executor is gone, with the step in flight (if any) and all it had in its KV cache.

        Every running sequence waits again and is computed anew from its tokens: no token that was
        sent is lost, doubled or changed.
        """
        self._end_step()
        while self._running:
            self._requeue_last()

    def _end(self, sequence: Sequence) -> None:
        """The request is over; what its sequence holds is freed when the step ends."""
        del self._by_request[sequence.request.request_id]
        sequence.finish()

    def _end_step(self) -> None:
        self._in_flight = None
        self._rows = []
        self._free_finished()

    def _free_finished(self) -> None:
        still_running = []
        for sequence in self._running:
            if sequence.state is SequenceState.RUNNING:
                still_running.append(sequence)
            else:
                self._kv_cache.release(sequence.sequence_id)
                self._writer.close(sequence.sequence_id)
        self._running = still_running

    def _requeue_last(self) -> None:
        """The running sequence that is last in order gives everything back and waits again."""
        sequence = self._running.pop()
        self._kv_cache.release(sequence.sequence_id)
        self._writer.close(sequence.sequence_id)
        sequence.requeue()
        insort(self._waiting, sequence, key=by_priority)

    # ------------------------------------------------------------------ facts

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet, or no longer."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks, those aborted in the step in flight included."""
        return len(self._running)

    @property
    def num_requests(self) -> int:
        """Requests that have neither ended nor been aborted."""
        return len(self._by_request)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._kv_cache.num_free_blocks

    def check(self) -> None:
        """Assert every invariant; each names itself. O(everything): for tests."""
        running, waiting = self._running, self._waiting
        self._kv_cache.check()
        for name, sequences in (("running", running), ("waiting", waiting)):
            keys = [by_priority(sequence) for sequence in sequences]
            assert keys == sorted(set(keys)), f"{name} sequences are in order, each once"
        assert len(running) <= self._limits.max_num_seqs, "at most max_num_seqs run"
        assert {s.state for s in waiting} <= {SequenceState.WAITING}, "waiting ones are WAITING"
        states = {sequence.state for sequence in running}
        allowed = {SequenceState.RUNNING, SequenceState.FINISHED}
        assert states <= (allowed if self._in_flight else {SequenceState.RUNNING}), (
            "running ones are RUNNING, or aborted in the step in flight"
        )
        live = [s for s in (*running, *waiting) if s.state is not SequenceState.FINISHED]
        assert self._by_request == {s.request.request_id: s for s in live}, (
            "the request map names the sequences that have not ended, and no others"
        )
        ids = sorted(int(sequence.sequence_id) for sequence in running)
        assert self._kv_cache.sequence_ids() == ids, "running sequences hold blocks, and only they"
        assert self._writer.sequence_ids() == ids, "the writer has the running sequences' tokens"
        for sequence in running:
            held = len(self._kv_cache.table(sequence.sequence_id)) * self._kv_cache.block_size
            assert sequence.num_computed <= held, f"{sequence!r} has blocks for what is computed"
            tokens = self._writer.token_ids(sequence.sequence_id)
            assert tokens == sequence.tokens, f"the writer's tokens are those of {sequence!r}"
        for sequence in live:
            assert 0 <= sequence.num_computed < sequence.num_tokens, (
                f"{sequence!r}: computed < tokens"
            )
            bound = self._limits.max_model_len
            assert sequence.num_tokens <= bound, f"{sequence!r} is within max_model_len"
        if self._in_flight is not None:
            planned = [int(row.sequence_id) for row in self._in_flight.rows]
            assert sorted(planned) == ids, "the step in flight has a row for each running sequence"
