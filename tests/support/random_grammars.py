"""Random grammars over the small vocabulary, each with a judge of texts that is not llguidance.

A `Form` is a grammar in llguidance's form, and what an output must satisfy.
"""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

import jsonschema
from hypothesis import strategies as st

from grammar_sources import lark, regex, schema


class Form(NamedTuple):
    """`name` is for the reader of a failure."""

    name: str
    grammar: str
    matches: Callable[[str], bool]


def _regex_form(pattern: str) -> Form:
    return Form(pattern, regex(pattern), lambda text: re.fullmatch(pattern, text) is not None)


def _schema_form(value: dict[str, object]) -> Form:
    validator = jsonschema.Draft202012Validator(value)

    def matches(text: str) -> bool:
        return bool(validator.is_valid(json.loads(text)))

    return Form(json.dumps(value), schema(value), matches)


def _balanced(text: str) -> bool:
    depth = 0
    for each in text:
        depth += {"(": 1, ")": -1}.get(each, -99)
        if depth < 0:
            return False
    return depth == 0


def _same_counts(text: str) -> bool:
    half = len(text) // 2
    return text == "a" * half + "b" * half and half > 0


_LARK = [
    Form("balanced", lark('start: "(" start ")" start | ""'), _balanced),
    Form("a^n b^n", lark('start: "a" start "b" | "ab"'), _same_counts),
    Form(
        "sums",
        lark('start: n ("+" n)*\nn: /[1-9][0-9]?/ | "(" start ")"'),
        lambda text: re.fullmatch(r"[0-9()+]+", text) is not None and eval_sum(text) > 0,
    ),
]


def eval_sum(text: str) -> int:
    """The value of a sum with parentheses; raises ValueError where it is none."""
    tokens = re.findall(r"[1-9][0-9]?|[()+]", text)
    if "".join(tokens) != text:
        raise ValueError(text)

    def total(at: int) -> tuple[int, int]:
        value = 0
        while True:
            if tokens[at] == "(":
                part, at = total(at + 1)
                if tokens[at] != ")":
                    raise ValueError(text)
            else:
                part = int(tokens[at])
            value, at = value + part, at + 1
            if at == len(tokens) or tokens[at] != "+":
                return value, at
            at += 1

    value, end = total(0)
    if end != len(tokens):
        raise ValueError(text)
    return value


def _combined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["*", "+", "?", "{1,2}", "{2}", "{2,3}"])
    return st.one_of(
        st.builds(lambda a, b: a + b, parts, parts),
        st.builds(lambda a, b: f"({a}|{b})", parts, parts),
        st.builds(lambda a, count: f"({a}){count}", parts, counts),
    )


regexes = st.recursive(st.sampled_from(["a", "b", "c", "ab", "[ab]", "é"]), _combined, max_leaves=6)

_leaves: st.SearchStrategy[dict[str, object]] = st.one_of(
    st.sampled_from([True, None, 10, "ab", 'q"\\', {"name": [1]}, ["é"]]).map(
        lambda value: {"const": value}
    ),
    st.lists(st.sampled_from([1, 2, 10, "a", "abc", None]), min_size=1, unique=True).map(
        lambda values: {"enum": values}
    ),
    st.just({"type": "boolean"}),
    st.tuples(st.integers(-20, 20), st.integers(0, 120)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.integers(0, 4).map(lambda most: {"type": "string", "maxLength": most}),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
)


def _nested(
    parts: st.SearchStrategy[dict[str, object]],
) -> st.SearchStrategy[dict[str, object]]:
    return st.one_of(
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            parts,
            st.integers(0, 2),
        ),
        st.dictionaries(st.sampled_from(["name", "a", "é"]), parts, min_size=1, max_size=2).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:1],
                "additionalProperties": False,
            }
        ),
    )


schemas = st.recursive(_leaves, _nested, max_leaves=3)

forms: st.SearchStrategy[Form] = st.one_of(
    regexes.map(_regex_form), schemas.map(_schema_form), st.sampled_from(_LARK)
)
