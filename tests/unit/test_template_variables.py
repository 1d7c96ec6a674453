import json

import pytest

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.template_variables import template_variables


def test_any_name_but_reserved_ones() -> None:
    assert template_variables("") == {}
    assert template_variables(" ") == {}
    given = {"enable_thinking": False, "thinking_budget": 3, "Custom": {"a": [None, "x"]}}
    assert template_variables(json.dumps(given)) == given


@pytest.mark.parametrize(
    "name",
    [
        *("messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "bos_token", "eos_token", "raise_exception", "strftime_now"),
        *("range", "namespace", "self", "", "_x", "a b", "1a", "render clock", "x" * 65, "ä"),
    ],
)
def test_refused_names(name: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        template_variables(json.dumps({"fine": 1, name: 1}))
    assert refusal.value.field == "chat_template_kwargs"


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "1", '"a"', "{", "null", '{"a": NaN}', '{"a": "' + "x" * (64 << 10) + '"}'),
        '{"a": ' + "[" * 16 + "]" * 16 + "}",
        json.dumps({f"k{number}": 1 for number in range(65)}),
    ],
)
def test_what_is_no_small_object(text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        template_variables(text)
    assert refusal.value.field == "chat_template_kwargs"


def test_depth_and_size_up_to_the_bounds() -> None:
    assert template_variables('{"a": ' + "[" * 15 + "]" * 15 + "}")
    assert template_variables(json.dumps({f"k{number}": "x" * 900 for number in range(64)}))
