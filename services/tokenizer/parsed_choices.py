"""The choices of a chat's answer on their way through their parsers."""

from triptych.engine_core.step import FinishReason
from triptych.services.tokenizer.calling import Calling
from triptych.services.tokenizer.chat_output import CallDelta, Content, Delta, Reasoning
from triptych.services.tokenizer.pieces import Piece
from triptych.services.tokenizer.validation import OutputParams


class ParsedChoices:
    """One parser for each delivered choice."""

    def __init__(self, calling: Calling, params: OutputParams) -> None:
        self._parsers = [calling.new_parser() for _ in range(params.n)]
        self._has_text = calling.has_text
        self._ends_with_calls = calling.ends_with_calls
        self._params = params
        self._carried = [0] * params.n

    def parse(self, piece: Piece) -> bool:
        """Sort the piece's text. Whether anything is left of it to deliver."""
        parser = self._parsers[piece.index]
        deltas = parser.push(piece.text) if piece.text else []
        if piece.finish is not None:
            deltas = [*deltas, *parser.finish()]
            stopped = piece.finish is FinishReason.STOP
            piece.called = stopped and self._ends_with_calls and parser.called
        _sort(piece, deltas)
        if not self._has_text:
            piece.text = ""
        piece.new_tokens += self._carried[piece.index]
        self._carried[piece.index] = 0
        if self._wanted(piece):
            return True
        self._carried[piece.index] = piece.new_tokens
        return False

    def _wanted(self, piece: Piece) -> bool:
        if piece.finish is not None or piece.logprobs or piece.prompt_logprobs:
            return True
        if piece.token_ids and self._params.token_ids:
            return True
        return self._params.text and bool(piece.text or piece.reasoning or piece.calls)


def _sort(piece: Piece, deltas: list[Delta]) -> None:
    content, reasoning, calls = [], [], []
    for delta in deltas:
        match delta:
            case Content():
                content.append(delta.text)
            case Reasoning():
                reasoning.append(delta.text)
            case CallDelta():
                calls.append(delta)
    piece.text, piece.reasoning, piece.calls = "".join(content), "".join(reasoning), calls
