"""Where an answer ends and why, over gRPC, from scripts with repeats."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from engine import Answer, Engine, generate_request, running_engine
from grpc_errors import refused
from scripted_models import T1_EOS, T1_FIRST_PIECE, T1_VOCABULARY
from segments import Segments
from triptych.v1 import common_pb2, inference_pb2

pytestmark = pytest.mark.e2e

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
PIECES = ("DEF", "HI")
DEF, HI = range(T1_FIRST_PIECE, T1_FIRST_PIECE + len(PIECES))
G, J, X = b"GJX"
NEWLINE = ord("\n")
newlines = [ord("a")] * 40
newlines[1] = newlines[24] = NEWLINE

SEGMENTS = Segments(
    {
        "match": [DEF, G, HI, J, *b"KLM"],
        "near match": [DEF, G, HI, X, *b"KLM"],
        "overlap": list(b"xxabcyy"),
        "multi-byte": list("é世stop世".encode()),
        "newlines": newlines,
        "five": list(b"abcde"),
        "eos inside": [*b"ab", T1_EOS, *b"cd"],
    }
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("stops")
    SEGMENTS.write(folder / "model", PIECES)
    flags = ("--kv-cache-memory", "16MiB", "--cpu-threads", "1")
    with running_engine(folder / "model", folder / "run", *flags) as engine:
        yield engine
        engine.wait_idle()


def run(engine: Engine, name: str, **params: Any) -> Answer:
    answer = engine.generate(SEGMENTS.prompt(name), temperature=0.0, **params)
    assert answer.finish_count == 1
    return answer


def test_a_stop_string_over_several_pieces(engine: Engine) -> None:
    answer = run(engine, "match", stop=["DEFGHIJ"])
    assert (answer.text, answer.finish_reason, answer.stop_string) == ("", STOP, "DEFGHIJ")
    assert answer.completion_tokens == 4


def test_a_stop_string_where_only_token_ids_are_wanted(engine: Engine) -> None:
    request = generate_request(SEGMENTS.prompt("match"), temperature=0.0, stop=["HIJ"])
    request.output_format = inference_pb2.OUTPUT_FORMAT_TOKEN_IDS
    answer = Answer()
    for response in engine.stub.Generate(request, timeout=30):
        answer.add(response)
    assert (answer.text, answer.token_ids) == ("", [DEF, G, HI, J])
    assert (answer.finish_reason, answer.stop_string) == (STOP, "HIJ")


def test_include_stop_str_in_output(engine: Engine) -> None:
    answer = run(engine, "match", stop=["HIJ"], include_stop_str_in_output=True)
    assert (answer.text, answer.finish_reason) == ("DEFGHIJ", STOP)


def test_a_near_match_is_delivered_in_full(engine: Engine) -> None:
    answer = run(engine, "near match", stop=["DEFGHIJ"])
    assert (answer.text, answer.finish_reason) == ("DEFGHIXKLM", STOP)
    assert answer.stop_string is None


def test_a_stop_string_at_the_first_token(engine: Engine) -> None:
    assert run(engine, "match", stop=["D"]).text == ""


@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
def test_overlapping_stops(engine: Engine, stops: list[str]) -> None:
    assert run(engine, "overlap", stop=stops).text == "xx"


def test_a_stop_string_beside_multi_byte_characters(engine: Engine) -> None:
    assert run(engine, "multi-byte", stop=["stop"]).text == "é世"
    assert run(engine, "multi-byte", stop=["p世"]).text == "é世sto"


def test_min_tokens_holds_back_stop_strings(engine: Engine) -> None:
    answer = run(engine, "newlines", stop=["\n"], min_tokens=20)
    assert answer.completion_tokens == 25
    assert answer.text == "a\n" + "a" * 22
    assert answer.finish_reason == STOP


def test_min_tokens_masks_stop_token_ids(engine: Engine) -> None:
    """As documented: a stop id cannot be sampled before min_tokens; another token stands there."""
    answer = run(engine, "newlines", stop_token_ids=[NEWLINE], min_tokens=20)
    assert answer.completion_tokens == 25
    assert NEWLINE not in answer.token_ids[:24]
    assert (answer.finish_reason, answer.stop_token_id) == (STOP, NEWLINE)


def test_min_tokens_masks_the_end_of_sequence(engine: Engine) -> None:
    answer = run(engine, "five", min_tokens=7, max_tokens=8)
    assert T1_EOS not in answer.token_ids[:7]
    assert answer.completion_tokens >= 7


def test_ignore_eos_goes_on(engine: Engine) -> None:
    answer = run(engine, "eos inside", ignore_eos=True, max_tokens=5)
    assert answer.token_ids == [*b"ab", T1_EOS, *b"cd"]
    assert answer.text == "abcd"
    assert answer.finish_reason == LENGTH


@pytest.mark.parametrize(
    ("params", "reason", "text", "tokens"),
    [
        ({"max_tokens": 3}, LENGTH, "abc", 3),
        ({}, STOP, "abcde", 6),
        ({"stop": ["de"], "max_tokens": 5}, STOP, "abc", 5),
        ({"max_tokens": 6}, STOP, "abcde", 6),
        ({"stop_token_ids": [ord("c")]}, STOP, "ab", 3),
    ],
)
def test_finish_reasons(
    engine: Engine, params: dict[str, Any], reason: int, text: str, tokens: int
) -> None:
    answer = run(engine, "five", **params)
    assert (answer.finish_reason, answer.text, answer.completion_tokens) == (reason, text, tokens)


def test_the_end_of_the_context_is_length(engine: Engine) -> None:
    answer = engine.generate([ord("a")] * 1020, temperature=0.0, ignore_eos=True)
    assert answer.finish_reason == LENGTH
    assert answer.prompt_tokens + answer.completion_tokens == 1024


@pytest.mark.parametrize("bad", [T1_VOCABULARY, T1_VOCABULARY + 1000, 2**31, 2**32 - 1])
def test_a_stop_id_outside_the_vocabulary_is_refused(engine: Engine, bad: int) -> None:
    reference = run(engine, "newlines").token_ids
    error = refused(lambda: run(engine, "five", stop_token_ids=[bad], min_tokens=5))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "stop_token_ids" in error.details()
    assert run(engine, "newlines").token_ids == reference
