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
    """One choice of a submitted request and where its script stands; `scored` prompt rows."""

    submit: stage_pb2.Submit
    tokens: Sequence[int]
    choice: int = 0
    sent: int = 0
    scored: int = 0
    begun: bool = False


@dataclass
class FakeScheduler:
    """Sends each request the tokens of `script`, `burst` a step, one step every `interval` seconds.

    A script that ends before max_tokens leaves its request waiting for ever. Stop token ids end a
    request with STOP, max_tokens with LENGTH. Set `paused` to hold all tokens back, `torn` to send
    outputs whose columns do not match. `choice_script` gives the tokens of each choice.

    Logprobs are `fake_logprob` and `fake_top`, ranks 1; every choice of beam search comes whole
    (unless `split_beams`), with minus its index as score. `prompt_rows` prompt logprobs a message;
    0: all, with the first token.

    A resumed choice goes on behind its tokens. It dies after `most_outputs` messages of tokens,
    without a word, and welcomes nobody while not `welcoming`.
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
    welcoming: bool = True
    split_beams: bool = False
    prompt_rows: int = 0
    most_outputs: int = -1
    outputs_sent: int = 0
    activity: int = 0
    epoch: int = field(default_factory=lambda: int.from_bytes(os.urandom(4)) + 1)
    hellos: list[stage_pb2.TokenizerHello] = field(default_factory=list)
    submits: list[stage_pb2.Submit] = field(default_factory=list)
    vocabularies: list[tuple[int, stage_pb2.Vocabulary]] = field(default_factory=list)
    """With how many submits had come before."""
    aborts: list[int] = field(default_factory=list)
    beats: int = 0
    errors: list[BaseException] = field(default_factory=list)
    jobs: dict[Key, Job] = field(default_factory=dict)
    _peers: dict[bytes, int] = field(default_factory=dict)
    """The attempt of each."""
    _unwelcomed: list[bytes] = field(default_factory=list)
    _used: set[Key] = field(default_factory=set)
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
        self._unwelcomed.clear()

    @property
    def dead(self) -> bool:
        """Whether its loop has ended, or is about to."""
        return self._stopping.is_set()

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
            if self.welcoming:
                while self._unwelcomed:
                    self._welcome(socket, self._unwelcomed.pop(0))
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
            epoch=self.epoch,
            executor_ready=self.executor_ready,
            step_age_ms=self.step_age_ms,
            activity=stage_pb2.Activity.ValueType(self.activity),
        )

    def _message(
        self, socket: zmq.Socket[bytes], peer: bytes, message: stage_pb2.TokenizerMessage
    ) -> None:
        welcomed = peer in self._peers and peer not in self._unwelcomed
        if not message.HasField("hello") and not (
            welcomed or (peer in self._peers and message.HasField("beat"))
        ):
            beat = stage_pb2.SchedulerBeat(epoch=0)
            self._send(socket, peer, stage_pb2.TokenizerReply(beat=beat))
            return
        match message.WhichOneof("message"):
            case "hello":
                self.hellos.append(message.hello)
                self._forget(peer)
                self._peers[peer] = message.hello.attempt
                self._unwelcomed.append(peer)
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

    def _forget(self, peer: bytes) -> None:
        """It says hello again: it has dropped all it had."""
        self.jobs = {key: job for key, job in self.jobs.items() if key[0] != peer}
        self._used = {key for key in self._used if key[0] != peer}
        if peer in self._unwelcomed:
            self._unwelcomed.remove(peer)

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
                epoch=self.epoch,
                model=model,
                max_sequence_len=self.max_sequence_len,
                attempt=self._peers[peer],
            )
            reply = stage_pb2.TokenizerReply(welcome=welcome)
        self._send(socket, peer, reply)

    def _submit(self, socket: zmq.Socket[bytes], peer: bytes, submit: stage_pb2.Submit) -> None:
        self.submits.append(submit)
        sent = np.frombuffer(submit.output_token_ids, "<u4").tolist()
        slots = {(peer, submit.slot + choice) for choice in range(submit.params.n)}
        assert self._used.isdisjoint(slots), "a slot is used twice"
        assert not sent or (submit.params.n == 1 and len(sent) < submit.params.max_tokens)
        self._used |= slots
        if self.failure is not None:
            failure = stage_pb2.Failure()
            failure.CopyFrom(self.failure)
            failure.slot = submit.slot
            outputs = stage_pb2.StepOutputs(failures=[failure])
            self._send(socket, peer, stage_pb2.TokenizerReply(outputs=outputs))
            return
        for choice in range(submit.params.n):
            index = submit.choice + choice
            tokens = (
                self.script(submit)
                if self.choice_script is None
                else self.choice_script(submit, index)
            )
            assert list(tokens[: len(sent)]) == sent, "it goes on from tokens that it never sent"
            self.jobs[peer, submit.slot + choice] = Job(submit, tokens, index, len(sent))

    def _step(self, socket: zmq.Socket[bytes]) -> None:
        outputs: dict[bytes, stage_pb2.StepOutputs] = {}
        for (peer, slot), job in list(self.jobs.items()):
            if job.sent >= len(job.tokens):
                continue
            if self._scores(job):
                message = outputs.setdefault(peer, stage_pb2.StepOutputs())
                self._score(message, slot, job, self.prompt_rows)
                continue
            message = outputs.setdefault(peer, stage_pb2.StepOutputs())
            if job.choice == self.failing_choice:
                reason = stage_pb2.FAILURE_REASON_NOT_FINITE
                message.failures.add(slot=slot, reason=reason, message="not finite")
                del self.jobs[peer, slot]
                continue
            if not job.begun:
                self._begin(message, slot, job)
            whole = job.submit.params.HasField("beam") and not self.split_beams
            burst = len(job.tokens) if whole else self.burst
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
            self.outputs_sent += 1
            if self.outputs_sent == self.most_outputs:
                self._stopping.set()
                return

    def _begin(self, message: stage_pb2.StepOutputs, slot: int, job: Job) -> None:
        job.begun = True
        message.started.add(slot=slot, cached_tokens=self.cached_tokens + job.choice)
        if self._is_scored(job) and not self.prompt_rows:
            self._score(message, slot, job, 1 << 30)

    def _scores(self, job: Job) -> bool:
        """Whether prompt logprobs come before the first token, in messages of their own."""
        rows = len(job.submit.prompt_token_ids) // 4 - 1
        return self._is_scored(job) and self.prompt_rows > 0 and job.scored < rows

    @staticmethod
    def _is_scored(job: Job) -> bool:
        """The first choice of a Submit computes the prompt for all."""
        is_first = job.choice == job.submit.choice
        return is_first and job.submit.params.HasField("prompt_logprobs")

    @staticmethod
    def _score(message: stage_pb2.StepOutputs, slot: int, job: Job, most: int) -> None:
        begin = 1 + job.scored
        tokens = np.frombuffer(job.submit.prompt_token_ids, "<u4").tolist()[begin:][:most]
        job.scored += len(tokens)
        count = job.submit.params.prompt_logprobs
        tops = [fake_top(position, count) for position in range(begin, begin + len(tokens))]
        message.prompt_logprobs.add(
            slot=slot,
            position=begin,
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
        thread.join(30)
    assert not scheduler.errors, scheduler.errors
