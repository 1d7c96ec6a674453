"""What an answer of a chat is made of, piece by piece, and the whole put together again."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thought; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of the call with this index, which counts from 0.

    `id` and `name` stand in the first piece of a call and are empty in the others. The pieces of
    `arguments` joined are JSON text as the model wrote it, which may be cut or wrong.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Delta: TypeAlias = Content | Reasoning | CallDelta


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call. `arguments`: JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]


def joined(deltas: Iterable[Delta]) -> Answer:
    """The answer that these pieces, in their order, are."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[tuple[str, str, list[str]]] = []
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallDelta(index, call_id, name, arguments):
                if index == len(calls):
                    calls.append((call_id, name, []))
                calls[index][2].append(arguments)
    return Answer(
        "".join(reasoning),
        "".join(content),
        tuple(Call(call_id, name, "".join(pieces)) for call_id, name, pieces in calls),
    )
