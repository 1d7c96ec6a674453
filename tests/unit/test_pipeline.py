"""Steps ahead of the device's answers: order, failures, ends of sessions, ages."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piped_steps import EPOCH, TIMEOUT, PipedBackend, PipedSession, settled
from triptych.engine_core.layout import PREVIOUS_SAMPLE
from triptych.services.executor import pipeline
from triptych.services.executor.backend import DrawnColumns, PipelinedBackend
from triptych.services.executor.device.errors import DeviceError, DeviceLostError
from triptych.services.executor.pipeline import DeviceFailedError, Pipeline
from triptych.services.executor.stats import Counters
from triptych.services.executor.step_inputs import StepInputsError
from triptych.v1 import stage_pb2

REFERRING = [PREVIOUS_SAMPLE]


class Run:
    """A pipeline at work in a thread."""

    def __init__(self, *, has_logits: bool = True, ranks: bool = False) -> None:
        self.session = PipedSession(has_logits=has_logits)
        self.backend: PipedBackend = PipedBackend()
        self.counters = Counters()
        self.fatal: list[str] = []
        self.error: BaseException | None = None
        self.pipeline = Pipeline(
            self.session,
            self.backend,
            self.counters,
            self.session.end,
            self.fatal.append if ranks else None,
        )
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.pipeline.serve(0)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()


@contextmanager
def running(*, has_logits: bool = True, ranks: bool = False) -> Iterator[Run]:
    run = Run(has_logits=has_logits, ranks=ranks)
    try:
        yield run
    finally:
        run.backend.finish_at_once = True
        while not run.backend.launched.empty():
            run.backend.launched.get().finish()
        run.session.end()
        run.join()
        let_go = run.session.close()
        assert let_go or run.error is not None, "somebody holds on to a ring"


@pytest.fixture(autouse=True)
def _nobody_keeps_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured log line holds its exception, that one its frames, and those views of a ring."""
    monkeypatch.setattr(pipeline._log, "disabled", True)


def test_it_is_a_pipelined_backend() -> None:
    assert isinstance(PipedBackend(), PipelinedBackend)


def test_two_steps_are_in_flight_and_never_three() -> None:
    with running() as run:
        for _ in range(3):
            run.session.put([1, 2])
        first, second = run.backend.next_launch(), run.backend.next_launch()
        assert (first.step_id, second.step_id) == (0, 1)
        time.sleep(0.02)
        assert run.backend.launched.empty()
        assert run.session.answers.empty()
        first.finish()
        assert run.session.answer().done.step_id == 0
        third = run.backend.next_launch()
        third.finish()  # before the second: it waits for its turn
        time.sleep(0.02)
        assert run.session.answers.empty()
        second.finish()
        assert [run.session.answer().done.step_id for _ in range(2)] == [1, 2]


def test_an_answer_has_what_was_drawn() -> None:
    ints = np.array([3, 1], np.int32)
    floats = np.array([-0.5, -1.5], np.float32)
    with running() as run:
        step_id = run.session.put([4, 5, 6], samples=2, host_rows=1)
        step = run.backend.next_launch()
        tops = np.array([7, 8, 9, 10], np.int32)
        step.drawn = DrawnColumns(
            np.array([9, -1], np.int32), floats, ints, ints, tops, np.ones(4, np.float32)
        )
        step.logits[0, :3] = 1, 2, 3
        step.finish()
        done = run.session.answer().done
        assert (done.step_id, done.slot, done.epoch) == (step_id, 0, EPOCH)
        assert np.frombuffer(done.drawn.token_ids, "<i4").tolist() == [9, -1]
        assert np.frombuffer(done.drawn.logprobs, "<f4").tolist() == floats.tolist()
        assert np.frombuffer(done.drawn.ranks, "<u4").tolist() == [3, 1]
        assert np.frombuffer(done.drawn.top_counts, "<u4").tolist() == [3, 1]
        assert np.frombuffer(done.drawn.top_ids, "<u4").tolist() == tops.tolist()
        assert np.frombuffer(done.drawn.top_logprobs, "<f4").tolist() == [1.0] * 4
        assert run.session.logits_ring is not None
        assert run.session.logits_ring.rows(0, step_id, 1)[0, :3].tolist() == [1, 2, 3]
        assert (run.counters.steps, run.counters.tokens) == (1, 3)
        assert done.execute_ns == pytest.approx(run.counters.step_seconds * 1e9, abs=2)


def test_logits_are_published_where_the_scheduler_reads_them() -> None:
    with running() as run:
        run.backend.finish_at_once = True
        steps = [run.session.put([1], samples=0), run.session.put([1]), run.session.put([1])]
        steps.append(run.session.put([1], host_rows=1))
        answers = [run.session.answer().done for _ in steps]
        assert [answer.HasField("drawn") for answer in answers] == [False, True, True, True]
        ring = run.session.logits_ring
        assert ring is not None
        for slot, step_id in ((0, steps[0]), (3, steps[3])):
            assert len(ring.rows(slot, step_id, 1)) == 1


def test_a_rank_without_logits() -> None:
    with running(has_logits=False, ranks=True) as run:
        run.backend.draws = False
        run.session.put([1], host_rows=1)
        step = run.backend.next_launch()
        assert step.logits.shape == (1, 1)
        step.finish()
        answer = run.session.answer()
        assert answer.HasField("done")
        assert not answer.done.HasField("drawn")
        assert run.backend.registered[1] == 0


def test_inputs_that_cannot_be_launched_fail_their_step_in_its_turn() -> None:
    with running(ranks=True) as run:
        run.backend.launch_error = lambda step: StepInputsError("no") if step == 1 else None
        for _ in range(2):
            run.session.put([1])
        first = run.backend.next_launch()
        time.sleep(0.02)
        assert run.session.answers.empty()
        first.finish()
        assert run.session.answer().done.step_id == 0
        answer = run.session.answer()
        assert (answer.failed.step_id, answer.failed.message) == (1, "StepInputsError: no")
        assert run.fatal == []


def test_a_slot_that_contradicts_itself_fails() -> None:
    with running() as run:
        run.backend.finish_at_once = True
        for _ in range(2):
            run.session.put([1])
        assert [run.session.answer().done.step_id for _ in range(2)] == [0, 1]
        run.session.put([1], host_rows=2)  # of one row of logits
        assert "do not fit" in run.session.answer().failed.message


@pytest.mark.parametrize("at", ["launch", "wait"])
def test_what_builds_on_a_step_that_failed_fails_too(at: str) -> None:
    with running() as run:
        if at == "launch":
            run.backend.launch_error = lambda step: DeviceError("x") if step == 1 else None
        run.session.put([1])
        run.backend.next_launch().finish()
        assert run.session.answer().HasField("done")
        run.session.put([1])
        if at == "wait":
            failing = run.backend.next_launch()
            run.session.put(REFERRING)
            behind = run.backend.next_launch()
            failing.finish(DeviceError("x"))
            behind.finish()
        else:
            run.session.put(REFERRING)
        assert run.session.answer().failed.message == "DeviceError: x"
        answer = run.session.answer()
        assert (answer.failed.step_id, "before it failed" in answer.failed.message) == (2, True)
        if at == "launch":  # the device still has the tokens of the one before: not to be taken
            assert "launched 2" not in run.backend.events
        run.session.put(REFERRING)  # builds on what was not computed either
        if at == "wait":
            run.backend.next_launch().finish()
        assert run.session.answer().HasField("failed")
        run.session.put([1])
        run.backend.next_launch().finish()
        assert run.session.answer().done.step_id == 4


def test_the_end_of_a_session_waits_for_what_is_in_flight() -> None:
    with running() as run:
        run.session.put([1])
        run.session.put([1])
        steps = run.backend.next_launch(), run.backend.next_launch()
        run.session.end()
        time.sleep(0.02)
        assert run.backend.events[-1] == "launched 1"
        for step in steps:
            step.finish()
        run.join()
        assert run.backend.events == ["registered", "launched 0", "launched 1", "unregistered"]
        assert [run.session.answer().done.step_id for _ in range(2)] == [0, 1]
        assert run.counters.watch.oldest_step is None


@pytest.mark.parametrize("at", ["launch", "wait"])
def test_a_lost_device_ends_the_loop_without_an_answer(at: str) -> None:
    with running() as run:
        lost = DeviceLostError("illegal address")
        if at == "launch":
            run.backend.launch_error = lambda step: lost
            run.session.put([1])
        else:
            run.session.put([1])
            run.session.put([1])
            run.backend.next_launch().finish(lost)
            run.backend.next_launch().finish()
        run.join()
        assert isinstance(run.error, DeviceFailedError)
        assert run.session.answers.empty()
        assert run.backend.events[-1] == "unregistered"


def test_ranks_that_compute_together_end_at_a_failure_of_one() -> None:
    with running(ranks=True) as run:
        run.session.put([1])
        run.backend.next_launch().finish(DeviceError("x"))
        assert settled(lambda: run.fatal == ["step 0 failed: DeviceError: x"])


def test_an_error_of_the_answering_thread_ends_the_loop() -> None:
    with running() as run:
        run.session.put([1])
        step = run.backend.next_launch()
        assert step.drawn is not None
        step.drawn = DrawnColumns(*[None] * 6)  # type: ignore[arg-type]  # a bug of a backend
        step.finish()
        run.join()
        assert isinstance(run.error, DeviceFailedError)


def test_ages_count_from_when_the_device_could_begin() -> None:
    with running() as run:
        run.session.put([1])
        run.session.put([1])
        first, second = run.backend.next_launch(), run.backend.next_launch()
        assert settled(lambda: len(run.counters.watch._state.begun) == 2)
        time.sleep(0.05)
        before = time.monotonic()
        first.finish()
        one = run.session.answer().done
        assert settled(lambda: (run.counters.watch.oldest_step or 0.0) >= before)
        second.finish()
        two = run.session.answer().done
        assert one.execute_ns >= 50_000_000
        assert two.execute_ns <= int((time.monotonic() - before) * 1e9)
        assert settled(lambda: run.counters.watch.oldest_step is None)


_OUTCOMES = st.lists(
    st.tuples(st.sampled_from(["done", "launch", "wait"]), st.booleans()), min_size=1, max_size=30
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_OUTCOMES)
def test_every_step_is_answered_once_in_order(outcomes: list[tuple[str, bool]]) -> None:
    """Its own failure, or that of what it refers to, and nothing else, makes a step fail."""
    with running() as run:

        def fails(step: int) -> Exception | None:
            return StepInputsError("x") if outcomes[step][0] == "launch" else None

        run.backend.launch_error = fails

        def finish() -> None:
            for step, (outcome, refers) in enumerate(outcomes):
                if outcome == "launch" or (refers and step and not was_launched[step - 1]):
                    continue
                launched = run.backend.next_launch()
                assert launched.step_id == step
                launched.finish(DeviceError("x") if outcome == "wait" else None)

        was_launched: list[bool] = []
        expected: list[bool] = []
        for step, (outcome, refers) in enumerate(outcomes):
            builds = refers and step > 0
            was_launched.append(outcome != "launch" and not (builds and not was_launched[-1]))
            expected.append(outcome == "done" and not (builds and not expected[-1]))
        finisher = threading.Thread(target=finish)
        finisher.start()
        answers: list[stage_pb2.ExecutorMessage] = []
        for step, (_, refers) in enumerate(outcomes):
            while step >= len(answers) + 2:
                answers.append(run.session.answer())
            run.session.put(REFERRING if refers and step else [1])
        while len(answers) < len(outcomes):
            answers.append(run.session.answer())
        finisher.join()
        ids = [
            (answer.done if answer.HasField("done") else answer.failed).step_id
            for answer in answers
        ]
        assert ids == list(range(len(outcomes)))
        assert [answer.HasField("done") for answer in answers] == expected
        assert run.session.answers.empty()
