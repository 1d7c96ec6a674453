"""Requests from what callers like to write: a string, token ids, turns of a chat."""

import secrets
from collections.abc import Sequence

from triptych.v1 import common_pb2, inference_pb2

Prompt = str | Sequence[int] | inference_pb2.GenerateRequest
"""Text, token ids, or a whole request of one's own."""
Messages = str | Sequence[inference_pb2.ChatMessage] | inference_pb2.ChatRequest
"""What the user says, the turns so far, or a whole request of one's own."""


def generate_request(
    prompt: Prompt, params: common_pb2.SamplingParams | None, model: str
) -> inference_pb2.GenerateRequest:
    """A request of the caller's own is copied. Raises ValueError when it comes with `params`."""
    if isinstance(prompt, inference_pb2.GenerateRequest):
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(prompt)
        _alone(params, model)
        return request
    request = inference_pb2.GenerateRequest(model=model, sampling_params=params)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(common_pb2.TokenIds(ids=prompt))
    return request


def chat_request(
    messages: Messages, params: common_pb2.SamplingParams | None, model: str
) -> inference_pb2.ChatRequest:
    """A request of the caller's own is copied. Raises ValueError when it comes with `params`."""
    if isinstance(messages, inference_pb2.ChatRequest):
        request = inference_pb2.ChatRequest()
        request.CopyFrom(messages)
        _alone(params, model)
        return request
    return inference_pb2.ChatRequest(model=model, messages=turns(messages), sampling_params=params)


def tokenize_request(
    text: str | Sequence[inference_pb2.ChatMessage] | inference_pb2.TokenizeRequest, model: str
) -> inference_pb2.TokenizeRequest:
    """Text, a chat, or a whole request of the caller's own."""
    if isinstance(text, inference_pb2.TokenizeRequest):
        _alone(None, model)
        return text
    if isinstance(text, str):
        return inference_pb2.TokenizeRequest(model=model, text=text)
    return inference_pb2.TokenizeRequest(model=model, messages=text)


def turns(
    messages: str | Sequence[inference_pb2.ChatMessage],
) -> Sequence[inference_pb2.ChatMessage]:
    """The messages; a string is one turn of the user."""
    if isinstance(messages, str):
        return [inference_pb2.ChatMessage(role="user", content=messages)]
    return messages


def set_seed(request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest) -> None:
    """Draw the seed here where none is set, so that the same request has the same answer."""
    params = request.sampling_params
    if not params.HasField("seed") and not params.HasField("beam"):
        request.sampling_params.seed = secrets.randbits(64)


def _alone(params: common_pb2.SamplingParams | None, model: str) -> None:
    if params is not None or model:
        raise ValueError("params, model: set them in the request that is given")
