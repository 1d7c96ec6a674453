"""Whatever JSON comes over HTTP: a request of gRPC or a refusal that names a field."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine_core.errors import RequestError
from triptych.services.tokenizer.openai_http import chat, completions, info_routes, responses
from triptych.services.tokenizer.openai_http.body import Body, parsed
from triptych.services.tokenizer.openai_http.chat import ChatCompletionRequest
from triptych.services.tokenizer.openai_http.completions import CompletionRequest
from triptych.services.tokenizer.openai_http.errors import http_error
from triptych.services.tokenizer.openai_http.info_routes import TokenizeRequest
from triptych.services.tokenizer.openai_http.responses import ResponsesRequest

WORDS = st.sampled_from(
    ["type", "text", "role", "content", "name", "function", "arguments", "json_schema", "schema",
     "user", "message", "function_call", "function_call_output", "reasoning", "structural_tag",
     "required", "json_object", "input_text", "1", "-1", "format", "parameters", "tool_calls"]
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), WORDS,
    st.sampled_from([0, 1, -1, 1 << 31, 1 << 32, 1 << 64, 1e300, 1e-320]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={
        "content": VALUES, "type": WORDS, "tool_calls": VALUES, "name": VALUES, "call_id": VALUES,
        "output": VALUES, "arguments": VALUES, "reasoning_content": VALUES,
    },
)  # fmt: skip


def complete(fields: Body) -> object:
    assert isinstance(fields, CompletionRequest)
    return completions.requests_of(fields, "")


def converse(fields: Body) -> object:
    assert isinstance(fields, ChatCompletionRequest)
    return chat.request_of(fields, "")


def respond(fields: Body) -> object:
    assert isinstance(fields, ResponsesRequest)
    return responses.request_of(fields, "")


def tokenize(fields: Body) -> object:
    assert isinstance(fields, TokenizeRequest)
    return info_routes.tokenize_request(fields)


CASES: list[tuple[type[Body], Callable[[Body], object], dict[str, st.SearchStrategy[object]]]] = [
    (CompletionRequest, complete, {"prompt": st.just("x") | VALUES}),
    (ChatCompletionRequest, converse, {"messages": st.lists(TURN, max_size=3) | VALUES}),
    (ResponsesRequest, respond, {"input": st.lists(TURN, max_size=3) | VALUES}),
    (TokenizeRequest, tokenize, {}),
]


@pytest.mark.parametrize(
    ("model", "translate", "needed"), CASES, ids=[model.__name__ for model, _, _ in CASES]
)
@given(data=st.data())
def test_a_body_is_translated_or_refused(
    model: type[Body],
    translate: Callable[[Body], object],
    needed: dict[str, st.SearchStrategy[object]],
    data: st.DataObject,
) -> None:
    names = [field.alias or name for name, field in model.model_fields.items()]
    some = data.draw(st.lists(st.sampled_from([*names, *model.REFUSED]), max_size=4, unique=True))
    body = {name: data.draw(VALUES, label=name) for name in some}
    body |= {name: data.draw(strategy, label=name) for name, strategy in needed.items()}
    try:
        translate(parsed(model, json.dumps(body).encode()))
    except RequestError as error:
        made = http_error(error)
        assert made.status == 400
        assert made.param
        json.loads(made.body())
