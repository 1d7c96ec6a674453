"""From a raw request to a running one: validated, submitted, its tokens on their way.

What Generate, Chat and Session have in common. It knows neither gRPC calls nor responses.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from triptych.engine_core.errors import Unavailable
from triptych.services.tokenizer.answer import AnswerStream
from triptych.services.tokenizer.detokenizer import IncrementalDetokenizer
from triptych.services.tokenizer.output_validation import check_held, output_params
from triptych.services.tokenizer.pieces import PromptPart, prompt_pieces
from triptych.services.tokenizer.prompts import Prompts
from triptych.services.tokenizer.responses import Responses
from triptych.services.tokenizer.sampling_validation import sampling_params, with_prompt
from triptych.services.tokenizer.scheduler_client import (
    SchedulerClient,
    SchedulerFacts,
)
from triptych.services.tokenizer.stats import Counters
from triptych.services.tokenizer.structured import StructuredOutputs
from triptych.services.tokenizer.tokenizer import Tokenizer
from triptych.services.tokenizer.validation import (
    ServedModel,
    TokenArray,
    ValidRequest,
    check_model,
    check_prompt_length,
    check_token_ids,
    routing,
)
from triptych.v1 import common_pb2, inference_pb2


class Running:
    """A submitted request. Leaving its `with` block aborts the choices that have not ended."""

    def __init__(
        self,
        request: ValidRequest,
        stream: AnswerStream,
        responses: Responses,
        client: SchedulerClient,
    ) -> None:
        self.stream = stream
        self.responses = responses
        self._client = client
        self._slots = client.submit(request.submit(), stream.choices)

    def cancel(self) -> None:
        """Stop the work now; the stream ends with ABORT."""
        self.stream.cancel()
        self._client.abort(self._slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.abort(self._slots)


class Generation:
    """Everything that it takes to start a request."""

    def __init__(  # the parts that meet here
        self,
        tokenizer: Tokenizer,
        names: tuple[str, ...],
        client: SchedulerClient,
        structured: StructuredOutputs,
        counters: Counters,
        *,
        seed: int | None,
        max_unread_tokens: int,
        max_logprobs: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.names = names
        self.prompts = Prompts(tokenizer)
        self._client = client
        self._structured = structured
        self._counters = counters
        self._seed = seed
        self._max_unread_tokens = max_unread_tokens
        self._max_logprobs = max_logprobs

    def facts(self) -> SchedulerFacts:
        """What the scheduler said of the model. Raises Unavailable before it ever did."""
        if self._client.facts is None:
            raise Unavailable("the engine is starting")
        return self._client.facts

    def model(self) -> ServedModel:
        """The bounds of requests. Raises Unavailable while none can run."""
        facts = self.facts()
        if not self._client.ready:
            raise Unavailable("the engine is not ready")
        return ServedModel(
            names=self.names,
            vocabulary_size=facts.vocabulary_size,
            max_model_len=facts.max_model_len,
            max_sequence_len=facts.max_sequence_len,
            eos_token_ids=tuple(self.tokenizer.eos_token_ids),
            max_logprobs=self._max_logprobs,
        )

    async def generate(self, request: inference_pb2.GenerateRequest) -> ValidRequest:
        """Validate a Generate. Raises RequestError."""
        check_model(request.model, self.names)
        model = self.model()

        async def prompt() -> TokenArray:
            if request.WhichOneof("prompt") == "token_ids":
                return check_token_ids(
                    # upb's container has the buffer protocol: 200 times faster than a list
                    request.token_ids.ids, "token_ids.ids", model.vocabulary_size
                )  # fmt: skip
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return await self.prompts.text(request.text, special, model.max_model_len)

        field = request.WhichOneof("prompt") or "prompt"
        valid = await self._valid(request, model, field, prompt, echo=request.echo)
        if not request.echo:
            return valid
        text = request.text
        if field == "token_ids":
            skip = valid.output.skip_special_tokens
            text = await self.prompts.detokenize(valid.prompt, skip)
        return replace(valid, text=text)

    async def chat(self, request: inference_pb2.ChatRequest) -> ValidRequest:
        """Validate a Chat. Raises RequestError."""
        check_model(request.model, self.names)
        model = self.model()

        async def prompt() -> TokenArray:
            opened = (
                request.add_generation_prompt if request.HasField("add_generation_prompt") else True
            )
            return await self.prompts.chat(request.messages, opened, model.max_model_len)

        return await self._valid(request, model, "messages", prompt)

    def start(self, request: ValidRequest, on_wake: Callable[[], None] | None = None) -> Running:
        """Submit. `on_wake` as for AnswerStream. Raises NoRoom."""
        output, token_ids = request.output, request.prompt.tolist()
        detokenizers = [
            IncrementalDetokenizer(
                self.tokenizer,
                skip_special_tokens=output.skip_special_tokens,
                prompt_ids=token_ids,
                as_matched=bool(request.params.grammar),
            )
            for _ in range(request.params.n)
        ]
        stream = AnswerStream(output, self._prompt_part(request, token_ids), detokenizers, on_wake)
        responses = Responses(output, self.tokenizer, self.facts().vocabulary_size)
        running = Running(request, stream, responses, self._client)
        self._counters.requests_total += 1
        return running

    def _prompt_part(self, request: ValidRequest, token_ids: list[int]) -> PromptPart:
        output = request.output
        reported = output.prompt_logprobs is not None or (
            output.echo and output.logprobs is not None
        )
        if not reported:
            return PromptPart(token_ids, request.text)
        pieces = prompt_pieces(
            self.tokenizer, token_ids, request.text, skip_special_tokens=output.skip_special_tokens
        )
        return PromptPart(token_ids, request.text, pieces)

    async def _valid(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
        model: ServedModel,
        field: str,
        prompt: Callable[[], Awaitable[TokenArray]],
        *,
        echo: bool = False,
    ) -> ValidRequest:
        """Cheap checks first: the prompt is read last."""
        raw: common_pb2.SamplingParams = request.sampling_params
        routed = routing(request)
        params = sampling_params(raw, model, self._seed, self._encode_word, echo=echo)
        unread = self._max_unread_tokens
        output = output_params(raw, request.output_format, model, unread, echo=echo)
        grammar = await self._structured.grammar(raw)
        token_ids = await prompt()
        max_tokens = check_prompt_length(len(token_ids), field, raw, model)
        check_held(output, model, len(token_ids), max_tokens)
        return ValidRequest(token_ids, with_prompt(params, max_tokens, grammar), output, routed)

    def _encode_word(self, word: str) -> list[int]:
        return self.tokenizer.encode(word, add_special_tokens=False, parse_special=False)
