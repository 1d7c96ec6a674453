"""/v1/completions: a request as GenerateRequests, one a prompt; their responses as its answer.

Choices are numbered over the prompts: those of the first one first.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field, WithJsonSchema
from pydantic_core import to_json

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.openai_http.logprobs import (
    CompletionLogprobs,
    Json,
    joined,
    prompt_logprobs,
)
from triptych.services.tokenizer.openai_http.sampling import (
    NAMES,
    SamplingFields,
    check_stream,
    fill_routing,
    fill_sampling,
    put,
)
from triptych.services.tokenizer.openai_http.sse import DONE, event
from triptych.services.tokenizer.openai_http.structured import StructuredFields, fill_structured
from triptych.services.tokenizer.openai_http.usage import UsageSum, finish_reason, stop_reason
from triptych.v1 import inference_pb2

MAX_CHOICES = 1024
"""Of all prompts of one request together."""
MAX_PARAMS_BYTES = 1 << 20
"""Of the sampling fields: each prompt has them for its own, checked and sent."""
DEFAULT_MAX_TOKENS = 16

_STRING: Json = {"type": "string"}
_IDS: Json = {"type": "array", "items": {"type": "integer"}}
_PROMPT = {
    "anyOf": [
        _STRING, {"type": "array", "items": _STRING}, _IDS, {"type": "array", "items": _IDS}
    ]
}  # fmt: skip


class CompletionRequest(SamplingFields, StructuredFields):
    """Completes one or several prompts, each a text or token ids."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "suffix": "this engine does not fill in the middle",
        "prompt_embeds": "prompts are text or token ids",
        "truncate_prompt_tokens": "prompts are never cut; send a shorter one",
    }

    # Its many small parts are checked by hand: pydantic would list what is wrong with each.
    prompt: Annotated[object, WithJsonSchema(_PROMPT)]
    max_tokens: int | None = Field(default=None, description="absent: 16, as OpenAI has it")
    best_of: int | None = None
    logprobs: int | None = Field(default=None, description="alternatives beside the drawn token")
    echo: bool | None = None
    add_special_tokens: bool | None = None


def requests_of(
    fields: CompletionRequest, label: str
) -> tuple[list[inference_pb2.GenerateRequest], Mapping[str, str]]:
    """One for each prompt, and what errors call their fields. Raises InvalidRequest."""
    check_stream(fields)
    prompts = _prompts(fields.prompt)
    choices = len(prompts) * max(fields.n or 1, 1)
    if len(prompts) > 1 and choices > MAX_CHOICES:
        raise InvalidRequest("prompt", f"{choices} choices in all, more than {MAX_CHOICES}")
    first = inference_pb2.GenerateRequest()
    params = first.sampling_params
    fill_sampling(fields, params)
    put(
        params, "max_tokens", DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    )
    if not fields.use_beam_search:
        put(params, "best_of", fields.best_of)
    put(params, "logprobs", fields.logprobs)
    form = fill_structured(fields, params)
    fill_routing(fields, first, label)
    put(first, "echo", fields.echo)
    put(first, "add_special_tokens", fields.add_special_tokens)
    size = len(prompts) * params.ByteSize()
    if len(prompts) > 1 and size > MAX_PARAMS_BYTES:
        raise InvalidRequest(
            "prompt",
            f"{len(prompts)} prompts with the same sampling fields make {size} bytes of them, more"
            f" than {MAX_PARAMS_BYTES}; send fewer in one request",
        )
    requests = []
    for prompt in prompts:
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(first)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
        requests.append(request)
    return requests, {**NAMES, "text": "prompt", "token_ids": "prompt.", "structured_output": form}


class CompletionReply:
    """The answer of one request: whole, or (`stream`) as events."""

    def __init__(self, fields: CompletionRequest, identity: Json) -> None:
        """`identity`: id, created and model."""
        self._fields = fields
        self._n = fields.n or 1
        self._usage = UsageSum()
        self._counted = bool(fields.stream_options and fields.stream_options.include_usage)
        self._identity = {"object": "text_completion", **identity}
        self._choices: dict[int, _Choice] = {}
        head = to_json({**self._identity, "choices": []})[:-2]
        self._head = b"data: " + head + b'{"index":'
        self._tail = b',"logprobs":null,"finish_reason":null}]'
        self._tail += b',"usage":null}\n\n' if self._counted else b"}\n\n"

    def add(self, prompt: int, response: inference_pb2.GenerateResponse) -> bytes:
        """Take the next response; the events that it makes."""
        self._usage.add(response.usage)
        index = prompt * self._n + response.index
        if not self._fields.stream:
            self._choice(index).add(response)
            return b""
        if not (response.finish_reason or response.logprobs or self._fields.return_token_ids):
            if not response.text:
                return b""
            return b"%s%d%s%s%s" % (
                self._head, index, b',"text":', to_json(response.text), self._tail
            )  # fmt: skip
        return self._full_event(index, response)

    def end(self) -> bytes:
        """The whole answer, or the end of the stream."""
        if self._fields.stream:
            if not self._counted:
                return DONE
            return event({**self._identity, "choices": [], "usage": self._usage.as_json()}) + DONE
        choices = [self._choices[index].as_json() for index in sorted(self._choices)]
        answer = {**self._identity, "choices": choices, "usage": self._usage.as_json()}
        return to_json(answer)

    def _full_event(self, index: int, response: inference_pb2.GenerateResponse) -> bytes:
        choice: Json = {"index": index, "text": response.text, "logprobs": None}
        if response.logprobs:
            choice["logprobs"] = self._choice(index).logprobs.of(response.logprobs)
        choice["finish_reason"] = finish_reason(response)
        if response.finish_reason:
            choice["stop_reason"] = stop_reason(response)
        if self._fields.return_token_ids:
            choice["token_ids"] = list(response.token_ids)
        data = {**self._identity, "choices": [choice]}
        return event(data | {"usage": None} if self._counted else data)

    def _choice(self, index: int) -> "_Choice":
        if index not in self._choices:
            self._choices[index] = _Choice(index, self._fields)
        return self._choices[index]


class _Choice:
    """One choice, as it grows."""

    def __init__(self, index: int, fields: CompletionRequest) -> None:
        self._index = index
        self._fields = fields
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logged: list[Json] = []
        self._prompt_logprobs: list[Json | None] = []
        self._last = inference_pb2.GenerateResponse()
        self.logprobs = CompletionLogprobs(as_ids=bool(fields.return_tokens_as_token_ids))

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        self._text.append(response.text)
        if self._fields.return_token_ids:
            self._token_ids.extend(response.token_ids)
        if response.logprobs:
            self._logged.append(self.logprobs.of(response.logprobs))
        self._prompt_logprobs.extend(prompt_logprobs(response.prompt_logprobs))
        self._last = response

    def as_json(self) -> Json:
        choice: Json = {
            "index": self._index,
            "text": "".join(self._text),
            "logprobs": None if self._fields.logprobs is None else joined(self._logged),
            "finish_reason": finish_reason(self._last),
            "stop_reason": stop_reason(self._last),
        }
        if self._fields.return_token_ids:
            choice["token_ids"] = self._token_ids
        if self._fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs or None
        return choice


def _prompts(prompt: object) -> list[str | list[int]]:
    """Raises InvalidRequest that names the first wrong part."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt", "it is no text, no list of texts, and no token ids")
    if not prompt:
        raise InvalidRequest("prompt", "is empty")
    if isinstance(prompt[0], int) and not isinstance(prompt[0], bool):
        return [_token_ids(prompt, "prompt")]
    if len(prompt) > MAX_CHOICES:
        raise InvalidRequest("prompt", f"{len(prompt)} prompts, more than {MAX_CHOICES}")
    return [_one(each, f"prompt[{index}]") for index, each in enumerate(prompt)]


def _one(prompt: object, field: str) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise InvalidRequest(field, "it is neither a text nor a list of token ids")
    return _token_ids(prompt, field)


def _token_ids(values: Sequence[object], field: str) -> list[int]:
    ids = [value for value in values if type(value) is int]  # bool is another type
    if len(ids) == len(values) and (not ids or (min(ids) >= 0 and max(ids) < 1 << 32)):
        return ids
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value < 1 << 32:
            raise InvalidRequest(f"{field}[{index}]", f"{value!r:.40} is no token id")
    raise AssertionError("one of them is wrong")
