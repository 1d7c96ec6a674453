"""An executor of several ranks, as its scheduler sees it: joined, asked and lost together."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from triptych.services.executor.scheduler_link import SchedulerLink, Session
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.run_dir import RunDir
from triptych.services.scheduler.executor_link import (
    ExecutorEvent,
    ExecutorJoined,
    ExecutorLink,
    ExecutorLost,
)
from triptych.services.transport.channel import wake_descriptor
from triptych.services.transport.rings import RingError
from triptych.v1 import stage_pb2

WAIT = 30.0
TIMEOUT = 5.0
EPOCH = 7
WELCOME = stage_pb2.ExecutorWelcome(
    epoch=EPOCH, num_slots=2, max_num_batched_tokens=16, max_num_seqs=4, max_logits=4
)


def hello_of(rank: int, size: int = 2, **facts: object) -> stage_pb2.ExecutorHello:
    values: dict[str, object] = {
        "fingerprint": "print", "architecture": "fake", "vocabulary_size": 9, "max_model_len": 64,
        "block_size": 4, "num_blocks": 32,
    }  # fmt: skip
    model = stage_pb2.ModelFacts(**{**values, **facts})  # type: ignore[arg-type]  # test values
    return stage_pb2.ExecutorHello(rank=rank, tensor_parallel_size=size, model=model)


class Rank:
    """A rank's end of the connection; it joins on a thread of its own."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], run_dir: RunDir, hello: object
    ) -> None:
        assert isinstance(hello, stage_pb2.ExecutorHello)
        self._link = SchedulerLink(context, run_dir, f"executor-{hello.rank}", hello)
        self._stopping = threading.Event()
        self._session: Session | None = None
        self.refused = ""
        self._wake = wake_descriptor()
        self._thread = threading.Thread(target=self._join)
        self._thread.start()

    def _join(self) -> None:
        try:
            joined = self._link.join(self._stopping)
        except StartupError as error:
            self.refused = str(error)
        else:
            self._session = None if joined is None else joined[0]

    @property
    def session(self) -> Session | None:
        return None if self._thread.is_alive() else self._session

    @property
    def there(self) -> Session:
        session = self.session
        assert session is not None
        return session

    def next_step(self) -> stage_pb2.StepReady | None:
        """None: the scheduler has let go of it."""
        return next(self.there.steps(self._wake), None)

    def done(self, step_id: int, execute_ns: int = 0) -> None:
        self.there.send(
            stage_pb2.ExecutorMessage(
                done=stage_pb2.StepDone(step_id=step_id, epoch=EPOCH, execute_ns=execute_ns)
            )
        )

    def failed(self, step_id: int, message: str) -> None:
        failed = stage_pb2.StepFailed(step_id=step_id, epoch=EPOCH, message=message)
        self.there.send(stage_pb2.ExecutorMessage(failed=failed))

    def end(self) -> None:
        """As a process ends: nobody has joined again in its name."""
        self._stopping.set()
        self._thread.join(WAIT)
        session, self._session = self._session, None
        if session is not None:
            session.close()


class Scene:
    """A link, its clock, and ranks."""

    def __init__(self, folder: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._run_dir = RunDir.open(folder)
        self.link = ExecutorLink(self._context, self._run_dir, WELCOME, self._poller, TIMEOUT)
        self.events: list[ExecutorEvent] = []
        self._ranks: list[Rank] = []

    def rank(self, hello: stage_pb2.ExecutorHello) -> Rank:
        self._ranks.append(Rank(self._context, self._run_dir, hello))
        return self._ranks[-1]

    def turn(self) -> None:
        ready = {int(each) for each, _ in self._poller.poll(10) if isinstance(each, int)}
        self.events += self.link.receive(ready, time.monotonic())

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < end, f"it does not come true: {self.events}"
            self.turn()

    def next_event(self) -> ExecutorEvent:
        self.until(lambda: self.events)
        return self.events.pop(0)

    def nothing_comes(self) -> None:
        for _ in range(10):
            self.turn()
        assert not self.events

    def joined(self, *hellos: stage_pb2.ExecutorHello) -> list[Rank]:
        ranks = [self.rank(hello) for hello in hellos or (hello_of(0), hello_of(1))]
        event = self.next_event()
        assert isinstance(event, ExecutorJoined)
        self.until(lambda: all(rank.session for rank in ranks))
        return ranks

    def close(self) -> None:
        for rank in self._ranks:
            rank.end()
        self.link.close()
        self._context.destroy(linger=0)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "run")
    yield scene
    scene.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_it_has_joined_when_all_are_there(scene: Scene, order: tuple[int, ...]) -> None:
    *early, last = order
    ranks = [scene.rank(hello_of(number, 3)) for number in early]
    scene.until(lambda: all(rank.session for rank in ranks))
    scene.nothing_comes()
    assert not scene.link.ready
    scene.rank(hello_of(last, 3))
    event = scene.next_event()
    assert isinstance(event, ExecutorJoined)
    assert event.facts == hello_of(0).model
    assert scene.link.ready


def test_a_step_goes_to_all_and_is_done_when_all_have_answered(scene: Scene) -> None:
    ranks = scene.joined()
    scene.link.step_slot(1)[:4] = b"step"
    assert scene.link.dispatch(5, 1)
    for rank in ranks:
        ready = rank.next_step()
        assert ready is not None
        assert (ready.step_id, ready.slot) == (5, 1)
        assert bytes(rank.there.step_ring.slot(1)[:4]) == b"step"
    ranks[1].done(5, execute_ns=100)
    scene.nothing_comes()
    ranks[0].done(5, execute_ns=200)
    event = scene.next_event()
    assert isinstance(event, stage_pb2.StepDone)
    assert event.execute_ns == 200


def test_only_rank_0_has_logits(scene: Scene) -> None:
    ranks = scene.joined()
    ring = ranks[0].there.logits_ring
    assert ring is not None
    assert ranks[1].there.logits_ring is None
    ring.logits(0)[2] = 3.0
    ring.publish(0, 5, 3)
    assert scene.link.logits(0, 5, 3)[2].tolist() == [3.0] * 9
    with pytest.raises(RingError):
        scene.link.logits(0, 6, 3)


def test_two_steps_on_their_way_end_in_order(scene: Scene) -> None:
    ranks = scene.joined()
    for step in (5, 6):
        assert scene.link.dispatch(step, step - 5)
    ranks[0].done(5)
    ranks[0].done(6)
    scene.nothing_comes()
    ranks[1].done(5)
    ranks[1].done(6)
    ended = [scene.next_event() for _ in range(2)]
    assert [getattr(event, "step_id", None) for event in ended] == [5, 6]


def test_a_step_that_failed_anywhere_has_failed(scene: Scene) -> None:
    ranks = scene.joined()
    assert scene.link.dispatch(5, 1)
    ranks[1].failed(5, "no room")
    scene.nothing_comes()
    ranks[0].done(5)
    event = scene.next_event()
    assert isinstance(event, stage_pb2.StepFailed)
    assert event.message == "rank 1: no room"
    assert scene.link.ready


@pytest.mark.parametrize("answers", [(5, 5), (6,)])
def test_an_answer_that_nobody_asked_for_is_the_end(scene: Scene, answers: tuple[int, ...]) -> None:
    ranks = scene.joined()
    assert scene.link.dispatch(5, 1)
    for step in answers:
        ranks[1].done(step)
    event = scene.next_event()
    assert isinstance(event, ExecutorLost)
    assert event.reason == f"rank 1: it answered step {answers[-1]}, which it was not asked"


@pytest.mark.parametrize("victim", [0, 1])
def test_all_are_lost_with_one(scene: Scene, victim: int) -> None:
    ranks = scene.joined()
    assert scene.link.dispatch(5, 1)
    assert ranks[1 - victim].next_step() is not None
    ranks[victim].end()
    event = scene.next_event()
    assert isinstance(event, ExecutorLost)
    assert event.reason == f"rank {victim}: its connection ended"
    assert not scene.link.ready
    assert ranks[1 - victim].next_step() is None
    ranks[1 - victim].end()
    scene.joined()  # and others take their place


def test_what_all_said_before_one_died_counts(scene: Scene) -> None:
    ranks = scene.joined()
    assert scene.link.dispatch(5, 1)
    for rank in ranks:
        assert rank.next_step() is not None
        rank.done(5)
    ranks[1].end()
    assert isinstance(scene.next_event(), stage_pb2.StepDone)
    assert isinstance(scene.next_event(), ExecutorLost)


def test_silence_of_one_is_the_end_of_all(scene: Scene) -> None:
    ranks = scene.joined()
    assert scene.link.dispatch(5, 1)
    begun = time.monotonic()
    ranks[0].done(5)  # heard later than the other
    scene.until(lambda: time.monotonic() > begun + 0.1)
    assert list(scene.link.expire(time.monotonic())) == []
    (lost,) = scene.link.expire(begun + TIMEOUT + 0.05)
    assert isinstance(lost, ExecutorLost)
    assert lost.reason.startswith("rank 1: it was silent for ")
    assert not scene.link.ready


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (hello_of(1, num_blocks=31), "num_blocks: 31 of rank 1, other ranks have 32"),
        (hello_of(1, fingerprint="x"), "fingerprint: x of rank 1, other ranks have print"),
        (hello_of(1, 3), "tensor_parallel_size: 3, others have 2"),
        (hello_of(2, 2), "rank: 2 is not below tensor_parallel_size 2"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused(
    scene: Scene, wrong: stage_pb2.ExecutorHello, reason: str
) -> None:
    first = scene.rank(hello_of(0))
    scene.until(lambda: first.session)
    refused = scene.rank(wrong)
    scene.until(lambda: refused.refused)
    assert refused.refused == f"the scheduler refused: {reason}"
    scene.rank(hello_of(1))
    assert isinstance(scene.next_event(), ExecutorJoined)


def test_nobody_else_once_all_are_there(scene: Scene) -> None:
    scene.joined()
    other = scene.rank(hello_of(0, 1))
    scene.until(lambda: other.refused)
    assert other.refused == "the scheduler refused: another executor is connected"
    assert scene.link.ready


def test_who_goes_before_all_are_there_is_waited_for(scene: Scene) -> None:
    first = scene.rank(hello_of(0))
    scene.until(lambda: first.session)
    first.end()
    scene.nothing_comes()
    scene.joined(hello_of(1), hello_of(0))


def test_the_newest_of_a_rank_wins_before_all_are_there(scene: Scene) -> None:
    stale = scene.rank(hello_of(0))
    scene.until(lambda: stale.session)
    again = scene.rank(hello_of(0))
    scene.until(lambda: again.session)
    assert stale.next_step() is None
    scene.rank(hello_of(1))
    assert isinstance(scene.next_event(), ExecutorJoined)
    assert scene.link.dispatch(1, 0)
    assert again.next_step() is not None


def test_one_process_alone_is_asked_as_ever(scene: Scene) -> None:
    (rank,) = scene.joined(hello_of(0, 0))
    assert scene.link.dispatch(5, 1)
    rank.failed(5, "no room")
    event = scene.next_event()
    assert isinstance(event, stage_pb2.StepFailed)
    assert event.message == "no room"
    rank.end()
    lost = scene.next_event()
    assert isinstance(lost, ExecutorLost)
    assert lost.reason == "its connection ended"
