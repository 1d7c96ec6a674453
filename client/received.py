"""What has been received of an answer, so that the same answer, told again, goes on behind it.

Knows neither gRPC nor time. Outputs are deterministic (seed, position), their cut into responses is
not: every column (text, token ids, ...) is therefore counted and compared by itself.
"""

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from triptych.client.errors import ResumeMismatch
from triptych.v1 import common_pb2, inference_pb2

Response = inference_pb2.GenerateResponse | inference_pb2.ChatResponse
ResponseT = TypeVar("ResponseT", bound=Response)


class _Column:
    """One sequence of items that responses bring in pieces: characters, or ids."""

    __slots__ = ("_items", "_told", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._items: list[object] = []
        self._told = 0

    def again(self) -> None:
        """From here on it is told from its beginning."""
        self._told = 0

    def known(self, items: Sequence[object]) -> int:
        """How many of the next items have been received before. Raises ResumeMismatch."""
        known = min(len(items), len(self._items) - self._told)
        for at, item in enumerate(items[:known], self._told):
            if item != self._items[at]:
                raise ResumeMismatch(
                    f"{self.name}: item {at} was {self._items[at]!r}, told again it is {item!r}"
                )
        self._items.extend(items[known:])
        self._told += len(items)
        return known

    def check_told(self) -> None:
        """Raises ResumeMismatch unless all that was received has been told again."""
        if self._told < len(self._items):
            raise ResumeMismatch(
                f"{self.name}: {len(self._items)} items were received, told again it ends"
                f" after {self._told}"
            )


class _Choice:
    """What has been received of one choice."""

    __slots__ = ("columns", "finish_reason")

    def __init__(self) -> None:
        self.columns: dict[str, _Column] = {}
        self.finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED

    def known(self, name: str, items: Sequence[object]) -> int:
        """`_Column.known` of the column of this name."""
        if name not in self.columns:
            self.columns[name] = _Column(name)
        return self.columns[name].known(items)


class Received(Generic[ResponseT]):
    """Takes every response of every attempt; gives what is new of each."""

    def __init__(self) -> None:
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._prompt_logprobs = _Column("prompt_logprobs")
        self.any = False
        """Whether anything has been received."""
        self.complete = False
        """Whether the last response has been received, or one that nothing can be behind."""

    def again(self) -> None:
        """The answer is told from its beginning once more."""
        self._prompt_logprobs.again()
        for choice in self._choices.values():
            for column in choice.columns.values():
                column.again()

    def pass_on(self, response: ResponseT) -> ResponseT:
        """A response whose answer nobody will go on with: nothing of it is kept."""
        self.any = True
        self.complete |= response.HasField("usage")
        return response

    def take(self, response: ResponseT) -> ResponseT | None:
        """What is new of a response; None where nothing is.

        Raises ResumeMismatch, which is the end: what is counted is out of step then.
        """
        choice = self._choices[response.index]
        try:
            known = _Known.of(response, choice, self._prompt_logprobs)
            ended_before = _check_end(response, choice)
        except ResumeMismatch:
            self.complete = True
            raise
        self.complete |= response.HasField("usage")
        self.any = True
        if not known.any and not ended_before:
            return response
        new = deepcopy(response)
        known.take_from(new)
        if ended_before:
            new.ClearField("finish_reason")
            new.ClearField("stop_reason")
            new.ClearField("score")
        # Of a response without anything new, the index is left.
        return new if any(field.name != "index" for field, _ in new.ListFields()) else None


@dataclass(slots=True)
class _Known:
    """How much of each column of a response has been received before."""

    text: int
    token_ids: int
    logprobs: int
    prompt_logprobs: int
    reasoning: int = 0
    calls: list[tuple[int, int]] = field(default_factory=list)
    """For each delta of a call: names (0 or 1), characters of its arguments."""

    @classmethod
    def of(cls, response: Response, choice: _Choice, prompt_logprobs: _Column) -> Self:
        """Counts and compares. Raises ResumeMismatch."""
        known = cls(
            text=choice.known("text", response.text),
            token_ids=choice.known("token_ids", response.token_ids),
            logprobs=choice.known("logprobs", [each.token_id for each in response.logprobs]),
            prompt_logprobs=prompt_logprobs.known(
                [each.token_id for each in response.prompt_logprobs]
            ),
        )
        if isinstance(response, inference_pb2.ChatResponse):
            known.reasoning = choice.known("reasoning", response.reasoning)
            for call in response.tool_calls:
                at = f"tool_calls[{call.index}]"
                # The id of a call is drawn by the engine: the first one stays.
                names = choice.known(f"{at}.name", [call.name] if call.name else [])
                known.calls.append((names, choice.known(f"{at}.arguments", call.arguments)))
        return known

    @property
    def any(self) -> bool:
        """Whether anything was."""
        columns = (self.text, self.token_ids, self.logprobs, self.prompt_logprobs, self.reasoning)
        return any(columns) or any(map(any, self.calls))

    def take_from(self, response: Response) -> None:
        """Leave in a response what is new."""
        response.text = response.text[self.text :]
        del response.token_ids[: self.token_ids]
        del response.logprobs[: self.logprobs]
        del response.prompt_logprobs[: self.prompt_logprobs]
        if isinstance(response, inference_pb2.ChatResponse):
            response.reasoning = response.reasoning[self.reasoning :]
            for call, (names, characters) in zip(response.tool_calls, self.calls, strict=True):
                call.arguments = call.arguments[characters:]
                if names:
                    call.id = call.name = ""
            left = [call for call in response.tool_calls if call.name or call.arguments]
            del response.tool_calls[:]
            response.tool_calls.extend(left)


def _check_end(response: Response, choice: _Choice) -> bool:
    """Whether the choice has ended before. Raises ResumeMismatch when it ends otherwise now."""
    if not response.finish_reason:
        return False
    for column in choice.columns.values():
        column.check_told()
    before, choice.finish_reason = choice.finish_reason, response.finish_reason
    if before not in (common_pb2.FINISH_REASON_UNSPECIFIED, response.finish_reason):
        name = common_pb2.FinishReason.Name
        raise ResumeMismatch(
            f"finish_reason: was {name(before)}, told again it is {name(response.finish_reason)}"
        )
    return bool(before)
