"""The requests of `make chaos`: drawn from a seed, so that each has one answer. No engine.

An `Ask` says what is asked in words that both doors share; `generate_request`, `chat_request` and
`http_body` spell it for each of them.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.json_format import ParseDict

from triptych.v1 import common_pb2, inference_pb2

Fields = Mapping[str, object]
DOORS = ("grpc", "session", "http", "http-stream")
_TEXT = (
    "lighthouse keeper counts seven ships before the storm reaches harbour and writes their names "
    "into a book that nobody reads while his sister mends nets sings old songs bakes bread for "
    "travellers who bring news of far markets bridges mountains rivers gardens clocks and letters"
)
_WORDS = _TEXT.split()
_QUESTIONS = (
    "Name three colours.", "Why is the sky blue?", "Write a haiku about rain.", "What is 12 + 30?",
    "Tell me a story about a fox.", "List five fruits.", "Describe a lighthouse.",
    "How do I boil an egg?", "Say something kind.", "What is a prime number?",
)  # fmt: skip
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_PREFIXES = 6


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `fields` are SamplingParams' but for `schema`, a flag; `refused`: it must be."""

    number: int
    door: str
    chat: bool
    prompt: str
    fields: Fields
    token_ids: tuple[int, ...] = ()
    model: str = ""
    refused: bool = False

    @property
    def choices(self) -> int:
        """How many it asks for."""
        n = self.fields.get("n", 1)
        assert isinstance(n, int)
        return n

    def line(self) -> str:
        """For people, with all that it takes to ask again."""
        kind = "chat" if self.chat else "text"
        prompt = f"token_ids={list(self.token_ids)}" if self.token_ids else repr(self.prompt)
        model = f" model={self.model}" if self.model else ""
        return f"#{self.number} {self.door} {kind}{model} {dict(self.fields)} {prompt}"


def draw_pool(seed: int, size: int) -> list[Ask]:
    """So many distinct requests of every kind."""
    dice = random.Random(f"chaos pool {seed}")
    prefixes = [_words(dice, 60 + 25 * i) for i in range(_PREFIXES)]
    return [_draw(dice, number, prefixes) for number in range(size)]


def _draw(dice: random.Random, number: int, prefixes: list[str]) -> Ask:
    door, chat = DOORS[number % len(DOORS)], dice.random() < 0.5
    if dice.random() < 0.06:
        return _bad(dice, number, door, chat)
    fields: dict[str, object] = {"max_tokens": dice.randint(16, 64)}
    if dice.random() < 0.1:
        fields["max_tokens"] = 300
    _choose_drawing(dice, fields)
    prompt = dice.choice(_QUESTIONS) if chat else _words(dice, dice.randint(4, 30))
    if dice.random() < 0.3:
        prompt = f"{dice.choice(prefixes)} {prompt}"
    elif dice.random() < 0.1:
        prompt = f"{_words(dice, dice.randint(300, 700))} {prompt}"
    _choose_form(dice, fields, grpc=door in ("grpc", "session"), chat=chat)
    ids: tuple[int, ...] = ()
    if not chat and dice.random() < 0.15:
        ids = tuple(dice.randrange(300, 40_000) for _ in range(dice.randint(8, 80)))
    return Ask(number, door, chat, prompt, fields, ids)


def _choose_drawing(dice: random.Random, fields: dict[str, object]) -> None:
    if dice.random() < 0.45:
        fields["temperature"] = 0.0
    else:
        fields |= {"temperature": dice.choice((0.7, 1.0, 1.3)), "seed": dice.getrandbits(32)}
        fields |= dice.choice(
            ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.95, "top_k": 100})
        )
        fields |= dice.choice(({}, {}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}))
    if dice.random() < 0.5:
        fields["ignore_eos"] = True


def _choose_form(dice: random.Random, fields: dict[str, object], *, grpc: bool, chat: bool) -> None:
    """What else is asked for: several choices, logprobs, stops, forms, what comes at the end."""
    kind = dice.random()
    if kind < 0.12:
        fields["n"] = dice.choice((2, 3))
        if dice.random() < 0.3:
            fields["logprobs"] = 2
    elif kind < 0.27:
        fields["logprobs"] = dice.choice((0, 1, 5)) if not chat else dice.choice((1, 5))
    elif kind < 0.40:
        fields["stop"] = dice.sample([" the", "\n\n", "er ", ". ", "and", "1"], 2)
    elif kind < 0.52:
        fields |= {"schema": True, "ignore_eos": False, "max_tokens": 80}
    elif kind < 0.56:
        fields |= {"regex": "[a-f]{8}(-[0-9a-f]{4}){3}", "ignore_eos": False}
    elif kind < 0.60 and grpc:
        fields["prompt_logprobs"] = 1
    elif kind < 0.64 and grpc:
        fields |= {"beam": 4, "n": 2, "max_tokens": 20, "ignore_eos": False}
        for name in fields.keys() - {"beam", "n", "max_tokens", "ignore_eos"}:
            del fields[name]
    elif kind < 0.67 and grpc:
        fields |= {"best_of": 3, "n": 1, "max_tokens": 24}
        if fields["temperature"] == 0.0:
            fields |= {"temperature": 1.0, "seed": dice.getrandbits(32)}
    elif kind < 0.75:
        fields["min_tokens"] = 12


def _bad(dice: random.Random, number: int, door: str, chat: bool) -> Ask:
    fields, model = dice.choice(
        (
            ({"temperature": -1.0}, ""),
            ({"max_tokens": 10, "top_p": 7.0}, ""),
            ({"n": 1000}, ""),
            ({"max_tokens": 1 << 20}, ""),
            ({"regex": "(unclosed"}, ""),
            ({}, "nobody"),
        )
    )
    return Ask(number, door, chat, "This is refused.", fields, model=model, refused=True)


def _words(dice: random.Random, count: int) -> str:
    return " ".join(dice.choice(_WORDS) for _ in range(count))


# ------------------------------------------------------------------------------------------- gRPC


def sampling_params(fields: Fields) -> common_pb2.SamplingParams:
    """The fields as the proto has them."""
    plain = {k: v for k, v in fields.items() if k not in ("schema", "regex", "beam")}
    params = ParseDict(plain, common_pb2.SamplingParams())
    if fields.get("schema"):
        params.structured_output.json_schema = json.dumps(_SCHEMA)
    if regex := fields.get("regex"):
        params.structured_output.regex = str(regex)
    if width := fields.get("beam"):
        assert isinstance(width, int)
        params.beam.width = width
    return params


def generate_request(ask: Ask) -> inference_pb2.GenerateRequest:
    """Of an Ask that is no chat."""
    request = inference_pb2.GenerateRequest(
        model=ask.model, sampling_params=sampling_params(ask.fields)
    )
    if ask.token_ids:
        request.token_ids.ids.extend(ask.token_ids)
    else:
        request.text = ask.prompt
    return request


def chat_request(ask: Ask) -> inference_pb2.ChatRequest:
    """Of an Ask that is a chat."""
    return inference_pb2.ChatRequest(
        model=ask.model,
        messages=[inference_pb2.ChatMessage(role="user", content=ask.prompt)],
        sampling_params=sampling_params(ask.fields),
    )


# ------------------------------------------------------------------------------------------- HTTP


def http_path(ask: Ask) -> str:
    """The route."""
    return "/v1/chat/completions" if ask.chat else "/v1/completions"


def http_body(ask: Ask) -> dict[str, object]:
    """The JSON body; token ids are asked for, so that there is something to compare."""
    body: dict[str, object] = {"stream": ask.door == "http-stream", "return_token_ids": True}
    if ask.model:
        body["model"] = ask.model
    if ask.chat:
        body["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        body["prompt"] = list(ask.token_ids) if ask.token_ids else ask.prompt
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    for name, value in ask.fields.items():
        if name == "schema":
            named = {"name": "person", "schema": _SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        elif name == "regex":
            body["structured_outputs"] = {"regex": value}
        elif name == "logprobs" and ask.chat:
            body |= {"logprobs": True, "top_logprobs": value}
        else:
            body[name] = value
    return body
