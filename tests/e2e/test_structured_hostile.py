"""What must not work, and what it costs others: faults R39 and R43 as reported, over gRPC."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
import pytest

from choices import joined
from engine import Engine, generate_request, running_engine
from grpc_errors import as_error, refused, violations
from leaving import until
from scripted_models import T1_EOS
from small_engines import SMALL, tiny_model
from structured import (
    Neighbour,
    asked,
    check_json,
    check_returned,
    checkers,
    distinct,
    figures,
    form,
    is_gone,
    one_of,
    resident,
    schema,
    slow_checkers,
)
from triptych.v1 import common_pb2

pytestmark = pytest.mark.e2e

PROMPT = [5, 6, 7]
LIMIT = 15.0
"""Seconds; less than what a form takes that nobody stops."""
TRIES = 5
FIELD = "sampling_params.structured_output"
Form = common_pb2.StructuredOutput


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("hostile")
    model = tiny_model(folder, max_position_embeddings=1024)
    flags = (*SMALL, "--structured-output-check-seconds", "1", "--structured-output-cache", "16")
    with running_engine(model, folder / "run", *flags) as engine:
        asked(engine, PROMPT, schema({"const": 1}), max_tokens=4)
        yield engine
        engine.wait_idle()


def nested(levels: int) -> str:
    """A schema with so many in one another, as text."""
    return '{"items":' * levels + "{}" + "}" * levels


BAD: dict[str, tuple[Form, str, str]] = {
    "unknown type": (schema({"type": "something"}), "json_schema", "type at #"),
    "type is true": (schema({"type": True}), "json_schema", "type"),
    "open parenthesis": (
        schema({"properties": {"x": {"pattern": "("}}}), "json_schema", "#/properties/x/pattern",
    ),
    "look-behind": (
        schema({"type": "string", "pattern": "(?<=a)b"}), "json_schema", "pattern",
    ),
    "no JSON": (form(json_schema="{"), "json_schema", ""),
    "no schema": (form(json_schema="7"), "json_schema", ""),
    "text behind it": (form(json_schema="{} {}"), "json_schema", ""),
    "NaN": (form(json_schema='{"const": NaN}'), "json_schema", "NaN"),
    "a name twice": (form(json_schema='{"type":"null","type":"null"}'), "json_schema", "type"),
    "half a surrogate pair": (form(json_schema='{"const":"\\ud800"}'), "json_schema", ""),
    "unsupported keyword": (
        schema({"type": "array", "uniqueItems": True}), "json_schema", "uniqueItems",
    ),
    "if": (schema({"if": {"type": "string"}, "then": False}), "json_schema", "if"),
    "foreign reference": (schema({"$ref": "http://example.com/x.json"}), "json_schema", "$ref"),
    "reference to nothing": (schema({"$ref": "#/$defs/A"}), "json_schema", "#/$defs/A"),
    "false": (schema(False), "json_schema", ""),
    "bad regex": (form(regex="[a"), "regex", ""),
    "look-behind of a regex": (form(regex="(?<!a)b"), "regex", "look"),
    "back-reference": (form(regex=r"(a)\1"), "regex", ""),
    "bad EBNF": (form(grammar='root ::= "a" ('), "grammar", ""),
    "rule that is not there": (form(grammar="start: nowhere"), "grammar", "nowhere"),
    "a token by number": (form(grammar="start: <[5]>"), "grammar", ""),
    "empty choice": (one_of("a", ""), "choice", ""),
    "tag without triggers": (
        form(structural_tag='{"structures": [{"begin":"<a>","schema":{},"end":"</a>"}]}'),
        "structural_tag", "triggers",
    ),
    "bad schema in a tag": (
        form(structural_tag=json.dumps({
            "structures": [{"begin": "<a>", "schema": {"type": "odd"}, "end": "</a>"}],
            "triggers": ["<a"],
        })),
        "structural_tag", "type at #",
    ),
}  # fmt: skip


def test_r39_each_bad_form_is_refused_by_name_and_the_neighbour_hears_nothing(
    engine: Engine,
) -> None:
    before = figures(engine)
    neighbour = Neighbour(engine, [9, 9], tokens=150)
    expected = neighbour.one()
    for name, (wanted, where, what) in BAD.items():
        request = generate_request([9, 9], max_tokens=150, temperature=0.0, ignore_eos=True)
        stream = engine.stub.Generate(request, timeout=60)
        token_ids = list(next(iter(stream)).token_ids)
        error = refused(partial(asked, engine, PROMPT, wanted, max_tokens=20))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, name
        fields = violations(error)
        assert len(fields) == 1, name
        ((field, description),) = fields.items()
        assert field.startswith(FIELD), name
        assert where in field or where in description, name
        assert what in field + description, (name, description)
        for response in stream:
            token_ids += response.token_ids
        assert token_ids == expected, name
    # The scheduler has not seen one of them.
    check_returned(engine, before)
    assert joined(engine.stub.Generate(generate_request(PROMPT, max_tokens=3), timeout=9)).finish


def many_patterns(least: int) -> Form:
    """Compiles for 19 s and takes 2 GB, whatever the library's limits."""
    counts = range(least, least + 14)
    return schema({"type": "string", "allOf": [{"pattern": f".*a.{{{n}}}"} for n in counts]})


def wide(count: int) -> dict[str, object]:
    return {"properties": {f"name{index}": {"type": "integer"} for index in range(count)}}


REFUSED: dict[str, Form] = {
    "a reference to itself": schema(
        {"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}
    ),
    "references in a ring": schema(
        {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}
    ),
    "a schema without end": schema(
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
    ),
    "a deep schema": form(json_schema=nested(5_000)),
    "a deeper one": form(json_schema=nested(20_000)),
    "a deep document": form(json_schema="[" * 100_000 + "]" * 100_000),
    "deep parentheses": form(regex="(" * 8_000 + "a" + ")" * 8_000),
    "patterns together": many_patterns(5),
    "a huge number": schema({"type": "integer", "multipleOf": 123_456_789}),
    "the smallest number": form(json_schema='{"const": -9223372036854775808}'),
    "an exponent": form(json_schema='{"type": "number", "maximum": 1e999}'),
    "many properties": schema(wide(5_001)),
    "an enum without bound": schema({"enum": list(range(20_000))}),
    "too many choices": one_of(*(str(number) for number in range(1025))),
    "a constant without bound": schema({"const": "x" * (200 << 10)}),
    "too large": form(json_schema='{"const":"' + "x" * (257 << 10) + '"}'),
    "left recursion only": form(grammar="start: start"),
    "an endless rule": form(grammar='start: "a" start'),
    "a regex that matches nothing": form(regex="[a&&b]"),
    "a deep grammar": form(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a deep tag": form(
        structural_tag='{"type":"structural_tag","format":'
        + '{"type":"sequence","elements":[' * 5_000 + '{"type":"any_text"}' + "]}" * 5_000 + "}"
    ),
}  # fmt: skip
# These may be kept or refused, but not for long.
EITHER: dict[str, Form] = {
    "counts of counts": form(regex="(a{1,1000}){1,1000}"),
    "counts of counts in a schema": schema({"pattern": "((a{1,999}){1,999}){1,999}"}),
    "a slow regex": form(regex="(.*a.{0,40}b)*"),
    "an ambiguous grammar": form(grammar='start: e\ne: e e | "a"'),
    "empty repetitions": form(grammar='start: (("a"*)*)*'),
    "nothing over and over": form(regex="(((a*)*)*)*"),
    "many alternatives": form(regex="|".join(f"{number}x*" for number in range(2_000))),
    "a wide object": schema(wide(240)),
    "a large constant": schema({"const": "x" * (8 << 10)}),
    "a long bounded string": schema({"type": "string", "maxLength": 1_000_000}),
    "a long bounded array": schema({"type": "array", "minItems": 100_000}),
}


def test_r43_hostile_forms_end_in_time_and_the_neighbours_tokens_keep_coming(
    engine: Engine,
) -> None:
    """A machine that is busy is slow in any case: the neighbour's gaps alone are the measure; those
    that the machine makes do not come each time."""
    assert any(hostile_forms_cost_nobody_time(engine) for _ in range(TRIES))


def hostile_forms_cost_nobody_time(engine: Engine) -> bool:
    before = figures(engine)
    alone = Neighbour(engine, [9, 9])
    expected = {tuple(alone.one()) for _ in range(3)}
    slow: dict[str, float] = {}
    with Neighbour(engine, [9, 9]).streaming() as neighbour:
        for name, wanted in (REFUSED | EITHER).items():
            started = time.monotonic()
            try:
                answer = asked(engine, PROMPT, wanted, max_tokens=40, seed=1)
                assert name in EITHER, (name, dict(answer.text))
            except grpc.RpcError as caught:
                error = as_error(caught)
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, (name, error.details())
                (named,) = violations(error)
                assert named.startswith(FIELD), name
            slow[name] = time.monotonic() - started
    late = {name: seconds for name, seconds in slow.items() if seconds > LIMIT}
    assert not late
    assert distinct(neighbour.answers) == expected
    check_returned(engine, before)
    return neighbour.longest_gap < max(0.5, 4 * alone.longest_gap)


def test_many_heavy_forms_at_once(engine: Engine) -> None:
    """Each may take its time for a mask; together they must leave time to others."""
    assert any(heavy_forms_cost_nobody_time(engine) for _ in range(TRIES))


def heavy_forms_cost_nobody_time(engine: Engine) -> bool:
    before = figures(engine)
    heavy = [EITHER[name] for name in ("an ambiguous grammar", "a slow regex", "a large constant")]
    alone = Neighbour(engine, [9, 9])
    expected = {tuple(alone.one()) for _ in range(3)}

    def one(number: int) -> None:
        wanted = heavy[number % len(heavy)]
        with suppress(grpc.RpcError):  # one that takes too long ends
            asked(engine, PROMPT, wanted, max_tokens=200, seed=number, ignore_eos=True)

    with Neighbour(engine, [9, 9]).streaming() as neighbour, ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(24)))
    assert distinct(neighbour.answers) == expected
    check_returned(engine, before)
    return neighbour.longest_gap < max(0.5, 4 * alone.longest_gap)


def test_a_new_form_passes_those_that_take_long(tmp_path: Path) -> None:
    seconds = 60.0
    flags = (*SMALL, "--structured-output-check-seconds", str(seconds))
    with (
        running_engine(tiny_model(tmp_path), tmp_path / "run", *flags) as engine,
        ThreadPoolExecutor(2) as pool,
    ):
        hostile = [
            pool.submit(refused, partial(asked, engine, PROMPT, many_patterns(n))) for n in (6, 7)
        ]
        until(lambda: slow_checkers(engine, seconds))
        (slow,) = slow_checkers(engine, seconds)
        slow.suspend()  # so that they take longer than the new one, whatever the machine does
        answer = asked(engine, PROMPT, schema({"const": "new"}), max_tokens=10)
        assert answer.text[0] == '"new"'
        assert not any(each.done() for each in hostile)
        slow.resume()
    assert {each.result().code() for each in hostile} == {grpc.StatusCode.INVALID_ARGUMENT}


def test_checkers_that_are_killed_are_replaced(engine: Engine) -> None:
    asked(engine, PROMPT, schema({"const": "before"}), max_tokens=4)
    children = checkers(engine)
    assert children
    for child in children:
        child.kill()
    deadline = time.monotonic() + 30
    while not all(map(is_gone, children)):
        assert time.monotonic() < deadline  # their parent looks at them when it needs one
        time.sleep(0.01)
    answer = asked(engine, PROMPT, schema({"const": "after the kill"}), max_tokens=40)
    assert answer.text[0] == '"after the kill"'
    assert {child.pid for child in checkers(engine)} - {child.pid for child in children}


def test_r43_a_tree_is_no_cycle(engine: Engine) -> None:
    tree: dict[str, object] = {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 99},
                    "children": {
                        "type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/tree"},
                    },
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    }  # fmt: skip
    depths = set()
    for seed in range(6):
        answer = asked(engine, PROMPT, schema(tree), max_tokens=700, seed=seed)
        if answer.finish[0] == common_pb2.FINISH_REASON_STOP:
            check_json(answer.text[0], tree)
            depths.add(answer.text[0].count("children"))
    assert len(depths) > 1


def test_r43_hundreds_of_schemas_leave_no_memory_behind(engine: Engine) -> None:
    def one(number: int) -> None:
        properties = {f"p{number}": {"const": number}, f"q{number}": {"enum": ["a", "b"]}}
        value = {"type": "object", "properties": properties, "required": [f"p{number}"],
                 "additionalProperties": False}  # fmt: skip
        answer = asked(engine, PROMPT, schema(value), max_tokens=60, temperature=0.0)
        check_json(answer.text[0], value)

    before = figures(engine)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(60)))
        at_first = resident(engine)
        list(pool.map(one, range(60, 360)))
    grown = {name: bytes_now - at_first[name] for name, bytes_now in resident(engine).items()}
    # 300 grammars kept whole would be 20 MB and more in each.
    assert max(grown.values()) < 12 << 20, grown
    check_returned(engine, before)
    # Those beyond the 16 that may stay go when their choices' ends are noticed.
    deadline = time.monotonic() + 30
    while engine.stats("scheduler").scheduler.grammars_cached > 16:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_schemas_abandoned_while_they_compile(engine: Engine) -> None:
    """Cancelled at any moment between the check and the first token: nothing stays behind."""
    before = figures(engine)

    def one(number: int) -> None:
        value = {"enum": [f"{number} {index}" for index in range(2_000)]}
        request = generate_request(
            PROMPT, max_tokens=100, structured_output=schema(value), stop_token_ids=[T1_EOS]
        )
        call = engine.stub.Generate(request)
        time.sleep(0.004 * number)
        call.cancel()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(24)))
        codes = list(
            pool.map(
                lambda number: refused(
                    lambda: list(
                        engine.stub.Generate(
                            generate_request(
                                PROMPT,
                                max_tokens=900,
                                structured_output=schema({"minItems": 300, "title": str(number)}
                                                         | {"type": "array"}),
                            ),
                            timeout=0.002 * (number + 1),
                        )
                    )
                ).code(),
                range(12),
            )
        )  # fmt: skip
    assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    check_returned(engine, before)
