"""Clients in JavaScript that are not ours: grpc-js with nothing but the protos, and OpenAI's.

They come from the npm registry and are installed once, in build/node:

    cp tests/support/node/package.json build/node/ && npm install --prefix build/node
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, running_engine
from small_engines import SMALL, tiny_model
from source_tree import REPO

pytestmark = pytest.mark.e2e
SOURCES = REPO / "tests" / "support" / "node"
INSTALLED = REPO / "build" / "node"
WITH_HTTP = [flag for flag in SMALL if flag != "--no-http"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("node")
    model = tiny_model(folder, max_position_embeddings=1024)
    with running_engine(model, folder / "run", *WITH_HTTP, "--http-port", "0") as engine:
        yield engine


def what_it_sees(program: str, *arguments: str) -> dict[str, Any]:
    """Skips where node or the packages are missing, saying which."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (INSTALLED / "node_modules").is_dir():
        pytest.skip(f"the packages are not in {INSTALLED}: see the top of {Path(__file__).name}")
    script = INSTALLED / program  # beside the packages: that is where node looks for them
    shutil.copyfile(SOURCES / program, script)
    command = [node, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_grpc_js(engine: Engine) -> None:
    seen = what_it_sees("grpc.mjs", engine.address, str(REPO / "protos"))
    ours = engine.generate("Once upon a time", max_tokens=48, seed=1, ignore_eos=True)
    assert seen["whole"]["text"] == ours.text
    assert seen["whole"]["token_ids"] == ours.token_ids
    assert seen["whole"]["usage"]["completion_tokens"] == 48
    assert (seen["cancelled"]["code"], seen["late"]["code"]) == ("CANCELLED", "DEADLINE_EXCEEDED")
    assert seen["refused"]["code"] == "INVALID_ARGUMENT"
    assert seen["refused"]["details"] == "sampling_params.top_p: 1.5 is not within 0 and 1"
    assert seen["session"] == {str(each): ours.token_ids[:16] for each in range(1, 5)}
    engine.wait_idle()


def test_openai_for_javascript(engine: Engine) -> None:
    seen = what_it_sees("openai.mjs", f"http://{engine.http_address}/v1")
    assert seen["tokens"] == 24
    assert seen["whole"]
    assert seen["whole"] == seen["streamed"] == seen["responses"]
    assert seen["pieces"] >= 3
    assert seen["error"]["type"] == "BadRequestError"
    assert seen["error"]["status"] == 400
    assert seen["error"]["message"].endswith("top_p: 3.0 is not within 0 and 1")
    engine.wait_idle()
