"""Streams with several choices, joined; logprobs as lists."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from triptych.v1 import common_pb2, inference_pb2


class Choices:
    """A whole stream, joined by choice."""

    def __init__(self) -> None:
        self.text: dict[int, str] = defaultdict(str)
        self.ids: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[common_pb2.TokenLogprob]] = defaultdict(list)
        self.prompt_logprobs: list[common_pb2.TokenLogprob] = []
        self.finish: dict[int, int] = {}
        self.score: dict[int, float] = {}
        self.usage: common_pb2.Usage | None = None
        self.messages = 0

    def add(self, response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse) -> None:
        assert self.usage is None, "nothing follows the usage"
        assert response.index not in self.finish, "nothing follows a choice's end"
        self.messages += 1
        self.text[response.index] += response.text
        self.ids[response.index] += response.token_ids
        self.logprobs[response.index] += response.logprobs
        self.prompt_logprobs += response.prompt_logprobs
        if response.finish_reason:
            self.finish[response.index] = response.finish_reason
        if response.HasField("score"):
            self.score[response.index] = response.score
        if response.HasField("usage"):
            self.usage = response.usage


def joined(
    responses: Iterable[inference_pb2.GenerateResponse | inference_pb2.ChatResponse],
) -> Choices:
    """A whole stream."""
    choices = Choices()
    for response in responses:
        choices.add(response)
    assert choices.usage is not None, "the last response carries the usage"
    return choices


def values(rows: Sequence[common_pb2.TokenLogprob]) -> list[float | None]:
    """The logprobs; None for the first token of a prompt."""
    return [row.logprob if row.HasField("logprob") else None for row in rows]
