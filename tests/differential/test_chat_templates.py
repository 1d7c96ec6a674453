"""Chats with tools, calls and thoughts against transformers' `apply_chat_template`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from chat_folders import write_chat_tokenizer
from chat_templates import HERMES, TEMPLATES
from scripted_models import CHATML_TEMPLATE
from triptych.engine_core.errors import InvalidRequest
from triptych.services.runtime.model_files import ModelFiles
from triptych.services.tokenizer.bounded_json import Json
from triptych.services.tokenizer.chat_messages import (
    ChatMessage,
    ChatOptions,
    ChatTool,
    ToolCall,
)
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer

Turn = Mapping[str, object]

SCHEMA: dict[str, Json] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": 'Größe <b>&</b> "quotes" 世界'},
        "days": {"type": "array", "items": {"type": "integer"}, "default": [1, 2]},
    },
    "required": ["city"],
}
TOOLS = (
    ChatTool("get_weather", "The weather, for some days", SCHEMA),
    ChatTool("now", "The time\nof day", {"type": "object", "properties": {}}),
)
ARGUMENTS: Sequence[dict[str, object]] = (
    {"city": 'Zürich "ZH"\n', "days": [3, 4], "deep": {"a": {"b": None, "c": 1.5}}},
    {},
)


def call(number: int) -> ToolCall:
    arguments = json.dumps(ARGUMENTS[number % 2], ensure_ascii=False)
    return ToolCall(f"callid{number:03}", TOOLS[number % 2].name, arguments)


def answered(number: int) -> ChatMessage:
    each = call(number)
    return ChatMessage("tool", f'{{"degrees": {number}}}', each.name, tool_call_id=each.id)


SYSTEM = ChatMessage("system", " Be brief. ")
ASKED = ChatMessage("user", "How warm is it?")
CHATS: Mapping[str, tuple[ChatMessage, ...]] = {
    "plain": (SYSTEM, ASKED, ChatMessage("assistant", "21 degrees."), ASKED),
    "call": (ASKED, ChatMessage("assistant", "", tool_calls=(call(0),))),
    "answered": (
        SYSTEM,
        ASKED,
        ChatMessage("assistant", "", tool_calls=(call(0),)),
        answered(0),
        ChatMessage("assistant", "It is warm."),
        ASKED,
        ChatMessage("assistant", "", tool_calls=(call(1),)),
        answered(1),
    ),
    "several": (
        ASKED,
        ChatMessage("assistant", "", tool_calls=(call(0), call(1), call(2))),
        *map(answered, range(3)),
    ),
    "with words": (
        ASKED,
        ChatMessage("assistant", "Let me see.", tool_calls=(call(0),)),
        answered(0),
    ),
    "thoughts": (
        ASKED,
        ChatMessage("assistant", "", tool_calls=(call(0),), reasoning="I should\nlook.\n"),
        answered(0),
        ChatMessage("assistant", "<think>\nold\n</think>\n\nWarm.", reasoning=""),
    ),
}
REFUSED = {  # by the template itself
    ("llama3", "several"),
}


def turn_of(message: ChatMessage, *, text: bool) -> Turn:
    """As a user of transformers writes it. `text`: arguments as text."""
    turn: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls and not message.content:
        turn["content"] = None
    if message.name:
        turn["name"] = message.name
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": each.id,
                "type": "function",
                "function": {
                    "name": each.name,
                    "arguments": each.arguments if text else json.loads(each.arguments),
                },
            }
            for each in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    return turn


def tool_of(tool: ChatTool) -> dict[str, object]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


class Pair:
    """A folder in both libraries."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        write_chat_tokenizer(folder, TEMPLATES[name])
        self.ours: Tokenizer = load_tokenizer(ModelFiles("folder", folder, "t1"))
        self.theirs: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)

    def theirs_of(self, messages: Sequence[ChatMessage], options: ChatOptions) -> list[int]:
        turns = [turn_of(each, text=self.name == "deepseek") for each in messages]
        # Not the method of the tokenizer: a late one drops what is none before it renders, and
        # DeepSeek's template asks whether the content is none.
        rendered, _ = render_jinja_template(
            [turns],
            tools=[tool_of(each) for each in options.tools] or None,
            chat_template=TEMPLATES[self.name],
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **self.theirs.special_tokens_map,
            **options.variables,
        )
        ids: list[int] = self.theirs.encode(rendered[0], add_special_tokens=False)
        return ids

    def check(self, messages: Sequence[ChatMessage], options: ChatOptions) -> None:
        expected = self.theirs_of(messages, options)
        assert self.ours.encode_chat(messages, options) == expected
        if self.name == "deepseek":
            return
        whole = self.theirs.apply_chat_template(
            [turn_of(each, text=False) for each in messages],
            tools=[tool_of(each) for each in options.tools] or None,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tokenize=True,
            return_dict=False,
            **options.variables,
        )
        assert whole == expected


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize("tools", [(), TOOLS[:1], TOOLS])
@pytest.mark.parametrize("chat", sorted(CHATS))
def test_ids_of_chats_with_tools(pair: Pair, chat: str, tools: tuple[ChatTool, ...]) -> None:
    if (pair.name, chat) in REFUSED:
        for encode in (pair.ours.encode_chat, pair.theirs_of):
            with pytest.raises((InvalidRequest, TemplateError), match="single tool-calls at once"):
                encode(CHATS[chat], ChatOptions(tools=tools))
        return
    for opened in (True, False):
        pair.check(CHATS[chat], ChatOptions(opened, tools=tools))


@pytest.mark.parametrize("content", ["It is", " It is \n", "<think>\nhm", "", "Ça ↵"])
def test_ids_of_a_message_left_open(pair: Pair, content: str) -> None:
    messages = (SYSTEM, ASKED, ChatMessage("assistant", content))
    pair.check(messages, ChatOptions(False, continue_final_message=True, tools=TOOLS))


def test_ids_with_more_variables(pair: Pair) -> None:
    for thinking in (True, False):
        variables = {
            "enable_thinking": thinking,
            "date_string": "1 Jan 2030",
            "tools_in_user_message": thinking,
            "note": "!",
        }
        pair.check(CHATS["answered"], ChatOptions(tools=TOOLS, variables=variables))


def test_ids_where_a_folder_has_a_template_for_tools(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path, "")
    (tmp_path / "chat_template.jinja").unlink()
    path = tmp_path / "tokenizer_config.json"
    named = [
        {"name": "tool_use", "template": HERMES},
        {"name": "default", "template": CHATML_TEMPLATE},
    ]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    ours = load_tokenizer(ModelFiles("folder", tmp_path, "t1"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for tools in ((), TOOLS):
        expected = theirs.apply_chat_template(
            [turn_of(each, text=False) for each in CHATS["plain"]],
            tools=[tool_of(each) for each in tools] or None,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert ours.encode_chat(CHATS["plain"], ChatOptions(tools=tools)) == expected
