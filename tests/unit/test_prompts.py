"""Long texts wait for a thread without holding anything once nobody waits for them."""

import asyncio
import json
import threading
import weakref
from pathlib import Path

import pytest

from scripted_models import write_t1_tokenizer
from triptych.engine_core.errors import TooLong
from triptych.services.runtime.model_files import ModelFiles
from triptych.services.tokenizer.chat_input import chat_input
from triptych.services.tokenizer.prompts import Prompts
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer
from triptych.v1 import inference_pb2


class Text(str):
    """A text that can be watched."""


def test_a_caller_that_goes_while_it_waits_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_t1_tokenizer(tmp_path)
    prompts = Prompts(load_tokenizer(ModelFiles("folder", tmp_path, "model")))
    free = threading.Event()
    started: list[str] = []

    def encode(_self: Tokenizer, text: str, **_flags: bool) -> list[int]:
        started.append(text[0])
        assert free.wait(30)
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)

    async def scenario() -> None:
        running = [asyncio.create_task(prompts.text(c * 5000, True, None)) for c in "ab"]
        while len(started) < 2:
            await asyncio.sleep(0.001)
        text = Text("c" * 5000)
        watched = weakref.ref(text)
        waiting = asyncio.create_task(prompts.text(text, True, None))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.wait((waiting,))
        del text, waiting
        assert watched() is None
        running[0].cancel()  # its thread goes on, and is not free for another one yet
        later = asyncio.create_task(prompts.text("d" * 5000, True, None))
        await asyncio.sleep(0.02)
        free.set()
        assert (await later).tolist() == (await running[1]).tolist() == [1]
        assert (sorted(started[:2]), started[2:]) == (["a", "b"], ["d"])

    asyncio.run(scenario())
    prompts.close()


def test_a_chat_is_refused_for_what_its_template_shows(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}"
    shown = template + "{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    hidden = template + "{% endfor %}{% endfor %}"
    arguments = json.dumps({"a": "<|im_end|> " * 20_000})
    call = inference_pb2.ToolCall(id="1", name="f", arguments=arguments)
    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="assistant", tool_calls=[call])]
    )

    async def chat(source: str) -> list[int]:
        write_t1_tokenizer(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(source)
        prompts = Prompts(load_tokenizer(ModelFiles("folder", tmp_path, "model")))
        try:
            return (await prompts.chat(chat_input(request), 64)).tolist()
        finally:
            prompts.close()

    with pytest.raises(TooLong) as refusal:
        asyncio.run(chat(shown))
    assert refusal.value.field == "messages"
    assert asyncio.run(chat(hidden)) == [ord("1")]
