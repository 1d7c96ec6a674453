"""Tools over gRPC with the real engine: what the model writes, what it is held to, how it ends.

The model follows a script wherever the grammar lets it; the length of the prompt picks the script.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from chat_calls import (
    AUTO,
    CITY_SCHEMA,
    NONE,
    NOW,
    REQUIRED,
    WEATHER,
    Turn,
    chat_request,
    hermes_call,
    joined,
    named,
)
from chat_folders import write_chat_tokenizer
from engine import Engine, running_engine
from scripted_models import T1_EOS, write_m2_random_llama, write_s2_positions
from segments import Segments
from triptych.v1 import common_pb2, inference_pb2

pytestmark = pytest.mark.e2e

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)
CITY = {"city": "Zürich"}
CALL = hermes_call("get_weather", CITY)
OTHER = hermes_call("now", {})
PROSE = "It is warm."
THOUGHTS = "<think>\nhm\n</think>\n\n"
TEXTS = {
    "call": CALL,
    "prose": PROSE,
    "words and calls": f"Well.\n{CALL}\n{OTHER}",
    "thoughts and prose": THOUGHTS + PROSE,
    "thoughts and call": THOUGHTS + CALL,
    "thoughts and JSON": THOUGHTS + json.dumps(CITY, ensure_ascii=False),
}
SEGMENTS = Segments({name: [*text.encode(), T1_EOS] for name, text in TEXTS.items()}, first=64)
FLAGS = ("--kv-cache-memory", "16MiB", "--cpu-threads", "1", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("calls")
    write_chat_tokenizer(folder / "model", TEMPLATE)
    write_s2_positions(folder / "model", SEGMENTS.script, num_positions=1024)
    flags = (*FLAGS, "--reasoning-parser", "qwen3")
    with running_engine(folder / "model", folder / "run", *flags) as engine:
        yield engine
        engine.wait_idle()


def ask(
    engine: Engine,
    name: str,
    *tools: inference_pb2.Tool,
    choice: inference_pb2.ToolChoice | None = None,
    **params: Any,
) -> Turn:
    """The answer to a prompt that makes the model follow the named script."""
    shown = sum(len(tool.name) + 1 for tool in tools)
    content = "." * (len(SEGMENTS.prompt(name)) - shown - 2)
    request = chat_request(*tools, content=content, choice=choice, temperature=0.0, **params)
    (turn,) = joined(engine.stub.Chat(request, timeout=60))
    return turn


@pytest.mark.parametrize("choice", [None, AUTO, REQUIRED, NONE, named("get_weather")])
@pytest.mark.parametrize("name", ["call", "prose"])
@pytest.mark.parametrize("cut", [False, True])
def test_what_a_choice_makes_of_an_answer(
    engine: Engine, choice: inference_pb2.ToolChoice | None, name: str, cut: bool
) -> None:
    params = {"max_tokens": len(TEXTS[name].encode()) // 2} if cut else {}
    turn = ask(engine, name, WEATHER, NOW, choice=choice, **params)
    mode = AUTO.mode if choice is None else choice.mode
    if mode == NONE.mode or (mode == AUTO.mode and name == "prose"):
        assert turn.calls == []
        assert turn.text == (
            TEXTS[name].encode()[: params["max_tokens"]].decode() if cut else TEXTS[name]
        )
        assert turn.finish == ("LENGTH" if cut else "STOP")
        return
    assert turn.text == "" or (cut and mode == AUTO.mode)  # a call without arguments is none yet
    if cut:
        assert turn.finish == "LENGTH"
        assert [call.name for call in turn.calls] in ([], ["get_weather"])
        return
    assert turn.finish == ("STOP" if mode == named("").mode else "TOOL_CALLS")
    (called, arguments), *others = turn.called()
    assert others == []
    assert called in ("get_weather", "now")
    if mode == named("").mode or name == "call":
        assert called == "get_weather"
        jsonschema.validate(arguments, CITY_SCHEMA)
    if name == "call":
        assert arguments == CITY


def test_text_beside_several_calls(engine: Engine) -> None:
    turn = ask(engine, "words and calls", WEATHER, NOW)
    assert turn.text.strip() == "Well."
    assert turn.called() == [("get_weather", CITY), ("now", {})]
    assert turn.finish == "TOOL_CALLS"


def test_one_call_where_several_are_not_wanted(engine: Engine) -> None:
    content = "." * (len(SEGMENTS.prompt("words and calls")) - len("get_weather;now;") - 2)
    request = chat_request(WEATHER, NOW, content=content, temperature=0.0)
    request.parallel_tool_calls = False
    (turn,) = joined(engine.stub.Chat(request, timeout=60))
    assert turn.called() == [("get_weather", CITY)]
    assert turn.finish == "TOOL_CALLS"


@pytest.mark.parametrize("choice", [None, REQUIRED, named("get_weather")])
def test_a_call_behind_thoughts(engine: Engine, choice: inference_pb2.ToolChoice | None) -> None:
    turn = ask(engine, "thoughts and call", WEATHER, NOW, choice=choice)
    assert turn.reasoning.strip() == "hm"
    assert turn.text.strip() == ""
    assert turn.called() == [("get_weather", CITY)]


def test_prose_behind_thoughts(engine: Engine) -> None:
    for tools in ((), (WEATHER,)):
        turn = ask(engine, "thoughts and prose", *tools)
        assert (turn.reasoning.strip(), turn.text, turn.finish) == ("hm", PROSE, "STOP")


@pytest.mark.parametrize("separate", [True, False])
def test_a_form_holds_behind_the_thought(engine: Engine, separate: bool) -> None:
    content = "." * (len(SEGMENTS.prompt("thoughts and JSON")) - 2)
    request = chat_request(content=content, temperature=0.0)
    form = common_pb2.StructuredOutput(json_schema=json.dumps(CITY_SCHEMA))
    request.sampling_params.structured_output.CopyFrom(form)
    request.separate_reasoning = separate
    (turn,) = joined(engine.stub.Chat(request, timeout=60))
    thought, _, answer = turn.text.rpartition("</think>")
    assert (turn.reasoning or thought.removeprefix("<think>")).strip() == "hm"
    assert json.loads(answer) == CITY
    assert turn.finish == "STOP"


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model that writes anything."""
    folder: Path = tmp_path_factory.mktemp("noisy")
    write_chat_tokenizer(folder / "model", TEMPLATE)
    write_m2_random_llama(folder / "model", max_position_embeddings=1024)
    flags = (*FLAGS, "--reasoning-parser", "none")
    with running_engine(folder / "model", folder / "run", *flags) as engine:
        yield engine
        engine.wait_idle()


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_keeps_its_schema_whatever_is_drawn(noisy: Engine, seed: int) -> None:
    strict = inference_pb2.Tool(
        name="f",
        parameters=json.dumps(
            {
                "type": "object",
                "properties": {
                    "kind": {"enum": ["a", 'b\n"c"']},
                    "on": {"type": "boolean"},
                    "list": {"type": "array", "items": {"type": "null"}, "maxItems": 3},
                },
                "required": ["kind", "on"],
                "additionalProperties": False,
            }
        ),
    )
    request = chat_request(strict, choice=REQUIRED, seed=seed, n=4, temperature=1.5)
    request.parallel_tool_calls = False
    for turn in joined(noisy.stub.Chat(request, timeout=60)):
        assert turn.finish == "TOOL_CALLS"
        ((name, arguments),) = turn.called()
        assert name == "f"
        jsonschema.validate(arguments, json.loads(strict.parameters))
