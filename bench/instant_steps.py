"""Steps of the stub scheduler for one tokenizer process, as the bytes that are sent."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from triptych.v1 import common_pb2, stage_pb2


class InstantSteps:
    """The same token for every open slot, until each has had all of its own.

    The bytes of a step in which nothing begins or ends are made once and sent again.
    """

    def __init__(self, token: int) -> None:
        self._token = token
        self.left: dict[int, int] = {}
        """Tokens by open slot that were to come when the usual step was made."""
        self._begun: list[int] = []
        self._usual = b""
        self._usual_sent = self._usual_most = 0

    def begin(self, slots: Iterable[int], tokens: int) -> None:
        """Each of them is to have so many tokens."""
        self._settle()
        for slot in slots:
            self.left[slot] = tokens
            self._begun.append(slot)

    def abort(self, slots: Iterable[int]) -> None:
        """Nobody waits for them any more."""
        self._settle()
        for slot in slots:
            self.left.pop(slot, None)
        self._begun = [slot for slot in self._begun if slot in self.left]

    def next_step(self) -> bytes:
        """A TokenizerReply with one token for each open slot."""
        if self._usual_sent < self._usual_most:
            self._usual_sent += 1
            return self._usual
        self._settle()
        step = _reply(self.left, self._token, self._begun)
        self._begun = []
        self.left = {slot: left - 1 for slot, left in self.left.items() if left > 1}
        self._usual = _reply(self.left, self._token)
        self._usual_most = min(self.left.values(), default=1) - 1
        return step

    def _settle(self) -> None:
        """Take what was sent off `left`; the next step is made anew."""
        for slot in self.left:
            self.left[slot] -= self._usual_sent
        self._usual, self._usual_sent, self._usual_most = b"", 0, 0


def _reply(left: Mapping[int, int], token: int, begun: Sequence[int] = ()) -> bytes:
    finishes = bytes(common_pb2.FINISH_REASON_LENGTH if each == 1 else 0 for each in left.values())
    outputs = stage_pb2.StepOutputs(
        slots=np.array(list(left), "<u4").tobytes(),
        token_ids=np.full(len(left), token, "<u4").tobytes(),
        finish_reasons=finishes,
        started=[stage_pb2.StartedChoice(slot=slot) for slot in begun],
    )
    return stage_pb2.TokenizerReply(outputs=outputs).SerializeToString()
