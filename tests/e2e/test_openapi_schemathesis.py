"""Our own OpenAPI description against a running engine: schemathesis makes requests of it.

No request ends in a 500, every status and content type is one that the description names, and
every refusal has OpenAI's shape. Bounded: a fixed number of examples per route, the same each time.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from engine import Engine, running_engine
from small_engines import tiny_model

pytestmark = pytest.mark.e2e

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, object]] = {
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104, 105]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hi"},
}
"""What each route needs at least; the description cannot say all of it."""
ASKED = ["/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/{name}"]
EXAMPLES = {GenerationMode.POSITIVE: 12, GenerationMode.NEGATIVE: 8}
FIELD_EXAMPLES = 40
TIMEOUT = 20.0


def bounded(examples: int) -> settings:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("openapi")
    model = tiny_model(folder, max_position_embeddings=128)
    flags = ("--kv-cache-memory", "16MiB", "--cpu-threads", "1", "--served-model-name", "tiny",
             "--tool-call-parser", "hermes")  # fmt: skip
    with running_engine(model, folder / "run", *flags) as engine:
        yield engine
        engine.wait_idle()
        assert engine.stats("tokenizer-0").tokenizer.streams == 0


@pytest.fixture(scope="module")
def operations(engine: Engine) -> dict[str, Any]:  # the package's types are loose
    """By path; each path has one method."""
    url = f"http://{engine.http_address}/openapi.json"
    schema: Any = schemathesis.openapi.from_url(url)
    made = [result.ok() for result in schema.get_all_operations()]
    assert len({each.path for each in made}) == len(made)
    return {each.path: each for each in made}


def test_every_route_is_described_and_tried(operations: dict[str, Any]) -> None:
    assert set(operations) == {*BODIES, *ASKED}


@pytest.mark.parametrize("path", ASKED)
def test_what_is_only_asked(operations: dict[str, Any], path: str) -> None:
    @bounded(8)
    @given(case=operations[path].as_strategy())
    def ask(case: Any) -> None:
        assert checked(case) in (200, 404 if "{" in path else 200)

    ask()


@pytest.mark.parametrize("mode", EXAMPLES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", BODIES)
def test_bodies_as_described_and_not(
    operations: dict[str, Any], path: str, mode: GenerationMode
) -> None:
    @bounded(EXAMPLES[mode])
    @given(case=operations[path].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        status = checked(case)
        assert mode.is_positive or status >= 400

    ask()


@pytest.mark.parametrize("path", BODIES)
def test_a_good_body_with_a_described_field(operations: dict[str, Any], path: str) -> None:
    """Deeper: all but two of the fields are left out, so that many requests are served."""
    seen: Counter[int] = Counter()

    @bounded(FIELD_EXAMPLES)
    @given(case=operations[path].as_strategy(), data=st.data())
    def ask(case: Any, data: st.DataObject) -> None:
        given = sorted(set(case.body) - {"model", *BODIES[path]})
        kept = data.draw(st.lists(st.sampled_from(given), max_size=2)) if given else []
        case.body = {**BODIES[path], **{name: case.body[name] for name in kept}}
        if path.startswith("/v1/"):
            case.body["stream"] = data.draw(st.booleans())
        seen[checked(case)] += 1

    ask()
    assert seen[200] >= 5, seen


def checked(case: Any) -> int:
    """Send it; the status of an answer that is as described."""
    answer = case.call(timeout=TIMEOUT)
    status: int = answer.status_code
    assert status not in (500, 501, 502), answer.text
    assert "internal_error" not in answer.text, answer.text  # a stream's error has no status
    case.validate_response(answer, checks=[status_code_conformance, content_type_conformance])
    if status >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return status
