"""A tokenizer process's end of the scheduler connection, without text, for one test's thread."""

import time
from collections.abc import Callable, Sequence

import zmq

from fake_executor import FINGERPRINT, VOCABULARY
from triptych.engine_core.errors import RequestError
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.step import FinishReason
from triptych.services.runtime.run_dir import RunDir
from triptych.services.transport import step_outputs, wire
from triptych.services.transport.channel import PROTOCOL_VERSION, DealerChannel, new_identity
from triptych.services.transport.vocabulary import Vocabulary, vocabulary_message
from triptych.v1 import stage_pb2

EOS = 94
_SPELLED = 94  # tokens below are the printable ASCII characters from "!" on


def fake_vocabulary() -> Vocabulary:
    """A character a token, without the blank; those that the fake executor gives a meaning have
    no text."""
    pieces = [bytes([ord("!") + token]) for token in range(_SPELLED)]
    pieces += [b"<eos>"] + [b""] * (VOCABULARY - _SPELLED - 1)
    return Vocabulary(tuple(pieces), (EOS,), (EOS,))


def text_of(token_ids: Sequence[int]) -> str:
    """What a tokenizer with this vocabulary would say."""
    return "".join(chr(ord("!") + token) for token in token_ids if token < _SPELLED)


class FakeTokenizer:
    """Says hello when made. What the scheduler says is taken in by `until` and `pump`."""

    def __init__(
        self,
        run_dir: RunDir,
        vocabulary_size: int = VOCABULARY,
        fingerprint: str = FINGERPRINT,
        protocol_version: int = PROTOCOL_VERSION,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel: DealerChannel[stage_pb2.TokenizerReply, stage_pb2.TokenizerMessage] = (
            DealerChannel(
                self._context,
                run_dir.scheduler_endpoint,
                stage_pb2.TokenizerReply,
                new_identity("tokenizer"),
            )
        )
        self._hello = stage_pb2.TokenizerHello(
            protocol_version=protocol_version,
            fingerprint=fingerprint,
            vocabulary_size=vocabulary_size,
        )
        self.welcomes: list[stage_pb2.TokenizerWelcome] = []
        self.beats: list[stage_pb2.SchedulerBeat] = []
        self.refused: str | None = None
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.failed: dict[int, RequestError] = {}
        self.logprobs: dict[int, list[step_outputs.TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, list[step_outputs.PromptRows]] = {}
        self.cached_tokens: dict[int, int] = {}
        self.scores: dict[int, float] = {}
        self.messages = 0
        self._next_slot = 1
        self._beaten = 0.0
        self.say_hello()

    def say_hello(self) -> None:
        self.welcomes.clear()
        self.beats.clear()
        self._hello.attempt += 1
        self.channel.send(stage_pb2.TokenizerMessage(hello=self._hello))

    def tell_vocabulary(self, message: stage_pb2.Vocabulary | None = None) -> None:
        """What has to be told before the first grammar."""
        said = vocabulary_message(fake_vocabulary()) if message is None else message
        self.channel.send(stage_pb2.TokenizerMessage(vocabulary=said))

    @property
    def executor_ready(self) -> bool:
        """What the last beat said; true when there was none."""
        return not self.beats or self.beats[-1].executor_ready

    @property
    def told_to_start_again(self) -> bool:
        return bool(self.beats) and self.beats[-1].epoch == 0

    @property
    def attempt(self) -> int:
        """Of the latest hello."""
        return self._hello.attempt

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        sent: Sequence[int] = (),
        *,
        accepted: bool = False,
        **params: object,
    ) -> int:
        """Send a greedy request; the slot of its first choice."""
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params})  # type: ignore[arg-type]  # test values
        return self.submit_with(
            prompt, sampling, output_token_ids=wire.pack_u32(sent), accepted=accepted
        )

    def submit_with(self, prompt: Sequence[int], params: SamplingParams, **fields: object) -> int:
        """Send a request with these further fields of its Submit; the slot of its first choice."""
        submit = wire.submit_of(wire.pack_u32(prompt), params)
        submit.slot = self._next_slot
        for name, value in fields.items():
            setattr(submit, name, value)
        self._next_slot = max(self._next_slot, submit.slot + params.n)
        self.send_submit(submit)
        return submit.slot

    def send_submit(self, submit: stage_pb2.Submit) -> None:
        for slot in range(submit.slot, submit.slot + max(submit.params.n, 1)):
            self.tokens.setdefault(slot, [])
        self.channel.send(stage_pb2.TokenizerMessage(submit=submit))

    def abort(self, *slots: int) -> None:
        self.channel.send(stage_pb2.TokenizerMessage(abort=stage_pb2.Abort(slots=slots)))

    def pump(self, seconds: float) -> None:
        """Take in what comes for so long, with beats."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if time.monotonic() - self._beaten > 0.1:
                self._beaten = time.monotonic()
                self.channel.send(stage_pb2.TokenizerMessage(beat=stage_pb2.TokenizerBeat()))
            self.channel.wait(min(left, 0.05))
            self._take()

    def until(self, condition: Callable[[], object], timeout: float = 30.0) -> None:
        """Take in what comes until the condition holds."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, "the condition does not come true"
            self.pump(0.02)

    def ended(self, *slots: int) -> bool:
        """Whether the requests have ended, either way."""
        return all(slot in self.finished or slot in self.failed for slot in slots)

    def close(self) -> None:
        self.channel.close()
        self._context.term()

    def _take(self) -> None:
        for reply in self.channel.receive():
            match reply.WhichOneof("message"):
                case "welcome":
                    self.welcomes.append(reply.welcome)
                case "refused":
                    self.refused = reply.refused.reason
                case "beat":
                    self.beats.append(reply.beat)
                case "outputs":
                    self.messages += 1
                    self._take_outputs(reply.outputs)

    def _take_outputs(self, outputs: stage_pb2.StepOutputs) -> None:
        logprobs = step_outputs.logprobs_from_outputs(outputs)
        scores = step_outputs.scores_from_outputs(outputs)
        for started in outputs.started:
            assert not self.tokens[started.slot], "a choice starts before its first token"
            self.cached_tokens[started.slot] = started.cached_tokens
        for rows in step_outputs.prompt_logprobs_from_outputs(outputs):
            self.prompt_logprobs.setdefault(rows.slot, []).append(rows)
        tokens = step_outputs.tokens_from_outputs(outputs)
        for entry, (slot, token_id, finish) in enumerate(tokens):
            assert not self.ended(slot), "a choice ends once"
            self.tokens[slot].append(token_id)
            if entry in logprobs:
                self.logprobs.setdefault(slot, []).append(logprobs[entry])
            if entry in scores:
                self.scores[slot] = scores[entry]
            if finish:
                self.finished[slot] = FinishReason(finish)
        for failure in step_outputs.failures_from_outputs(outputs):
            assert not self.ended(failure.slot), "a choice ends once"
            self.failed[failure.slot] = failure.error
