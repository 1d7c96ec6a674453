"""Usage and finish reasons as OpenAI writes them."""

from triptych.v1 import common_pb2, inference_pb2

Response = inference_pb2.GenerateResponse | inference_pb2.ChatResponse

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class UsageSum:
    """The usage of an HTTP request: of all its prompts together."""

    def __init__(self) -> None:
        self.prompt = self.completion = self.cached = 0

    def add(self, usage: common_pb2.Usage) -> None:
        """Of one prompt; all zeroes before its end."""
        self.prompt += usage.prompt_tokens
        self.completion += usage.completion_tokens
        self.cached += usage.cached_tokens

    def as_json(self) -> dict[str, object]:
        """The `usage` object of completions and chat."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def finish_reason(response: Response) -> str | None:
    """Null while the choice goes on."""
    return _REASONS.get(response.finish_reason)


def stop_reason(response: Response) -> str | int | None:
    """vLLM's: the stop string or token id that ended the choice; null for end of sequence."""
    match response.WhichOneof("stop_reason"):
        case "stop_string":
            return response.stop_string
        case "stop_token_id":
            return response.stop_token_id
        case _:
            return None
