"""From a raw request to a running one: validated, submitted, its tokens on their way.

What Generate, Chat and Session have in common. It knows neither gRPC calls nor responses.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from triptych.engine_core.errors import InvalidRequest, NotSupported, Unavailable
from triptych.services.tokenizer.answer import AnswerStream
from triptych.services.tokenizer.calling import ParserNames, calling_of
from triptych.services.tokenizer.chat_forms import chat_grammar
from triptych.services.tokenizer.chat_input import chat_input
from triptych.services.tokenizer.chat_output import ChoiceMode
from triptych.services.tokenizer.detokenizer import IncrementalDetokenizer
from triptych.services.tokenizer.output_validation import (
    check_held,
    end_token_ids,
    output_params,
)
from triptych.services.tokenizer.pieces import Piece, PromptPart, prompt_pieces
from triptych.services.tokenizer.prompts import Prompts
from triptych.services.tokenizer.responses import Response, Responses
from triptych.services.tokenizer.sampling_validation import sampling_params, with_prompt
from triptych.services.tokenizer.scheduler_client import SchedulerClient
from triptych.services.tokenizer.scheduler_connection import SchedulerFacts
from triptych.services.tokenizer.stats import Counters
from triptych.services.tokenizer.structured import StructuredOutputs
from triptych.services.tokenizer.timing import Observer, RequestTimes
from triptych.services.tokenizer.tokenizer import Tokenizer
from triptych.services.tokenizer.validation import (
    ServedModel,
    TokenArray,
    ValidRequest,
    check_model,
    check_prompt_length,
    check_size,
    check_token_ids,
    routing,
)
from triptych.v1 import common_pb2, inference_pb2, stage_pb2

_MOST_MS = 2**32 - 1  # of a u32


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """What the settings say. `seed`: of requests without one; None: drawn at random.

    `parsers`: of the model's calls and thoughts. `hide_uncallable_tools`: a chat whose tool_choice
    is none does not show its tools to the model.
    """

    seed: int | None
    max_unread_tokens: int
    max_logprobs: int
    parsers: ParserNames = field(default_factory=ParserNames)
    hide_uncallable_tools: bool = False


class Running:
    """A submitted request. Leaving its `with` block aborts the choices that have not ended."""

    def __init__(
        self,
        submit: stage_pb2.Submit,
        stream: AnswerStream,
        responses: Responses,
        client: SchedulerClient,
        times: RequestTimes | None = None,
    ) -> None:
        self.stream = stream
        self._responses = responses
        self._client = client
        self._times = times
        self._slots = client.submit(submit, stream.choices)

    def response(self, kind: type[Response], piece: Piece) -> Response:
        """A piece of `stream` as a response, on its way to the client."""
        response = kind()
        self.fill(response, piece)
        return response

    def fill(
        self, response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse, piece: Piece
    ) -> None:
        """The same into a new message that is there already."""
        if self._times is not None:
            self._times.note(piece)
        self._responses.fill(response, piece)

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
        rules: GenerationRules,
    ) -> None:
        self.tokenizer = tokenizer
        self.names = names
        self.prompts = Prompts(tokenizer)
        self._client = client
        self._structured = structured
        self._counters = counters
        self.observer: Observer | None = None
        """Of the times of requests; whoever wants to see them sets it."""
        self._rules = rules
        self._kept = tokenizer.special_ids(rules.parsers.markers)

    def facts(self) -> SchedulerFacts:
        """What the scheduler said of the model. Raises Unavailable before it ever did."""
        if self._client.facts is None:
            raise Unavailable(self._client.reason)
        return self._client.facts

    def model(self) -> ServedModel:
        """The bounds of requests. Raises Unavailable while none is taken."""
        facts = self.facts()
        self._client.check()
        return ServedModel(
            names=self.names,
            vocabulary_size=facts.vocabulary_size,
            max_model_len=facts.max_model_len,
            max_sequence_len=facts.max_sequence_len,
            eos_token_ids=tuple(self.tokenizer.eos_token_ids),
            max_logprobs=self._rules.max_logprobs,
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
        if not self.tokenizer.has_chat_template:
            raise NotSupported("the model has no chat template; use Generate with a prompt")
        calling = calling_of(request, self._rules.parsers)
        hidden = calling.choice.mode is ChoiceMode.NONE and self._rules.hide_uncallable_tools
        chat = chat_input(request, show_tools=not hidden)

        async def prompt() -> TokenArray:
            return await self.prompts.chat(chat, model.max_model_len)

        valid = await self._valid(request, model, "messages", prompt)
        if calling.read == ParserNames():
            return valid
        calling = replace(
            calling, prompt_tail=self.prompts.end_of(valid.prompt), continued=chat.continued
        )
        valid = replace(valid, calling=calling)
        raw = request.sampling_params
        grammar = await chat_grammar(raw, calling, self._structured)
        if grammar is None:
            return valid
        return replace(
            valid,
            params=replace(valid.params, grammar=grammar),
            output=replace(valid.output, end_token_ids=end_token_ids(raw, model)),
        )

    async def tokenized(self, request: inference_pb2.TokenizeRequest) -> TokenArray:
        """u32 [n] of a text or a chat. Raises RequestError."""
        check_model(request.model, self.names)
        limit = self.facts().max_model_len
        if not request.messages:
            for name in ("tools", "chat_template_kwargs", "continue_final_message"):
                if getattr(request, name):
                    raise InvalidRequest(name, "it goes with messages only")
            check_size(len(request.text), "text", limit)
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return await self.prompts.text(request.text, special, None)
        if request.text:
            raise InvalidRequest("text", "it is set together with messages; set one of them")
        chat = chat_input(request)
        check_size(chat.size, "messages", limit)
        return await self.prompts.chat(chat, None)

    def start(
        self,
        request: ValidRequest,
        on_wake: Callable[[], None] | None = None,
        remaining: float | None = None,
    ) -> Running:
        """Submit. `on_wake` as for AnswerStream; `remaining`: seconds until the call's deadline.

        Raises NoRoom.
        """
        output, token_ids = request.output, request.prompt.tolist()
        # What a parser reads, and what a grammar has matched, is text, be it a special token.
        if request.params.grammar:
            kept = self._kept
        else:
            read = request.calling.read if request.calling is not None else ParserNames()
            kept = self.tokenizer.special_ids(read.markers)
        detokenizers = [
            IncrementalDetokenizer(
                self.tokenizer,
                skip_special_tokens=output.skip_special_tokens,
                prompt_ids=token_ids,
                as_matched=bool(request.params.grammar),
                kept=kept,
            )
            for _ in range(request.params.n)
        ]
        stream = AnswerStream(
            output, self._prompt_part(request, token_ids), detokenizers, on_wake, request.calling
        )
        responses = Responses(output, self.tokenizer, self.facts().vocabulary_size)
        times = None if self.observer is None else RequestTimes(self.observer, request.arrived)
        submit = request.submit()
        if remaining is not None:
            submit.deadline_ms = min(max(1, int(remaining * 1000)), _MOST_MS)
        running = Running(submit, stream, responses, self._client, times)
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
        arrived = time.monotonic()
        raw: common_pb2.SamplingParams = request.sampling_params
        routed = routing(request)
        params = sampling_params(raw, model, self._rules.seed, self._encode_word, echo=echo)
        unread = self._rules.max_unread_tokens
        output = output_params(raw, request.output_format, model, unread, echo=echo)
        grammar = await self._structured.grammar(raw)
        token_ids = await prompt()
        max_tokens = check_prompt_length(len(token_ids), field, raw, model)
        check_held(output, model, len(token_ids), max_tokens)
        return ValidRequest(
            token_ids,
            with_prompt(params, max_tokens, grammar),
            output,
            routed,
            arrived=arrived,
        )

    def _encode_word(self, word: str) -> list[int]:
        return self.tokenizer.encode(word, add_special_tokens=False, parse_special=False)
