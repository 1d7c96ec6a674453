"""The fields of a JSON object whose shape is known: all that are needed, and no others."""

from collections.abc import Sequence

from triptych.services.tokenizer.structured_output.refusal import Pointer, Refused, listed, shown
from triptych.services.tokenizer.structured_output.strict_json import Json

MAX_TEXT_BYTES = 4096
MAX_ELEMENTS = 1024


class Fields:
    """One object. Every method raises Refused naming the field and its place."""

    def __init__(
        self, value: Json, pointer: Pointer, *, needed: Sequence[str], others: Sequence[str] = ()
    ) -> None:
        if not isinstance(value, dict):
            raise Refused(f"{pointer} must be an object")
        for name in needed:
            if name not in value:
                raise Refused(f"{name} is missing at {pointer}")
        unknown = [name for name in value if name not in (*needed, *others)]
        if unknown:
            raise Refused(f"{listed(unknown)} at {pointer} is not supported")
        self._value = value
        self._pointer = pointer

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def value(self, name: str) -> Json:
        """Whatever it is."""
        return self._value[name]

    def text(self, name: str, *, empty: bool = False) -> str:
        """A string."""
        return checked_text(self._value[name], self._pointer.down(name), empty=empty)

    def texts(self, name: str) -> list[str]:
        """An array of strings, none empty."""
        return [
            checked_text(each, self._pointer.down(name, index), empty=False)
            for index, each in enumerate(self.array(name))
        ]

    def array(self, name: str) -> list[Json]:
        """An array of something, not empty."""
        value = self._value[name]
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_ELEMENTS:
            raise Refused(
                f"{name} at {self._pointer} must be an array of 1 to {MAX_ELEMENTS} elements"
            )
        return value

    def flag(self, name: str) -> bool:
        """True or false; false where it is left out."""
        value = self._value.get(name, False)
        if not isinstance(value, bool):
            raise Refused(f"{name} at {self._pointer} must be true or false")
        return value


def checked_text(value: Json, pointer: Pointer, *, empty: bool) -> str:
    """A string of bounded size. Raises Refused."""
    if not isinstance(value, str):
        raise Refused(f"{pointer} must be a string, not {shown(repr(value))}")
    if not value and not empty:
        raise Refused(f"{pointer} is empty")
    size = len(value.encode())
    if size > MAX_TEXT_BYTES:
        raise Refused(f"{pointer}: {size} bytes, more than {MAX_TEXT_BYTES}")
    return value
