"""Structured output and speculation with the real model and its 49,152 tokens."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from choices import Choices, joined
from engine import Engine, running_engine
from structured import Asked, ask_all, ask_through_a_death, check_json, form, one_of, said, schema
from triptych.v1 import common_pb2, inference_pb2

pytestmark = [pytest.mark.e2e, pytest.mark.smollm]

STOP = common_pb2.FINISH_REASON_STOP
PERSON: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2,
                    "maxItems": 4},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}  # fmt: skip
NOTE = (
    "The ferry leaves the old harbour at seven and the new one at nine. It takes an hour. "
    "Repeat: The ferry leaves the old harbour at seven and"
)
REQUESTS: list[Asked] = [
    ("A person as JSON:", {"structured_output": schema(PERSON), "temperature": 0.0}),
    ("A person as JSON:", {"structured_output": schema(PERSON), "logprobs": 2}),
    ("The time is ", {"structured_output": form(regex="[0-2][0-9]:[0-5][0-9]"), "n": 3}),
    ("Is the sky blue? ", {"structured_output": one_of("yes", "no", "sometimes")}),
    (NOTE, {"temperature": 0.0, "logprobs": 1}),
    (NOTE, {"temperature": 0.0, "repetition_penalty": 1.1, "stop": ["seven"]}),
    ("One, two, three, one, two, three, one,", {"temperature": 0.3}),
    ("A song, la la la la", {"temperature": 0.0, "n": 2, "min_tokens": 8}),
]


@pytest.fixture(scope="module")
def plain(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    with running_engine(smollm, run_dir, "--kv-cache-memory", "64MiB") as engine:
        yield engine
        engine.wait_idle()


@pytest.fixture(scope="module")
def mix(plain: Engine) -> list[Asked]:
    """The requests, as token ids."""

    def encoded(text: str | Sequence[int]) -> list[int]:
        request = inference_pb2.TokenizeRequest(text=str(text))
        return list(plain.stub.Tokenize(request, timeout=10).token_ids)

    shared: dict[str, Any] = {"max_tokens": 40, "seed": 5}
    return [(encoded(prompt), shared | params) for prompt, params in REQUESTS]


@pytest.fixture(scope="module")
def answers(plain: Engine, mix: list[Asked]) -> list[Choices]:
    return ask_all(plain, mix)


def test_answers_have_their_form(answers: list[Choices]) -> None:
    for answer in answers[:2]:
        assert answer.finish[0] == STOP
        check_json(answer.text[0], PERSON)
    for text in answers[2].text.values():
        assert re.fullmatch("[0-2][0-9]:[0-5][0-9]", text) is not None
    assert answers[3].text[0] in ("yes", "no", "sometimes")


def test_guesses_change_nothing(
    answers: list[Choices], mix: list[Asked], smollm: Path, tmp_path: Path
) -> None:
    expected = [said(each) for each in answers]
    flags = ("--kv-cache-memory", "64MiB", "--speculative-method", "suffix")
    with running_engine(smollm, tmp_path / "run", *flags) as engine:
        assert [said(each) for each in ask_all(engine, mix)] == expected
        assert [said(each) for each in ask_all(engine, mix, at_once=1)] == expected
        stats = engine.wait_idle()
        assert 0 < stats.accepted_draft_tokens_total <= stats.draft_tokens_total


def test_a_chat_answer_in_a_form(plain: Engine) -> None:
    message = inference_pb2.ChatMessage(role="user", content="What is the capital of France?")
    wanted = schema({"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}},
                     "required": ["city"], "additionalProperties": False})  # fmt: skip
    params = common_pb2.SamplingParams(temperature=0.0, max_tokens=24, structured_output=wanted)
    request = inference_pb2.ChatRequest(messages=[message], sampling_params=params)
    answer = joined(plain.stub.Chat(request, timeout=60))
    assert answer.finish[0] == STOP
    assert "Paris" in answer.text[0]


def test_the_executor_dies_in_the_middle(
    plain: Engine, answers: list[Choices], mix: list[Asked]
) -> None:
    expected = [said(each) for each in answers]
    assert [said(each) for each in ask_through_a_death(plain, mix)] == expected
