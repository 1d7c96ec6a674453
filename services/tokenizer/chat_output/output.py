"""Where parsers write what they found; it becomes the deltas of one push."""

from collections.abc import Callable

from triptych.services.tokenizer.chat_output.deltas import CallDelta, Content, Delta, Reasoning


class Output:
    """One answer. Neighbours of a kind become one delta."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self._kind: type[Content | Reasoning | CallDelta] = Content
        self._pieces: list[str] = []
        self._first = CallDelta(0)  # of the call that the pieces are arguments of, without them
        self._opened = 0
        self._closed = 0
        self.after_call = False
        """Whether a call is what was written last."""

    @property
    def called(self) -> bool:
        """Whether there was a call, and all of them are complete."""
        return 0 < self._opened == self._closed

    def content(self, text: str) -> None:
        """Text for the user."""
        if text:
            self._write(Content, text)
            self.after_call = False

    def reasoning(self, text: str) -> None:
        """Text of the model's thought."""
        if text:
            self._write(Reasoning, text)

    def open(self, name: str) -> None:
        """A call begins; it cannot be taken back."""
        self._flush()
        self._kind = CallDelta
        self._first = CallDelta(self._opened, self._new_id(), name)
        self._opened += 1
        self.after_call = True

    def arguments(self, text: str) -> None:
        """Text of the arguments of the call that was opened last."""
        self._pieces.append(text)

    def close(self) -> None:
        """Its arguments are complete. One that is not closed was cut, or is not JSON."""
        self._closed += 1

    def drain(self) -> list[Delta]:
        """What was written since the last time."""
        self._flush()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _write(self, kind: type[Content | Reasoning], text: str) -> None:
        if self._kind is not kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._kind is CallDelta:
            first = self._first
            if first.name or text:
                self._deltas.append(CallDelta(first.index, first.id, first.name, text))
                self._first = CallDelta(first.index)
        elif text:
            self._deltas.append(Content(text) if self._kind is Content else Reasoning(text))
