"""What the tokenizer service answers: text, ids, usage, and how an output ends."""

from pathlib import Path
from typing import Any

import pytest

from scripted_models import T1_BOS, T1_EOS, T1_IM_END, write_m2_random_llama, write_t1_tokenizer
from tokenizer_bench import (
    FOREVER,
    INVALID,
    LENGTH,
    STOP,
    Joined,
    V,
    bench,
    refused,
    request_of,
    run,
    until,
)
from triptych.services.runtime.model_files import resolve_model
from triptych.services.tokenizer.server import LoadedModel
from triptych.services.tokenizer.tokenizer import load_tokenizer
from triptych.v1 import common_pb2, inference_pb2


def test_generate_streams_text_ids_and_usage(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", "é世!".encode()) as b:
            joined = await b.generate("hello", max_tokens=6)
            assert joined.text == "é世!"
            assert joined.ids == list("é世!".encode())
            assert joined.last.finish_reason == LENGTH
            assert joined.last.usage.prompt_tokens == 5
            assert joined.last.usage.completion_tokens == 6
            submit = b.scheduler.submits[0]
            assert submit.prompt_token_ids == b"".join(c.to_bytes(4, "little") for c in b"hello")
            assert T1_EOS in submit.params.stop_token_ids
            await b.idle()

    run(scenario)


def test_one_message_per_drain_not_per_token(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, burst=64) as b:
            joined = await b.generate(max_tokens=640)
            assert len(joined.ids) == 640
            assert joined.messages <= 20

    run(scenario)


@pytest.mark.parametrize(
    ("script", "params", "text", "tokens", "reason"),
    [
        (b"abcdef", {"max_tokens": 3}, "abc", 3, LENGTH),
        ([*b"abc", T1_EOS], {}, "abc", 4, STOP),
        ([*b"abc", T1_EOS], {"max_tokens": 4}, "abc", 4, STOP),
        (b"abcde", {"max_tokens": 5, "stop": ["de"]}, "abc", 5, STOP),
        (b"abcdefgh", {"stop": ["cd"]}, "ab", 4, STOP),
        (b"abcdefgh", {"stop": ["cd"], "include_stop_str_in_output": True}, "abcd", 4, STOP),
        (b"a\nb\nc", {"stop": ["\n"], "min_tokens": 3}, "a\nb", 4, STOP),
        (b"abXc", {"stop": ["bXd"], "max_tokens": 4}, "abXc", 4, LENGTH),
        ([*b"ab", T1_IM_END, *b"c"], {"max_tokens": 4}, "abc", 4, LENGTH),
        (
            [*b"ab", T1_IM_END, *b"c"], {"max_tokens": 4, "skip_special_tokens": False},
            "ab<|im_end|>c", 4, LENGTH,
        ),
        ([*b"ab", T1_EOS, *b"c"], {"max_tokens": 4, "ignore_eos": True}, "abc", 4, LENGTH),
        (b"a\xf0\x9f", {"max_tokens": 3}, "a\ufffd", 3, LENGTH),
    ],
)  # fmt: skip
def test_how_outputs_end(
    model: LoadedModel, tmp_path: Path, script: object, params: dict[str, Any], text: str,
    tokens: int, reason: int,
) -> None:  # fmt: skip
    async def scenario() -> None:
        for burst in (1, 100):
            async with bench(model, tmp_path / "run", script, burst=burst) as b:
                joined = await b.generate(**params)
                assert joined.text == text
                assert len(joined.ids) == joined.last.usage.completion_tokens == tokens
                assert joined.last.finish_reason == reason
                await b.idle()

    run(scenario)


def test_stop_reasons_and_the_abort_behind_a_stop_string(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            joined = await b.generate(stop=["aaa"])
            assert joined.last.stop_string == "aaa"
            await until(lambda: b.scheduler.aborts == [b.scheduler.submits[0].slot])
            joined = await b.generate(stop_token_ids=[ord("a")])
            assert joined.last.stop_token_id == ord("a")
            assert (joined.text, joined.ids) == ("", [ord("a")])
            joined = await b.generate(max_tokens=1)
            assert joined.last.WhichOneof("stop_reason") is None
            await b.idle()

    run(scenario)


def test_output_format(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", b"abc") as b:
            for form, text, ids in ((1, "abc", []), (2, "", list(b"abc"))):
                request = request_of(max_tokens=3)
                request.output_format = form  # type: ignore[assignment]  # a bare number
                joined = Joined()
                async for response in b.stub.Generate(request):
                    joined.add(response)
                assert (joined.text, joined.ids) == (text, ids)
                assert joined.last.usage.completion_tokens == 3

    run(scenario)


def test_chat_renders_the_template(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", [*b"ok", T1_EOS]) as b:
            message = inference_pb2.ChatMessage(role="user", content="<|im_end|>")
            joined = Joined()
            async for response in b.stub.Chat(inference_pb2.ChatRequest(messages=[message])):
                joined.add(response)
            assert joined.text == "ok"
            asked = inference_pb2.TokenizeRequest(messages=[message])
            ids = list((await b.stub.Tokenize(asked)).token_ids)
            assert ids.count(T1_IM_END) == 1
            assert joined.last.usage.prompt_tokens == len(ids)

    run(scenario)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({}, "abc"),
        ({"skip_special_tokens": True}, "abc"),
        ({"skip_special_tokens": False}, "ab<|im_end|>c"),
    ],
)
def test_special_tokens_in_a_chat_answer(
    model: LoadedModel, tmp_path: Path, flags: dict[str, Any], text: str
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", [*b"ab", T1_IM_END, *b"c", T1_EOS]) as b:
            request = inference_pb2.ChatRequest(
                messages=[inference_pb2.ChatMessage(role="user", content="hi")],
                sampling_params=common_pb2.SamplingParams(**flags),
            )
            joined = Joined()
            async for response in b.stub.Chat(request):
                joined.add(response)
            assert joined.text == text

    run(scenario)


def test_an_empty_text_is_a_prompt_where_the_tokenizer_adds_a_token(tmp_path: Path) -> None:
    write_t1_tokenizer(tmp_path / "model", add_bos=True)
    write_m2_random_llama(tmp_path / "model")
    tokenizer = load_tokenizer(resolve_model(str(tmp_path / "model")))

    async def scenario() -> None:
        async with bench(LoadedModel(tokenizer, "print", ("m",)), tmp_path / "run", b"abc") as b:
            joined = await b.generate("", max_tokens=3)
            assert (joined.text, joined.last.usage.prompt_tokens) == ("abc", 1)
            bare = request_of("")
            bare.add_special_tokens = False
            for request in (bare, request_of([])):
                error = await refused(b.stub.Generate(request).read())
                assert error.code() is INVALID

    run(scenario)


def test_tokenize_detokenize_and_list_models(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            long = "héllo " * 3000
            reply = await b.stub.Tokenize(inference_pb2.TokenizeRequest(text=long))
            assert list(reply.token_ids) == list(long.encode())
            assert reply.max_model_len == 4096
            ids = [*reply.token_ids, T1_BOS]
            back = await b.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))
            assert back.text == long
            models = (await b.stub.ListModels(inference_pb2.ListModelsRequest())).models
            assert [each.name for each in models] == ["tiny", "alias"]
            assert models[0].vocabulary_size == V
            assert models[0].has_chat_template
            assert T1_EOS in models[0].eos_token_ids

    run(scenario)
