"""Chats through the tokenizer service of tokenizer_bench."""

from pathlib import Path

from chat_calls import Turn, joined
from chat_folders import write_chat_tokenizer
from scripted_models import T1_EOS, write_m2_random_llama
from tokenizer_bench import Bench
from triptych.services.runtime.model_files import resolve_model
from triptych.services.tokenizer.server import LoadedModel
from triptych.services.tokenizer.tokenizer import load_tokenizer
from triptych.v1 import inference_pb2


def loaded(folder: Path, template: str) -> LoadedModel:
    write_chat_tokenizer(folder, template)
    write_m2_random_llama(folder)
    return LoadedModel(load_tokenizer(resolve_model(str(folder))), "print", ("tiny",))


def script_of(text: str) -> list[int]:
    return [*text.encode(), T1_EOS]


async def chat(b: Bench, request: inference_pb2.ChatRequest) -> list[Turn]:
    return joined([each async for each in b.stub.Chat(request, timeout=20)])
