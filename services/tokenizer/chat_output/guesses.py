"""The parsers of a model, from what its chat template says."""

import re

from triptych.services.tokenizer.chat_output import deepseek_v3, hermes, llama3_json, mistral

_OTHER_CALLS = re.compile(r"<function=|<arg_key>|<parameter=|<invoke ")
"""What calls in <tool_call> have inside with models whose notation is another: Qwen3-Coder, GLM."""
_DEEPSEEK_TURN = "<\uff5cAssistant\uff5c>"
_PYTHON_CALLS = re.compile(r"\[func_name1\(|<\|python_start\|>")


def guess_parsers(chat_template: str) -> tuple[str | None, str | None]:
    """The names of the tool parser and of the reasoning parser; None where nothing tells."""
    return _tool_parser(chat_template), _reasoning_parser(chat_template)


def _tool_parser(template: str) -> str | None:
    if deepseek_v3.CALLS_BEGIN in template:
        return "deepseek_v3" if deepseek_v3.FENCE_BEGIN in template else "deepseek_v31"
    if mistral.TAG in template:
        return "mistral"
    if hermes.BEGIN in template and not _OTHER_CALLS.search(template):
        return "hermes"
    if _PYTHON_CALLS.search(template):
        return "pythonic"
    if llama3_json.TAG in template or (
        "<|start_header_id|>" in template and '"parameters": ' in template
    ):
        return "llama3_json"
    return None


def _reasoning_parser(template: str) -> str | None:
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template:
        return None
    if _DEEPSEEK_TURN in template:
        return "deepseek_r1"
    return "qwen3" if hermes.BEGIN in template or "enable_thinking" in template else "think"
