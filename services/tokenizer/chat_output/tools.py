"""The tools of a request, and which of them the model is to call."""

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call. `parameters`: the JSON Schema of its arguments as text,
    "" for a function that takes none. `strict`: its arguments must match that schema."""

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool | None = None


class ChoiceMode(Enum):
    """Whether the model calls."""

    NONE = auto()
    AUTO = auto()
    REQUIRED = auto()
    NAMED = auto()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name`: the tool to call, for NAMED."""

    mode: ChoiceMode
    name: str = ""
