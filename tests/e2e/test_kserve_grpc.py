"""KServe's inference.GRPCInferenceService, driven by NVIDIA's tritonclient."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, is_serving, running_engine
from small_engines import EXACT, tiny_model
from triptych.kserve import inference_pb2 as kserve_pb2

VISIT = Path(__file__).parents[1] / "support" / "triton_visit.py"
PROMPT = "hello there"
PARAMS: dict[str, Any] = {"max_tokens": 7, "temperature": 0.7, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = tiny_model(tmp_path_factory.mktemp("kserve"))
    run_dir = tmp_path_factory.mktemp("run")
    flags = (*EXACT, "--kserve-grpc", "--served-model-name", "tiny")
    with running_engine(model, run_dir, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def seen(engine: Engine) -> dict[str, Any]:
    """What the client got."""
    done = subprocess.run(
        [sys.executable, "-W", "error", VISIT, engine.address, "tiny", PROMPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_facts(engine: Engine, seen: dict[str, Any]) -> None:
    assert is_serving(engine.address, "inference.GRPCInferenceService")
    assert (seen["live"], seen["ready"], seen["model_ready"]) == (True, True, [True, False])
    assert seen["server"] == "triptych"
    assert seen["inputs"][:2] == ["text_input", "input_ids"]
    assert seen["outputs"] == ["text_output", "finish_reason", "output_ids"]


def test_text_in_text_out(engine: Engine, seen: dict[str, Any]) -> None:
    expected = engine.generate(PROMPT, **PARAMS)
    assert seen["text"] == [expected.text]
    assert seen["reason"] == ["length"]
    assert seen["with_prompt"] == [PROMPT + expected.text]


def test_ids_in_ids_out(engine: Engine, seen: dict[str, Any]) -> None:
    assert seen["ids"] == engine.generate([5, 6, 7], **PARAMS).token_ids


def test_several_choices(engine: Engine, seen: dict[str, Any]) -> None:
    assert seen["several"][0] == seen["text"][0]
    assert len(seen["several"]) == 3


def test_requests_on_one_stream(seen: dict[str, Any]) -> None:
    events = seen["stream"]
    first = [event for event in events if event.get("id") == "0"]
    assert "".join(text for event in first for text in event["text"]) == seen["text"][0]
    assert [event["final"] for event in first] == [False] * (len(first) - 1) + [True]
    (error,) = [event["error"] for event in events if "error" in event]
    assert "sampling_parameters.top_p" in error
    (last,) = [event for event in events if event.get("id") == "2"]
    assert last["text"] == seen["text"]


def test_errors_name_what_is_wrong(seen: dict[str, Any]) -> None:
    errors = seen["errors"]
    assert "exactly one of text_input and input_ids" in errors["twice"]
    assert "inputs: 'prompt' is not one of text_input" in errors["unknown"]
    assert "sampling_parameters: " in errors["params"]
    assert "heat" in errors["params"]
    assert "sampling_parameters.temperature" in errors["bound"]
    assert errors["model"].startswith("StatusCode.NOT_FOUND")
    assert "stream: it goes with ModelStreamInfer" in errors["stream"]


def test_nothing_is_left(engine: Engine, seen: dict[str, Any]) -> None:
    assert seen["text"]
    engine.wait_idle()


def test_the_contract_is_the_one_of_the_client(seen: dict[str, Any]) -> None:
    """Every message and field of ours is theirs, with its number and type."""
    for name, message in kserve_pb2.DESCRIPTOR.message_types_by_name.items():
        theirs = seen["contract"][name]
        for field in message.fields:
            kind = field.message_type
            ours = [field.number, field.type, field.is_repeated, kind.full_name if kind else ""]
            assert theirs[field.name] == ours, f"{name}.{field.name}"
