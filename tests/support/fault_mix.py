"""A random mix of requests of every kind, for engines of `fault_model`."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from chat_calls import NOW, REQUIRED, WEATHER, chat_request, user
from engine import generate_request
from fault_asks import Ask, Call, Http, Session
from scripted_models import T1_EOS, write_m2_random_llama
from structured import form, one_of, schema
from triptych.v1 import common_pb2, inference_pb2

CONTEXT = 1024
CHUNK = 64
ENGINE = (
    "--kv-cache-memory", "12MiB", "--cpu-threads", "1", "--max-num-seqs", "12",
    "--max-num-batched-tokens", str(CHUNK), "--tool-call-parser", "hermes",
)  # fmt: skip
"""A prompt spans several steps, and not all requests run at once."""

_LIST: dict[str, object] = {
    "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99_999},
    "minItems": 15, "maxItems": 24,
}  # fmt: skip
_GBNF = 'root ::= item ("," item){9,12}\nitem ::= [0-9]+ ":" ("yes" | "no")\n'
_SUMMER = list("Größe, 世界! ".encode())


def fault_model(folder: Path) -> Path:
    """A random Llama whose step takes about a millisecond, so that there is time to disturb it."""
    model = folder / "model"
    if not model.exists():
        write_m2_random_llama(
            model, hidden_size=192, intermediate_size=512, num_attention_heads=6,
            num_key_value_heads=2, num_hidden_layers=3, max_position_embeddings=CONTEXT,
        )  # fmt: skip
    return model


class Mixer:
    """Makes mixes; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._source = Random(seed)

    def mix(self) -> list[Ask]:
        """One request of every kind."""
        return [*self._plain(), *self._choices(), *self._filtered(), *self._stops(),
                *self._structured(), *self._chats(), self._session(), *self._http()]  # fmt: skip

    def streams(self, count: int, tokens: int = 200) -> list[Ask]:
        """Long greedy and seeded streams only."""
        return [
            self._generate(f"stream {k}", self.prompt(4, 40), max_tokens=tokens, ignore_eos=True,
                           **self._drawn(k % 2 == 0))
            for k in range(count)
        ]  # fmt: skip

    def long_prompts(self, count: int, tokens: int) -> list[Ask]:
        """Prompts that are computed in several steps, and some tokens."""
        return [
            self._generate(f"long {k}", self._long(), max_tokens=tokens, ignore_eos=True,
                           **self._drawn(k % 2 == 0))
            for k in range(count)
        ]  # fmt: skip

    def prompt(self, least: int, most: int) -> list[int]:
        return [self._source.randrange(256) for _ in range(self._source.randint(least, most))]

    def _text(self, least: int, most: int) -> str:
        size = self._source.randint(least, most)
        return "".join(self._source.choice("abc déf 世界, ") for _ in range(size))

    def _long(self) -> list[int]:
        """One that is computed in several steps."""
        return self.prompt(3 * CHUNK, 7 * CHUNK)

    def _seed(self) -> int:
        return self._source.randrange(2**32)

    def _drawn(self, greedy: bool = False) -> dict[str, Any]:
        if greedy:
            return {"temperature": 0.0}
        return {
            "temperature": self._source.choice([0.7, 1.0, 1.3]),
            "seed": self._seed(),
            "top_p": self._source.choice([1.0, 0.95]),
            "top_k": self._source.choice([0, 40]),
        }

    def _generate(self, name: str, prompt: str | Sequence[int], **params: Any) -> Call:
        return Call(name, generate_request(prompt, add_special_tokens=False, **params))

    def _plain(self) -> list[Ask]:
        only_text = self._generate("text only", self._text(20, 60), max_tokens=80, **self._drawn())
        only_text.request.output_format = inference_pb2.OUTPUT_FORMAT_TEXT
        only_ids = self._generate("ids only", self.prompt(2, 9), max_tokens=80, **self._drawn())
        only_ids.request.output_format = inference_pb2.OUTPUT_FORMAT_TOKEN_IDS
        short = self._generate("one token", self.prompt(1, 20), max_tokens=1, **self._drawn())
        return [
            self._generate("greedy", self.prompt(1, 30), max_tokens=200, ignore_eos=True,
                           temperature=0.0),
            self._generate("greedy, long prompt", self._long(), max_tokens=100, temperature=0.0),
            self._generate("seeded", self.prompt(1, 30), max_tokens=200, **self._drawn()),
            self._generate("seeded, long prompt", self._long(), max_tokens=100, **self._drawn()),
            only_text, only_ids, short,
        ]  # fmt: skip

    def _choices(self) -> list[Ask]:
        echo = self._generate("echo", self.prompt(5, 80), max_tokens=30, logprobs=1,
                              **self._drawn())  # fmt: skip
        assert isinstance(echo.request, inference_pb2.GenerateRequest)
        echo.request.echo = True
        beam = common_pb2.BeamSearch(width=3)
        return [
            self._generate("n", self._long(), n=3, max_tokens=60, logprobs=2, **self._drawn()),
            self._generate("best of", self.prompt(5, 90), n=2, best_of=4, max_tokens=40,
                           **self._drawn()),
            self._generate("beams", self.prompt(5, 90), n=2, beam=beam, max_tokens=40),
            self._generate("logprobs", self.prompt(5, 90), max_tokens=120, logprobs=5,
                           **self._drawn()),
            self._generate("prompt logprobs", self._long(), max_tokens=40, prompt_logprobs=3,
                           logprobs=1, **self._drawn()),
            self._generate("prompt logprobs of n", self._long(), n=2, max_tokens=40,
                           prompt_logprobs=1, **self._drawn()),
            echo,
        ]  # fmt: skip

    def _filtered(self) -> list[Ask]:
        bias = {self._source.randrange(256): 3.0, self._source.randrange(256): -100.0}
        return [
            self._generate("penalties", self.prompt(5, 90), max_tokens=120, min_tokens=100,
                           repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.3,
                           **self._drawn()),
            self._generate("no n-gram twice", self.prompt(5, 90), max_tokens=120, logit_bias=bias,
                           no_repeat_ngram_size=2, **self._drawn(greedy=True)),
            self._generate("bad words", self.prompt(5, 90), max_tokens=100, bad_words=["a", "bc"],
                           min_p=0.01, typical_p=0.95, **self._drawn()),
            self._generate("bytes of characters", self.prompt(5, 30), max_tokens=150,
                           allowed_token_ids=common_pb2.TokenIds(ids=sorted({*_SUMMER})),
                           **self._drawn()),
        ]  # fmt: skip

    def _stops(self) -> list[Ask]:
        """Of three letters, so that the beginning of a stop string comes and goes all the time."""
        few = common_pb2.TokenIds(ids=list(b"abc"))
        return [
            self._generate("stop string", self._text(5, 50), max_tokens=300, min_tokens=60,
                           stop=["abcab", "ccccca", "babab"], allowed_token_ids=few,
                           **self._drawn()),
            self._generate("stop string kept", self._text(5, 50), max_tokens=300, min_tokens=30,
                           stop=["aacb", "cbcb"], include_stop_str_in_output=True, n=2,
                           allowed_token_ids=few, logprobs=0, **self._drawn()),
            self._generate("held back to the end", self._text(5, 50), max_tokens=120,
                           stop=["ab" * 40, "abc~", "c" * 20, "b?"], allowed_token_ids=few,
                           **self._drawn()),
            self._generate("stop token", self.prompt(5, 50), max_tokens=300, min_tokens=50,
                           stop_token_ids=[*range(0, 256, 9), T1_EOS], **self._drawn()),
        ]  # fmt: skip

    def _structured(self) -> list[Ask]:
        forms = {
            "schema": schema(_LIST),
            "characters": form(regex="[一-龥é-ü]{20,40}"),
            "grammar": form(grammar=_GBNF),
            "one of": one_of("north", "south-west", "nowhere"),
            "any object": form(json_object=True),
        }
        return [
            self._generate(name, self.prompt(5, 60), max_tokens=120, structured_output=wanted,
                           n=1 + k % 2, **self._drawn(greedy=k == 0))
            for k, (name, wanted) in enumerate(forms.items())
        ]  # fmt: skip

    def _chats(self) -> list[Ask]:
        turns = chat_request(content=self._text(90, 200), max_tokens=90, n=2, logprobs=1,
                             stop=["ab"], **self._drawn())  # fmt: skip
        turns.messages.append(user(self._text(5, 20)))
        calls = chat_request(WEATHER, NOW, content=self._text(5, 30), choice=REQUIRED,
                             max_tokens=200, **self._drawn())  # fmt: skip
        return [Call("chat", turns), Call("chat with calls", calls)]

    def _session(self) -> Ask:
        calls = [
            self._generate("greedy", self.prompt(1, 90), max_tokens=100, temperature=0.0),
            self._generate("n", self.prompt(1, 90), max_tokens=40, n=2, logprobs=1,
                           **self._drawn()),
            self._generate("beams", self.prompt(1, 90), max_tokens=20,
                           beam=common_pb2.BeamSearch(width=2)),
            self._generate("schema", self.prompt(1, 90), max_tokens=90, **self._drawn(),
                           structured_output=schema(_LIST)),
            Call("chat", chat_request(content=self._text(9, 30), max_tokens=60, **self._drawn())),
        ]  # fmt: skip
        return Session("session", calls)

    def _http(self) -> list[Ask]:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        drawn = {"temperature": 1.0, "seed": self._seed()}
        complete: dict[str, Any] = {
            "prompt": self._text(30, 90), "max_tokens": 60, "logprobs": 2, "n": 2, **drawn,
        }  # fmt: skip
        chat: dict[str, Any] = {
            "messages": [{"role": "user", "content": self._text(30, 90)}], "max_tokens": 60,
            "logprobs": True, "top_logprobs": 2, **drawn,
        }  # fmt: skip
        wanted = {"type": "json_schema", "json_schema": {"name": "list", "schema": _LIST}}
        return [
            Http("http completion", "/v1/completions", complete),
            Http("http completion streamed", "/v1/completions",
                 {**complete, **usage, "echo": True, "stop": ["a世", "éé"]}),
            Http("http chat", "/v1/chat/completions", {**chat, "n": 2}),
            Http("http chat streamed", "/v1/chat/completions", {**chat, **usage}),
            Http("http chat of a schema", "/v1/chat/completions",
                 {**chat, **usage, "response_format": wanted, "max_tokens": 150}),
        ]  # fmt: skip
