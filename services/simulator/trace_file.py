"""Traces as files: one JSON object a line, read and written a line at a time.

    {"arrival": 0.25, "prompt_tokens": 310, "output_tokens": 64, "priority": 0, "tenant": "a"}

`arrival` in seconds, never descending. `prompt_token_ids` may stand in place of `prompt_tokens`.
`prefix_group` and `prefix_tokens` say that a prompt begins like others. docs/simulate.md has all.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from triptych.engine_core.request import MAX_TENANT_BYTES
from triptych.services.simulator.arrivals import NO_GROUP, Arrival
from triptych.services.simulator.prompts import VOCABULARY

_MOST_LINE_BYTES = 16 << 20
_MOST = (1 << 31) - 1
_LATEST = 1e12  # seconds
_KEYS = frozenset(
    {
        *("arrival", "prompt_tokens", "prompt_token_ids", "output_tokens", "priority", "tenant"),
        *("prefix_group", "prefix_tokens"),
    }
)


class BadTrace(Exception):
    """A trace that cannot be read: the message names line, field, value and bound."""


class TraceFile:
    """Arrivals from a file. Iterating raises BadTrace at the first line that is not right."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: BinaryIO = path.open("rb")
            self._size = max(1, path.stat().st_size)
        except OSError as error:
            raise BadTrace(f"{path}: {error.strerror}") from error
        self._read = 0

    @property
    def fraction(self) -> float:
        """Of its bytes."""
        return min(1.0, self._read / self._size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __iter__(self) -> Iterator[Arrival]:
        before, number = 0.0, 0
        while line := self._line(number + 1):
            number += 1
            self._read += len(line)
            try:
                arrival = parse_arrival(line)
                if arrival.at < before:
                    raise BadTrace(f"arrival: {arrival.at:g} is before the {before:g} above it")
            except BadTrace as error:
                raise BadTrace(f"{self._path}, line {number}: {error}") from None
            before = arrival.at
            yield arrival

    def _line(self, number: int) -> bytes:
        try:
            line = self._file.readline(_MOST_LINE_BYTES + 1)
        except OSError as error:
            raise BadTrace(f"{self._path}: {error.strerror}") from error
        if len(line) > _MOST_LINE_BYTES:
            raise BadTrace(f"{self._path}, line {number}: longer than {_MOST_LINE_BYTES} bytes")
        return line


def parse_arrival(line: bytes) -> Arrival:
    """One line. Raises BadTrace, without the line's number."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadTrace(f"no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadTrace("not a JSON object")
    for key in fields:
        if key not in _KEYS:
            raise BadTrace(f"{key}: no key of a trace; those are {', '.join(sorted(_KEYS))}")
    token_ids = _token_ids(fields)
    group = _number(fields, "prefix_group", 0, default=NO_GROUP)
    num_prefix = _number(fields, "prefix_tokens", 1, default=0)
    if (group == NO_GROUP) != (num_prefix == 0):
        raise BadTrace("prefix_group: it goes together with prefix_tokens")
    if token_ids and num_prefix:
        raise BadTrace("prefix_group: not together with prompt_token_ids")
    return Arrival(
        _seconds(fields),
        len(token_ids) or _number(fields, "prompt_tokens", 1),
        _number(fields, "output_tokens", 1),
        _number(fields, "priority", -_MOST, default=0),
        _tenant(fields),
        group,
        num_prefix,
        token_ids,
    )


def _seconds(fields: dict[str, object]) -> float:
    value = fields.get("arrival")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadTrace(f"arrival: {value!r} is not a number of seconds")
    if not 0 <= value <= _LATEST:  # NaN is not either
        raise BadTrace(f"arrival: {str(value)[:32]} is not within 0 and {_LATEST:g} seconds")
    return float(value)


def _number(fields: dict[str, object], key: str, least: int, default: int | None = None) -> int:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadTrace(f"{key}: {value!r} is not a whole number")
    if key in fields and not least <= value <= _MOST:
        raise BadTrace(f"{key}: {value} is not within {least} and {_MOST}")
    return value


def _tenant(fields: dict[str, object]) -> str:
    value = fields.get("tenant", "")
    if not isinstance(value, str):
        raise BadTrace(f"tenant: {value!r} is not text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise BadTrace(f"tenant: {value!r} is not Unicode text") from error
    if size > MAX_TENANT_BYTES:
        raise BadTrace(f"tenant: {size} bytes, more than {MAX_TENANT_BYTES}")
    return value


def _token_ids(fields: dict[str, object]) -> tuple[int, ...]:
    value = fields.get("prompt_token_ids")
    if value is None:
        return ()
    if "prompt_tokens" in fields:
        raise BadTrace("prompt_token_ids: not together with prompt_tokens")
    if not isinstance(value, list) or not value:
        raise BadTrace("prompt_token_ids: not a list of token ids")
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id < VOCABULARY:
            raise BadTrace(
                f"prompt_token_ids: {token_id!r} at index {index} is not within 0 and"
                f" {VOCABULARY - 1}"
            )
    return tuple(value)


class SavedTrace:
    """Passes a trace through and writes it down. Raises OSError where it cannot."""

    def __init__(self, trace: Iterator[Arrival], out: TextIO) -> None:
        self._trace = trace
        self._out = out

    def __iter__(self) -> Iterator[Arrival]:
        for arrival in self._trace:
            self._out.write(json.dumps(_fields(arrival)) + "\n")
            yield arrival


def _fields(arrival: Arrival) -> dict[str, object]:
    fields: dict[str, object] = {"arrival": arrival.at}
    if arrival.prompt_token_ids:
        fields["prompt_token_ids"] = arrival.prompt_token_ids
    else:
        fields["prompt_tokens"] = arrival.num_prompt
    fields["output_tokens"] = arrival.num_output
    if arrival.priority:
        fields["priority"] = arrival.priority
    if arrival.tenant:
        fields["tenant"] = arrival.tenant
    if arrival.prefix_group != NO_GROUP:
        fields["prefix_group"] = arrival.prefix_group
        fields["prefix_tokens"] = arrival.num_prefix
    return fields
