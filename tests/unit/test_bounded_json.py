import json
import time

import pytest

from triptych.services.tokenizer.bounded_json import JsonBounds, NoJson, read_json

BOUNDS = JsonBounds(1 << 20, 16)


@pytest.mark.parametrize(
    "value", [{}, [], None, 1, -2.5, "ü", {"a": [1, {"b": ']}\\"'}]}, [[[[1]]]], 10**300]
)
def test_values_come_back(value: object) -> None:
    assert read_json(json.dumps(value), BOUNDS) == value
    assert read_json(json.dumps(value, ensure_ascii=False, indent=1), BOUNDS) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("{} {}", "no JSON"),
        ("'a'", "no JSON"),
        ("NaN", "NaN is no number"),
        ("[Infinity]", "Infinity is no number"),
        ("1e999", "too large"),
        ("1" * 500, "too large"),
        ('"\\ud800"', "half of a surrogate pair"),
        ("[" * 17 + "]" * 17, "more than 16 arrays"),
        ('{"a":' * 17 + "1" + "}" * 17, "more than 16 arrays"),
        ("[" * 100_000, "more than 16 arrays"),
        ('"' + "x" * (1 << 20) + '"', "more than 1048576"),
    ],
)
def test_refusals(text: str, reason: str) -> None:
    with pytest.raises(NoJson, match=reason):
        read_json(text, BOUNDS)


def test_brackets_in_strings_are_no_depth() -> None:
    assert read_json(json.dumps(["[" * 50]), BOUNDS) == ["[" * 50]
    assert read_json("[" * 16 + "]" * 16, BOUNDS) is not None


def test_a_string_that_never_ends_costs_no_more_than_others() -> None:
    text = '"' + '\\"' * (1 << 18)
    started = time.thread_time()
    with pytest.raises(NoJson):
        read_json(text, BOUNDS)
    assert time.thread_time() - started < 2, "one look, not one for each quote"
