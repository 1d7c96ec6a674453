"""Refusals that name the field, and the place in it, that the client must change."""

from collections.abc import Sequence

from triptych.engine_core.errors import InvalidRequest

FIELD = "sampling_params.structured_output"

_SHOWN_CHARACTERS = 200


class Refused(Exception):
    """Text of one form cannot be kept; `Refused.named` says of which field."""

    def named(self, form: str) -> InvalidRequest:
        """As the client sees it. `form`: the field of StructuredOutput, "" for the message."""
        return InvalidRequest(f"{FIELD}.{form}" if form else FIELD, str(self))


class Pointer:
    """Where a value stands in a document: a JSON pointer (RFC 6901) as a URI fragment."""

    __slots__ = ("_path",)

    def __init__(self, path: tuple[str, ...] = ()) -> None:
        self._path = path

    def down(self, *steps: str | int) -> "Pointer":
        """The place that many steps below."""
        return Pointer((*self._path, *map(str, steps)))

    def __str__(self) -> str:
        return shown("#" + "".join(f"/{_escaped(step)}" for step in self._path))


def shown(text: str) -> str:
    """A client's own text, short enough for an error."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}...{text[-half:]}"


def listed(names: Sequence[str]) -> str:
    """Names for an error."""
    return ", ".join(shown(name) for name in names)


def _escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")
