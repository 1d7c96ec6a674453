"""From a raw request to a running one: validated, submitted, its tokens on their way.

What Generate, Chat and Session have in common. It knows neither gRPC calls nor responses.
"""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from triptych.engine_core.errors import Unavailable
from triptych.services.tokenizer.detokenizer import IncrementalDetokenizer
from triptych.services.tokenizer.prompts import Prompts
from triptych.services.tokenizer.scheduler_client import (
    SchedulerClient,
    SchedulerFacts,
)
from triptych.services.tokenizer.stats import Counters
from triptych.services.tokenizer.stream import OutputStream
from triptych.services.tokenizer.tokenizer import Tokenizer
from triptych.services.tokenizer.validation import (
    ServedModel,
    TokenArray,
    ValidRequest,
    check_model,
    check_prompt_length,
    check_request_id,
    check_token_ids,
    output_params,
    sampling_params,
    with_max_tokens,
)
from triptych.v1 import common_pb2, inference_pb2


class Running:
    """A submitted request. Leaving its `with` block aborts it, unless it has ended."""

    def __init__(
        self, request: ValidRequest, stream: OutputStream, client: SchedulerClient
    ) -> None:
        self.request = request
        self.stream = stream
        self._client = client
        self._slot = client.submit(request.submit(), stream)

    def cancel(self) -> None:
        """Stop the work now; the stream ends with ABORT."""
        self.stream.cancel()
        self._client.abort(self._slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.abort(self._slot)


class Generation:
    """Everything that it takes to start a request."""

    def __init__(  # the parts that meet here
        self,
        tokenizer: Tokenizer,
        names: tuple[str, ...],
        client: SchedulerClient,
        counters: Counters,
        *,
        seed: int | None,
        max_unread_tokens: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.names = names
        self.prompts = Prompts(tokenizer)
        self._client = client
        self._counters = counters
        self._seed = seed
        self._max_unread_tokens = max_unread_tokens

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
        return await self._valid(request, model, field, prompt)

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
        """Submit. `on_wake` as for OutputStream. Raises NoRoom."""
        detokenizer = IncrementalDetokenizer(
            self.tokenizer,
            skip_special_tokens=request.output.skip_special_tokens,
            prompt_ids=request.prompt.tolist(),
        )
        running = Running(request, OutputStream(request.output, detokenizer, on_wake), self._client)
        self._counters.requests_total += 1
        return running

    async def _valid(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
        model: ServedModel,
        field: str,
        prompt: Callable[[], Awaitable[TokenArray]],
    ) -> ValidRequest:
        """Cheap checks first: the prompt is read last."""
        raw: common_pb2.SamplingParams = request.sampling_params
        label = check_request_id(request.request_id)
        params = sampling_params(raw, model, self._seed)
        output = output_params(raw, request.output_format, model, self._max_unread_tokens)
        token_ids = await prompt()
        max_tokens = check_prompt_length(len(token_ids), field, raw, model)
        return ValidRequest(label, token_ids, with_max_tokens(params, max_tokens), output)
