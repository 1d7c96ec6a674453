"""Regular expressions, choices, grammars, objects, white space: kept, or refused by name."""

from collections.abc import Sequence

import pytest

from grammar_walks import accepts
from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.structured_output.wanted import wanted_grammar
from triptych.v1 import common_pb2

Raw = common_pb2.StructuredOutput
FIELD = "sampling_params.structured_output"


def refusal(raw: common_pb2.StructuredOutput) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as raised:
        wanted_grammar(raw)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600
    return raised.value.field.removeprefix(FIELD).removeprefix("."), raised.value.description


def choices(*texts: str) -> common_pb2.StructuredOutput:
    return Raw(choice=common_pb2.Choices(texts=texts))


def test_a_form_is_needed() -> None:
    assert refusal(Raw()) == ("", "none of its forms is set")
    assert refusal(Raw(json_object=False)) == (
        "json_object", "it is false; leave structured_output out instead"
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ choice


def test_choices() -> None:
    texts = ("a", "ab", "b c", 'é\n"\\\x01\x7f/😀', '"', "%json {}", "<|im_end|>", "a")
    grammar = wanted_grammar(choices(*texts))
    assert all(accepts(grammar, text) for text in texts)
    assert not any(accepts(grammar, text) for text in ("", "abc", "b", "b  c", "x"))


def test_choices_are_bounded() -> None:
    assert refusal(choices()) == ("choice", "0 texts is not within 1 and 1024")
    assert refusal(choices("a", "")) == ("choice", "texts[1] is empty")
    assert refusal(choices(*map(str, range(1025)))) == (
        "choice", "1025 texts is not within 1 and 1024"
    )  # fmt: skip
    assert refusal(choices("a" * 65537)) == ("choice", "65537 bytes together, more than 65536")
    assert refusal(choices("b", "a" * 8193)) == ("choice", "texts[1]: 8193 bytes, more than 8192")
    assert accepts(wanted_grammar(choices(*map(str, range(1024)))), "1023")


# ------------------------------------------------------------------------------------------- regex


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("a*", ("", "aaa"), ("b",)),
        ("[0-9]{3}", ("123",), ("12", "1234")),
        ("a/b\n\\/\\n", ("a/b\n/\n",), ("a/b",)),
        ("^a|b$", ("a", "b"), ("^a",)),
        (r"\d+\.\d\d", ("12.34",), ("12.3",)),
        ('"[^"]*"', ('"é"',), ('"',)),
        (r"(?i)yes|no", ("YES", "No"), ("maybe",)),
        (r"\\", ("\\",), ("/",)),
        ("[/]", ("/",), ("\\/",)),
        ("(a{1,1000}){1,1000}", ("a" * 50,), ("b",)),
    ],
)
def test_regexes(pattern: str, right: Sequence[str], wrong: Sequence[str]) -> None:
    grammar = wanted_grammar(Raw(regex=pattern))
    assert all(accepts(grammar, text) for text in right)
    assert not any(accepts(grammar, text) for text in wrong)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "it is empty"),
        ("(", "unclosed group"),
        ("a(?=b)", "look-around, including look-ahead and look-behind, is not supported"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        (r"\bword", "lookarounds not supported"),
        ("[^\\s\\S]", "no text matches it"),
        ("a{2,1}", "invalid repetition count range"),
        ("\\", "it ends with half an escape"),
        ("a" * 20_000, "20000 bytes, more than 16384"),
        ("(" * 3000 + "a" + ")" * 3000, "invalid regex"),
    ],
    ids=lambda each: each[:20],
)
def test_bad_regexes(pattern: str, why: str) -> None:
    field, description = refusal(Raw(regex=pattern))
    assert field == "regex"
    assert why in description


# ---------------------------------------------------------------------------------------- grammars

LARK = r"""
start: greeting " " NAME ("!" | "?")?   // a comment with <angle> and @at
greeting: "hello" | "<b>"
NAME: /[A-Z][a-z\/]{0,9}/
"""
GBNF = r"""
# the rules
root ::= greeting-word " " name ("!" | "?")?
greeting-word ::= "hello" | "<b>"
name ::= [A-Z] [a-z/]*
"""


@pytest.mark.parametrize("text", [LARK, GBNF])
def test_grammars(text: str) -> None:
    grammar = wanted_grammar(Raw(grammar=text))
    for right in ("hello World", "<b> W/x?", "hello A!"):
        assert accepts(grammar, right)
    for wrong in ("hello", "hello world", "hello World!!", ""):
        assert not accepts(grammar, wrong)


def test_escapes_of_gbnf() -> None:
    text = r'root ::= "\u00e9\x41\"\\" [\u0041-\U00000043] | "\u005b\n" [^\n\]a]'
    grammar = wanted_grammar(Raw(grammar=text))
    assert accepts(grammar, 'éA"\\B')
    assert not accepts(grammar, 'éA"\\D')
    assert accepts(grammar, "[\nb")
    assert not accepts(grammar, "[\na")


def test_recursion_in_grammars() -> None:
    grammar = wanted_grammar(Raw(grammar='root ::= "(" root ")" | "x"'))
    assert accepts(grammar, "(((x)))")
    assert not accepts(grammar, "((x)")


def test_schemas_in_grammars_are_checked() -> None:
    text = 'start: "call " %json {"type": "object", "properties": {"a": %s}, "required": ["a"]} "."'
    grammar = wanted_grammar(Raw(grammar=text.replace("%s", '{"type": "integer"}')))
    assert accepts(grammar, 'call {"a": 1}.')
    assert not accepts(grammar, 'call {"a":  1}.')
    field, why = refusal(Raw(grammar=text.replace("%s", '{"uniqueItems": true}')))
    assert (field, why) == (
        "grammar", "%json at line 1: uniqueItems at #/properties/a is not supported"
    )  # fmt: skip
    lenient = text.replace("%s", '{"not": {}}').replace(
        '{"type"', '{"x-guidance": {"lenient": true}, "type"', 1
    )
    assert "not at #/properties/a is not supported" in refusal(Raw(grammar=lenient))[1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("start: x", 'unknown name: "x"'),
        ('begin: "a"', "start"),
        ('start: "a', "lexer error"),
        ('start: "a" |\nstart: "b"', "start"),
        ('start: <|im_end|> "a"', "<|im_end|> at line 1: tokens by name or number"),
        ('start: "a"\n  | <[5]>', "<[5]> at line 2: tokens by name or number"),
        ('start: "b" | /a\n"/ <[5]> /"c/', "<[5]> at line 2: tokens by name or number"),
        ("start: @other", "@other at line 1: there are no other grammars"),
        ('start: a\na[temperature=0.5]: "x"', "temperature= at line 2: it is not supported"),
        ('start: a\na[max_tokens=5]: /.*/ "x"', "max_tokens= at line 2: it is not supported"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "%llguidance at line 1 takes"),
        ("start: %json {", "it is no JSON"),
        ("start: " + "(" * 3000, "too deeply nested"),
        ("x" * 65537, "65537 bytes, more than 65536"),
        ("root ::= x", "it is no GBNF: Rule 'x' not found"),
        ('main ::= "a"', "it is no GBNF: No 'root' rule found"),
        ('root ::= "a', "it is no GBNF: Unexpected end of input"),
        ("root ::= " + "(" * 3000, "it is no GBNF: groups stand too deep in one another"),
        (r'root ::= "\ud800"', "is no character"),
        (r'root ::= "\q"', "it is no GBNF: Invalid escape sequence"),
        ("start: A\nA: /a/ & /b/", "no text matches it"),
        ('start: "a" start', "it is too complex, or has no end"),
    ],
    ids=lambda each: each[:24],
)
def test_bad_grammars(text: str, why: str) -> None:
    field, description = refusal(Raw(grammar=text))
    assert field == "grammar"
    assert why in description


# ----------------------------------------------------------------------------- objects and blanks


def test_objects() -> None:
    grammar = wanted_grammar(Raw(json_object=True))
    for right in ("{}", '{"a": [1, "x", null, {"b": {}}]}'):
        assert accepts(grammar, right)
    for wrong in ("[]", "1", '{"a"}', "{}x", '{  "a":1}'):
        assert not accepts(grammar, wrong)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("", '{"a":1}', '{"a": 1}'),
        (" ?", '{"a": 1}', '{"a":  1}'),
        ("\\n\\t{0,4}| ", '{\n\t\t"a": 1\n}', '{\n "a":1}'),
        ("[ \\n]{0,64}", '{\n\n  "a":1}', "{" + " " * 65 + "}"),
    ],
)
def test_white_space_patterns(pattern: str, right: str, wrong: str) -> None:
    grammar = wanted_grammar(Raw(json_object=True, whitespace_pattern=pattern))
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (" *", "more than 64 characters"),
        ("\\n+", "more than 64 characters"),
        ("( {0,9}){0,9}", "more than 64 characters"),
        ("[ ]{0,65}", "more than 64 characters"),
        ("a?", "no white space of JSON"),
        ("\\s?", "no white space of JSON"),
        ("(", "unclosed group"),
    ],
)
def test_bad_white_space(pattern: str, why: str) -> None:
    field, description = refusal(Raw(json_object=True, whitespace_pattern=pattern))
    assert field == "whitespace_pattern"
    assert why in description


def test_wishes_that_say_nothing_are_refused() -> None:
    for raw in (Raw(regex="a", whitespace_pattern=" "), Raw(grammar=LARK, whitespace_pattern=" ")):
        assert refusal(raw)[0] == "whitespace_pattern"
    assert refusal(Raw(regex="a", disable_any_whitespace=True))[0] == "disable_any_whitespace"
    assert refusal(Raw(json_object=True, disable_additional_properties=True)) == (
        "disable_additional_properties", "beside json_object it says nothing"
    )  # fmt: skip
    both = Raw(json_object=True, whitespace_pattern=" ", disable_any_whitespace=True)
    assert refusal(both)[0] == "whitespace_pattern"
