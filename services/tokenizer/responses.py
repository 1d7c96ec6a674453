"""Pieces of output as the messages of the public service."""

from typing import TypeVar

from triptych.services.tokenizer.generation import Running
from triptych.services.tokenizer.stream import Piece
from triptych.v1 import common_pb2, inference_pb2

Response = TypeVar("Response", inference_pb2.GenerateResponse, inference_pb2.ChatResponse)


def response_of(kind: type[Response], piece: Piece, running: Running) -> Response:
    """One response, with the forms of the output that the client asked for."""
    output = running.request.output
    response = kind()
    if output.text:
        response.text = piece.text
    if output.token_ids:
        response.token_ids.extend(piece.token_ids)
    if piece.finish is not None:
        # engine_core's numbers are the wire's; a test holds them together
        response.finish_reason = common_pb2.FinishReason.ValueType(piece.finish)
        response.usage.prompt_tokens = len(running.request.prompt)
        response.usage.completion_tokens = piece.completion_tokens
        if piece.stop_string is not None:
            response.stop_string = piece.stop_string
        elif piece.stop_token_id is not None:
            response.stop_token_id = piece.stop_token_id
    return response
