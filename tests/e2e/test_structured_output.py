"""Structured output beside everything else that a request can ask for, or that can happen to it."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from choices import Choices, joined, values
from engine import Engine, generate_request, running_engine
from grpc_errors import as_error, violations
from scripted_models import T1_EOS
from small_engines import SMALL, tiny_model
from structured import (
    Asked,
    ask,
    ask_all,
    ask_through_a_death,
    asked,
    check_json,
    check_returned,
    figures,
    form,
    one_of,
    said,
    schema,
)
from triptych.v1 import common_pb2, inference_pb2

pytestmark = pytest.mark.e2e

STOP = common_pb2.FINISH_REASON_STOP
BLOCK_BYTES = 3072
"""2 layers x 16 tokens x 2 heads x (k of 8, v in lanes of 16) x 2 bytes."""
PROMPT = list(b"tell me")
PERSON: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3,
                 "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}  # fmt: skip
LIST: dict[str, object] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 99_999},
    "minItems": 20,
    "maxItems": 24,
}
LINES = form(regex="([a-z]{3,9} ){12,16}[a-z]+[.]")
GBNF = form(grammar='root ::= item ("," item){9,12}\nitem ::= [0-9]+ ":" ("yes" | "no")\n')
LARK = form(grammar="start: pair (/;/ pair){8,9}\npair: KEY /=/ /[0-9]{1,4}/\nKEY: /[a-z]{2,5}/\n")
TAGS = json.dumps(
    {
        "structures": [
            {"begin": "<f=sum>", "schema": {"type": "array", "items": {"type": "boolean"},
                                            "minItems": 2, "maxItems": 3}, "end": "</f>"},
            {"begin": "<f=day>", "schema": {"enum": ["mon", "tue"]}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
)  # fmt: skip
FORMS = [schema(PERSON), schema(LIST), LINES, GBNF, LARK, one_of("north", "south-west", "nowhere")]


def holds(index: int, text: str) -> bool:
    """Whether a text has the form of that index."""
    patterns = {
        2: r"([a-z]{3,9} ){12,16}[a-z]+[.]",
        3: r"[0-9]+:(yes|no)(,[0-9]+:(yes|no)){9,12}",
        4: r"[a-z]{2,5}=[0-9]{1,4}(;[a-z]{2,5}=[0-9]{1,4}){8,9}",
        5: r"north|south-west|nowhere",
    }
    if index in patterns:
        return re.fullmatch(patterns[index], text) is not None
    check_json(text, [PERSON, LIST][index])
    return True


def a_mix(count: int, start: int = 0) -> list[Asked]:
    """Requests of every form, prompts that share beginnings, all ways of drawing."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5},
        {"temperature": 1.2, "logprobs": 2},
        {"temperature": 1.0, "n": 2},
    ]
    return [
        (
            [*PROMPT * (1 + k % 5), k],
            {"max_tokens": 150, "seed": k, "structured_output": FORMS[k % len(FORMS)]}
            | ways[k % len(ways)],
        )
        for k in range(start, start + count)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m2"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running_engine(model, tmp_path_factory.mktemp("plain") / "run", *SMALL) as engine:
        yield engine
        assert engine.wait_idle().grammars_running == 0


@pytest.fixture(scope="module")
def small_pool(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """24 blocks: two or three of these requests."""
    flags = ("--kv-cache-memory", str(24 * BLOCK_BYTES), "--cpu-threads", "1", "--max-num-seqs",
             "16", "--max-num-batched-tokens", "64", "--max-model-len", "256")  # fmt: skip
    with running_engine(model, tmp_path_factory.mktemp("pool") / "run", *flags) as engine:
        assert engine.wait_idle().blocks_total == 24
        asked(engine, PROMPT, one_of("a"), max_tokens=1)  # the checker is there
        yield engine
        assert engine.wait_idle().grammars_running == 0


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> list[Choices]:
    """The answers to `a_mix(24)`, one after the other."""
    return [ask(engine, each) for each in a_mix(24)]


def test_every_form_holds(undisturbed: list[Choices]) -> None:
    for k, answer in enumerate(undisturbed):
        for index, text in answer.text.items():
            if answer.finish[index] == STOP:
                assert holds(k % len(FORMS), text), text
    ended = [answer.finish[0] == STOP for answer in undisturbed]
    assert sum(ended) > len(ended) // 2
    for k in range(len(FORMS)):
        assert any(ended[k :: len(FORMS)])


# ------------------------------------------------------------------ other fields


def test_each_choice_has_the_form_and_is_the_same_whatever_n_is(engine: Engine) -> None:
    params: dict[str, Any] = {"max_tokens": 150, "seed": 3}
    four = asked(engine, PROMPT, schema(PERSON), n=4, **params)
    seven = asked(engine, PROMPT, schema(PERSON), n=7, **params)
    one = asked(engine, PROMPT, schema(PERSON), **params)
    assert [four.ids[k] for k in range(4)] == [seven.ids[k] for k in range(4)]
    assert one.ids[0] == four.ids[0]
    assert len(set(seven.text.values())) == 7
    assert set(seven.finish.values()) == {STOP}
    for text in seven.text.values():
        check_json(text, PERSON)
    best = asked(engine, PROMPT, schema(PERSON), n=2, best_of=5, **params)
    for text in best.text.values():
        check_json(text, PERSON)


def test_logprobs_are_there_and_change_nothing(engine: Engine) -> None:
    for wanted in FORMS:
        params: dict[str, Any] = {"max_tokens": 200, "seed": 8}
        bare = asked(engine, PROMPT, wanted, **params)
        shown = asked(engine, PROMPT, wanted, logprobs=3, **params)
        assert (shown.text, shown.ids, shown.finish) == (bare.text, bare.ids, bare.finish)
        rows = shown.logprobs[0]
        assert [row.token_id for row in rows] == shown.ids[0]
        assert all(value is not None and value < 0 for value in values(rows))
        assert all(len(row.top) == 3 for row in rows)
        assert b"".join(row.token for row in rows).decode() == shown.text[0]
        # Of the model's own logits: the form masks only what is drawn from.
        assert any(top.token_id != row.token_id for row in rows for top in row.top[:1])


def test_stop_strings_cut_it(engine: Engine) -> None:
    whole = asked(engine, PROMPT, schema(LIST), max_tokens=200, seed=4).text[0]
    stop = whole[40:43]
    answer = asked(engine, PROMPT, schema(LIST), max_tokens=200, seed=4, stop=[stop])
    assert answer.text[0] == whole[: whole.index(stop)]
    assert answer.finish[0] == STOP
    # One whose end is the end of the form.
    answer = asked(engine, PROMPT, one_of("north"), max_tokens=20, stop=["th"])
    assert (answer.text[0], answer.finish[0]) == ("nor", STOP)
    kept = asked(
        engine, PROMPT, one_of("north"), max_tokens=20, stop=["th"], include_stop_str_in_output=True
    )
    assert kept.text[0] == "north"
    near = asked(engine, PROMPT, one_of("north"), max_tokens=20, stop=["thx"])
    assert (near.text[0], near.finish[0]) == ("north", STOP)


def test_prefix_hits(engine: Engine) -> None:
    prompt = list(b"a prompt that takes more than three blocks of sixteen")
    engine.flush_cache()
    first = asked(engine, prompt, schema(PERSON), max_tokens=150, seed=5)
    again = asked(engine, prompt, schema(PERSON), max_tokens=150, seed=5)
    assert first.usage is not None
    assert again.usage is not None
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, len(prompt) - 1)
    assert said(first) == said(again)
    # The answer is a prompt in turn: the form begins anew behind it.
    longer = [*prompt, *first.ids[0]]
    follow_up = asked(engine, longer, schema(PERSON), max_tokens=150, seed=6)
    assert follow_up.usage is not None
    assert follow_up.usage.cached_tokens > len(prompt)
    check_json(follow_up.text[0], PERSON)


def test_the_whole_vocabulary_beside_a_grammar(engine: Engine) -> None:
    """Token ids, special tokens' text, penalties, and the fields that narrow what is drawn."""
    letters = list(b'{}[]":,0123456789 \nabcdefghijklmnopqrstuvwxyz')
    ways: list[dict[str, Any]] = [
        {"allowed_token_ids": {"ids": letters}},
        {"top_k": 1},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"repetition_penalty": 2.0, "presence_penalty": 2.0},
        {"logit_bias": {ord("]"): 100.0, T1_EOS: 100.0, ord("x"): 100.0}},
        {"skip_special_tokens": False},
        {"stop_token_ids": [ord("~"), T1_EOS]},
    ]
    for params in ways:
        answer = asked(engine, PROMPT, schema(LIST), max_tokens=250, seed=9, **params)
        assert answer.finish[0] == STOP
        check_json(answer.text[0], LIST)


def test_beam_search_is_refused(engine: Engine) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        asked(engine, PROMPT, one_of("a"), beam=common_pb2.BeamSearch(width=2))
    assert as_error(caught.value).code() == grpc.StatusCode.INVALID_ARGUMENT


# ------------------------------------------------------------------ structural tags

TAGGED = r"(?s)(?:(?!<f=).)*(?:<f=(?:sum>(?P<sum>.*?)|day>(?P<day>.*?))</f>(?:(?!<f=).)*)*"


def test_structural_tags_of_both_notations(engine: Engine) -> None:
    fixed = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "So: "},
                {"type": "tag", "begin": "<call>", "end": "</call>",
                 "content": {"type": "json_schema", "json_schema": PERSON}},
                {"type": "or", "elements": [{"type": "const_string", "value": "!"},
                                            {"type": "regex", "pattern": "[?]{2,3}"}]},
            ],
        },
    }  # fmt: skip
    for seed in range(3):
        answer = asked(
            engine, PROMPT, form(structural_tag=json.dumps(fixed)), max_tokens=200, seed=seed
        )
        assert answer.finish[0] == STOP
        match = re.fullmatch(r"(?s)So: <call>(.*)</call>(!|[?]{2,3})", answer.text[0])
        assert match is not None, answer.text[0]
        check_json(match[1], PERSON)
    push = {ord(letter): 9.0 for letter in "<f="}
    found = set()
    for seed in range(6):
        answer = asked(
            engine, PROMPT, form(structural_tag=TAGS), max_tokens=150, seed=seed,
            logit_bias=push | {T1_EOS: 8.0},
        )  # fmt: skip
        if answer.finish[0] != STOP:
            continue
        text = answer.text[0]
        assert re.fullmatch(TAGGED, text) is not None, text
        for name, body in re.findall(r"(?s)<f=(sum|day)>(.*?)</f>", text):
            found.add(name)
            value = json.loads(body)
            assert value in ("mon", "tue") if name == "day" else set(value) <= {True, False}
    assert found == {"sum", "day"}


def test_triggered_tags_at_least_one(engine: Engine) -> None:
    value = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags", "triggers": ["<f="], "at_least_one": True,
            "stop_after_first": True,
            "tags": [{"type": "tag", "begin": "<f=x>", "end": "</f>",
                      "content": {"type": "json_schema", "json_schema": {"const": [1]}}}],
        },
    }  # fmt: skip
    answer = asked(engine, PROMPT, form(structural_tag=json.dumps(value)), max_tokens=60, seed=1)
    assert re.fullmatch(r"<f=x>\[\s*1\s*\]</f>", answer.text[0]) is not None
    assert answer.finish[0] == STOP


# ------------------------------------------------------------------ Session and Chat


def test_chat(engine: Engine) -> None:
    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content="Is it?")],
        sampling_params=common_pb2.SamplingParams(
            max_tokens=20, structured_output=one_of("yes", "no"), logprobs=0
        ),
    )
    answer = joined(engine.stub.Chat(request, timeout=30))
    assert answer.text[0] in ("yes", "no")
    assert answer.finish[0] == STOP
    request.sampling_params.structured_output.CopyFrom(schema({"type": "odd"}))
    with pytest.raises(grpc.RpcError) as caught:
        list(engine.stub.Chat(request, timeout=30))
    assert violations(as_error(caught.value))


def test_a_session(engine: Engine) -> None:
    wanted = [*FORMS, schema({"pattern": "("}), schema(PERSON)]

    def requests() -> Iterator[inference_pb2.SessionRequest]:
        for k, each in enumerate(wanted):
            generate = generate_request(
                PROMPT, max_tokens=200, seed=8, structured_output=each, temperature=1.0
            )
            start = inference_pb2.SessionStart(id=k, generate=generate)
            yield inference_pb2.SessionRequest(start=start)
        yield inference_pb2.SessionRequest(cancel=inference_pb2.SessionCancel(id=len(wanted) - 1))

    answers: dict[int, Choices] = {}
    errors: dict[int, int] = {}
    for response in engine.stub.Session(requests(), timeout=60):
        for event in response.events:
            if event.HasField("error"):
                errors[event.id] = event.error.code
            else:
                answers.setdefault(event.id, Choices()).add(event.output)
    assert errors == {len(FORMS): grpc.StatusCode.INVALID_ARGUMENT.value[0]}
    for k, each in enumerate(FORMS):
        alone = asked(engine, PROMPT, each, max_tokens=200, seed=8)
        assert answers[k].text == alone.text
        assert answers[k].ids == alone.ids
        assert holds(k, alone.text[0])


# ------------------------------------------------------------------ company, preemption, death


def test_the_same_alone_and_in_company_of_other_grammars(
    engine: Engine, undisturbed: list[Choices]
) -> None:
    assert [said(each) for each in ask_all(engine, a_mix(24))] == [
        said(each) for each in undisturbed
    ]
    subject = a_mix(1, start=7)[0]
    alone = said(ask(engine, subject))
    company = [
        (
            [*PROMPT, 200 + k],
            {"max_tokens": 100, "seed": k,
             "structured_output": form(regex=f"[{chr(97 + k)}-z ]{{{10 + k},90}}")},
        )
        for k in range(16)
    ]  # fmt: skip
    for place in (0, 16):
        requests: Sequence[Asked] = [*company[:place], subject, *company[place:]]
        assert said(ask_all(engine, requests)[place]) == alone


def test_preempted_and_resumed(small_pool: Engine, undisturbed: list[Choices]) -> None:
    before = figures(small_pool)
    for _ in range(5):  # a machine that is busy may not get many of them to run at once
        answers = ask_all(small_pool, a_mix(24))
        assert [said(each) for each in answers] == [said(each) for each in undisturbed]
        if (preemptions := small_pool.wait_idle().preemptions_total) > 0:
            break
    assert preemptions > 0
    check_returned(small_pool, before)


@pytest.mark.parametrize("pool", ["engine", "small_pool"])
def test_the_executor_dies_in_the_middle(
    pool: str, undisturbed: list[Choices], request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(pool)
    before = figures(engine)
    answers = ask_through_a_death(engine, a_mix(24))
    assert [said(each) for each in answers] == [said(each) for each in undisturbed]
    check_returned(engine, before)
