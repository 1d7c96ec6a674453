"""Formats: what they exclude is not let through."""

import datetime
import random

import pytest

from grammar_walks import accepts, walk
from schema_grammars import grammar_of, said
from triptych.services.tokenizer.structured_output.strict_json import Json

CASES: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "0004-02-29", "2023-02-28", "2023-12-31", "0001-01-01"],
        ["2023-02-29", "1900-02-29", "2100-02-29", "0000-01-01", "0000-02-29", "2023-04-31"],
    ),
    "date-time": (
        ["2024-02-29T23:59:59Z", "2023-01-31t00:00:00.5+23:59"],
        ["2023-02-29T00:00:00Z", "1998-12-31T23:58:60Z", "0000-01-01T00:00:00Z"],
    ),
    "time": (["23:59:59Z", "00:00:00.123-01:30"], ["22:59:60Z", "12:00:60+01:00", "24:00:00Z"]),
    "hostname": (
        ["a", "a.b-c.d1", "a" * 63, ".".join(["a" * 62] * 4)],
        ["xn--X", "ab--cd", "a-", "-a", "a..b", "a" * 64, ".".join(["a" * 50] * 5)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_format_excludes(name: str) -> None:
    kept, lost = CASES[name]
    grammar = grammar_of({"type": "string", "format": name})
    assert [text for text in kept if not accepts(grammar, said(text))] == []
    assert [text for text in lost if accepts(grammar, said(text))] == []


def test_every_day_of_some_years() -> None:
    grammar = grammar_of({"type": "string", "format": "date"})
    for year in (1, 1899, 1900, 2000, 2023, 2024, 9999):
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                try:
                    datetime.date(year, month, day)
                    real = True
                except ValueError:
                    real = False
                text = f"{year:04}-{month:02}-{day:02}"
                assert accepts(grammar, said(text)) == real, text


@pytest.mark.parametrize(
    "schema",
    [
        {"format": "date", "pattern": "^20"},
        {"format": "date", "pattern": "^20", "allOf": [{"pattern": "-02-"}]},
        {"$ref": "#/$defs/day", "pattern": "^20", "$defs": {"day": {"format": "date"}}},
    ],
)
def test_beside_a_pattern(schema: Json) -> None:
    assert isinstance(schema, dict)
    grammar = grammar_of({"type": "string", **schema})
    assert accepts(grammar, said("2024-02-29"))
    for text in ("2023-02-29", "1996-02-29"):
        assert not accepts(grammar, said(text))


def test_lengths_of_host_names_are_kept() -> None:
    grammar = grammar_of({"type": "string", "format": "hostname", "maxLength": 3})
    assert accepts(grammar, '"a.b"')
    assert not accepts(grammar, '"a.bc"')


@pytest.mark.parametrize("seed", range(20))
def test_walks_are_moments(seed: int) -> None:
    text = walk(grammar_of({"type": "string", "format": "date-time"}), random.Random(seed))
    assert text is not None
    moment = text.decode().strip('"').upper()
    datetime.datetime.fromisoformat(moment[:19])
