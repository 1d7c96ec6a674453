"""The choices of one request, joined: for answers that are one message."""

from dataclasses import dataclass, field

from triptych.engine_core.errors import InvalidRequest
from triptych.v1 import common_pb2, inference_pb2

_BYTES_PER_ID = 4  # of an INT32 tensor
_BYTES_PER_CHOICE = 64  # finish reason, lengths


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED


class WholeAnswers:
    """Of one request. Texts, ids and reasons only."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of the message that will hold them; gRPC would refuse a larger one."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._choices: dict[int, _Choice] = {}

    def add(self, piece: inference_pb2.GenerateResponse) -> None:
        """The next piece of a choice. Raises InvalidRequest above `max_bytes`."""
        if piece.index not in self._choices:
            self._choices[piece.index] = _Choice()
            self._bytes += _BYTES_PER_CHOICE
        choice = self._choices[piece.index]
        self._bytes += len(piece.text.encode()) + _BYTES_PER_ID * len(piece.token_ids)
        if self._bytes > self._max_bytes:
            raise InvalidRequest(
                "sampling_parameters.max_tokens",
                f"the answer in one message is above max_message_bytes {self._max_bytes}:"
                " stream it, or ask for less",
            )
        choice.texts.append(piece.text)
        choice.ids += piece.token_ids
        choice.finish_reason = piece.finish_reason or choice.finish_reason

    def joined(self) -> list[inference_pb2.GenerateResponse]:
        """One message for each choice, in their order."""
        return [
            inference_pb2.GenerateResponse(
                index=index,
                text="".join(choice.texts),
                token_ids=choice.ids,
                finish_reason=choice.finish_reason,
            )
            for index, choice in sorted(self._choices.items())
        ]
