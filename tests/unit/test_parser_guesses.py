"""Which parsers a chat template asks for."""

import pytest

from triptych.services.tokenizer.chat_output import (
    guess_parsers,
    reasoning_parser_names,
    tool_parser_names,
)

QWEN = """{{- '<tool_call>\\n{"name": <function-name>, "arguments": <args>}\\n</tool_call>' }}"""
TURN = "<\uff5cAssistant\uff5c>"
CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"

TEMPLATES = [
    ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}", None, None),
    (QWEN, "hermes", None),
    (f"{QWEN}{{% if enable_thinking %}}<think>\n\n</think>", "hermes", "qwen3"),
    ("<tool_call>\n<function=f>\n<parameter=a>", None, None),
    ("<tool_call>f\n<arg_key>a</arg_key></think>", None, "qwen3"),
    (f"{TURN}{CALLS}function\n```json\n{{% if '</think>' in content %}}", "deepseek_v3",
     "deepseek_r1"),
    (f"{TURN}{CALLS}", "deepseek_v31", None),
    ('{"name": function name, "parameters": {}}<|start_header_id|>', "llama3_json", None),
    ('<|python_tag|>"parameters": ', "llama3_json", None),
    ("[func_name1(params_name1=params_value1)]<|header_start|>", "pythonic", None),
    ("[TOOL_CALLS][AVAILABLE_TOOLS]", "mistral", None),
    ("[TOOL_CALLS][THINK]", "mistral", "mistral"),
    ("{{ content.split('</think>') }}", None, "think"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_templates(template: str, tools: str | None, reasoning: str | None) -> None:
    assert guess_parsers(template) == (tools, reasoning)
    assert tools is None or tools in tool_parser_names()
    assert reasoning is None or reasoning in reasoning_parser_names()
