"""A whole answer, joined from its pieces."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from triptych.v1 import common_pb2, inference_pb2

Response = inference_pb2.GenerateResponse | inference_pb2.ChatResponse


@dataclass(slots=True)
class Choice:
    """One output of a request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it."""
    logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    score: float | None = None
    reasoning: str = ""
    """What the model thought before the text (chat only)."""
    tool_calls: list[inference_pb2.ToolCall] = field(default_factory=list)

    def add(self, response: Response) -> None:
        """Join the next piece of this choice."""
        self.text += response.text
        self.token_ids += response.token_ids
        self.logprobs += response.logprobs
        if response.finish_reason:
            self.finish_reason = response.finish_reason
        match response.WhichOneof("stop_reason"):
            case "stop_string":
                self.stop_reason = response.stop_string
            case "stop_token_id":
                self.stop_reason = response.stop_token_id
        if response.HasField("score"):
            self.score = response.score
        if isinstance(response, inference_pb2.ChatResponse):
            self.reasoning += response.reasoning
            for delta in response.tool_calls:
                self._add_call(delta)

    def _add_call(self, delta: inference_pb2.ToolCallDelta) -> None:
        while len(self.tool_calls) <= delta.index:
            self.tool_calls.append(inference_pb2.ToolCall())
        call = self.tool_calls[delta.index]
        call.id += delta.id
        call.name += delta.name
        call.arguments += delta.arguments


@dataclass(slots=True)
class Answer:
    """All choices of a request. The shorthands are those of the first one."""

    choices: list[Choice] = field(default_factory=list)
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)
    prompt_logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)

    def add(self, response: Response) -> None:
        """Join the next piece."""
        while len(self.choices) <= response.index:
            self.choices.append(Choice())
        self.choices[response.index].add(response)
        self.prompt_logprobs += response.prompt_logprobs
        if response.HasField("usage"):
            self.usage = response.usage

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> common_pb2.FinishReason.ValueType:
        """Of the first choice."""
        return self.choices[0].finish_reason


def joined(responses: Iterable[Response]) -> Answer:
    """The answer that these pieces are."""
    answer = Answer()
    for response in responses:
        answer.add(response)
    return answer
