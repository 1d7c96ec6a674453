"""A ROUTER that answers like the scheduler, with scripted tokens instead of a model."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import zmq

from triptych.v1 import common_pb2, stage_pb2

Script = Callable[[stage_pb2.Submit], Sequence[int]]
Key = tuple[bytes, int]


def fake_logprob(token: int) -> float:
    """What the fake scheduler says of a token; a float32."""
    return -0.5 - (token % 8)


def fake_top(position: int, count: int) -> list[int]:
    """The most likely tokens that it names at a position."""
    return [(position + rank) % 256 for rank in range(count)]


@dataclass
class Job:
    """One choice of a submitted request and where its script stands."""

    submit: stage_pb2.Submit
    tokens: Sequence[int]
    choice: int = 0
    sent: int = 0


@dataclass
class FakeScheduler:
    """Sends each request the tokens of `script`, `burst` a step, one step every `interval` seconds.

    A script that ends before max_tokens leaves its request waiting for ever. Stop token ids end a
    request with STOP, max_tokens with LENGTH. Set `paused` to hold all tokens back, `torn` to send
    outputs whose columns do not match. `choice_script` gives the tokens of each choice.

    Logprobs are `fake_logprob` and `fake_top`, ranks 1; every choice of beam search comes whole,
    with minus its index as score.
    """

    endpoint: str
    script: Script
    vocabulary_size: int = 320
    max_model_len: int = 4096
    max_sequence_len: int = 4096
    interval: float = 0.001
    burst: int = 1
    choice_script: Callable[[stage_pb2.Submit, int], Sequence[int]] | None = None
    cached_tokens: int = 0
    failing_choice: int = -1
    executor_ready: bool = True
    refusal: str = ""
    failure: stage_pb2.Failure | None = None
    torn: bool = False
    paused: bool = False
    step_age_ms: int = 0
    silent: bool = False
    epoch: int = field(default_factory=lambda: int.from_bytes(os.urandom(4)) + 1)
    hellos: list[stage_pb2.TokenizerHello] = field(default_factory=list)
    submits: list[stage_pb2.Submit] = field(default_factory=list)
    vocabularies: list[tuple[int, stage_pb2.Vocabulary]] = field(default_factory=list)
    """With how many submits had come before."""
    aborts: list[int] = field(default_factory=list)
    beats: int = 0
    errors: list[BaseException] = field(default_factory=list)
    jobs: dict[Key, Job] = field(default_factory=dict)
    _peers: set[bytes] = field(default_factory=set)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """The thread's body: one socket, one loop."""
        try:
            with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.bind(self.endpoint)
                self._loop(socket)
        except BaseException as error:
            self.errors.append(error)
            raise

    def forget_peers(self) -> None:
        """As a scheduler that was restarted, or that took its tokenizers for dead."""
        self.jobs.clear()
        self._peers.clear()

    def stop(self) -> None:
        """End the loop; `running` joins the thread."""
        self._stopping.set()

    def _loop(self, socket: zmq.Socket[bytes]) -> None:
        next_step = next_beat = time.monotonic()
        while not self._stopping.is_set():
            if socket.poll(1):
                peer, frame = socket.recv_multipart()
                if not self.silent:
                    self._message(socket, peer, stage_pb2.TokenizerMessage.FromString(frame))
            now = time.monotonic()
            if now >= next_beat and not self.silent:
                next_beat = now + 0.1
                for peer in self._peers:
                    self._send(socket, peer, stage_pb2.TokenizerReply(beat=self._beat()))
            if now >= next_step and not self.paused:
                next_step = now + self.interval
                self._step(socket)

    def _beat(self) -> stage_pb2.SchedulerBeat:
        return stage_pb2.SchedulerBeat(
            epoch=self.epoch, executor_ready=self.executor_ready, step_age_ms=self.step_age_ms
        )

    def _message(
        self, socket: zmq.Socket[bytes], peer: bytes, message: stage_pb2.TokenizerMessage
    ) -> None:
        if not message.HasField("hello") and peer not in self._peers:
            beat = stage_pb2.SchedulerBeat(epoch=0)
            self._send(socket, peer, stage_pb2.TokenizerReply(beat=beat))
            return
        match message.WhichOneof("message"):
            case "hello":
                self.hellos.append(message.hello)
                self._peers.add(peer)
                self._welcome(socket, peer)
            case "submit":
                self._submit(socket, peer, message.submit)
            case "abort":
                for slot in message.abort.slots:
                    self.aborts.append(slot)
                    self.jobs.pop((peer, slot), None)
            case "beat":
                self.beats += 1
            case "vocabulary":
                self.vocabularies.append((len(self.submits), message.vocabulary))

    def _welcome(self, socket: zmq.Socket[bytes], peer: bytes) -> None:
        if self.refusal:
            reply = stage_pb2.TokenizerReply(refused=stage_pb2.Refused(reason=self.refusal))
        else:
            model = stage_pb2.ModelFacts(
                architecture="llama",
                vocabulary_size=self.vocabulary_size,
                max_model_len=self.max_model_len,
            )
            welcome = stage_pb2.TokenizerWelcome(
                epoch=self.epoch, model=model, max_sequence_len=self.max_sequence_len
            )
            reply = stage_pb2.TokenizerReply(welcome=welcome)
        self._send(socket, peer, reply)

    def _submit(self, socket: zmq.Socket[bytes], peer: bytes, submit: stage_pb2.Submit) -> None:
        self.submits.append(submit)
        if self.failure is not None:
            failure = stage_pb2.Failure()
            failure.CopyFrom(self.failure)
            failure.slot = submit.slot
            outputs = stage_pb2.StepOutputs(failures=[failure])
            self._send(socket, peer, stage_pb2.TokenizerReply(outputs=outputs))
            return
        for choice in range(submit.params.n):
            tokens = (
                self.script(submit)
                if self.choice_script is None
                else self.choice_script(submit, choice)
            )
            self.jobs[peer, submit.slot + choice] = Job(submit, tokens, choice)

    def _step(self, socket: zmq.Socket[bytes]) -> None:
        outputs: dict[bytes, stage_pb2.StepOutputs] = {}
        for (peer, slot), job in list(self.jobs.items()):
            if job.sent >= len(job.tokens):
                continue
            message = outputs.setdefault(peer, stage_pb2.StepOutputs())
            if job.choice == self.failing_choice:
                reason = stage_pb2.FAILURE_REASON_NOT_FINITE
                message.failures.add(slot=slot, reason=reason, message="not finite")
                del self.jobs[peer, slot]
                continue
            if job.sent == 0:
                self._begin(message, slot, job)
            burst = len(job.tokens) if job.submit.params.HasField("beam") else self.burst
            for token in job.tokens[job.sent : job.sent + burst]:
                job.sent += 1
                finish = self._finish(job, token)
                self._add(message, slot, job, token, finish)
                if finish:
                    del self.jobs[peer, slot]
                    break
        for peer, message in outputs.items():
            if self.torn:
                message.finish_reasons = b""
            self._send(socket, peer, stage_pb2.TokenizerReply(outputs=message))

    def _begin(self, message: stage_pb2.StepOutputs, slot: int, job: Job) -> None:
        message.started.add(slot=slot, cached_tokens=self.cached_tokens + job.choice)
        params = job.submit.params
        if job.choice or not params.HasField("prompt_logprobs"):
            return
        tokens = np.frombuffer(job.submit.prompt_token_ids, "<u4").tolist()[1:]
        count = params.prompt_logprobs
        tops = [fake_top(position, count) for position in range(1, 1 + len(tokens))]
        message.prompt_logprobs.add(
            slot=slot,
            position=1,
            logprobs=np.array([fake_logprob(token) for token in tokens], "<f4").tobytes(),
            ranks=np.ones(len(tokens), "<u4").tobytes(),
            top_counts=np.full(len(tokens), count, "<u4").tobytes(),
            top_ids=np.array(tops, "<u4").tobytes(),
            top_logprobs=np.array(
                [[fake_logprob(token) for token in top] for top in tops], "<f4"
            ).tobytes(),
        )

    def _add(
        self, message: stage_pb2.StepOutputs, slot: int, job: Job, token: int, finish: int
    ) -> None:
        params = job.submit.params
        entry = len(message.finish_reasons)
        message.slots += np.array([slot], "<u4").tobytes()
        message.token_ids += np.array([token], "<u4").tobytes()
        message.finish_reasons += bytes([finish])
        if params.HasField("logprobs"):
            top = fake_top(job.sent - 1, params.logprobs)
            message.logprobs.add(
                entry=entry,
                logprob=fake_logprob(token),
                rank=1,
                top_ids=np.array(top, "<u4").tobytes(),
                top_logprobs=np.array([fake_logprob(each) for each in top], "<f4").tobytes(),
            )
        if finish and params.HasField("beam"):
            message.scores.add(entry=entry, score=-job.choice)

    @staticmethod
    def _finish(job: Job, token: int) -> int:
        if token in job.submit.params.stop_token_ids:
            return common_pb2.FINISH_REASON_STOP
        if job.sent >= job.submit.params.max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return 0

    @staticmethod
    def _send(socket: zmq.Socket[bytes], peer: bytes, reply: stage_pb2.TokenizerReply) -> None:
        socket.send_multipart([peer, reply.SerializeToString()])


@contextmanager
def running(scheduler: FakeScheduler) -> Iterator[FakeScheduler]:
    """Run it on a thread of its own."""
    thread = threading.Thread(target=scheduler.run, name="fake scheduler", daemon=True)
    thread.start()
    try:
        yield scheduler
    finally:
        scheduler.stop()
        thread.join(10)
    assert not scheduler.errors, scheduler.errors
