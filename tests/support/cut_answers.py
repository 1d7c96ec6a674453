"""A chat answer with everything in it, told several times, each time cut otherwise."""

from collections.abc import Iterator
from random import Random

from triptych.v1 import common_pb2, inference_pb2

Response = inference_pb2.ChatResponse

TEXTS = ("naïve ☃ answer", "другой ответ")
REASONING = "so, ☂ then"
CALLS = (("weather", '{"city": "Zürich"}'), ("time", "{}"))


def told_otherwise(cuts: Random) -> list[Response]:
    """The same answer, whatever `cuts` is; only the calls' ids and the cuts differ."""
    left = [_steps(choice, cuts) for choice in range(len(TEXTS))]
    responses: list[Response] = []
    while left:
        steps = cuts.choice(left)
        response = steps.pop(0)
        for _ in range(min(cuts.randint(0, 5), len(steps))):
            _join(response, steps.pop(0))
        responses.append(response)
        left = [each for each in left if each]
    at = cuts.randrange(2)  # before the first tokens, or with them
    if at == 0:
        responses.insert(0, Response())
    responses[0].prompt_logprobs.extend(_logprobs([7, 8, 9]))
    responses[-1].usage.completion_tokens = 99
    return responses


def _steps(choice: int, cuts: Random) -> list[Response]:
    """Of one choice, the smallest responses there are, in their order."""
    steps = [Response(index=choice, reasoning=each) for each in REASONING]
    for each in TEXTS[choice]:
        step = Response(index=choice, text=each, token_ids=[ord(each)])
        step.logprobs.extend(_logprobs([ord(each)]))
        steps.append(step)
    for index, (name, arguments) in enumerate(CALLS):
        with_name = cuts.randint(0, 2)
        first = inference_pb2.ToolCallDelta(id=f"call_{cuts.random()}", name=name)
        first.arguments = arguments[:with_name]
        deltas = [first]
        deltas += [inference_pb2.ToolCallDelta(arguments=each) for each in arguments[with_name:]]
        for delta in deltas:
            delta.index = index
            steps.append(Response(index=choice, tool_calls=[delta]))
    end = Response(index=choice, score=-0.5 - choice)
    if choice == 0:
        end.finish_reason = common_pb2.FINISH_REASON_STOP
        end.stop_string = "\n"
    else:
        end.finish_reason = common_pb2.FINISH_REASON_LENGTH
    return [*steps, end]


def _join(response: Response, after: Response) -> None:
    text, reasoning = response.text + after.text, response.reasoning + after.reasoning
    response.MergeFrom(after)
    response.text, response.reasoning = text, reasoning


def _logprobs(ids: list[int]) -> Iterator[common_pb2.TokenLogprob]:
    return (common_pb2.TokenLogprob(token_id=each, logprob=-each / 7) for each in ids)
