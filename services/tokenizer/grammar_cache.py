"""Answers of the grammar checker, the latest ones, up to a number of bytes."""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

from triptych.engine_core.errors import InvalidRequest

CACHE_BYTES = 8 << 20

_ENTRY_BYTES = 512  # what Python adds to an entry


@dataclass(frozen=True, slots=True)
class Answer:
    """A grammar, or why there is none."""

    grammar: str = ""
    field: str = ""
    refusal: str = ""

    def result(self) -> str:
        """The grammar. Raises InvalidRequest."""
        if self.refusal:
            raise InvalidRequest(self.field, self.refusal)
        return self.grammar


class GrammarCache:
    """By message; thread-safe."""

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._lock = Lock()
        self.size_bytes = 0
        """Of what it holds, about."""

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, message: bytes) -> Answer | None:
        """The answer to a message, which becomes the latest used."""
        with self._lock:
            answer = self._answers.get(message)
            if answer is not None:
                self._answers.move_to_end(message)
            return answer

    def put(self, message: bytes, answer: Answer) -> None:
        """Keep an answer; the least lately used make room."""
        with self._lock:
            if message in self._answers:
                return
            self._answers[message] = answer
            self.size_bytes += _size(message, answer)
            while self.size_bytes > self._most_bytes:
                self.size_bytes -= _size(*self._answers.popitem(last=False))


def _size(message: bytes, answer: Answer) -> int:
    # Python keeps a text in up to 4 bytes a character.
    return len(message) + 4 * len(answer.grammar) + 4 * len(answer.refusal) + _ENTRY_BYTES
