"""Patterns as JSON strings: what a set leaves out, no escape lets in; and every name has one
spelling."""

import itertools
import json
import re
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_walks import accepts
from schema_grammars import grammar_of, refusal, said
from triptych.services.tokenizer.structured_output.json_schema import MAX_FIXED_BYTES
from triptych.services.tokenizer.structured_output.quotable_patterns import quotable
from triptych.services.tokenizer.structured_output.refusal import Refused
from triptych.services.tokenizer.structured_output.strict_json import Json

CHARACTERS = '"\\\n\t\b\f\r ab/é😀'

PATTERNS = [
    '^[^"]$',
    '^[^"]*$',
    r"^[^\\]$",
    r'^[^"\\]$',
    r'^[^"\n]$',
    r"^[\u0000-\u001f]$",
    r"^[\x00-!]$",
    r"^[\x00-Z]$",
    r"^[\x00-\x7f]$",
    r'^([^"]|b)$',
    r'^(?:[^"\\]|\\[a"])*$',
    r"^[^-a]$",
    r"^[^a-]$",
    r"^[^\]]$",
    r"^[^\W]$",
    r"^[\S\t]$",
    r"^\S$",
    r"^\[[^a]$",
    r"[^a]",
    "^[ -~]$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_string_matches_as_what_it_says_does(pattern: str) -> None:
    grammar = grammar_of({"type": "string", "pattern": pattern})
    texts = ["", *CHARACTERS, *map("".join, itertools.product(CHARACTERS[:8], repeat=2))]
    for text in texts:
        if pattern == r"^[^\W]$" and not text.isascii():
            continue  # in Python é is a letter of words
        python = pattern.removesuffix("$") + (r"\Z" if pattern[-1] == "$" else "")
        assert accepts(grammar, said(text)) == bool(re.search(python, text)), text


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*'"\\/ab-]^[ é', "\\n", "\\x00", "\\x1f", "\\s", "\\W"]), min_size=1),
    st.booleans(),
    st.sampled_from(CHARACTERS),
)
def test_sets_of_anything(parts: list[str], negated: bool, text: str) -> None:
    """As Python's, of the same characters, all of them escaped."""
    inside = "".join("\\" + each if each in set("\\-]^[&~") else each for each in parts)
    pattern = f"^[{'^' * negated}{inside}]$"
    compiled = re.compile(pattern.removesuffix("$") + r"\Z", re.ASCII)
    if not any(compiled.match(each) for each in CHARACTERS):
        return  # nothing at all matches, or nothing that is tried here
    grammar = grammar_of({"type": "string", "pattern": pattern})
    if "\\s" in parts or "\\W" in parts:
        text = text if text.isascii() else "a"  # Python's, of ASCII only, differ
    assert accepts(grammar, said(text)) == bool(compiled.match(text))


NAMED: list[tuple[Json, str, str]] = [
    # a schema, a name that it does not know, and another spelling of one that it does
    ({"properties": {"a": {"type": "integer"}}}, "b", r"\u0061"),
    ({"properties": {"é": {"type": "integer"}}}, "e", r"\u00e9"),
    ({"properties": {'"': {"type": "integer"}}}, "e", r"\u0022"),
    ({"properties": {"😀": {"type": "integer"}}}, "e", r"\ud83d\ude00"),
    ({"patternProperties": {"a": {"type": "integer"}}}, "b", r"b\u0061"),
    ({"patternProperties": {"": {"type": "integer"}}}, "", r"\u0061"),
    ({"patternProperties": {'^[^"]$': {"type": "integer"}}}, "ab", r"\u0061"),
    ({"required": ["a"], "additionalProperties": {"type": ["integer", "string"]}}, "b", r"\u0061"),
]


@pytest.mark.parametrize(("schema", "unknown", "spelling"), NAMED)
def test_a_name_has_one_spelling(schema: Json, unknown: str, spelling: str) -> None:
    """Else it would be a property that the schema does not know: of any value."""
    assert isinstance(schema, dict)
    grammar = grammar_of({"type": "object", **schema}, compact=True)
    before = '"a":1,' if "required" in schema else ""
    assert accepts(grammar, f'{{{before}"{unknown}":1}}')
    assert not accepts(grammar, f'{{{before}"{spelling}":"x"}}')
    assert not accepts(grammar, f'{{{before}"{spelling}":1}}')


def test_a_set_of_names_does_not_take_in_what_it_leaves_out() -> None:
    schema: Json = {
        "type": "object",
        "patternProperties": {'^[^"]$': {"type": "string"}},
        "additionalProperties": {"type": "integer"},
    }
    grammar = grammar_of(schema, compact=True)
    for name in CHARACTERS:
        kept, lost = ('"x"', "1") if name != '"' else ("1", '"x"')
        assert accepts(grammar, f"{{{said(name)}:{kept}}}"), name
        assert not accepts(grammar, f"{{{said(name)}:{lost}}}"), name


# ECMA-262, sections 12.2 and 12.3.
ENDS_OF_LINES = "\n\r\u2028\u2029"
BLANKS = ENDS_OF_LINES + "\t\f \u00a0\ufeff\u1680\u2000\u200a\u202f\u205f\u3000"
OTHERS = "\u0085\u180e\u200b\u2060az0-é😀"


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("^.$", set(BLANKS + OTHERS) - set(ENDS_OF_LINES)),
        (r"^\s$", set(BLANKS)),
        (r"^\S$", set(OTHERS)),
        (r"^[\s]$", set(BLANKS)),
        (r"^[^\s]$", set(OTHERS)),
        (r"^[\S]$", set(OTHERS)),
        (r"^[^\S]$", set(BLANKS)),
        (r"^[\s\S]$", set(BLANKS + OTHERS)),
        (r"^[^\s0-9]$", set(OTHERS) - {"0"}),
        (r"^\w$", {"a", "z", "0"}),
        (r"^\W$", set(BLANKS + OTHERS) - {"a", "z", "0"}),
        (r"^\d$", {"0"}),
        (r"^[^\w\s]$", set(OTHERS) - {"a", "z", "0"}),
    ],
)
def test_classes_are_those_of_ecma(pattern: str, matched: set[str]) -> None:
    grammar = grammar_of({"type": "string", "pattern": pattern})
    assert {each for each in BLANKS + OTHERS if accepts(grammar, said(each))} == matched


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"^\x00$", "U+0000"),
        (r"^[a-z\x01]|\u{0}$", "U+0000"),
        ("^[a&&b]$", "&& in the set [a&&b]"),
        ("^[a--b]$", "-- in the set [a--b]"),
        ("^[~~]$", "~~ in the set [~~]"),
        ("^[[:alpha:]]$", r"must be written \["),
        ("^[[a]$", r"must be written \["),
        ("^[]a]$", "is empty"),
        ("^[^]$", "is empty"),
        ("(?x) a b ", "(?x) is not supported: of flags only i is"),
        ("(?ix:a b)", "(?ix: is not supported"),
        ("a(?s).", "(?s) is not supported"),
        ("(?i-u)a", "(?i-u) is not supported"),
        ("[a", "is not closed"),
    ],
)
def test_what_would_be_read_in_two_ways_is_refused(pattern: str, why: str) -> None:
    reason = refusal({"properties": {"a": {"pattern": pattern}}})
    assert reason.startswith("#/properties/a/pattern: ")
    assert why in reason
    assert why in refusal({"patternProperties": {pattern: {}}})


@pytest.mark.parametrize("value", ["\x00", "\x01", "\x1f", "\x7f", ["a\x0b"], {"\x01": 1}])
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_a_value_that_cannot_be_written_is_refused(value: Json, keyword: str) -> None:
    reason = refusal({keyword: value if keyword == "const" else [1, value]})
    assert f"{keyword} at # has a control character" in reason


def test_values_that_are_escaped_are_kept() -> None:
    value: Json = {"\n": '\b\f\n\r\t"\\/é😀\u2028\x80'}
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert accepts(grammar_of({"const": value}, compact=True), text)


@pytest.mark.parametrize(
    "pattern", ["^[a-z]+$", r"\d{3}-[0-9]", "(?i)a|(?:b)", r"^\[x\.\]$", "^[ -~.]*$"]
)
def test_what_is_quoted_right_stays_as_it_is(pattern: str) -> None:
    assert quotable(pattern) == pattern


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet='[]^\\-&~|()*x0u{}?a"p\x00', max_size=12))
def test_total(pattern: str) -> None:
    with suppress(Refused):
        assert len(quotable(pattern)) >= len(pattern)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "{}"},
        {"enum": [1, ["{}"]]},
        {"const": {"{}": 1}},
        {"items": {"properties": {"{}": True}}},
        {"required": ["{}"]},
    ],
)
def test_texts_that_are_spelled_out_are_bounded(schema: Json) -> None:
    """Characters of two bytes count as two."""
    text = json.dumps(schema, ensure_ascii=False)
    grammar_of(text.replace("{}", "é" * (MAX_FIXED_BYTES // 2)))
    reason = refusal(text.replace("{}", "é" * (MAX_FIXED_BYTES // 2) + "a"))
    assert f"a text of {MAX_FIXED_BYTES + 1} bytes, more than {MAX_FIXED_BYTES}" in reason
